#include "decode.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "bench/memory.h"
#include "error.h"
#include "read_probe.h"

namespace command {
namespace {

// An empty cache for as many positions of each sequence as there are rows, in memory of its own.
class Cache {
 public:
  Cache(const mha_layer_config &shape, const CallInputs &inputs, uint32_t type) {
    mha_kv_cache_config config = {};
    config.struct_size = sizeof config;
    config.num_sequences = inputs.batch();
    config.capacity = inputs.n_q();
    config.num_kv_heads = shape.num_kv_heads;
    config.head_dim = shape.head_dim;
    config.head_dim_v = shape.head_dim_v;
    config.k_type = config.v_type = type;
    mha_error error;
    check(mha_kv_cache_size(&config, &bytes_, &error), error, inputs.query.name);
    memory_ = bench::make_array<unsigned char>(static_cast<int64_t>(bytes_));
    check(mha_kv_cache_init(&config, memory_.get(), bytes_, &cache_, &error), error, inputs.query.name);
  }

  mha_kv_cache *get() const { return cache_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
  bench::Array<unsigned char> memory_;
  mha_kv_cache *cache_ = nullptr;
};

// Steps, each a call for some rows of all sequences.
class Decoder {
 public:
  Decoder(const Work &work, mha_kv_cache *cache, int64_t prompt) : work_(work), cache_(cache) {
    mha_score_options score;
    const mha_forward_args longest = arguments(0, prompt, &score);
    mha_error error;
    check(mha_forward_workspace(work.layer.get(), &longest, &workspace_bytes_, &error), error, name());
    workspace_ = std::make_unique<unsigned char[]>(workspace_bytes_);
  }

  mha_call_info describe(int64_t row, int64_t count) const {
    mha_score_options score;
    const mha_forward_args args = arguments(row, count, &score);
    mha_call_info info = {};
    info.struct_size = sizeof info;
    mha_error error;
    check(mha_info(work_.layer.get(), &args, &info, &error), error, name());
    return info;
  }

  // Returns the seconds that it took.
  double step(int64_t row, int64_t count) const {
    mha_score_options score;
    const mha_forward_args args = arguments(row, count, &score);
    mha_error error;
    const auto start = std::chrono::steady_clock::now();
    check(mha_forward(work_.layer.get(), &args, workspace_.get(), workspace_bytes_, &error), error, name());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  const std::string &name() const { return work_.inputs.query.name; }

  // *score is for the arguments to point to.
  mha_forward_args arguments(int64_t row, int64_t count, mha_score_options *score) const {
    const CallInputs &inputs = work_.inputs;
    mha_forward_args args = work_.arguments(0, inputs.batch(), score);
    args.n_q = count;
    args.query = inputs.query.from(row * inputs.query.width());
    args.query_batch_stride = inputs.n_q() * inputs.query.width();
    args.output = work_.output_row(row);
    args.output_batch_stride = inputs.n_q() * work_.layer.shape().output_dim;
    args.cache = cache_;
    work_.options.move_to_row(row, score);
    return args;
  }

  const Work &work_;
  mha_kv_cache *cache_;
  size_t workspace_bytes_ = 0;
  std::unique_ptr<unsigned char[]> workspace_;
};

}  // namespace

mha_forward_args Work::arguments(int64_t first, int64_t count, mha_score_options *score) const {
  mha_forward_args args = inputs.arguments(first, count);
  args.output = output_row(first * inputs.n_q());
  args.output_type = output_type;
  args.scheduler = scheduler.num_threads > 1 ? &scheduler : nullptr;
  options.add_to(&args, first, score);
  return args;
}

void add_decode_options(CLI::App *app, DecodeOptions *options) {
  app->add_flag("--decode", options->is_wanted, "Feed the rows one by one, over a KV cache, as when generating; the result is the same")
      ->group(kComputation);
  app->add_option("--prompt", options->prompt, "Rows of each sequence that --decode feeds at once at the beginning; default 1")
      ->type_name("N")
      ->check(whole_number())
      ->group(kComputation);
  app->add_option("--cache-type", options->cache_type, "How the cache of --decode keeps keys and values: f32 (default), f16, bf16 or int8")
      ->type_name("NAME")
      ->check(type_name(MHA_TYPE_INT8))
      ->group(kComputation);
}

void check_decode_options(const DecodeOptions &options, const InputOptions &inputs, const AttentionOptions &attention) {
  if (!options.is_wanted) {
    const char *const name = options.prompt != 0 ? "--prompt" : !options.cache_type.empty() ? "--cache-type" : nullptr;
    if (name != nullptr) fail(name, ": is an option of --decode, which is not given");
    return;
  }
  if (!inputs.is_causal) fail("--decode: a row that is fed knows none of those after it; give --causal too");
  const char *const other = !inputs.key.empty() ? "--key" : !inputs.value.empty() ? "--value" : nullptr;
  if (other != nullptr) fail("--decode: keys and values are made of the rows that are fed; leave out ", other);
  if (attention.adds_groups) fail("--decode: a row that is fed can't see later ones of its group; leave out --groups-also");
  const char *const of_rows = !attention.cu_seqlens.empty() ? "--cu-seqlens"
                              : !attention.lengths.empty() ? "--lengths"
                              : !attention.starts.empty()  ? "--starts"
                                                           : nullptr;
  if (of_rows != nullptr) fail("--decode: feeds all rows of all sequences; leave out ", of_rows);
}

std::string decode(const DecodeOptions &options, const Work &work, bool is_measured, Progress *progress) {
  const CallInputs &inputs = work.inputs;
  const int64_t rows = inputs.n_q(), sequences = inputs.batch(), prompt = std::max<int64_t>(options.prompt, 1);
  if (rows == 0 || sequences == 0) return "no rows";
  if (prompt > rows) fail("--prompt: ", prompt, " rows are more than the ", rows, " of ", inputs.query.name);

  const Cache cache(work.layer.shape(), inputs, type_of(options.cache_type));
  const Decoder decoder(work, cache.get(), prompt);
  const mha_call_info info = decoder.describe(0, prompt);
  std::optional<ReadProbe> probe;
  double bandwidth = 0;
  if (is_measured && rows > prompt) {
    progress->stage("measuring the read bandwidth");
    probe.emplace(info.instruction_set, work.scheduler, static_cast<double>(info.packed_bytes + cache.bytes()));
    bandwidth = probe->measure();
  }

  const double prompt_seconds = decoder.step(0, prompt);
  double seconds = 0, bytes = 0;
  for (int64_t row = prompt; row < rows; ++row) {
    progress->step("token", row - prompt, rows - prompt);
    bytes += static_cast<double>(decoder.describe(row, 1).bytes);
    seconds += decoder.step(row, 1);
  }

  std::string told = text("cache of ", options.cache_type.empty() ? "f32" : options.cache_type, ", prompt of ",
                          count_text(prompt, "row"), " in ", duration_text(prompt_seconds));
  if (rows == prompt) return told;
  const double tokens = static_cast<double>((rows - prompt) * sequences);
  told += text(", ", count_text((rows - prompt) * sequences, "token"), " in ", duration_text(seconds), ", ",
               decimal_text(seconds > 0 ? tokens / seconds : 0, 0), " tokens/s");
  if (!probe) return told;
  bandwidth = std::max(bandwidth, probe->measure());
  const double share = seconds > 0 ? bytes / seconds / bandwidth : 0;
  return told + text(", ", decimal_text(100 * share, 0), "% of the read bandwidth (", decimal_text(bandwidth * 1e-9, 1), " GB/s)");
}

}  // namespace command
