// mha explain: one call, step by step, with every matrix. All numbers that a call makes come from the library (mha_taps).
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <sstream>

#include "call_options.h"
#include "commands.h"
#include "error.h"
#include "example.h"
#include "files.h"
#include "html_page.h"
#include "inputs.h"
#include "layer.h"
#include "matrix.h"
#include "options.h"
#include "page.h"
#include "taps.h"
#include "terminal.h"

namespace command {
namespace {

// The widths of the columns that queries, keys and values take in W_Q|W_K|W_V.
struct Columns {
  int64_t q, k, v;

  int64_t all() const { return q + k + v; }
  int64_t of(char which) const { return which == 'Q' ? q : which == 'K' ? k : v; }
  int64_t before(char which) const { return which == 'Q' ? 0 : which == 'K' ? q : q + k; }
};

Columns columns_of(const mha_layer_config &shape) {
  return {shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim_v};
}

// The same of the matrices: that of the queries may hold the gate's columns too.
Columns columns_of(const mha_layer_config &shape, const mha_layer_weights &weights) {
  Columns columns = columns_of(shape);
  if (shape.gate != MHA_GATE_NONE && weights.w_g == nullptr) columns.q += shape.num_heads * shape.gate_dim;
  return columns;
}

// W_Q, W_K or W_V, [in, out], wherever the layout has it.
Matrix part_of_weights(const mha_layer_config &shape, const mha_layer_weights &weights, char which) {
  const Columns columns = columns_of(shape, weights);
  const bool is_fused = weights.w_qkv != nullptr;
  const int64_t in = which == 'Q' ? shape.query_dim : which == 'K' ? shape.key_dim : shape.value_dim;
  const int64_t out = columns.of(which);
  const int64_t first = is_fused ? columns.before(which) : 0;
  const void *matrix = is_fused ? weights.w_qkv : which == 'Q' ? weights.w_q : which == 'K' ? weights.w_k : weights.w_v;
  const float *data = static_cast<const float *>(matrix);
  if (weights.layout == MHA_LAYOUT_IN_OUT) return {data + first, in, out, is_fused ? columns.all() : out, 1};
  return {data + first * in, in, out, 1, in};
}

const float *part_of_bias(const mha_layer_config &shape, const mha_layer_weights &weights, char which) {
  if (weights.b_qkv != nullptr) return weights.b_qkv + columns_of(shape, weights).before(which);
  return which == 'Q' ? weights.b_q : which == 'K' ? weights.b_k : weights.b_v;
}

// The heads that share their keys and values, or do not.
std::string sentence_about_heads(const mha_layer_config &shape) {
  const std::string kv_heads = count_text(shape.num_kv_heads, "key and value head");
  if (shape.num_kv_heads == shape.num_heads) {
    return text("The ", columns_of(shape).q, " columns of the queries are shared out to ", count_text(shape.num_heads, "head"),
                " of width ", shape.head_dim, ": each can look for something else.");
  }
  return text("The ", shape.num_heads, " query heads are served by ", kv_heads, ", ", shape.num_heads / shape.num_kv_heads,
              " by each: fewer keys and values to compute and keep.");
}

// Steps 1 to 5: from the rows to queries, keys and values. weights may be NULL: then the layer was packed before.
void show_projection(Page *page, const mha_layer_config &shape, const mha_layer_weights *weights, const CallInputs &inputs,
                     const Forward &forward) {
  const int64_t n_q = inputs.n_q();
  const int64_t n_kv = inputs.n_kv();
  const Columns columns = columns_of(shape);
  const bool is_self = !inputs.key && !inputs.value;

  const std::string shown = inputs.batch() > 1 ? text(" Shown is the first of ", inputs.batch(), " sequences.") : "";
  page->step("1", "input", shape_text({1, n_q, shape.query_dim}), "A row for each token." + shown);
  std::vector<Block> rows = {matrix_block(is_self ? "x" : "query input", {inputs.query.floats(), n_q, shape.query_dim, shape.query_dim})};
  if (inputs.key) rows.push_back(matrix_block("key input", {inputs.key->floats(), n_kv, shape.key_dim, shape.key_dim}));
  if (inputs.value) rows.push_back(matrix_block("value input", {inputs.value->floats(), n_kv, shape.value_dim, shape.value_dim}));
  page->blocks(rows);

  page->step("2", "heads", text(columns.q, " / ", shape.num_heads, " -> ", shape.head_dim), sentence_about_heads(shape));

  const std::string packed_shape = shape_text({shape.query_dim, columns.all()});
  if (is_self) {
    page->step("3", "fused projection", text("W_Q|W_K|W_V ", packed_shape),
               "Side by side the three matrices are one, so that one product does the work of three.");
  } else {
    const std::string key_shape = shape_text({shape.key_dim, columns.k});
    const std::string value_shape = shape_text({shape.value_dim, columns.v});
    page->step("3", "projections", text(shape_text({shape.query_dim, columns.q}), ", ", key_shape, ", ", value_shape),
               "Queries, keys and values come from different inputs, each through its own matrix.");
  }
  std::vector<Block> matrices;
  const auto title = [&](const char *name, char which) {
    const bool has_gate = which == 'Q' && shape.gate != MHA_GATE_NONE && weights->w_g == nullptr;
    return text(name, which, has_gate ? " and gate" : "");
  };
  for (const char which : {'Q', 'K', 'V'}) {
    if (weights != nullptr) matrices.push_back(matrix_block(title("W_", which), part_of_weights(shape, *weights, which)));
  }
  for (const char which : {'Q', 'K', 'V'}) {
    const float *bias = weights != nullptr ? part_of_bias(shape, *weights, which) : nullptr;
    const int64_t width = bias != nullptr ? columns_of(shape, *weights).of(which) : 0;
    if (bias != nullptr) matrices.push_back(matrix_block(title("b_", which), {bias, 1, width, width}));
  }
  page->blocks(matrices);
  if (weights == nullptr) page->note("(packed: not shown)");

  const std::string q_shape = shape_text({1, n_q, columns.q});
  const std::string k_shape = shape_text({1, n_kv, columns.k});
  const std::string v_shape = shape_text({1, n_kv, columns.v});
  const std::string results = q_shape == k_shape && k_shape == v_shape ? "3 x " + q_shape : q_shape + ", " + k_shape + ", " + v_shape;
  page->step("4", "queries, keys, values",
             is_self ? text(shape_text({1, n_q, shape.query_dim}), " x ", packed_shape, " -> ", results) : results,
             "What each token looks for, what it can be found by, and what it has to give.");
  page->blocks({matrix_block("Q", forward.q.merged()), matrix_block("K", forward.k.merged()), matrix_block("V", forward.v.merged())});

  page->step("5", "split by heads", text(q_shape, " -> ", shape_text({1, n_q, shape.num_heads, shape.head_dim})),
             "A head is a range of columns, so nothing moves. Shown are the queries, a row for each head.");
  page->blocks(blocks_of(n_q, [&](int64_t i) { return matrix_block(text("token ", i + 1), forward.q.token(i)); }));
}

// Steps 5a and 5b: what is done to queries and keys, where something is.
void show_preparation(Page *page, const CallOptions &options, const Forward &forward) {
  const mha_norm *const norm = options.norm();
  char letter = 'a';
  const auto show = [&](const Prepared &prepared, const char *title, const std::string &why, std::vector<Block> blocks) {
    blocks.push_back(matrix_block("Q", prepared.q.merged()));
    blocks.push_back(matrix_block("K", prepared.k.merged()));
    if (!prepared.v_values.empty()) blocks.push_back(matrix_block("V", prepared.v.merged()));
    const auto shape = [](const Heads &heads) { return shape_text({1, heads.rows, heads.count, heads.width}); };
    page->step(text("5", letter++), title, text(shape(prepared.q), ", ", shape(prepared.k)), why);
    page->blocks(blocks);
  };
  const auto show_norm = [&] {
    if (!forward.norm) return;
    const bool is_layer = (norm->flags & MHA_NORM_LAYER) != 0, is_of_all = (norm->flags & MHA_NORM_ALL_HEADS) != 0;
    const std::string of = is_of_all ? " of all heads together" : " of each head";
    const std::string weight = norm->q_weight != nullptr ? " * weight" : "", epsilon = text(" + ", norm->epsilon, ")");
    const std::string values = (norm->flags & MHA_NORM_VALUES) != 0 ? " Of values the RMS norm of each head, without weights." : "";
    const std::string formula = is_layer ? text("Layer norm", of, ": (x - mean) / sqrt(mean of (x - mean)^2", epsilon, weight, ".")
                                         : text("RMS norm", of, ": x / sqrt(mean of x^2", epsilon, weight, ".");
    std::vector<Block> weights;
    const auto add = [&](const char *title, const float *row, const Heads &heads) {
      const int64_t width = is_of_all ? heads.count * heads.width : heads.width;
      if (row != nullptr) weights.push_back(matrix_block(title, {row, 1, width, width}));
    };
    add("weight of Q", norm->q_weight, forward.q);
    add("weight of K", norm->k_weight, forward.k);
    show(*forward.norm, "normalised", formula + values, weights);
  };
  const bool is_norm_last = norm != nullptr && (norm->flags & MHA_NORM_AFTER_ROPE) != 0;
  if (!is_norm_last) show_norm();
  if (forward.rotation) {
    show(*forward.rotation, "rotated",
         text("RoPE, ", options.rope_text(), ": (a, b) -> (a cos - b sin, b cos + a sin), by an angle that grows with the position."), {});
  }
  if (is_norm_last) show_norm();
  if (options.score() == nullptr || options.score()->q_scales == nullptr) return;
  page->step(text("5", letter++), "queries scaled", shape_text({forward.q.rows}), "Each query times a number of its row, from the file.");
  page->blocks({matrix_block("scales", {options.score()->q_scales, 1, forward.q.rows, forward.q.rows})});
}

// What changes the scores of a call; all zero where nothing does.
const mha_score_options &score_of(const Attention &a) {
  static const mha_score_options none = {};
  return a.call->score() != nullptr ? *a.call->score() : none;
}

// What is done to the scores before softmax, and which are masked.
std::string sentence_about_masks(const Attention &a) {
  std::string out;
  bool has_mask = false;
  const auto say = [&out](const std::string &sentence) { out += (out.empty() ? "" : " ") + sentence; };
  const auto say_mask = [&](bool is_there, const std::string &sentence) {
    if (is_there) say(sentence);
    has_mask |= is_there;
  };
  const mha_score_options &score = score_of(a);
  if (score.alibi_slopes != nullptr) say("ALiBi: s - slope * |j - i|, from the row's own place i to the key's, j.");
  if (score.relative_bias != nullptr) {
    say(text("s + relative bias of j - i, from ", -score.relative_left, " to ", score.relative_right, "."));
  }
  if (score.bias != nullptr) say("s + bias, from the file.");
  say_mask(a.call->num_packed() != 0, "Packed: no token sees those of another sequence.");
  say_mask(a.is_causal, "Causal: no token sees those that follow it.");
  say_mask(a.call->window() != 0, text("Window: none sees more than ", count_text(a.call->window(), "token"), ", itself included."));
  const bool adds_groups = score.groups == MHA_GROUPS_ALSO;
  say_mask(score.q_groups != nullptr,
           adds_groups ? "Groups: but those of a group see each other." : "Groups: none sees those of another group.");
  say_mask(score.mask != nullptr, "None sees those where the mask is 0.");
  say(has_mask ? "-inf will become the weight 0." : "Nothing is masked: every token sees all.");
  return out;
}

// Steps 6 to 11: from the heads of q, k and v to the merged context.
void show_attention(Page *page, const Attention &a) {
  const std::string q_shape = shape_text({1, a.q.count, a.q.rows, a.q.width});
  const std::string k_shape = shape_text({1, a.k.count, a.k.rows, a.k.width});
  const std::string v_shape = shape_text({1, a.v.count, a.v.rows, a.v.width});
  const std::string score_shape = shape_text({1, a.q.count, a.q.rows, a.k.rows});
  const std::string context_shape = shape_text({1, a.q.count, a.q.rows, a.v.width});
  const std::string context_rows = shape_text({1, a.q.rows, a.q.count, a.v.width});
  std::vector<Block> scores, scaled_scores, softcapped_scores, masked_scores, weights;  // of the heads that are shown
  for (const int64_t head : shown_blocks(a.q.count)) {
    const HeadScores of_head = head < 0 ? HeadScores{} : scores_of_head(a, head);
    const auto add = [&](std::vector<Block> *blocks, const std::vector<float> &values) {
      blocks->push_back(head < 0 ? gap_block() : matrix_block(text("head ", head + 1), of_head.matrix(values)));
    };
    add(&scores, of_head.scores);
    add(&scaled_scores, of_head.scaled_scores);
    add(&softcapped_scores, of_head.softcapped_scores);
    add(&masked_scores, of_head.masked_scores);
    add(&weights, of_head.weights);
  }

  page->step("6", "group by heads", text(shape_text({1, a.q.rows, a.q.count, a.q.width}), " -> ", q_shape),
             "From here on each head works alone, on its own three matrices with a row for each token.");
  page->blocks(blocks_of(a.q.count, [&](int64_t i) { return matrix_block(text("Q head ", i + 1), a.q.head(i)); }));
  page->blocks(blocks_of(a.k.count, [&](int64_t i) { return matrix_block(text("K head ", i + 1), a.k.head(i)); }));
  page->blocks(blocks_of(a.v.count, [&](int64_t i) { return matrix_block(text("V head ", i + 1), a.v.head(i)); }));

  page->step("7", "attention scores", text(q_shape, " x ", k_shape, "^T -> ", score_shape),
             "Q K^T: row i, column j tells how well what token i looks for fits what token j can be found by.");
  page->blocks(scores);

  const bool is_default_scale = a.scale == 1 / std::sqrt(static_cast<float>(a.q.width));
  const std::string scale =
      is_default_scale ? text("1 / sqrt(", a.q.width, ") = ", decimal_text(a.scale, 4)) : text("the scale, ", a.scale);
  char letter = 'a';
  const auto part = [&letter] { return text("8", letter++); };
  page->step(part(), "scaled", text(score_shape, " x ", decimal_text(a.scale, 4)),
             text("Times ", scale, ", since sums over a head grow with its width."));
  page->blocks(scaled_scores);

  const mha_score_options &score = score_of(a);
  if (score.softcap != 0) {
    const std::string cap = text(score.softcap);
    page->step(part(), "softcap", score_shape, text(cap, " * tanh(s / ", cap, "): no score is beyond ", cap, "."));
    page->blocks(softcapped_scores);
  }

  page->step(part(), "masked", score_shape, sentence_about_masks(a));
  std::vector<Block> changes;
  if (score.alibi_slopes != nullptr) changes.push_back(matrix_block("slopes", {score.alibi_slopes, 1, a.q.count, a.q.count}));
  if (score.relative_bias != nullptr) {
    const int64_t distances = score.relative_left + 1 + score.relative_right;
    changes.push_back(matrix_block("relative bias", {score.relative_bias, a.q.count, distances, distances}));
  }
  page->blocks(changes);
  page->blocks(masked_scores);

  const bool has_sinks = score.sinks != nullptr;
  page->step(part(), "attention weights", score_shape,
             has_sinks ? "Softmax with a sink: exp(s) / (sum of exp(s) + exp(sink)). A row sums to less than 1: the rest goes to no value."
                       : "Softmax turns each row into shares that sum to 1.");
  if (has_sinks) page->blocks({matrix_block("sinks", {score.sinks, 1, a.q.count, a.q.count})});
  page->blocks(weights);

  page->step("9", "context of each head", text(score_shape, " x ", v_shape, " -> ", context_shape),
             text("Each token takes from the values in the shares of its row",
                  score.head_scales != nullptr ? ", times the scale of the head. One of 0 is not computed." : "."));
  if (score.head_scales != nullptr) page->blocks({matrix_block("scales", {score.head_scales, 1, a.q.count, a.q.count})});
  page->blocks(blocks_of(a.q.count, [&](int64_t i) { return matrix_block(text("head ", i + 1), a.context.head(i)); }));

  page->step("10", "group by tokens", text(context_shape, " -> ", context_rows),
             "Back to the order of the input: what each token learnt, a row for each head.");
  page->blocks(blocks_of(a.q.rows, [&](int64_t i) { return matrix_block(text("token ", i + 1), a.context.token(i)); }));

  page->step("11", "merge the heads", text(context_rows, " -> ", shape_text({1, a.q.rows, a.q.count * a.v.width})),
             "The heads of a token, side by side: again a row for each token.");
  page->blocks({matrix_block("context", a.context.merged())});
}

// Step 11a, where there is a gate. weights may be NULL.
void show_gate(Page *page, const mha_layer_config &shape, const mha_layer_weights *weights, int64_t n_q, const Forward &forward) {
  if (shape.gate == MHA_GATE_NONE) return;
  const int64_t merged = shape.num_heads * shape.head_dim_v, width = shape.num_heads * shape.gate_dim;
  page->step("11a", "gated", shape_text({1, n_q, merged}),
             text("context * ", shape.gate == MHA_GATE_SIGMOID ? "1 / (1 + exp(-g))" : "ln(1 + exp(g))",
                  ", where g is a projection of the row: a number for each ", shape.gate_dim == 1 ? "head." : "element."));
  if (weights == nullptr) return page->note("(packed: not shown)");
  std::vector<Block> blocks;
  if (weights->w_g != nullptr) {
    const bool is_in_out = weights->layout == MHA_LAYOUT_IN_OUT;
    const float *w_g = static_cast<const float *>(weights->w_g);
    blocks.push_back(matrix_block("W_G", {w_g, shape.query_dim, width, is_in_out ? width : 1, is_in_out ? 1 : shape.query_dim}));
    if (weights->b_g != nullptr) blocks.push_back(matrix_block("b_G", {weights->b_g, 1, width, width}));
  }
  blocks.push_back(matrix_block("gated", {forward.gated.data(), n_q, merged, merged}));
  page->blocks(blocks);
}

void show_output(Page *page, const mha_layer_config &shape, const mha_layer_weights *weights, int64_t n_q, const Forward &forward) {
  const int64_t merged = shape.num_heads * shape.head_dim_v;
  const Matrix output = {forward.output.data(), n_q, shape.output_dim, shape.output_dim};
  if (weights != nullptr && weights->w_o == nullptr) {
    page->step("12", "output", shape_text({1, n_q, merged}), "This layer has no W_O: the merged heads are its output.");
    page->blocks({matrix_block("y", output)});
    return;
  }
  page->step(
      "12", "output projection",
      text(shape_text({1, n_q, merged}), " x ", shape_text({merged, shape.output_dim}), " -> ", shape_text({1, n_q, shape.output_dim})),
      weights != nullptr ? "W_O mixes what the heads have found." : "W_O, if the packed layer has one, mixes what the heads have found.");
  std::vector<Block> blocks;
  if (weights != nullptr) {
    const bool is_in_out = weights->layout == MHA_LAYOUT_IN_OUT;
    const float *w_o = static_cast<const float *>(weights->w_o);
    blocks.push_back(matrix_block("W_O", {w_o, merged, shape.output_dim, is_in_out ? shape.output_dim : 1, is_in_out ? 1 : merged}));
    if (weights->b_o != nullptr) blocks.push_back(matrix_block("b_O", {weights->b_o, 1, shape.output_dim, shape.output_dim}));
  }
  blocks.push_back(matrix_block("y", output));
  page->blocks(blocks);
}

// ---- The sub-command ------------------------------------------------------------------------------------------------------------

constexpr const char *kOutput = "Output";

struct ExplainOptions {
  LayerOptions layer;
  InputOptions inputs;
  AttentionOptions attention;
  std::string html;
  std::optional<std::string> tokens;
  std::optional<std::string> key_tokens;

  bool is_example() const { return layer.weights.empty() && layer.packed.empty() && inputs.query.empty(); }
};

void check_options(const ExplainOptions &options) {
  if (!options.is_example()) check_needed(options.layer, true, {{"--input", options.inputs.query}});
  if (options.html.empty()) {
    const char *const name = options.tokens ? "--tokens" : options.key_tokens ? "--key-tokens" : nullptr;
    if (name != nullptr) fail(name, ": labels the maps of --html, which is not given");
    return;
  }
  check_output(options.html, files_of(options.layer, options.inputs, options.attention), "--html");
}

// The beginning of a long word: it stands beside a map, again and again.
std::string shortened(const std::string &word) {
  constexpr int kMostLetters = 20;
  int letters = 0;
  for (size_t i = 0; i < word.size(); ++i) {
    const bool begins_letter = (static_cast<unsigned char>(word[i]) & 0xC0) != 0x80;  // of UTF-8
    if ((begins_letter && ++letters > kMostLetters) || i >= 4 * kMostLetters) return word.substr(0, i) + "\u2026";
  }
  return word;
}

// The words of an option, which must be as many as there are rows.
std::vector<std::string> words_of(const std::optional<std::string> &words, const char *option, int64_t rows, const std::string &of_what) {
  std::vector<std::string> result;
  if (!words) return result;
  std::istringstream stream(*words);
  for (std::string word; stream >> word;) result.push_back(shortened(word));
  if (static_cast<int64_t>(result.size()) != rows) {
    fail(option, ": ", count_text(static_cast<int64_t>(result.size()), "token"), " for ", count_text(rows, "row"), " of ", of_what,
         "; one for each is expected, with blanks between them");
  }
  return result;
}

Labels read_labels(const ExplainOptions &options, const CallInputs &inputs) {
  const bool has_own_keys = inputs.key || inputs.value;
  if (options.key_tokens && !has_own_keys)
    fail("--key-tokens: the keys are of the same tokens as the queries; leave it out, or give --key");
  Labels labels;
  labels.rows = words_of(options.tokens, "--tokens", inputs.n_q(), inputs.query.name);
  const Array &keys = inputs.key ? *inputs.key : inputs.value ? *inputs.value : inputs.query;
  labels.columns = has_own_keys ? words_of(options.key_tokens, "--key-tokens", inputs.n_kv(), keys.name) : labels.rows;
  return labels;
}

std::string headline_about(const std::string &what, const CallInputs &inputs, const mha_layer_config &shape, const CallOptions &call) {
  const std::string options = call.text();
  return text(what, ": ", count_text(inputs.n_q(), "token"), " of width ", shape.query_dim, ", ", count_text(shape.num_heads, "head"),
              " of width ", shape.head_dim, inputs.is_causal ? ", causal" : "", options.empty() ? "" : ", ", options);
}

void explain_on(Page *page, const ExplainOptions &options, const CallInputs &inputs, const Labels &labels) {
  const bool is_example = options.is_example();
  const bool is_packed = !options.layer.packed.empty();
  LayerWeights weights = is_example ? example_weights() : is_packed ? LayerWeights{} : read_layer_weights(options.layer);
  const auto layer = is_packed ? std::make_unique<const LoadedLayer>(options.layer.packed, options.layer)
                               : std::make_unique<const LoadedLayer>(weights, options.layer);
  check_widths(inputs, layer->shape(), layer->name(), layer->layout_doubt());
  const CallOptions call(options.layer, options.attention, *layer, inputs);
  std::unique_ptr<const LoadedLayer> without_output;
  if (!is_packed && weights.config.gate != MHA_GATE_NONE) {
    const mha_layer_config config = weights.config;
    const mha_layer_weights matrices = weights.weights;
    weights.weights.w_o = nullptr;
    weights.weights.b_o = nullptr;
    weights.config.output_dim = 0;
    without_output = std::make_unique<const LoadedLayer>(weights, options.layer);
    weights.config = config;
    weights.weights = matrices;
  }
  const std::unique_ptr<const Forward> forward = look_into(*layer, without_output.get(), inputs, call);

  const mha_layer_config &shape = layer->shape();
  const mha_layer_weights *matrices = is_packed ? nullptr : &weights.weights;
  const std::string what =
      is_example ? "A worked example" : text("The layer of ", one_line(layer->name()), " on ", one_line(inputs.query.name));
  page->headline("Multi-head attention, step by step",
                 text(headline_about(what, inputs, shape, call), ". Every number is what the library computed (",
                      mha_instruction_set_name(forward->middle.instruction_set), ")."));
  page->maps(forward->middle, labels);
  show_projection(page, shape, matrices, inputs, *forward);
  show_preparation(page, call, *forward);
  show_attention(page, forward->middle);
  show_gate(page, shape, matrices, inputs.n_q(), *forward);
  show_output(page, shape, matrices, inputs.n_q(), *forward);
  if (!is_example || !call.text().empty()) return;

  const std::unique_ptr<const Attention> smaller = look_into(grouped_example(), forward->middle.instruction_set);
  page->headline(
      "The same steps on smaller numbers",
      "The scores above are so large that softmax gave nearly all weight to one token. Trained layers keep them small, like those "
      "below: from step 6 on, with queries, keys and values made up for the purpose.");
  page->maps(*smaller, labels);
  show_attention(page, *smaller);
  page->note("Here it ends: these smaller numbers come without an output projection, so that there is no step 12.");
}

void explain(const ExplainOptions &options) {
  check_options(options);
  CallInputs inputs = options.is_example() ? example_inputs() : read_inputs(options.inputs);
  inputs.query = widened(inputs.query);  // which changes no result: the library widens them itself
  if (inputs.key) inputs.key = widened(*inputs.key);
  if (inputs.value) inputs.value = widened(*inputs.value);
  const Labels labels = read_labels(options, inputs);
  if (options.html.empty()) {
    TerminalPage page;
    explain_on(&page, options, inputs, labels);
    return;
  }
  OutputFile file(options.html);
  Progress progress(true);
  HtmlPage page(&progress);
  explain_on(&page, options, inputs, labels);
  const std::string html = page.html();
  file.write(html.data(), html.size());
  file.commit();
  progress.clear();
  std::fprintf(stderr, "%s: %s, %s\n", one_line(options.html).c_str(), page.about_maps().c_str(),
               bytes_text(static_cast<double>(html.size())).c_str());
}

}  // namespace

void add_explain_command(CLI::App *app) {
  const auto options = std::make_shared<ExplainOptions>();
  CLI::App *explain_app = app->add_subcommand("explain", "Show every step of a layer, with all shapes and matrices");
  add_weight_options(explain_app, &options->layer);
  add_rope_options(explain_app, &options->layer);
  add_packed_option(explain_app, &options->layer);
  add_input_options(explain_app, &options->inputs);
  add_attention_options(explain_app, &options->attention);
  add_instruction_set_option(explain_app, &options->layer);
  add_back_end_option(explain_app, &options->layer);
  explain_app->add_option("--html", options->html, "Write a page for a browser instead, with a heat map of what each head attends to")
      ->type_name("FILE")
      ->group(kOutput);
  explain_app->add_option("--tokens", options->tokens, "Words for the rows of the input, on the maps; default their numbers")
      ->type_name("\"A B C\"")
      ->group(kOutput);
  explain_app->add_option("--key-tokens", options->key_tokens, "Words for the rows of --key; default their numbers")
      ->type_name("\"A B\"")
      ->group(kOutput);
  explain_app->footer(R"(
Without options it walks through a worked example of 3 tokens and 2 heads. Of large matrices it shows the corners.

The page of --html loads nothing from elsewhere. Its maps have at most a million cells together, and the page at most 4 MiB: with
a long input a cell is the mean of a square of weights, which the page and the terminal then say.

Examples:
  mha explain
  mha explain | less -R
  mha explain --softcap 50 --alibi
  mha explain --html explained.html --tokens "the cat sleeps"
  mha explain --weights gpt2.safetensors --layer h.0 --heads 12 --causal --input x.npy
  mha explain --weights gpt2.safetensors --layer h.0 --heads 12 --causal --input x.npy --html h.0.html)");
  explain_app->callback([options] { explain(*options); });
}

}  // namespace command
