// decode: one token through the whole layer, over a KV cache; every call has another layer and
// cache in turn, so that all comes from memory. decode_hot: always the same layer and cache.
// decode_batch: a token for each of several sequences. decode_tokens: several tokens of one, as
// speculative decoding checks them. decode_attention: the middle stage alone. threads: on one core
// and on all.

#include "decode_case.h"
#include "groups.h"
#include "machine.h"
#include "pool.h"

namespace bench {
namespace {

constexpr DecodeShape shapes[] = {
    {12, 12, 64, 1024}, {16, 16, 128, 4096},  {32, 8, 64, 4096},
    {32, 8, 128, 8192}, {32, 32, 128, 32768},
};
constexpr DecodeShape usual = shapes[2], longest = shapes[4], one_head = {1, 1, 128, 32768};

// As many query heads as kv heads, over the same cache.
constexpr DecodeShape ungrouped(const DecodeShape &shape) {
  return {shape.kv_heads, shape.kv_heads, shape.head_dim, shape.past};
}

}  // namespace

const Group decode_benchmarks([](const Setting &setting) {
  const DecodeOptions cold = {setting.instruction_set, rotated_bytes(), setting.most_rotated_bytes};
  const DecodeOptions hot = {setting.instruction_set, 0, setting.most_rotated_bytes};
  for (const DecodeShape &shape : shapes)
    add("decode/" + shape.layer_name(), [=] { return make_decode_layer(shape, cold); });
  for (const DecodeShape &shape : shapes) {
    // 1.3 GB: no cache holds it, so that it is the same as before.
    if (shape.past == longest.past) continue;
    add("decode_hot/" + shape.layer_name(), [=] { return make_decode_layer(shape, hot); });
  }
  for (const int64_t batch : {2, 4, 8, 16}) {
    DecodeShape shape = usual;
    shape.batch = batch;
    add("decode_batch/B:" + std::to_string(batch) + "/" + shape.layer_name(),
        [=] { return make_decode_layer(shape, cold); });
  }
  for (const int64_t n : {2, 4, 8, 16}) {
    DecodeShape shape = usual;
    shape.n = n;
    add("decode_tokens/n:" + std::to_string(n) + "/" + shape.layer_name(),
        [=] { return make_decode_layer(shape, cold); });
  }

  for (const DecodeShape &shape : {usual, ungrouped(usual), one_head}) {
    add("decode_attention/" + shape.attention_name(), [=] {
      std::unique_ptr<Case> test = make_decode_attention(shape, cold);
      if (shape.heads != shape.kv_heads) {
        test->rival = make_decode_attention(ungrouped(shape), cold);
        test->rival_counter = "times_ungrouped";
      }
      return test;
    });
  }

  for (const uint32_t threads : {uint32_t{1}, num_cores()}) {
    DecodeOptions options = cold;
    options.threads = threads;
    const std::string end = "/T:" + std::to_string(threads);
    add(
        "threads/decode/" + longest.layer_name() + end,
        [=] { return make_decode_layer(longest, options); }, Clock::wall);
    add(
        "threads/decode_attention/" + one_head.attention_name() + end,
        [=] { return make_decode_attention(one_head, options); }, Clock::wall);
    if (num_cores() == 1) break;
  }
});

}  // namespace bench
