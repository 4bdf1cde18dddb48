// mha run: rows in a file through a layer in a file, to rows in a file.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>

#include "bench/workers.h"
#include "call_options.h"
#include "commands.h"
#include "decode.h"
#include "error.h"
#include "files.h"
#include "inputs.h"
#include "layer.h"
#include "options.h"
#include "terminal.h"

namespace command {
namespace {

struct RunOptions {
  LayerOptions layer;
  InputOptions inputs;
  AttentionOptions attention;
  DecodeOptions decode;
  std::string output;
  std::string output_type;
  uint32_t num_threads = 1;
  bool is_quiet = false;
};

std::unique_ptr<const LoadedLayer> load(const LayerOptions &options, Progress *progress) {
  if (!options.packed.empty()) return std::make_unique<const LoadedLayer>(options.packed, options);
  const LayerWeights weights = read_layer_weights(options);
  progress->stage("packing " + options.weights);
  return std::make_unique<const LoadedLayer>(weights, options);
}

// How many sequences go into one call: enough that the call is not lost in its own overhead, few enough that progress is seen. The
// results do not depend on it.
int64_t sequences_per_call(const mha_call_info &whole, int64_t batch) {
  const double operations_per_sequence = static_cast<double>(whole.operations) / static_cast<double>(batch);
  const double target = 4e9 * whole.num_threads;
  return std::max<int64_t>(1, std::min<int64_t>(batch, static_cast<int64_t>(target / std::max(1.0, operations_per_sequence))));
}

size_t checked_product(const std::string &name, const std::vector<int64_t> &shape) {
  size_t product = 1;
  for (const int64_t extent : shape) {
    if (extent == 0) return 0;
  }
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(product, static_cast<size_t>(extent), &product) || product > SIZE_MAX / 8) {
      fail(name, ": the output would have the shape ", shape_text(shape), ", which is too large");
    }
  }
  return product;
}

std::string back_end_text(const mha_call_info &info) {
  const std::string set = mha_instruction_set_name(info.instruction_set);
  return info.back_end == MHA_BACK_END_SGEMM ? set + " and openblas" : set;
}

// Runs all rows, and returns what there is to say about it; whole is what they cost together.
std::string run_at_once(const Work &work, const mha_call_info &whole, Progress *progress) {
  const CallInputs &inputs = work.inputs;
  const bool is_empty = inputs.batch() == 0 || inputs.n_q() == 0;
  const int64_t slice = is_empty ? 0 : sequences_per_call(whole, inputs.batch());
  mha_score_options score;
  const mha_forward_args longest = work.arguments(0, slice, &score);
  size_t workspace_bytes = 0;
  mha_error error;
  check(mha_forward_workspace(work.layer.get(), &longest, &workspace_bytes, &error), error, inputs.query.name);
  const auto workspace = std::make_unique<unsigned char[]>(workspace_bytes);

  const auto start = std::chrono::steady_clock::now();
  for (int64_t done = 0; !is_empty && done < inputs.batch(); done += slice) {
    progress->step("sequence", done, inputs.batch());
    const mha_forward_args args = work.arguments(done, std::min(slice, inputs.batch() - done), &score);
    check(mha_forward(work.layer.get(), &args, workspace.get(), workspace_bytes, &error), error, inputs.query.name);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double gflops = seconds > 0 ? static_cast<double>(whole.operations) / seconds * 1e-9 : 0;
  return duration_text(seconds) + ", " + decimal_text(gflops, 1) + " GFLOP/s";
}

void run(const RunOptions &options) {
  check_needed(options.layer, true, {{"--input", options.inputs.query}, {"--output", options.output}});
  check_output(options.output, files_of(options.layer, options.inputs, options.attention));
  check_decode_options(options.decode, options.inputs, options.attention);
  Progress progress(!options.is_quiet);
  const CallInputs inputs = read_inputs(options.inputs);
  const std::unique_ptr<const LoadedLayer> layer = load(options.layer, &progress);
  check_widths(inputs, layer->shape(), layer->name(), layer->layout_doubt());

  // The output: as the input, but for the width.
  std::vector<int64_t> shape = inputs.query.shape;
  shape.back() = layer->shape().output_dim;
  const std::string &name = inputs.query.name;
  const uint32_t output_type = type_of(options.output_type);
  const size_t output_bytes = checked_product(name, shape) * (output_type == MHA_TYPE_F32 ? sizeof(float) : sizeof(uint16_t));
  const auto output = std::make_unique<char[]>(output_bytes);  // zeroed, so that its pages are there before the clock runs
  OutputFile file(options.output);

  const CallOptions call(options.layer, options.attention, *layer, inputs);
  const bench::Workers workers(options.num_threads);
  const Work work = {*layer, inputs, call, workers.scheduler(), output.get(), output_type};

  // What the whole batch costs.
  mha_score_options score;
  const mha_forward_args args = work.arguments(0, inputs.batch(), &score);
  mha_error error;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  check(mha_info(layer->get(), &args, &info, &error), error, name);
  const std::string told =
      options.decode.is_wanted ? decode(options.decode, work, !options.is_quiet, &progress) : run_at_once(work, info, &progress);

  progress.stage("writing " + options.output);
  const std::string header = npy_header(shape, output_type);
  file.write(header.data(), header.size());
  file.write(output.get(), output_bytes);
  file.commit();
  progress.clear();
  if (options.is_quiet) return;
  const std::string heads = heads_text(layer->shape()) + (call.text().empty() ? "" : ", " + call.text());
  std::fprintf(stderr, "%s -> %s, %s, %s, %s, %s\n", shape_text(inputs.query.shape).c_str(), shape_text(shape).c_str(), heads.c_str(),
               back_end_text(info).c_str(), count_text(info.num_threads, "thread").c_str(), told.c_str());
}

}  // namespace

void add_run_command(CLI::App *app) {
  const auto options = std::make_shared<RunOptions>();
  CLI::App *run_app = app->add_subcommand("run", "Run a layer on the rows of a file");
  add_weight_options(run_app, &options->layer);
  add_rope_options(run_app, &options->layer);
  add_kept_heads_option(run_app, &options->layer);
  add_packed_option(run_app, &options->layer);
  add_input_options(run_app, &options->inputs);
  add_attention_options(run_app, &options->attention);
  add_padding_options(run_app, &options->attention);
  run_app->add_option("--output", options->output, "Where the result goes (.npy), with the rank of the input")
      ->type_name("FILE")
      ->group(kInput);
  add_output_type_option(run_app, &options->output_type);
  add_instruction_set_option(run_app, &options->layer);
  add_weight_type_option(run_app, &options->layer);
  add_back_end_option(run_app, &options->layer);
  run_app->add_option("--threads", options->num_threads, "Number of threads, default 1; the result is the same bits for any")
      ->type_name("N")
      ->check(whole_number(1024))
      ->group(kComputation);
  add_decode_options(run_app, &options->decode);
  run_app->add_flag("--quiet", options->is_quiet, "No progress, no line about the run");
  run_app->footer(R"(
Examples:
  mha run --weights layer.safetensors --heads 12 --causal --input x.npy --output y.npy
  mha run --weights gpt2.safetensors --layer h.0 --heads 12 --causal --input x.npy --output y.npy
  mha run --weights a.safetensors --names q=wq,k=wk,v=wv,o=wo --layout in-out --heads 8 --input x.npy --output y.npy
  mha run --weights llama.safetensors --layer layers.0 --heads 32 --rope-base 500000 --causal --input x.npy --output y.npy
  mha run --weights qwen3.safetensors --layer layers.0 --heads 16 --rope-base 1000000 --causal --input x.npy --output y.npy
  mha run --weights qwen3-next.safetensors --layer layers.3 --heads 16 --gate sigmoid --rope-dims 64 --rope-base 10000000 ...
  mha run --weights llama.safetensors --layer layers.0 --heads 32 --rope-scaling '{"rope_type": "linear", "factor": 4}' ...
  mha run --packed layer.mha --input x.npy --output y.npy --threads 2
  mha run --packed layer.mha --causal --decode --prompt 128 --cache-type f16 --input x.npy --output y.npy

The names of these layers are known: W_query, W_key, W_value (as nn.Linear or as matrices), nn.MultiheadAttention, Llama and kin
(rotated by base 10000 if no option says otherwise), BERT, GPT-2. A packed layer is rotated if one of the --rope options is given.
Of Llama's kin, the tensors tell the norms (Qwen3, Gemma 3 and 4, OLMo 2), a scale of 1 (Gemma 3n and 4) and the sinks (gpt-oss,
with its YaRN); the line about the run says so. No tensor tells base, epsilon, window, softcap and the kind of a gate: config.json
does. With --gate, a gate has the tensor g_proj.weight or g=.. in --names or, without one, the columns of q_proj behind those of
each head (Qwen3-Next). Of other names, the bias of a.weight is a.bias, or given by bq=.., bk=.., bv=.., bqkv=.., bo=.. in
--names. Without o=.. the merged heads are the output.

--decode feeds as many rows at once as --prompt says, then one of each sequence at a time. It tells how many tokens that are per
second, and the share of the read bandwidth (measured before and after) that they take: each step reads the weights once, and the
keys and values that are in the cache. With a --cache-type of fewer bits than f32, these are rounded.)");
  run_app->callback([options] { run(*options); });
}

}  // namespace command
