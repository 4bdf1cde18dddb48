// plain_arrays: one query and two over keys and values that the caller holds, in turns with the
// same over a cache of the library. In memory, head_first is [head][position][dim], and
// position_first [position][head][dim]. Arrays and caches take turns, so that they come from
// memory.

#include <algorithm>
#include <cstring>

#include "decode_case.h"
#include "groups.h"
#include "layer_case.h"
#include "machine.h"
#include "pool.h"

namespace bench {
namespace {

class PlainCase : public Case {
 public:
  PlainCase(const DecodeShape &shape, bool is_head_first, const DecodeOptions &options)
      : array_bytes_(shape.past * shape.kv_width() * (options.cache_type == MHA_TYPE_F32 ? 4 : 2)),
        scheduler_(pool_scheduler(options.threads)) {
    const int64_t q_floats = shape.n * shape.width();
    bytes = 2 * static_cast<double>(array_bytes_ + 4 * q_floats);
    stages = {{4 * static_cast<double>(q_floats * shape.past), bytes}};
    copies_ = std::max<int64_t>(
        1, std::min(options.rotated_bytes, options.most_rotated_bytes) / (2 * array_bytes_));
    working_set_bytes = bytes * static_cast<double>(copies_);
    instruction_set = options.instruction_set;
    threads = options.threads;
    q_ = support::Random(3).Uniforms(q_floats, 1.7f);
    output_.resize(q_.size());
    // The same numbers again and again.
    const int64_t size = 2 * copies_ * array_bytes_, part = 1 << 16;
    arrays_ = support::Memory(static_cast<size_t>(size), support::Place::kLargePages);
    std::vector<float> floats = support::Random(11).Uniforms(part, 1.7f);
    std::vector<uint16_t> halves(part);
    for (int64_t i = 0; i < part; ++i)
      halves[i] = static_cast<uint16_t>(0x3000 + support::Random(i).Below(0xc00));  // 0.125 to 1
    const bool is_f32 = options.cache_type == MHA_TYPE_F32;
    const void *const from = is_f32 ? static_cast<const void *>(floats.data()) : halves.data();
    for (int64_t at = 0, step = is_f32 ? 4 * part : 2 * part; at < size; at += step)
      memcpy(arrays_.data() + at, from, static_cast<size_t>(std::min(step, size - at)));

    args_.call.batch = 1;
    args_.call.n_q = shape.n;
    args_.call.n_kv = shape.past;
    args_.num_heads = shape.heads;
    args_.num_kv_heads = shape.kv_heads;
    args_.head_dim = shape.head_dim;
    args_.q.data = q_.data();
    args_.k.type = args_.v.type = options.cache_type;
    if (is_head_first)
      args_.k.strides = args_.v.strides = {0, shape.head_dim, shape.past * shape.head_dim};
    args_.output.data = output_.data();
    args_.instruction_set = options.instruction_set;
    if (threads > 1) args_.call.scheduler = &scheduler_;
    point(0);
    size_t workspace_bytes = 0;
    support::Check(mha_attention_workspace(&args_, &workspace_bytes, &error_), error_);
    workspace_ = support::Memory(workspace_bytes, support::Place::kLargePages);
  }

  void call() override {
    support::Check(mha_attention(&args_, workspace_.data(), workspace_.size(), &error_), error_);
    point((copy_ + 1) % copies_);
  }

 private:
  void point(int64_t copy) {
    copy_ = copy;
    args_.k.data = arrays_.data() + 2 * copy * array_bytes_;
    args_.v.data = arrays_.data() + (2 * copy + 1) * array_bytes_;
  }

  const int64_t array_bytes_;
  int64_t copies_ = 1, copy_ = 0;
  mha_attention_args args_ = support::Zeroed<mha_attention_args>();
  mha_scheduler scheduler_;
  std::vector<float> q_, output_;
  support::Memory arrays_, workspace_;
  mha_error error_ = {};
};

constexpr DecodeShape shapes[] = {
    {8, 8, 128, 4000}, {32, 8, 128, 4000}, {12, 12, 64, 4000}, {9, 3, 64, 4000}};

}  // namespace

const Group plain_benchmarks([](const Setting &setting) {
  DecodeOptions options = {setting.instruction_set, rotated_bytes(), setting.most_rotated_bytes};
  for (const uint32_t threads : {uint32_t{1}, num_cores()}) {
    options.threads = threads;
    for (const auto &[type, name] : {std::pair(MHA_TYPE_F32, "f32"), {MHA_TYPE_F16, "f16"}}) {
      options.cache_type = type;
      for (DecodeShape shape : shapes) {
        for (const int64_t n : {1, 2}) {
          shape.n = n;
          for (const bool is_head_first : {true, false}) {
            const std::string all = std::string("plain_arrays/") + name +
                                    "/n:" + std::to_string(n) + "/" + shape.attention_name() + "/" +
                                    (is_head_first ? "head_first" : "position_first") +
                                    "/T:" + std::to_string(threads);
            add(
                all,
                [=] {
                  auto test = std::make_unique<PlainCase>(shape, is_head_first, options);
                  test->rival = make_decode_attention(shape, options);
                  test->rival_counter = "times_cache";
                  return test;
                },
                threads > 1 ? Clock::wall : Clock::processor);
          }
        }
      }
    }
    if (num_cores() == 1) break;
  }
});

}  // namespace bench
