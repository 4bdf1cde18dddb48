// storage: decoding with stored keys and values of each type, and projections with stored weights of each type, in turns with f32.
// arithmetic: layers with weights of int8 whose projections compute in integers, and a token's with int8 and int4, in turns with those of
// f32.

#include "decode_case.h"
#include "groups.h"
#include "layer_case.h"
#include "machine.h"

namespace bench {
namespace {

constexpr DecodeShape shape = {16, 16, 128, 4096};

constexpr struct {
  uint32_t type;
  const char *name;
} types[] = {{MHA_TYPE_F32, "f32"}, {MHA_TYPE_F16, "f16"}, {MHA_TYPE_BF16, "bf16"}, {MHA_TYPE_INT8, "int8"}, {MHA_TYPE_INT4, "int4"}};

// A sequence's first token: next to its weights, there is nothing to read.
constexpr DecodeShape first_token = {32, 32, 128, 0};

constexpr LayerShape layers[] = {
    {1, 16, 768, 12, true}, {1, 128, 768, 12, true}, {8, 128, 768, 12, true}, {1, 1024, 768, 12, true}, {1, 512, 4096, 32, true}};

constexpr struct {
  const char *name;
  uint32_t arithmetic;
  Change change;
} arithmetics[] = {{"int8", MHA_ARITHMETIC_INT8, [](support::LayerProblem *problem) { problem->arithmetic = support::Arithmetic::kInt8; }},
                   {"int16", MHA_ARITHMETIC_INT16,
                    [](support::LayerProblem *problem) { problem->arithmetic = support::Arithmetic::kInt16; }}};

}  // namespace

void register_storage_benchmarks(const Setting &setting) {
  const DecodeOptions f32 = {setting.instruction_set, rotated_bytes(), setting.most_rotated_bytes};
  for (const auto &[type, name] : types) {
    if (type == MHA_TYPE_INT4) continue;  // of weights only
    DecodeOptions stored = f32;
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
  for (const auto &[type, name] : types) {
    DecodeOptions stored = f32;
    stored.weight_type = type;
    add(std::string("storage/weights:") + name + "/" + first_token.layer_name(), [=] {
      std::unique_ptr<Case> test = make_decode_layer(first_token, stored);
      if (stored.weight_type != f32.weight_type) {
        test->rival = make_decode_layer(first_token, f32);
        test->rival_counter = "times_f32";
      }
      return test;
    });
  }
  for (const auto &[name, kind, change] : arithmetics) {
    const uint32_t arithmetic = kind;
    for (const LayerShape &layer : layers) {
      LayerOptions integers = {setting.instruction_set};
      integers.change = change;
      integers.weight_type = support::Stored::kInt8;
      add(std::string("arithmetic/") + name + "/" + layer.name(), [=] {
        std::unique_ptr<Case> test = make_layer_case(layer, integers);
        test->rival = make_layer_case(layer, {setting.instruction_set});
        test->rival_counter = "times_f32";
        test->in_integers = true;
        return test;
      });
    }
    for (const auto &[type, weights] : types) {
      if (type != MHA_TYPE_INT8 && type != MHA_TYPE_INT4) continue;
      DecodeOptions integers = f32;
      integers.weight_type = type;
      integers.arithmetic = arithmetic;
      add(std::string("arithmetic/") + name + "/weights:" + weights + "/" + first_token.layer_name(), [=] {
        std::unique_ptr<Case> test = make_decode_layer(first_token, integers);
        test->rival = make_decode_layer(first_token, f32);
        test->rival_counter = "times_f32";
        test->in_integers = true;
        return test;
      });
    }
  }
}

}  // namespace bench
