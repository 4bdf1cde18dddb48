// The oracle is bits: any call with any numbers, including NaNs and infinities of all kinds, has
// the bits of the specification on each instruction set of this machine. The input chooses options
// of the generated calls (support/generated_options.h), which have their own threads, cuttings,
// batches, types and caches; and what these calls lack: products, states, choices of keys,
// recurrent attention and its convolution.
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/bytes.h"
#include "spec/spec.h"
#include "support/choice.h"
#include "support/generated_options.h"
#include "support/given_weights.h"
#include "support/instruction_sets.h"
#include "support/recurrent.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Sets with products of bytes or pairs differ from the others only in their arithmetic. The scalar
// kernels take as long as all others together.
std::vector<uint32_t> SetsOfThisMachine(bool has_products, bool has_scalar = true) {
  std::vector<uint32_t> sets;
  for (const uint32_t set : SetsOfTheArchitecture(has_products ? Sets::kAll : Sets::kWithKernels)) {
    if ((set != MHA_INSTRUCTION_SET_SCALAR || has_scalar) && (mha_instruction_sets() >> set & 1))
      sets.push_back(set);
  }
  return sets;
}

void ExpectNone(const std::string &differences, uint32_t set, const std::string &what) {
  fuzz::Expect(differences.empty(), what.c_str(),
               (mha_instruction_set_name(set) + (" " + differences)).c_str());
}

// ---- Generated calls

// The bytes choose values of some dimensions; the others are plain, or random.
Choice ChoiceOf(fuzz::Bytes *bytes, uint64_t seed, uint8_t flags) {
  const Space &space = OptionSpace();
  Choice choice(static_cast<size_t>(space.size()), -1);
  const auto choose = [&](int dimension, int value) {
    int &chosen = choice[static_cast<size_t>(dimension)];
    const int before = std::exchange(chosen, value);
    if (!space.Allows(choice)) chosen = before;
  };
  const int values = space.NumberOf("values");
  if (flags & 1) choose(values, space.ValueNumber(values, "any"));
  while (!bytes->AtEnd()) {
    const int dimension = bytes->Byte() % space.size();
    choose(dimension, bytes->Byte() % space.CountOf(dimension));
  }
  const auto order = [&](int dimension, const Choice &) {
    Random random(seed * 131 + static_cast<uint64_t>(dimension));
    return RandomOrder(space, dimension, &random, flags & 2 ? 0 : 1);
  };
  while (!space.Complete(order, &choice)) {  // what is chosen leaves nothing for another dimension
    size_t last = choice.size();
    while (choice[--last] < 0) {
    }
    choice[last] = -1;
  }
  return choice;
}

void CheckGeneratedCall(fuzz::Bytes *bytes) {
  const uint64_t seed = bytes->Raw(3);
  const uint8_t flags = bytes->Byte();
  const Choice choice = ChoiceOf(bytes, seed, flags);
  const Case c = MakeCase(choice, seed);
  const Outputs expected = Specify(c);
  const bool has_products = !c.Is("arithmetic", "f32") || c.whole.is_in_integers;
  for (const uint32_t set : SetsOfThisMachine(has_products, flags % 5 == 0)) {
    ExpectNone(CaseRun(c, expected, set).Differences(), set,
               "seed " + std::to_string(seed) + " " + OptionSpace().Describe(choice));
  }
}

// ---- What these calls lack

std::vector<float> Numbers(Random *random, int64_t count) {
  std::vector<float> x = QuickNormals(random, count);
  if (random->Chance(0.7))
    MakeSpecial(random, random->Chance(0.7) ? Values::kAny : RandomKind(random), 1, &x);
  return x;
}

void CheckPartials(fuzz::Bytes *bytes) {
  const int64_t rows = bytes->Integer(1, 5), heads = bytes->Integer(1, 3),
                width = bytes->Integer(1, 70) + 2;
  Random random(bytes->Raw(4));
  const std::vector<float> right = Numbers(&random, rows * heads * width);
  std::vector<float> left = Numbers(&random, rows * heads * width);
  // The least number of which exp is not 0.
  if (bytes->Boolean()) left[0] = right[0] - 0x1.5d589ep+6f;
  std::vector<float> sinks = Numbers(&random, heads), scales = Numbers(&random, heads),
                     merged(left.size());
  for (float &sink : sinks) sink = IsLow(sink) ? sink : 1;
  for (float &scale : scales) scale = IsFinite(scale) ? scale : 1;
  const bool has_sinks = bytes->Boolean(), has_scales = bytes->Boolean();
  Outputs expected;
  expected.context.resize(static_cast<size_t>(rows * heads * (width - 2)));
  expected.lse.resize(static_cast<size_t>(rows * heads));
  for (int64_t row = 0; row < rows * heads; row++) {
    spec::Fastest().merge_partials(width - 2, left.data() + row * width, right.data() + row * width,
                                   merged.data() + row * width);
    const int64_t h = row / rows, i = row % rows;
    float *const context = expected.context.data() + (i * heads + h) * (width - 2);
    spec::Fastest().finish_partial(width - 2, merged.data() + row * width,
                                   has_sinks ? &sinks[static_cast<size_t>(h)] : nullptr,
                                   has_scales ? &scales[static_cast<size_t>(h)] : nullptr, context,
                                   &expected.lse[static_cast<size_t>(row)]);
  }
  for (const uint32_t set : SetsOfThisMachine(false)) {
    std::vector<float> states(left.size());
    mha_error error;
    Check(mha_partials_merge(rows * heads, width - 2, left.data(), right.data(), states.data(), set,
                             &error),
          error);
    const testing::AssertionResult same = SameBits("merged", states, merged);
    ExpectNone(same.message(), set, "states");
    Outputs outputs = {};
    outputs.context.resize(expected.context.size());
    outputs.lse.resize(expected.lse.size());
    mha_partials_args args = Zeroed<mha_partials_args>();
    args.batch = 1;
    args.num_heads = heads;
    args.n_q = rows;
    args.head_dim_v = width - 2;
    args.partials = states.data();
    args.sinks = has_sinks ? sinks.data() : nullptr;
    args.head_scales = has_scales ? scales.data() : nullptr;
    args.output.data = outputs.context.data();
    args.lse = outputs.lse.data();
    args.instruction_set = set;
    Check(mha_partials_finish(&args, &error), error);
    ExpectNone(SameBits(outputs, expected).message(), set, "finished states");
  }
}

void CheckProduct(fuzz::Bytes *bytes) {
  const int64_t rows = bytes->Integer(1, 30), out = bytes->Integer(1, 70);
  const int64_t in = bytes->Choice({0, 0, 32, 64, 256, 512}) +
                     bytes->Integer(1, 20);  // beyond a border of groups or blocks of terms
  const auto stored = static_cast<Stored>(MHA_TYPE_F32 + bytes->Integer(0, 6));
  const bool has_codes = HasCodes(stored), has_high_bits = stored > Stored::kInt4;
  constexpr std::pair<Arithmetic, uint32_t> arithmetics[] = {
      {Arithmetic::kF32, MHA_ARITHMETIC_F32},
      {Arithmetic::kInt8, MHA_ARITHMETIC_INT8},
      {Arithmetic::kInt16, MHA_ARITHMETIC_INT16},
      {Arithmetic::kBf16, MHA_ARITHMETIC_BF16}};
  const auto [arithmetic, arithmetic_field] =
      arithmetics[has_codes ? bytes->Integer(has_high_bits ? 1 : 0, 2)
                  : stored == Stored::kBf16 && bytes->Boolean() ? 3
                                                                : 0];
  const auto type = [&] { return bytes->Choice({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16}); };
  const uint32_t input_type = type(), output_type = type();
  const bool has_bias = bytes->Boolean(), has_residual = bytes->Boolean(),
             has_any_scales = has_high_bits || (has_codes && bytes->Boolean());
  const int64_t group = has_high_bits ? bytes->Choice({16, 32, 64, 128})
                        : has_codes   ? bytes->Choice({0, 0, 16, 32, 64, 128})
                                      : 0;
  const uint32_t scale_type = !has_any_scales || bytes->Boolean() ? MHA_TYPE_F32
                              : arithmetic == Arithmetic::kF32
                                  ? MHA_TYPE_F16
                                  : bytes->Choice({MHA_TYPE_F16, MHA_TYPE_INT8});
  const bool has_offsets = has_any_scales && bytes->Boolean();
  const uint32_t threads = bytes->Choice({1u, 2u, 5u});
  Random random(bytes->Raw(4));
  support::Format format(stored, group);
  const int64_t groups = format.group != 0 ? (in + format.group - 1) / format.group : 1;
  std::vector<float> w = Numbers(&random, in * out), scales(static_cast<size_t>(groups * out)),
                     offsets, y(static_cast<size_t>(rows * out));
  for (float &x : w) x = stored == Stored::kF16 && IsFinite(x) && std::fabs(x) >= 65520 ? 1 : x;
  const std::vector<float> x = Rounded(static_cast<Storage>(input_type),
                                       Numbers(&random, rows * in)),
                           bias = Numbers(&random, out),
                           residual = Rounded(static_cast<Storage>(output_type),
                                              Numbers(&random, rows * out));
  std::vector<float> numbers = w;
  spec::Fastest().store_weights({std::min(stored, Stored::kInt4), group}, w.data(), in, out,
                                numbers.data(), scales.data());
  mha_linear_weights weights = Zeroed<mha_linear_weights>();
  weights.input_dim = in;
  weights.output_dim = out;
  weights.w.data = w.data();
  weights.w.bias = has_bias ? bias.data() : nullptr;
  weights.format.type = static_cast<uint32_t>(stored);
  weights.format.group_size = static_cast<uint32_t>(group);
  weights.format.arithmetic = arithmetic_field;
  std::vector<unsigned char> given, given_scales, given_offsets, given_factors[2];
  if (has_any_scales) {  // of a quantiser
    MakeSpecial(&random, Values::kAny, 1, &scales);
    for (float &code : numbers) code = stored == Stored::kInt8 && random.Chance(0.1) ? -128 : code;
    if (format.group != 0 && has_offsets) offsets = Numbers(&random, groups * out);
    if (format.group != 0) weights.format.scale_type = scale_type;
    const auto give = [&](std::vector<float> *of_groups, std::vector<unsigned char> *memory,
                          std::vector<unsigned char> *factors, const float **given_numbers,
                          const float **given_to) {
      if (weights.format.scale_type == MHA_TYPE_F16)
        *of_groups = Rounded(Storage::kF16, *of_groups);
      if (weights.format.scale_type == MHA_TYPE_INT8) {
        for (float &x : *of_groups) x = static_cast<float>(random.Between(-128, 127));
        const std::vector<float> more =
            Rounded(Storage::kF16, Numbers(&random, (in + 255) / 256 * out));
        *factors = ScalesInMemory(more, out);
        *given_to = reinterpret_cast<const float *>(factors->data());
        *memory = ScalesInMemory(*of_groups, out);
        of_groups->insert(of_groups->end(), more.begin(), more.end());
        format.are_in_blocks = true;
      } else {
        *memory = ScalesInMemory(*of_groups, out);
      }
      *given_numbers = reinterpret_cast<const float *>(memory->data());
    };
    const float centre = CentreOf(stored);
    for (float &code : numbers) {
      if (has_high_bits)
        code = static_cast<float>(random.Between(0, 2 * static_cast<int64_t>(centre) - 1)) - centre;
      if (!offsets.empty()) code += centre;
    }
    give(&scales, &given_scales, &given_factors[0], &weights.w.scales, &weights.w.block_scales);
    if (!offsets.empty()) {
      give(&offsets, &given_offsets, &given_factors[1], &weights.w.offsets,
           &weights.w.block_offsets);
      format.offsets = offsets.data();
    }
    given = InMemory(stored, numbers, in, out, MHA_LAYOUT_OUT_IN, 0, !offsets.empty());
    weights.type = has_high_bits ? MHA_TYPE_INT8 : weights.format.type;
    weights.layout = MHA_LAYOUT_OUT_IN;
    weights.w.data = given.data();
  }
  spec::Fastest().linear(format, arithmetic, x.data(), numbers.data(), scales.data(),
                         weights.w.bias, has_residual ? residual.data() : nullptr, rows, in, out,
                         y.data());
  const std::vector<float> expected = Rounded(static_cast<Storage>(output_type), y);
  const Memory x_rows = InType(input_type, x.data(), x.size()),
               to_add = InType(output_type, residual.data(), residual.size()),
               as_stored = InType(output_type, expected.data(), expected.size());
  const Scheduler scheduler(threads, RunBackwards);
  for (const uint32_t set : SetsOfThisMachine(arithmetic != Arithmetic::kF32)) {
    mha_layer *layer = nullptr;
    mha_error error;
    const mha_layer_options options = Options(set);
    Check(mha_linear_create(&weights, &options, &layer, &error), error);
    const Layer owner(layer);
    Memory output(as_stored.size());
    output.Fill(0xff);
    mha_linear_args args = Zeroed<mha_linear_args>();
    args.rows = rows;
    args.x.data = x_rows.data();
    args.x.type = input_type;
    args.residual.data = has_residual ? to_add.data() : nullptr;
    args.output.data = output.data();
    args.output.type = output_type;
    args.scheduler = threads > 1 ? scheduler.get() : nullptr;
    size_t size = 0;
    Check(mha_linear_workspace(layer, &args, &size, &error), error);
    Memory workspace(size);
    Check(mha_linear(layer, &args, workspace.data(), size, &error), error);
    ExpectNone(output.Bytes() == as_stored.Bytes() ? "" : "has other bits", set,
               "a product of " + std::to_string(rows) + " rows, " + std::to_string(in) + " to " +
                   std::to_string(out));
  }
}

void CheckChoice(fuzz::Bytes *bytes) {
  ChoiceProblem problem;
  problem.batch = bytes->Integer(1, 2);
  problem.n_q = bytes->Integer(1, 5);
  problem.n_kv = bytes->Integer(5, 300);
  problem.num_heads = bytes->Integer(1, 9);
  problem.head_dim = bytes->Integer(1, 40);
  problem.num_chosen = bytes->Integer(1, 100);
  problem.is_causal = bytes->Boolean();
  if (bytes->Boolean()) problem.window_left = bytes->Integer(0, 300);
  const uint32_t threads = bytes->Choice({1u, 3u});
  Random random(bytes->Raw(4));
  problem.q = Numbers(&random, problem.batch * problem.n_q * problem.num_heads * problem.head_dim);
  problem.k = Numbers(&random, problem.batch * problem.n_kv * problem.head_dim);
  problem.v.resize(static_cast<size_t>(problem.batch * problem.n_kv * problem.head_dim_v));
  problem.weights = Numbers(&random, problem.batch * problem.n_q * problem.num_heads);
  const Outputs expected = Specify(problem);
  const Scheduler scheduler(threads, RunBackwards);
  for (const uint32_t set : SetsOfThisMachine(false)) {
    AttentionCall call;
    call.instruction_set = set;
    call.scheduler = threads > 1 ? scheduler.get() : nullptr;
    ExpectNone(SameBits(Choose(problem, call), expected).message(), set,
               "chosen keys of " + Describe(problem));
  }
}

// A call with states, of any numbers.
template <typename Problem>
void CheckStateful(const Problem &problem, uint32_t threads) {
  const StatefulResults expected = Specify(problem);
  const Scheduler scheduler(threads, RunBackwards);
  for (const uint32_t set : SetsOfThisMachine(false)) {
    const StatefulResults results =
        Compute(problem, {set, threads > 1 ? scheduler.get() : nullptr});
    ExpectNone(SameBits("output", results.y, expected.y).message(), set, Describe(problem));
    ExpectNone(SameBits("state_out", results.state, expected.state).message(), set,
               Describe(problem));
    ExpectNone(SameBits("snapshots", results.snapshots, expected.snapshots).message(), set,
               Describe(problem));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Bytes bytes(data, size);
  switch (bytes.Choice({0, 0, 0, 4, 0, 0, 0, 1, 2, 3})) {
    case 1:
      CheckPartials(&bytes);
      break;
    case 2:
      CheckProduct(&bytes);
      break;
    case 3:
      CheckChoice(&bytes);
      break;
    case 4: {
      const bool is_convolution = bytes.Boolean();
      const uint32_t threads = bytes.Choice({1u, 3u});
      Random random(bytes.Raw(4));
      if (is_convolution) {
        CheckStateful(RandomConvolution(&random), threads);
      } else {
        CheckStateful(RandomRecurrent(&random), threads);
      }
      break;
    }
    default:
      CheckGeneratedCall(&bytes);
  }
  return 0;
}
