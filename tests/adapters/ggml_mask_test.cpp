// How the backend for llama.cpp reads masks: each becomes the expected calls, and these give what
// adding the mask gives, computed in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "../tools/adapters/ggml/mask.h"
#include "support/random.h"
#include "support/schedulers.h"

namespace {

using mha_ggml::AdditiveMask;
using mha_ggml::MaskedCalls;
using support::Random;

constexpr uint16_t kInfinite = 0x7C00, kMasked = 0xFC00, kOne = 0x3C00, kNaN = 0x7E00;

double ValueOf(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? fraction ? NAN : INFINITY
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

// An operation of ggml. Its mask has two rows more than there are queries, full of NaN.
struct Operation {
  int64_t streams = 1, heads = 2, n_q = 1, n_kv = 1;
  int64_t mask_heads = 1, mask_streams = 1;
  std::vector<uint16_t> mask = {};

  uint16_t *row(int64_t stream, int64_t head, int64_t query) {
    return mask.data() +
           (((stream % mask_streams) * mask_heads + head % mask_heads) * (n_q + 2) + query) * n_kv;
  }
  AdditiveMask view() const {
    const int64_t of_head = (n_q + 2) * n_kv;
    return {mask.data(), n_kv, mask_heads > 1 ? of_head : 0,
            mask_streams > 1 ? of_head * mask_heads : 0};
  }
};

using Value = std::function<uint16_t(int64_t stream, int64_t head, int64_t query, int64_t key)>;

Operation Make(Operation shape, const Value &value) {
  shape.mask.assign(shape.mask_streams * shape.mask_heads * (shape.n_q + 2) * shape.n_kv, kNaN);
  for (int64_t s = 0; s < shape.mask_streams; s++)
    for (int64_t h = 0; h < shape.mask_heads; h++)
      for (int64_t i = 0; i < shape.n_q; i++)
        for (int64_t j = 0; j < shape.n_kv; j++) shape.row(s, h, i)[j] = value(s, h, i, j);
  return shape;
}

Operation Open(Operation shape,
               const std::function<bool(int64_t stream, int64_t query, int64_t key)> &is_open) {
  return Make(shape, [&](int64_t s, int64_t, int64_t i, int64_t j) {
    return is_open(s, i, j) ? 0 : kMasked;
  });
}

// Runs the calls that a mask is read as, over keys and values of one kv head, and compares. Returns
// the forms: "causal 5, lists 2" has two calls, of 5 queries and of 2.
std::string FormsOf(Operation operation, uint32_t threads = 1, bool by_heads = false) {
  const int64_t width = 4, &streams = operation.streams, &heads = operation.heads,
                &n_q = operation.n_q, &n_kv = operation.n_kv;
  Random random(static_cast<uint64_t>(n_q * 1000 + n_kv));
  const std::vector<float> q = random.Normals(streams * heads * n_q * width),
                           k = random.Normals(streams * n_kv * width),
                           v = random.Normals(streams * n_kv * width);
  std::vector<float> output(q.size(), NAN);
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.num_heads = heads, args.num_kv_heads = 1, args.head_dim = width;
  args.call.batch = streams, args.call.n_q = n_q, args.call.n_kv = n_kv;
  const mha_strides of_rows = {n_q * heads * width, heads * width, width},
                    of_heads = {n_q * heads * width, width, n_q * width};
  args.q = {q.data(), MHA_TYPE_F32, 0, by_heads ? of_heads : of_rows, nullptr};
  args.k = {k.data(), MHA_TYPE_F32, 0, {n_kv * width, width, width}, nullptr};
  args.v = {v.data(), MHA_TYPE_F32, 0, {n_kv * width, width, width}, nullptr};
  args.output = {output.data(), MHA_TYPE_F32, 0, of_rows};
  const support::Scheduler scheduler(threads, support::RunBackwards);

  static MaskedCalls calls;  // which keeps its memory
  calls.read(operation.view(), streams, n_q, n_kv, scheduler.get());
  std::string forms;
  for (size_t call = 0; call < calls.count(); call++) {
    mha_attention_args part = args;
    calls.apply(call, part);
    const mha_score_arrays *const arrays = part.call.score_arrays;
    const char *const form = arrays && arrays->chosen_keys        ? "lists"
                             : arrays                             ? "bias"
                             : part.call.flags == MHA_CAUSAL      ? "causal"
                             : part.call.flags == MHA_WINDOW_LEFT ? "window"
                             : part.call.flags                    ? "causal window"
                                                                  : "all";
    forms += (call ? ", " : "") + std::string(form) + " " +
             std::to_string(part.call.batch * part.call.n_q);
    mha_error error;
    size_t bytes = 0;
    EXPECT_EQ(mha_attention_workspace(&part, &bytes, &error), MHA_OK) << error.message;
    std::vector<char> workspace(bytes);
    EXPECT_EQ(mha_attention(&part, workspace.data(), bytes, &error), MHA_OK) << error.message;
  }

  for (int64_t s = 0; s < streams; s++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < n_q; i++) {
        const uint16_t *const added = operation.row(s, h, i);
        const float *const query = q.data() + s * n_q * heads * width +
                                   (by_heads ? (h * n_q + i) * width : (i * heads + h) * width);
        const float *const given = output.data() + ((s * n_q + i) * heads + h) * width;
        double sum = 0, context[width] = {};
        for (int64_t j = 0; j < n_kv; j++) {
          if (added[j] == kMasked) continue;
          EXPECT_LT(j, calls.end_of_keys());
          const float *const key = k.data() + (s * n_kv + j) * width, *const of_key =
                                                                          v.data() +
                                                                          (s * n_kv + j) * width;
          double score = 0;
          for (int64_t d = 0; d < width; d++) score += static_cast<double>(query[d]) * key[d];
          const double weight = std::exp(score / 2 + ValueOf(added[j]));
          sum += weight;
          for (int64_t d = 0; d < width; d++) context[d] += weight * of_key[d];
        }
        for (int64_t d = 0; d < width; d++) {
          const double expected = sum == 0 ? 0 : context[d] / sum;
          const bool is_same = std::isnan(expected) ? std::isnan(given[d])
                                                    : std::abs(given[d] - expected) <= 2e-6 * 4;
          if (!is_same) {
            ADD_FAILURE() << forms << ": stream " << s << ", head " << h << ", query " << i << ": "
                          << given[d] << " is not " << expected;
            return forms;
          }
        }
      }
  return forms;
}

TEST(GgmlMask, OfOneSequence) {
  const auto ends = [](int64_t first) {
    return [first](int64_t, int64_t i, int64_t j) { return j < first + i; };
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 1, 256}, ends(200))), "all 1");
  EXPECT_EQ(FormsOf(Open({1, 2, 9, 256}, ends(1))), "causal 9") << "a prompt";
  EXPECT_EQ(FormsOf(Open({1, 2, 9, 256}, ends(120))), "causal 9") << "after other keys";
  EXPECT_EQ(FormsOf(Open({1, 2, 9, 64}, ends(0))), "causal 9") << "the first query sees nothing";
  EXPECT_EQ(FormsOf(Open({1, 2, 9, 64}, ends(60))), "causal 9") << "the last queries see all";
  EXPECT_EQ(FormsOf(Open({1, 2, 9, 64}, ends(64))), "all 9");
  EXPECT_EQ(
      FormsOf(Open({1, 2, 9, 64}, [](int64_t, int64_t, int64_t j) { return j >= 7 && j < 50; })),
      "all 9");
  EXPECT_EQ(FormsOf(Open({1, 2, 3, 64}, [](int64_t, int64_t, int64_t) { return false; })), "all 3")
      << "no key";
}

TEST(GgmlMask, OfWindows) {
  const auto window = [](int64_t first, int64_t left, int64_t right) {
    return [=](int64_t, int64_t i, int64_t j) {
      return j >= first + i - left && j <= first + i + right;
    };
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 30, 100}, window(0, 7, 0))), "causal window 30") << "begins within";
  EXPECT_EQ(FormsOf(Open({1, 2, 30, 100}, window(50, 7, 0))), "causal window 30");
  EXPECT_EQ(FormsOf(Open({1, 2, 30, 100}, window(50, 0, 0))), "causal window 30") << "itself alone";
  EXPECT_EQ(FormsOf(Open({1, 2, 5, 100}, window(0, 7, 0))), "causal 5")
      << "shorter than the window";
  EXPECT_EQ(FormsOf(Open({1, 2, 30, 30}, window(0, 7, 7))), "causal window 30") << "on both sides";
  EXPECT_EQ(FormsOf(Open({1, 2, 30, 100}, window(0, 7, 200))), "window 30");
  const auto blocks = [](int64_t, int64_t i, int64_t j) { return j <= i && j >= i / 8 * 8; };
  EXPECT_EQ(FormsOf(Open({1, 2, 20, 32}, blocks)), "causal 16, causal 4") << "windows that jump";
  const auto stops = [](int64_t, int64_t i, int64_t j) {
    return j >= std::min<int64_t>(i, 4) && j <= i + 9;
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 8, 32}, stops)), "causal window 5, causal 3");
  const auto goes_on = [](int64_t, int64_t i, int64_t j) { return j <= (i < 4 ? 9 : i + 6); };
  EXPECT_EQ(FormsOf(Open({1, 2, 8, 32}, goes_on)), "all 4, causal 4");
}

// Sequences of a cache that all share, and streams, which have keys of their own.
TEST(GgmlMask, OfSeveralSequences) {
  const auto one_each = [](int64_t, int64_t i, int64_t j) {
    return j >= 10 * i && j < 10 * i + 5 + i;
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 4, 64}, one_each)), "all 4");
  const auto prompts = [](int64_t, int64_t i, int64_t j) { return j >= i / 6 * 6 && j <= i; };
  EXPECT_EQ(FormsOf(Open({1, 2, 18, 64}, prompts)), "causal 18");
  const auto unequal = [](int64_t, int64_t i, int64_t j) {
    return i < 7 ? j <= i : j > 30 && j < 40 + i;
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 12, 64}, unequal)), "causal 7, causal 5");
  const auto mixed = [](int64_t, int64_t i, int64_t j) {
    return i < 20 ? j <= 40 + i : j > 60 && (j - i) % 8 == 0;
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 24, 128}, mixed)), "causal 20, lists 4")
      << "a prompt, and tokens of others";

  const auto streams = [](int64_t s, int64_t i, int64_t j) { return j >= s && j < 9 * s + 5 + i; };
  EXPECT_EQ(FormsOf(Open({3, 2, 1, 64, 1, 3}, streams)), "all 3");
  EXPECT_EQ(FormsOf(Open({3, 2, 6, 64, 1, 3}, streams)), "causal 18");
  EXPECT_EQ(FormsOf(Open({3, 2, 6, 64, 1, 1}, streams)), "causal 18") << "one mask for all";
  const auto sparse = [](int64_t s, int64_t i, int64_t j) { return j % (10 - s) == i; };
  EXPECT_EQ(FormsOf(Open({3, 2, 5, 99, 1, 3}, sparse)), "lists 15");
  EXPECT_EQ(FormsOf(Open({3, 2, 5, 99, 1, 1}, sparse)), "lists 15");
  const auto shorter = [](int64_t s, int64_t i, int64_t j) { return j % (8 + s) == i; };
  EXPECT_EQ(FormsOf(Open({3, 2, 5, 99, 1, 3}, shorter)), "lists 15") << "of 13, 11 and 10 keys";
  const auto dense = [](int64_t s, int64_t i, int64_t j) { return j != i + s + 1; };
  EXPECT_EQ(FormsOf(Open({3, 2, 5, 99, 1, 3}, dense)), "bias 15");
  EXPECT_EQ(FormsOf(Open({3, 2, 5, 99, 1, 1}, dense)), "bias 15");
  const auto different = [](int64_t s, int64_t i, int64_t j) {
    return s == 0 ? j <= i : s == 1 ? j % 8 == i : j < 7;
  };
  EXPECT_EQ(FormsOf(Open({3, 2, 4, 64, 1, 3}, different)), "causal 4, lists 4, all 4");
}

TEST(GgmlMask, WithHoles) {
  const auto every = [](int64_t step) {
    return [step](int64_t, int64_t i, int64_t j) { return j >= 3 && j % step == i % step; };
  };
  EXPECT_EQ(FormsOf(Open({1, 2, 8, 100}, every(8))), "lists 8");
  EXPECT_EQ(FormsOf(Open({1, 2, 8, 100}, every(4))), "bias 8") << "too many keys for lists";
  EXPECT_EQ(FormsOf(Open({1, 2, 1, 100}, every(4))), "lists 1");
  EXPECT_EQ(FormsOf(Open({1, 2, 1, 100}, every(2))), "bias 1");
  const auto around = [](int64_t, int64_t i, int64_t j) { return j < 20 + i || j >= 40 + i; };
  EXPECT_EQ(FormsOf(Open({1, 2, 8, 100}, around)), "bias 8") << "a ring of cells";
}

TEST(GgmlMask, OfNumbers) {
  const auto value = [](uint16_t at_5, uint16_t others) {
    return [=](int64_t, int64_t, int64_t i, int64_t j) {
      return j > i + 8 ? kMasked : j == 5 ? at_5 : others;
    };
  };
  EXPECT_EQ(FormsOf(Make({1, 2, 4, 32}, value(0x8000, 0))), "causal 4") << "-0";
  for (const uint16_t number : {kOne, uint16_t{0x0001}, uint16_t{0xFBFF}, kNaN, uint16_t{0xFE00}})
    EXPECT_EQ(FormsOf(Make({1, 2, 4, 32}, value(number, 0))), "bias 4") << std::hex << number;
  EXPECT_EQ(FormsOf(Make({1, 2, 4, 32}, value(kInfinite, 0))), "bias 4") << "infinity over itself";
  EXPECT_EQ(FormsOf(Make({1, 2, 1, 99}, [](int64_t, int64_t, int64_t,
                                           int64_t j) { return j % 9 ? kMasked : kOne; })),
            "bias 1");
}

TEST(GgmlMask, OfHeads) {
  const auto slopes = [](int64_t, int64_t h, int64_t i, int64_t j) {
    return static_cast<uint16_t>(j > i ? kMasked : kOne + 512 * h);
  };
  EXPECT_EQ(FormsOf(Make({2, 3, 4, 32, 3, 2}, slopes)), "bias 8");
  const auto same = [](int64_t, int64_t, int64_t i, int64_t j) {
    return j > i ? kMasked : uint16_t{0};
  };
  EXPECT_EQ(FormsOf(Make({2, 3, 4, 32, 3, 2}, same)), "bias 8") << "not compared";
  const auto holes = [](int64_t, int64_t h, int64_t i, int64_t j) {
    return j % 9 == i + h ? uint16_t{0} : kMasked;
  };
  EXPECT_EQ(FormsOf(Make({1, 3, 4, 64, 3, 1}, holes)), "bias 4");
}

TEST(GgmlMask, IsReadByThreads) {
  const auto causal = [](int64_t, int64_t i, int64_t j) { return j <= 1000 + i; };
  EXPECT_EQ(FormsOf(Open({1, 1, 100, 2048}, causal), 3), "causal 100");
  const auto every = [](int64_t, int64_t i, int64_t j) { return j % 64 == i % 64; };
  EXPECT_EQ(FormsOf(Open({1, 1, 100, 2048}, every), 3), "lists 100");
}

TEST(GgmlMask, OfNothing) {
  Operation operation{2, 2, 3, 40};
  MaskedCalls calls;
  calls.read({}, 2, 3, 40, nullptr);
  EXPECT_EQ(calls.count(), 1u);
  EXPECT_EQ(calls.end_of_keys(), 40);
}

// Rows of random pieces, of which many go on as the row before does.
TEST(GgmlMask, Random) {
  std::string all_forms;
  for (uint64_t seed = 0; seed < 400; seed++) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Operation shape{random.Between(1, 3), 2, random.Between(1, 20), random.Between(1, 300)};
    shape.mask_heads = random.Chance(0.2) ? 2 : 1,
    shape.mask_streams = random.Coin() ? shape.streams : 1;
    const double chance_of_holes = random.Pick({0.0, 0.0, 0.5, 0.9}),
                 chance_of_numbers = random.Pick({0.0, 0.0, 0.2}),
                 jump = random.Pick({0.0, 0.1, 0.5});
    int64_t begin = 0, end = 0, begin_by = 0, end_by = 0;
    bool has_holes = false, has_numbers = false;
    all_forms += FormsOf(
        Make(shape,
             [&](int64_t, int64_t, int64_t i, int64_t j) {
               if (j == 0) {
                 begin += begin_by, end += end_by;
                 if (i == 0 || random.Chance(jump)) {
                   begin = random.Between(0, shape.n_kv), end = random.Between(begin, shape.n_kv);
                   has_holes = random.Chance(chance_of_holes),
                   has_numbers = random.Chance(chance_of_numbers);
                 }
                 if (i == 0 || random.Chance(jump)) {
                   begin_by = random.Between(0, 1), end_by = random.Between(0, 1);
                 }
               }
               if (j < begin || j >= end || (has_holes && random.Chance(0.9))) return kMasked;
               return has_numbers && random.Chance(0.1)
                          ? random.Pick({kOne, uint16_t{0x8001}, uint16_t{0xD400}})
                          : random.Pick({uint16_t{0}, uint16_t{0}, uint16_t{0x8000}});
             }),
        1, random.Coin());
    if (HasFailure()) return;
  }
  for (const char *form : {"all", "causal ", "window", "causal window", "lists", "bias"})
    EXPECT_NE(all_forms.find(form), std::string::npos) << form;
}

}  // namespace
