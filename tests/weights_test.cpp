// Weights kept in fewer bits: the bits of the specification for every type, way of giving them and number of rows; what is refused; the
// packed format; and how far the results are from those of the weights as given.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "spec/spec.h"
#include "support/instruction_sets.h"
#include "support/layer.h"
#include "support/outputs.h"
#include "support/random.h"
#include "support/schedulers.h"

namespace {

using support::Converted;
using support::Describe;
using support::Forward;
using support::FromBits;
using support::Layer;
using support::LayerCall;
using support::LayerForm;
using support::LayerProblem;
using support::MakeLayer;
using support::Random;
using support::SameBits;
using support::Scheduler;
using support::Specify;
using support::Stored;
using support::WeightForm;

constexpr Stored kTypes[] = {Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4};
const char *const kNames[] = {"f32", "f16", "bf16", "int8", "int4"};

const char *NameOf(Stored stored) { return kNames[static_cast<uint32_t>(stored)]; }

LayerProblem RandomProblem(Random *random, int64_t n, int64_t dim, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t head_dim_v,
                           int64_t output_dim) {
  LayerProblem problem;
  problem.batch = 1;
  problem.n_q = problem.n_kv = n;
  problem.num_heads = heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  problem.query_dim = problem.key_dim = problem.value_dim = dim;
  problem.output_dim = output_dim;
  problem.is_causal = random->Chance(0.5);
  FillNormal(random, static_cast<uint32_t>(random->Between(0, 15)), true, &problem);
  return problem;
}

// ---- The bits

class StoredWeights : public support::InstructionSetTest {};

TEST_P(StoredWeights, GiveTheBitsOfTheSpecificationForEveryNumberOfRows) {
  Random random(1);
  // Depths around the groups of 32 and the blocks of 256, odd and even; columns that fill panels of 48 and ones that do not.
  const struct {
    int64_t dim, heads, kv_heads, head_dim, head_dim_v, output_dim;
  } shapes[] = {{1, 1, 1, 1, 1, 1}, {31, 2, 1, 12, 7, 49}, {64, 3, 3, 16, 16, 48}, {257, 2, 2, 24, 31, 100}, {289, 2, 1, 26, 17, 289}};
  for (const auto &shape : shapes) {
    for (int64_t n = 1; n <= 40; n += n < 20 ? 1 : 5) {
      LayerProblem problem =
          RandomProblem(&random, n, shape.dim, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim_v, shape.output_dim);
      for (const Stored stored : kTypes) {
        LayerForm form;
        form.instruction_set = instruction_set();
        form.weight_type = stored;
        const Layer layer = MakeLayer(problem, form);
        ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(Converted(problem, stored))))
            << NameOf(stored) << " " << Describe(problem);
      }
    }
  }
}

TEST_P(StoredWeights, GiveTheSameBitsForManyRowsAndThreads) {
  Random random(2);
  for (const int64_t n : {143, 144, 145, 300}) {
    LayerProblem problem = RandomProblem(&random, n, 70, 2, 1, 40, 33, 60);
    problem.batch = n == 300 ? 1 : 2;
    problem.query = random.Normals(problem.batch * n * problem.query_dim);
    for (const Stored stored : kTypes) {
      LayerForm form;
      form.instruction_set = instruction_set();
      form.weight_type = stored;
      const Layer layer = MakeLayer(problem, form);
      const support::Outputs expected = Specify(Converted(problem, stored));
      for (const uint32_t threads : {1u, 3u}) {
        const Scheduler scheduler(threads, support::RunBackwards);
        LayerCall call;
        call.scheduler = scheduler.get();
        call.asked = threads == 1 ? 0u : support::kAskAll;  // without taps, results go straight to their rows
        const support::Outputs outputs = Forward(layer.get(), problem, call);
        ASSERT_EQ(std::memcmp(outputs.y.data(), expected.y.data(), expected.y.size() * sizeof(float)), 0)
            << NameOf(stored) << " " << threads << " threads " << Describe(problem);
      }
    }
  }
}

TEST_P(StoredWeights, GiveTheSameBitsHoweverTheyLieInMemory) {
  Random random(3);
  LayerProblem problem = RandomProblem(&random, 5, 67, 3, 1, 20, 20, 50);
  for (const Stored stored : kTypes) {
    const support::Outputs expected = Specify(Converted(problem, stored));
    for (const WeightForm weight_form : {WeightForm::kThreeMatrices, WeightForm::kFused, WeightForm::kPerHead}) {
      for (const uint32_t layout : {MHA_LAYOUT_IN_OUT, MHA_LAYOUT_OUT_IN}) {
        for (const int64_t gap : {0, 3}) {
          LayerForm form;
          form.instruction_set = instruction_set();
          form.weight_type = stored;
          form.form = weight_form;
          form.layout = layout;
          form.row_gap = gap;
          const Layer layer = MakeLayer(problem, form);
          ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), expected)) << Describe(form);
        }
      }
    }
  }
}

TEST_P(StoredWeights, HoldEveryKindOfNumber) {
  Random random(4);
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (int round = 0; round < 12; round++) {
    LayerProblem problem = RandomProblem(&random, 1 + round % 7, 90, 2, 2, 30, 30, 70);
    const float odd[] = {nan,       infinity,           -infinity,  0x1p-149f, -0x1p-120f, 65504.0f, -65519.9f,
                         0x1p-101f, 0x1.fffffep-101f, 0x1p-100f, 3e-8f,     -0x1p-14f,  -0.0f,    0x1p-25f};
    for (std::vector<float> *w : {&problem.w_q, &problem.w_k, &problem.w_v, &problem.w_o}) {
      if (round % 3 == 0) {
        for (int i = 0; i < 40; i++) (*w)[random.Between(0, w->size() - 1)] = random.Pick({nan, infinity, -infinity, 0.0f});
      } else if (round % 3 == 1) {  // whole groups of tiny numbers
        for (float &x : *w) x = odd[random.Between(7, 13)] * (random.Chance(0.5) ? 1.0f : -1.0f);
      } else {
        for (float &x : *w) x = random.Chance(0.3) ? odd[random.Between(3, 13)] : x;
      }
    }
    for (const Stored stored : kTypes) {
      LayerForm form;
      form.instruction_set = instruction_set();
      form.weight_type = stored;
      const Layer layer = MakeLayer(problem, form);
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(Converted(problem, stored)))) << NameOf(stored) << " " << round;
    }
  }
}

// ---- Weights that are not floats when they are given

struct Given {
  mha_layer_config config = {};
  mha_layer_weights weights = {};
  std::vector<std::vector<unsigned char>> arrays;

  const void *Keep(std::vector<unsigned char> bytes) {
    arrays.push_back(std::move(bytes));
    return arrays.back().data();
  }
};

template <class Number>
std::vector<unsigned char> Bytes(const std::vector<Number> &numbers) {
  std::vector<unsigned char> bytes(numbers.size() * sizeof(Number));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// f16 and bf16 numbers that a float holds exactly.
uint16_t Upper(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

uint16_t Half(float x) {
  if (x == 0) return 0;
  const double a = std::fabs(static_cast<double>(x));
  const int exponent = std::max(std::ilogb(a), -14);
  const auto units = static_cast<uint32_t>(a / std::ldexp(1.0, exponent - 10));
  const uint32_t magnitude = units < 1024 ? units : (static_cast<uint32_t>(exponent + 15) << 10) + (units - 1024);
  return static_cast<uint16_t>(magnitude | (x < 0 ? 0x8000u : 0u));
}

// w [in, out] of numbers or codes, in memory as the type and layout say, with `gap` elements between rows.
std::vector<unsigned char> InMemory(Stored stored, const std::vector<float> &w, int64_t in, int64_t out, uint32_t layout, int64_t gap) {
  const bool in_out = layout == MHA_LAYOUT_IN_OUT;
  const int64_t rows = in_out ? in : out, width = in_out ? out : in;
  const auto at = [&](int64_t row, int64_t i) { return in_out ? w[row * out + i] : w[i * out + row]; };
  if (stored == Stored::kInt4) {
    const int64_t row_bytes = (width + 1) / 2 + gap / 2;
    std::vector<unsigned char> bytes(rows * row_bytes, 0xff);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t i = 0; i < width; i++) {
        unsigned char &byte = bytes[row * row_bytes + i / 2];
        const auto code = static_cast<unsigned>(static_cast<int>(at(row, i)) + 8);
        byte = static_cast<unsigned char>(i % 2 == 0 ? (byte & 0xf0u) | code : (byte & 0x0fu) | code << 4);
      }
    }
    return bytes;
  }
  const int64_t stride = width + gap;
  std::vector<uint16_t> wide(rows * stride, 0x7e01u);
  std::vector<int8_t> narrow(rows * stride, 99);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < width; i++) {
      const float x = at(row, i);
      narrow[row * stride + i] = static_cast<int8_t>(stored == Stored::kInt8 ? x : 0);
      wide[row * stride + i] = stored == Stored::kF16 ? Half(x) : stored == Stored::kBf16 ? Upper(x) : 0;
    }
  }
  return stored == Stored::kInt8 ? Bytes(narrow) : Bytes(wide);
}

// Scales as they are given: int4 has those of a column side by side.
std::vector<unsigned char> ScalesInMemory(Stored stored, const std::vector<float> &scales, int64_t out) {
  if (stored == Stored::kInt8) return Bytes(scales);
  const int64_t groups = static_cast<int64_t>(scales.size()) / out;
  std::vector<float> given(scales.size());
  for (int64_t g = 0; g < groups; g++) {
    for (int64_t n = 0; n < out; n++) given[n * groups + g] = scales[g * out + n];
  }
  return Bytes(given);
}

void Beside(std::vector<float> *all, int64_t rows, const std::vector<const std::vector<float> *> &parts) {
  for (int64_t r = 0; r < rows; r++) {
    for (const std::vector<float> *part : parts) {
      const int64_t columns = static_cast<int64_t>(part->size()) / rows;
      all->insert(all->end(), part->begin() + r * columns, part->begin() + (r + 1) * columns);
    }
  }
}

// A problem whose matrices are of its type already, to be given as they are.
Given GivenAs(const LayerProblem &problem, uint32_t layout, bool is_fused, int64_t gap) {
  Given given;
  given.arrays.reserve(16);
  given.config = ConfigOf(problem, false);
  given.config.weight_type = static_cast<uint32_t>(problem.stored);
  mha_layer_weights &weights = given.weights;
  weights.struct_size = sizeof weights;
  weights.layout = layout;
  weights.type = static_cast<uint32_t>(problem.stored);
  const auto stride_of = [&](int64_t in, int64_t out) -> int64_t {
    const int64_t width = layout == MHA_LAYOUT_IN_OUT ? out : in;
    if (gap == 0) return 0;
    return (problem.stored == Stored::kInt4 ? (width + 1) / 2 * 2 : width) + gap;
  };
  const auto keep = [&](const std::vector<float> &w, const std::vector<float> &s, int64_t in, int64_t out, const void **matrix,
                        const float **scales, int64_t *stride) {
    *matrix = given.Keep(InMemory(problem.stored, w, in, out, layout, gap));
    *stride = stride_of(in, out);
    if (!s.empty()) *scales = reinterpret_cast<const float *>(given.Keep(ScalesInMemory(problem.stored, s, out)));
  };
  const int64_t dim = problem.query_dim;
  if (is_fused) {
    std::vector<float> w, s;
    Beside(&w, dim, {&problem.w_q, &problem.w_k, &problem.w_v});
    if (!problem.s_q.empty()) {
      Beside(&s, static_cast<int64_t>(problem.s_q.size()) / problem.q_width(), {&problem.s_q, &problem.s_k, &problem.s_v});
    }
    keep(w, s, dim, problem.q_width() + problem.k_width() + problem.v_width(), &weights.w_qkv, &weights.w_qkv_scales,
         &weights.w_qkv_stride);
  } else {
    keep(problem.w_q, problem.s_q, dim, problem.q_width(), &weights.w_q, &weights.w_q_scales, &weights.w_q_stride);
    keep(problem.w_k, problem.s_k, problem.key_dim, problem.k_width(), &weights.w_k, &weights.w_k_scales, &weights.w_k_stride);
    keep(problem.w_v, problem.s_v, problem.value_dim, problem.v_width(), &weights.w_v, &weights.w_v_scales, &weights.w_v_stride);
  }
  keep(problem.w_o, problem.s_o, problem.merged_width(), problem.output_dim, &weights.w_o, &weights.w_o_scales, &weights.w_o_stride);
  const auto bias = [&](const std::vector<float> &b) {
    return b.empty() ? nullptr : reinterpret_cast<const float *>(given.Keep(Bytes(b)));
  };
  weights.b_q = bias(problem.b_q);
  weights.b_k = bias(problem.b_k);
  weights.b_v = bias(problem.b_v);
  weights.b_o = bias(problem.b_o);
  return given;
}

Layer MakeLayer(Given *given, uint32_t instruction_set) {
  mha_layer_options options = {};
  options.struct_size = sizeof options;
  options.instruction_set = instruction_set;
  mha_layer *layer = nullptr;
  mha_error error = {};
  EXPECT_EQ(mha_layer_create(&given->config, &given->weights, &options, &layer, &error), MHA_OK) << error.message;
  for (std::vector<unsigned char> &array : given->arrays) std::fill(array.begin(), array.end(), 0xa5);
  return Layer(layer);
}

TEST_P(StoredWeights, AreTakenAsTheyAreGiven) {
  Random random(5);
  for (const int64_t dim : {66, 95}) {
    LayerProblem problem = RandomProblem(&random, 6, dim, 3, 1, 20, 20, 52);
    for (const Stored stored : {Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
      LayerProblem converted = Converted(problem, stored);
      // What a quantiser may also do: the code -128, and scales that are negative or of its own choice.
      if (stored == Stored::kInt8) converted.w_q[3] = -128;
      if (!converted.s_k.empty()) converted.s_k[1] = -3.0f * converted.s_k[1];
      const support::Outputs expected = Specify(converted);
      for (const uint32_t layout : {MHA_LAYOUT_IN_OUT, MHA_LAYOUT_OUT_IN}) {
        if (stored == Stored::kInt4 && layout == MHA_LAYOUT_IN_OUT) continue;
        for (const bool is_fused : {false, true}) {
          for (const int64_t gap : {0, 6}) {
            Given given = GivenAs(converted, layout, is_fused, gap);
            const Layer layer = MakeLayer(&given, instruction_set());
            ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), expected))
                << NameOf(stored) << " layout " << layout << (is_fused ? " fused" : "") << " gap " << gap << " dim " << dim;
          }
        }
      }
    }
  }
}

TEST_P(StoredWeights, AreConvertedFrom16BitsToEveryType) {
  Random random(6);
  LayerProblem problem = RandomProblem(&random, 6, 75, 2, 2, 20, 20, 30);
  for (const Stored from : {Stored::kF16, Stored::kBf16}) {
    const LayerProblem narrow = Converted(problem, from);
    for (const Stored to : kTypes) {
      Given given = GivenAs(narrow, MHA_LAYOUT_OUT_IN, false, 0);
      given.config.weight_type = static_cast<uint32_t>(to);
      const Layer layer = MakeLayer(&given, instruction_set());
      ASSERT_TRUE(SameBits(Forward(layer.get(), problem, {}), Specify(Converted(narrow, to)))) << NameOf(from) << " to " << NameOf(to);
    }
  }
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(StoredWeights);

}  // namespace
