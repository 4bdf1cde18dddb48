// mha explain: one call, step by step, with every matrix. All numbers that a call makes come from the library (mha_taps).
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <memory>

#include "commands.h"
#include "error.h"
#include "example.h"
#include "inputs.h"
#include "layer.h"
#include "matrix.h"
#include "options.h"
#include "taps.h"
#include "terminal.h"

namespace command {
namespace {

// ---- How it is shown ------------------------------------------------------------------------------------------------------------

class Page {
 public:
  void headline(const std::string &title, const std::string &sentence) {
    std::printf("%s\n", palette_.strong(title).c_str());
    for (const std::string &words : wrapped(sentence, width_)) std::printf("%s\n", words.c_str());
  }

  void step(const std::string &number, const std::string &title, const std::string &shapes, const std::string &why) {
    char line[80];
    std::snprintf(line, sizeof line, "Step %-4s%-23s", number.c_str(), title.c_str());
    std::printf("\n%s%s\n", palette_.title(line).c_str(), palette_.shape(shapes).c_str());
    for (const std::string &words : wrapped(why, width_ - 2)) std::printf("  %s\n", palette_.faint(words).c_str());
  }

  // Words in the place of blocks.
  void note(const std::string &sentence) {
    std::printf("\n");
    for (const std::string &words : wrapped(sentence, width_ - 2)) std::printf("  %s\n", words.c_str());
  }

  void blocks(const std::vector<Block> &blocks) {
    if (!blocks.empty()) std::printf("\n");
    print_blocks(blocks, palette_, width_);
  }

 private:
  const int width_ = terminal_width(STDOUT_FILENO);
  Palette palette_{STDOUT_FILENO};
};

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

// W_Q, W_K or W_V, [in, out], wherever the layout has it.
Matrix part_of_weights(const mha_layer_config &shape, const mha_layer_weights &weights, char which) {
  const Columns columns = columns_of(shape);
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
  if (weights.b_qkv != nullptr) return weights.b_qkv + columns_of(shape).before(which);
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
  const Attention &middle = forward.middle;
  const int64_t n_q = inputs.n_q();
  const int64_t n_kv = inputs.n_kv();
  const Columns columns = columns_of(shape);
  const bool is_self = !inputs.key && !inputs.value;

  const std::string shown = inputs.batch() > 1 ? text(" Shown is the first of ", inputs.batch(), " sequences.") : "";
  page->step("1", "input", shape_text({1, n_q, shape.query_dim}), "A row for each token." + shown);
  std::vector<Block> rows = {matrix_block(is_self ? "x" : "query input", {inputs.query.data, n_q, shape.query_dim, shape.query_dim})};
  if (inputs.key) rows.push_back(matrix_block("key input", {inputs.key->data, n_kv, shape.key_dim, shape.key_dim}));
  if (inputs.value) rows.push_back(matrix_block("value input", {inputs.value->data, n_kv, shape.value_dim, shape.value_dim}));
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
  for (const char which : {'Q', 'K', 'V'}) {
    if (weights != nullptr) matrices.push_back(matrix_block(text("W_", which), part_of_weights(shape, *weights, which)));
  }
  for (const char which : {'Q', 'K', 'V'}) {
    const float *bias = weights != nullptr ? part_of_bias(shape, *weights, which) : nullptr;
    const int64_t width = columns.of(which);
    if (bias != nullptr) matrices.push_back(matrix_block(text("b_", which), {bias, 1, width, width}));
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
  page->blocks({matrix_block("Q", middle.q.merged()), matrix_block("K", middle.k.merged()), matrix_block("V", middle.v.merged())});

  page->step("5", "split by heads", text(q_shape, " -> ", shape_text({1, n_q, shape.num_heads, shape.head_dim})),
             "A head is a range of columns, so nothing moves. Shown are the queries, a row for each head.");
  page->blocks(blocks_of(n_q, [&](int64_t i) { return matrix_block(text("token ", i + 1), middle.q.token(i)); }));
}

// Steps 6 to 11: from the heads of q, k and v to the merged context.
void show_attention(Page *page, const Attention &a) {
  const std::string q_shape = shape_text({1, a.q.count, a.q.rows, a.q.width});
  const std::string k_shape = shape_text({1, a.k.count, a.k.rows, a.k.width});
  const std::string v_shape = shape_text({1, a.v.count, a.v.rows, a.v.width});
  const std::string score_shape = shape_text({1, a.q.count, a.q.rows, a.k.rows});
  const std::string context_shape = shape_text({1, a.q.count, a.q.rows, a.v.width});
  const std::string context_rows = shape_text({1, a.q.rows, a.q.count, a.v.width});
  const auto show_scores = [&](const std::vector<float> &scores) {
    page->blocks(blocks_of(a.q.count, [&](int64_t i) { return matrix_block(text("head ", i + 1), a.of_head(scores, i)); }));
  };

  page->step("6", "group by heads", text(shape_text({1, a.q.rows, a.q.count, a.q.width}), " -> ", q_shape),
             "From here on each head works alone, on its own three matrices with a row for each token.");
  page->blocks(blocks_of(a.q.count, [&](int64_t i) { return matrix_block(text("Q head ", i + 1), a.q.head(i)); }));
  page->blocks(blocks_of(a.k.count, [&](int64_t i) { return matrix_block(text("K head ", i + 1), a.k.head(i)); }));
  page->blocks(blocks_of(a.v.count, [&](int64_t i) { return matrix_block(text("V head ", i + 1), a.v.head(i)); }));

  page->step("7", "attention scores", text(q_shape, " x ", k_shape, "^T -> ", score_shape),
             "Q K^T: row i, column j tells how well what token i looks for fits what token j can be found by.");
  show_scores(a.scores);

  const bool is_default_scale = a.scale == 1 / std::sqrt(static_cast<float>(a.q.width));
  const std::string scale =
      is_default_scale ? text("1 / sqrt(", a.q.width, ") = ", decimal_text(a.scale, 4)) : text("the scale, ", a.scale);
  page->step("8a", "scaled", text(score_shape, " x ", decimal_text(a.scale, 4)),
             text("Times ", scale, ", since sums over a head grow with its width."));
  show_scores(a.scaled_scores);

  page->step("8b", "masked", score_shape,
             a.is_causal ? "Causal: no token sees those that follow it. -inf will become the weight 0."
                         : "Nothing is masked: every token sees all.");
  show_scores(a.masked_scores);

  page->step("8c", "attention weights", score_shape, "Softmax turns each row into shares that sum to 1.");
  show_scores(a.weights);

  page->step("9", "context of each head", text(score_shape, " x ", v_shape, " -> ", context_shape),
             "Each token takes from the values in the shares of its row.");
  page->blocks(blocks_of(a.q.count, [&](int64_t i) { return matrix_block(text("head ", i + 1), a.context.head(i)); }));

  page->step("10", "group by tokens", text(context_shape, " -> ", context_rows),
             "Back to the order of the input: what each token learnt, a row for each head.");
  page->blocks(blocks_of(a.q.rows, [&](int64_t i) { return matrix_block(text("token ", i + 1), a.context.token(i)); }));

  page->step("11", "merge the heads", text(context_rows, " -> ", shape_text({1, a.q.rows, a.q.count * a.v.width})),
             "The heads of a token, side by side: again a row for each token.");
  page->blocks({matrix_block("context", a.context.merged())});
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

std::string instruction_set_of(const LoadedLayer &layer, const CallInputs &inputs) {
  const mha_forward_args args = inputs.arguments(0, 1);
  mha_call_info info = {};
  info.struct_size = sizeof info;
  mha_error error;
  check(mha_info(layer.get(), &args, &info, &error), error, inputs.query.name);
  return mha_instruction_set_name(info.instruction_set);
}

// ---- The sub-command ------------------------------------------------------------------------------------------------------------

struct ExplainOptions {
  LayerOptions layer;
  InputOptions inputs;
};

void explain(const ExplainOptions &options) {
  const bool is_example = options.layer.weights.empty() && options.layer.packed.empty() && options.inputs.query.empty();
  if (!is_example) check_needed(options.layer, true, {{"--input", options.inputs.query}});
  const CallInputs inputs = is_example ? example_inputs() : read_inputs(options.inputs);
  const bool is_packed = !options.layer.packed.empty();
  const LayerWeights weights = is_example ? example_weights() : is_packed ? LayerWeights{} : read_layer_weights(options.layer);
  const auto layer = is_packed ? std::make_unique<const LoadedLayer>(options.layer.packed, options.layer)
                               : std::make_unique<const LoadedLayer>(weights, options.layer);
  check_widths(inputs, layer->shape(), layer->name(), layer->layout_doubt());
  const std::unique_ptr<const Forward> forward = look_into(*layer, inputs);

  const mha_layer_config &shape = layer->shape();
  const mha_layer_weights *matrices = is_packed ? nullptr : &weights.weights;
  const std::string what =
      is_example ? "A worked example" : text("The layer of ", one_line(layer->name()), " on ", one_line(inputs.query.name));
  Page page;
  page.headline("Multi-head attention, step by step",
                text(what, ": ", count_text(inputs.n_q(), "token"), " of width ", shape.query_dim, ", ",
                     count_text(shape.num_heads, "head"), " of width ", shape.head_dim, inputs.is_causal ? ", causal" : "",
                     ". Every number is what the library computed (", instruction_set_of(*layer, inputs), ")."));
  show_projection(&page, shape, matrices, inputs, *forward);
  show_attention(&page, forward->middle);
  show_output(&page, shape, matrices, inputs.n_q(), *forward);
  if (!is_example) return;

  std::printf("\n\n");
  page.headline(
      "The same steps on smaller numbers",
      "The scores above are so large that softmax gave nearly all weight to one token. Trained layers keep them small, like those "
      "below: from step 6 on, with queries, keys and values made up for the purpose.");
  show_attention(&page, *look_into(grouped_example(), computation_options(options.layer).instruction_set));
  page.note("Here it ends: these smaller numbers come without an output projection, so that there is no step 12.");
}

}  // namespace

void add_explain_command(CLI::App *app) {
  const auto options = std::make_shared<ExplainOptions>();
  CLI::App *explain_app = app->add_subcommand("explain", "Show every step of a layer, with all shapes and matrices");
  add_weight_options(explain_app, &options->layer);
  add_packed_option(explain_app, &options->layer);
  add_input_options(explain_app, &options->inputs);
  add_instruction_set_option(explain_app, &options->layer);
  add_back_end_option(explain_app, &options->layer);
  explain_app->footer(R"(
Without options it walks through a worked example of 3 tokens and 2 heads. Of large matrices it shows the corners.

Examples:
  mha explain
  mha explain | less -R
  mha explain --weights gpt2.safetensors --layer h.0 --heads 12 --causal --input x.npy)");
  explain_app->callback([options] { explain(*options); });
}

}  // namespace command
