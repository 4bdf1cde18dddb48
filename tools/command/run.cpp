// mha run: rows in a file through a layer in a file, to rows in a file.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>

#include "bench/workers.h"
#include "commands.h"
#include "error.h"
#include "files.h"
#include "npy.h"

namespace command {
namespace {

struct RunOptions {
  LayerOptions layer;
  std::string input, output;
  std::vector<std::string> cache_types;  // of keys, of values
  uint32_t num_threads = 1;
  bool decodes = false, is_quiet = false;
  int64_t prompt = 0;
};

void check_options(const RunOptions &options) {
  if ((options.layer.weights + options.layer.packed).empty())
    fail("--weights (or --packed) is needed");
  if (options.input.empty()) fail("--input is needed");
  check_output(options.output, options.layer);
  if (is_same_file(options.output, options.input))
    fail("--output: ", options.output, " is also the --input; name another file");
  const char *const other = options.prompt != 0            ? "--prompt"
                            : !options.cache_types.empty() ? "--cache-type"
                                                           : nullptr;
  if (!options.decodes && other != nullptr)
    fail(other, ": is an option of --decode, which is not given");
}

// Memory for the library, aligned to 64 bytes.
struct Memory {
  explicit Memory(size_t bytes) : storage(bytes + 64), bytes(bytes) {}
  void *get() {
    return storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
  }
  std::vector<unsigned char> storage;
  size_t bytes;
};

// What goes through a layer, and where to.
struct Work {
  const Layer &layer;
  const Rows &rows;
  const PreparedCall &call;
  const mha_scheduler &scheduler;
  float *output;

  // The arguments for count rows of all sequences, from the one numbered first.
  mha_forward_args arguments(int64_t first, int64_t count, mha_kv_cache *cache) const {
    mha_forward_args args = {};
    args.struct_size = sizeof args;
    args.batch = rows.batch();
    args.n_q = count;
    args.query.data = rows.from(first);
    args.query.type = rows.type();
    args.query.strides.batch = rows.count() * rows.width();
    args.output.data = output + first * layer.shape().output_dim;
    args.output.strides.batch = rows.count() * layer.shape().output_dim;
    args.cache = cache;
    args.scheduler = scheduler.num_threads > 1 ? &scheduler : nullptr;
    call.add_to(&args);
    return args;
  }

  // Returns the seconds that a call takes.
  double forward(const mha_forward_args &args) const {
    mha_error error;
    size_t bytes = 0;
    check(mha_forward_workspace(layer.get(), &args, &bytes, &error), error, rows.name());
    Memory workspace(bytes);
    const auto start = std::chrono::steady_clock::now();
    check(mha_forward(layer.get(), &args, workspace.get(), bytes, &error), error, rows.name());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};

std::string milliseconds(double seconds) {
  char words[64];
  std::snprintf(words, sizeof words, seconds >= 0.1 ? "%.0f ms" : "%.3g ms", seconds * 1e3);
  return words;
}

// A prompt at once, then row by row, over a KV cache. Returns what there is to say.
std::string decode(const RunOptions &options, const Work &work) {
  const int64_t prompt = std::max<int64_t>(options.prompt, 1), rows = work.rows.count();
  if (!work.layer.call().is_causal)
    fail(
        "--decode: rows that are fed one by one cannot attend to later rows, but the layer is not "
        "causal");
  if (prompt > rows)
    fail("--prompt: ", prompt, " rows are more than the ", rows, " of ", work.rows.name());
  mha_kv_cache_config config = {};
  config.struct_size = sizeof config;
  config.num_sequences = work.rows.batch();
  config.capacity = rows;
  config.num_kv_heads = work.layer.shape().num_kv_heads;
  config.head_dim = work.layer.shape().head_dim;
  config.head_dim_v = work.layer.shape().head_dim_v;
  if (!options.cache_types.empty()) config.k_type = type_of(options.cache_types.front());
  if (!options.cache_types.empty()) config.v_type = type_of(options.cache_types.back());
  mha_error error;
  size_t bytes = 0;
  mha_kv_cache *cache = nullptr;
  check(mha_kv_cache_size(&config, &bytes, &error), error, work.rows.name());
  Memory memory(bytes);
  check(mha_kv_cache_init(&config, memory.get(), bytes, &cache, &error), error, work.rows.name());

  const double prompt_seconds = work.forward(work.arguments(0, prompt, cache));
  double seconds = 0;
  for (int64_t row = prompt; row < rows; ++row)
    seconds += work.forward(work.arguments(row, 1, cache));
  std::string type;
  for (const std::string &given : options.cache_types) type += (type.empty() ? "" : ", ") + given;
  const std::string told = text("cache of ", type.empty() ? "f32" : type, ", prompt of ",
                                count_text(prompt, "row"), " in ", milliseconds(prompt_seconds));
  if (rows == prompt) return told;
  const int64_t tokens = (rows - prompt) * work.rows.batch();
  const double rate = static_cast<double>(tokens) / std::max(seconds, 1e-9);
  return told + text(", ", count_text(tokens, "token"), " in ", milliseconds(seconds), ", ",
                     static_cast<int64_t>(rate), " tokens/s");
}

void run(const RunOptions &options) {
  check_options(options);
  const Layer layer(options.layer);
  const Rows rows(options.input);
  const int64_t width = layer.shape().query_dim;
  if (rows.width() != width)
    fail(rows.name(), ": has rows of ", rows.width(), ", but ", layer.name(), " takes rows of ",
         width);
  std::vector<int64_t> shape = rows.shape();  // of the output
  shape.back() = layer.shape().output_dim;
  OutputFile file(options.output);
  std::vector<float> output(static_cast<size_t>(rows.batch() * rows.count() * shape.back()));
  const PreparedCall call(layer.call(), layer.shape(), rows.count());
  const bench::Workers workers(options.num_threads);
  const Work work = {layer, rows, call, workers.scheduler(), output.data()};

  const mha_forward_args args = work.arguments(0, rows.count(), nullptr);
  mha_call_info info = {};
  info.struct_size = sizeof info;
  mha_error error;
  check(mha_info(layer.get(), &args, &info, &error), error, rows.name());
  std::string told;
  if (options.decodes) {
    told = decode(options, work);
  } else {
    const double seconds = std::max(work.forward(args), 1e-9);
    told = text(milliseconds(seconds), ", ",
                static_cast<int64_t>(static_cast<double>(info.operations) / seconds * 1e-9),
                " GFLOP/s");
  }
  const std::string header = npy_header(shape);
  file.write(header.data(), header.size());
  file.write(output.data(), output.size() * sizeof output[0]);
  const std::string line = text(shape_text(rows.shape()), " -> ", shape_text(shape), ", ",
                                layer.text(), ", ", mha_instruction_set_name(info.instruction_set),
                                ", ", count_text(info.num_threads, "thread"), ", ", told);
  file.commit();  // after which nothing needs memory
  if (!options.is_quiet) std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

void add_run_command(CLI::App *app, Task *task) {
  const auto options = std::make_shared<RunOptions>();
  CLI::App *run_app = app->add_subcommand("run", "Run a layer on the rows of a file");
  const auto add = [&](const char *name, auto *value, const char *type, const char *description,
                       const char *group) {
    return run_app->add_option(name, *value, description)->type_name(type)->group(group);
  };
  add("--packed", &options->layer.packed, "FILE",
      "A layer from mha pack, instead of the weights below; mapped, not copied", "Packed");
  add_layer_options(run_app, &options->layer);
  add("--input", &options->input, "FILE",
      "The rows: (n, width) or (batch, n, width) (.npy; float32, float16, bfloat16)", kInput);
  add("--output", &options->output, "FILE",
      "The file for the result (.npy), which has the rank of the input", kInput);
  add("--threads", &options->num_threads, "N",
      "Number of threads, default 1; the result has the same bits for any number", kComputation)
      ->check(whole_number(1024));
  run_app
      ->add_flag("--decode", options->decodes,
                 "Feed the rows one by one over a KV cache, as in generation; same result")
      ->group(kComputation);
  add("--prompt", &options->prompt, "N", "Rows that --decode feeds at once at the start; default 1",
      kComputation)
      ->check(whole_number());
  add("--cache-type", &options->cache_types, "NAME",
      "The type of the cache of --decode, or those of keys and values: f32 (default), f16, bf16, "
      "int8, of values also int4",
      kComputation)
      ->expected(1, 2)
      ->check(one_of(type_names, 5));
  run_app->add_flag("--quiet", options->is_quiet, "Do not print a line about the run");
  run_app->footer(R"(
Examples:
  mha run --weights model.safetensors --layer layers.0 --input x.npy --output y.npy
  mha run --weights layer.safetensors --heads 12 --causal --input x.npy --output y.npy
  mha run --packed layer.mha --decode --prompt 128 --cache-type f16 --input x.npy --output y.npy

The first example reads the config.json next to the model.

The command knows these names of weights: W_query, W_key, W_value (as nn.Linear or as matrices),
nn.MultiheadAttention, Llama and similar models, Phi-3, BERT, GPT-2, vision transformers of timm. It
knows these values of model_type in config.json: bert, gemma, gemma2, gemma3_text, gpt2, gpt_oss,
llama, mistral, olmo2, phi3, qwen2, qwen3, roberta. Windows, norms of queries and keys, sinks,
softcap and scaled RoPE need a config.json. An unknown key in it is an error. The library and the
Python package support what the command lacks: cross-attention, masks, padding, gates, other
names.)");
  run_app->callback([=] { *task = [options] { run(*options); }; });
}

}  // namespace command
