// storage: decoding with stored keys and values of each type, in turns with f32.

#include "decode_case.h"
#include "groups.h"
#include "machine.h"

namespace bench {
namespace {

constexpr DecodeShape shape = {16, 16, 128, 4096};

constexpr struct {
  uint32_t type;
  const char *name;
} cache_types[] = {{MHA_TYPE_F32, "f32"}, {MHA_TYPE_F16, "f16"}, {MHA_TYPE_BF16, "bf16"}, {MHA_TYPE_INT8, "int8"}};

}  // namespace

void register_storage_benchmarks(const Setting &setting) {
  for (const auto &[type, name] : cache_types) {
    DecodeOptions f32 = {setting.instruction_set, rotated_bytes(), setting.most_rotated_bytes}, stored = f32;
    stored.cache_type = type;
    add(std::string("storage/cache:") + name + "/" + shape.attention_name(), [=] {
      std::unique_ptr<Case> test = make_decode_attention(shape, stored);
      if (stored.cache_type != f32.cache_type) {
        test->rival = make_decode_attention(shape, f32);
        test->rival_counter = "times_f32";
      }
      return test;
    });
  }
}

}  // namespace bench
