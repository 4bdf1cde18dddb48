// storage: decoding with stored keys and values of each type, and projections with stored weights
// of each type, in turns with f32; values of int4, in turns with those of the keys' type, under a
// token and under a prompt; one query, in turns with a loop that reads as many bytes. arithmetic:
// layers with weights of int8 whose projections compute in integers, and a token's with int8 and
// int4, in turns with those of f32; and in bf16 with weights of bf16, in turns with f32.
// int16/cache: attention over caches of int8.

#include "decode_case.h"
#include "groups.h"
#include "layer_case.h"
#include "limits.h"
#include "machine.h"
#include "pool.h"

namespace bench {
namespace {

constexpr DecodeShape shape = {16, 16, 128, 4096};

constexpr DecodeShape of_values[] = {
    {8, 8, 128, 8192}, {32, 8, 128, 8192}, {32, 8, 128, 4096, 1, 512}};

constexpr DecodeShape in_words[] = {
    {8, 8, 128, 4096}, {32, 8, 128, 4096}, {8, 8, 128, 8192, 1, 128}};

// A sequence's first token: next to its weights, there is nothing to read.
constexpr DecodeShape first_token = {32, 32, 128, 0};

constexpr LayerShape layers[] = {{1, 16, 768, 12, true},
                                 {1, 128, 768, 12, true},
                                 {8, 128, 768, 12, true},
                                 {1, 1024, 768, 12, true},
                                 {1, 512, 4096, 32, true}};

// The case in turns with the same in f32.
std::unique_ptr<Case> beside_f32(std::unique_ptr<Case> test, std::unique_ptr<Case> in_f32) {
  test->rival = std::move(in_f32);
  test->rival_counter = "times_f32";
  return test;
}

struct PlainReading : Case {
  const LimitsOf of;
  explicit PlainReading(const LimitsOf &limits) : of(limits) {}
  void call() override { read_once(of); }
};

}  // namespace

const Group storage_benchmarks([](const Setting &setting) {
  const DecodeOptions f32 = {setting.instruction_set, rotated_bytes(), setting.most_rotated_bytes};
  for (const support::Storage of_weights : support::kWeightTypes) {
    const auto type = static_cast<uint32_t>(of_weights);
    const std::string name = support::NameOf(of_weights);
    const bool is_f32 = type == MHA_TYPE_F32;
    DecodeOptions stored = f32;
    stored.weight_type = type;
    add(std::string("storage/weights:") + name + "/" + first_token.layer_name(), [=] {
      std::unique_ptr<Case> test = make_decode_layer(first_token, stored);
      return is_f32 ? std::move(test)
                    : beside_f32(std::move(test), make_decode_layer(first_token, f32));
    });
    if (type == MHA_TYPE_INT4) continue;  // no type of keys
    stored = f32;
    stored.cache_type = type;
    add(std::string("storage/cache:") + name + "/" + shape.attention_name(), [=] {
      std::unique_ptr<Case> test = make_decode_attention(shape, stored);
      return is_f32 ? std::move(test)
                    : beside_f32(std::move(test), make_decode_attention(shape, f32));
    });
  }
  for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_INT8, MHA_TYPE_INT4}) {
    for (const DecodeShape &over : {DecodeShape{8, 8, 128, 4096}, of_values[0]}) {
      for (const uint32_t threads : {uint32_t{1}, num_cores()}) {
        const Clock clock = threads > 1 ? Clock::wall : Clock::processor;
        DecodeOptions stored = f32;
        stored.threads = threads, stored.value_type = type;
        stored.cache_type = type == MHA_TYPE_INT4 ? MHA_TYPE_INT8 : type;
        add(
            std::string("storage/reading/") + support::NameOf(static_cast<support::Storage>(type)) +
                "/" + over.attention_name() + "/T:" + std::to_string(threads),
            [=] {
              std::unique_ptr<Case> test = make_decode_attention(over, stored);
              const double bytes = test->bytes, buffer = test->working_set_bytes + bytes;
              test->rival = std::make_unique<PlainReading>(LimitsOf{
                  test->instruction_set, threads, clock, buffer, static_cast<int64_t>(bytes)});
              test->rival_counter = "of_reading";
              return test;
            },
            clock);
        if (num_cores() == 1) break;
      }
    }
  }
  for (const auto &[type, name] :
       {std::pair(MHA_TYPE_INT8, "int8"), std::pair(MHA_TYPE_F16, "f16")}) {
    for (const uint32_t threads : {uint32_t{1}, num_cores()}) {
      for (const DecodeShape &under : of_values) {
        DecodeOptions keys = f32;
        if (under.n > 1) keys.rotated_bytes = 0;
        keys.threads = threads, keys.cache_type = type;
        DecodeOptions stored = keys;
        stored.value_type = MHA_TYPE_INT4;
        add(
            std::string("storage/values:int4/keys:") + name + "/n:" + std::to_string(under.n) +
                "/" + under.attention_name() + "/T:" + std::to_string(threads),
            [=] {
              std::unique_ptr<Case> test = make_decode_attention(under, stored);
              test->rival = make_decode_attention(under, keys);
              test->rival_counter = "times_same";
              return test;
            },
            threads > 1 ? Clock::wall : Clock::processor);
      }
      if (num_cores() == 1) break;
    }
  }
  for (const auto &[name, arithmetic] :
       {std::pair("int8", MHA_ARITHMETIC_INT8), std::pair("int16", MHA_ARITHMETIC_INT16),
        std::pair("bf16", MHA_ARITHMETIC_BF16)}) {
    const std::string group = std::string("arithmetic/") + name;
    const bool is_bf16 = arithmetic == MHA_ARITHMETIC_BF16;
    LayerOptions floats = {setting.instruction_set};
    if (is_bf16) floats.weight_type = support::Stored::kBf16;
    LayerOptions chosen = floats;
    if (!is_bf16) chosen.weight_type = support::Stored::kInt8;
    chosen.arithmetic = static_cast<support::Arithmetic>(arithmetic);
    for (const bool attends_in_integers : {false, true}) {
      if (attends_in_integers && arithmetic != MHA_ARITHMETIC_INT16) continue;
      chosen.attends_in_integers = attends_in_integers;
      for (const LayerShape &layer : layers) {
        add(group + (attends_in_integers ? "/attention/" : "/") + layer.name(), [=] {
          std::unique_ptr<Case> test = make_layer_case(layer, chosen);
          test->in_integers = true;
          return beside_f32(std::move(test), make_layer_case(layer, floats));
        });
      }
    }
    for (const auto &[type, weights] :
         {std::pair(MHA_TYPE_INT8, "int8"), std::pair(MHA_TYPE_INT4, "int4"),
          std::pair(MHA_TYPE_BF16, "bf16")}) {
      if ((type == MHA_TYPE_BF16) != is_bf16) continue;
      DecodeOptions token = f32, in_f32 = f32;
      if (is_bf16) in_f32.weight_type = type;
      token.weight_type = type;
      token.arithmetic = arithmetic;
      add(group + "/weights:" + weights + "/" + first_token.layer_name(), [=] {
        std::unique_ptr<Case> test = make_decode_layer(first_token, token);
        test->in_integers = true;
        return beside_f32(std::move(test), make_decode_layer(first_token, in_f32));
      });
    }
  }
  for (const DecodeShape &over : in_words) {
    DecodeOptions floats = f32;
    floats.cache_type = MHA_TYPE_INT8;
    for (const uint32_t type : {MHA_TYPE_INT8, MHA_TYPE_INT4}) {
      floats.value_type = type;
      DecodeOptions words = floats;
      words.attends_in_integers = true;
      add(std::string("arithmetic/int16/cache:int8/values:") +
              support::NameOf(static_cast<support::Storage>(type)) +
              "/n:" + std::to_string(over.n) + "/" + over.attention_name(),
          [=] {
            std::unique_ptr<Case> test = make_decode_attention(over, words);
            test->in_integers = true;
            return beside_f32(std::move(test), make_decode_attention(over, floats));
          });
    }
  }
});

}  // namespace bench
