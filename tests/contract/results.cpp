#include "contract/results.h"

#include <mha.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/choice.h"
#include "support/fixtures.h"
#include "support/packed_sequences.h"
#include "support/recurrent.h"

namespace results {
namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr uint32_t kNaN = 0x7fc00000u, kOtherNaN = 0xff812345u, kInfinity = 0x7f800000u,
                   kNegativeInfinity = 0xff800000u;

// ---- Inputs and checksums

// Numbers of 16 bits between 2^-3 and 2 in magnitude.
std::vector<uint16_t> Halves(Random *random, int64_t count, uint32_t type) {
  const int mantissa_bits = type == MHA_TYPE_F16 ? 10 : 7, bias = type == MHA_TYPE_F16 ? 15 : 127;
  std::vector<uint16_t> x(count);
  for (uint16_t &value : x) {
    const uint64_t z = random->Next();
    const int exponent = bias - 3 + static_cast<int>(z >> 32 & 3);
    value = static_cast<uint16_t>((z & 0x8000u) | (z & ((1u << mantissa_bits) - 1)) |
                                  static_cast<uint32_t>(exponent << mantissa_bits));
  }
  return x;
}

std::vector<unsigned char> RandomBytes(Random *random, int64_t count) {
  std::vector<unsigned char> x(count);
  for (unsigned char &value : x) value = static_cast<unsigned char>(random->Next() >> 56);
  return x;
}

// FNV-1a, 64 bits.
class Sum {
 public:
  Sum &Add(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
      sum_ = (sum_ ^ static_cast<const unsigned char *>(data)[i]) * 1099511628211u;
    return *this;
  }
  template <typename T>
  Sum &Add(const std::vector<T> &x) {
    return Add(x.data(), x.size() * sizeof(T));
  }
  uint64_t value() const { return sum_; }

 private:
  uint64_t sum_ = 14695981039346656037u;
};

// A packed layer and a cache begin with 8 letters, the byte order and the version of the format,
// and have a header of 256 bytes, of which the contract number is a part.
constexpr size_t kHeaderBytes = 256;
std::string FormatOf(const Memory &buffer) {
  uint32_t version;
  std::memcpy(&version, buffer.data() + 12, sizeof version);
  return " format " + std::to_string(version);
}

// ---- The cases

// All cases on one instruction set, by one kind of threads.
class Cases {
 public:
  Cases(uint32_t instruction_set, const mha_scheduler *scheduler)
      : instruction_set_(instruction_set), scheduler_(scheduler) {}

  Checksums Run() {
    Functions();
    Attentions();
    NotFinite();
    Rotations();
    Layers();
    Caches();
    Products();
    GroupProducts();
    Choices();
    States();
    Recurrences();
    return std::move(checksums_);
  }

 private:
  void Record(const std::string &name, const Sum &sum) {
    if (!checksums_.emplace(name, sum.value()).second)
      throw std::logic_error("two cases have the name " + name);
  }

  void RecordBytes(const std::string &name, const Memory &buffer) {
    Record(name + FormatOf(buffer),
           Sum().Add(buffer.data() + kHeaderBytes, buffer.size() - kHeaderBytes));
  }

  // ---- mha_attention

  AttentionProblem Sizes(int64_t batch, int64_t n_q, int64_t n_kv, int64_t heads, int64_t kv_heads,
                         int64_t head_dim, int64_t head_dim_v) const {
    AttentionProblem problem;
    problem.batch = batch;
    problem.n_q = n_q;
    problem.n_kv = n_kv;
    problem.num_heads = heads;
    problem.num_kv_heads = kv_heads;
    problem.head_dim = head_dim;
    problem.head_dim_v = head_dim_v;
    return problem;
  }

  static AttentionProblem Filled(AttentionProblem problem, uint64_t seed, float factor = 1.0f) {
    Random random(seed);
    problem.q =
        random.Uniforms(problem.batch * problem.n_q * problem.num_heads * problem.head_dim, factor);
    problem.k = random.Uniforms(
        problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim, factor);
    problem.v =
        random.Uniforms(problem.batch * problem.n_kv * problem.num_kv_heads * problem.head_dim_v);
    return problem;
  }
  static AttentionProblem Filled(AttentionProblem problem, const std::string &name,
                                 float factor = 1.0f) {
    return Filled(std::move(problem), Sum().Add(name.data(), name.size()).value(), factor);
  }

  // with_pairs: all outputs; else all but those with one number per pair.
  AttentionCall Form(bool with_pairs = true) const {
    AttentionCall call;
    call.asked = with_pairs ? kAskAll & ~kAskContext : kAskLse;
    call.scheduler = scheduler_;
    call.instruction_set = instruction_set_;
    return call;
  }

  static void Add(const Outputs &outputs, Sum *sum) {
    sum->Add(outputs.y).Add(outputs.lse).Add(outputs.attention_weights);
    sum->Add(outputs.scores).Add(outputs.scaled_scores).Add(outputs.masked_scores);
  }

  void RecordOutputs(const std::string &name, const Outputs &outputs) {
    Sum sum;
    Add(outputs, &sum);
    Record(name, sum);
  }

  void Attention(const std::string &name, const AttentionProblem &sizes, float factor = 1.0f) {
    RecordOutputs(name, Attend(Filled(sizes, name, factor), Form()));
  }

  // With queries x_i and the keys 0 and -1, weights and context show exp(-x_i); with all scores 0,
  // lse shows log(i + 1).
  void Functions() {
    AttentionProblem problem = Sizes(1, 4096, 2, 1, 1, 1, 1);
    problem.scale = 1.0f;
    for (int i = 0; i < 4096; i++) problem.q.push_back(static_cast<float>(i * 23) * 0x1p-10f);
    problem.k = {0.0f, -1.0f};
    problem.v = {0.0f, 1.0f};
    RecordOutputs("exp from 0 to -92", Attend(problem, Form()));
    for (float &x : problem.q) x = x * 0x1p-20f;
    RecordOutputs("exp next to 0", Attend(problem, Form()));

    problem = Sizes(1, 2000, 2000, 1, 1, 1, 1);
    problem.is_causal = true;
    problem.q.assign(2000, 1.0f);
    problem.k.assign(2000, 0.0f);
    problem.v.assign(2000, 1.0f);
    RecordOutputs("log from 1 to 2000", Attend(problem, Form(false)));
  }

  void Attentions() {
    AttentionProblem problem = Sizes(2, 37, 37, 3, 3, 16, 16);
    Attention("attention", problem);
    problem.is_causal = true;
    Attention("attention causal", problem);
    Attention("attention causal, scores far apart", problem, 16.0f);
    Attention("attention causal, subnormal products", problem, 0x1p-74f);
    problem.scale = -0.75f;
    Attention("attention with a scale", problem);
    problem = Sizes(1, 21, 290, 8, 2, 33, 33);
    problem.is_causal = true;
    Attention("attention of grouped heads", problem);
    Attention("attention of one kv head, narrow values", Sizes(2, 19, 45, 4, 1, 24, 7));
    Attention("attention of wide values", Sizes(1, 9, 33, 2, 2, 5, 50));
    Attention("attention of heads of 600", Sizes(1, 3, 40, 2, 1, 600, 8));
    problem =
        Sizes(1, 25, 300, 2, 1, 100, 16);  // scores of four blocks of terms, the last one short
    problem.is_causal = true;
    Attention("attention of heads of 100", problem);
    Attention("attention to nothing", Sizes(2, 5, 0, 2, 1, 4, 4));

    problem = Sizes(1, 3, 2100, 4, 2, 16, 12);
    problem.is_causal = true;
    Attention("attention to 9 chunks", problem);
    problem.n_q = 1;
    problem.n_kv = 5000;
    Attention("attention of one row to 20 chunks", problem);
    problem = Sizes(1, 700, 700, 1, 1, 8, 8);
    problem.is_causal = true;
    Attention("attention of 700 rows", problem);
    problem.window_left = 130;
    Attention("attention of 700 rows in a window", problem);
    problem.is_causal = false;
    problem.window_right = 30;
    Attention("attention of 700 rows in a window on both sides", problem);

    problem = Sizes(3, 20, 300, 2, 1, 8, 8);
    problem.is_causal = true;
    problem.q_start = {0, 400, 30};
    Attention("attention from given positions", problem);
    problem.q_lengths = {20, 0, 7};
    problem.kv_lengths = {280, 300, 31};
    Attention("attention with padding", problem);
    PadLeft(true, &problem);
    Attention("attention with padding on the left", problem);
    PadLeft(false, &problem);
    problem.window_left = 9;
    Attention("attention with padding on the left in a window", problem);

    problem = Sizes(3, 40, 30, 2, 1, 8, 8);
    problem.is_causal = true;
    problem.kv_start = {0, 20, 30};
    Attention("attention to keys from a first one on", problem);
    problem.q_start = {-50, -20, 10};
    Attention("attention from before the first key", problem);
    problem = Sizes(1, 60, 700, 2, 1, 8, 8);
    problem.is_causal = true;
    const std::string name =
        "attention of packed sequences";  // some without queries, some without keys
    const PackedSequences packed = {
        {0, 2, 31, 31, 59, 59, 60}, {0, 0, 40, 50, 699, 700, 700}, {0, 11, 10, 621, 1, 0}};
    RecordOutputs(name, Attend(Filled(problem, name, 1.0f), packed, Form()));

    problem = Sizes(2, 20, 300, 4, 2, 16, 12);
    problem.is_causal = true;
    Random random(300);
    ScoreArrays score;
    score.softcap = 0.5f;
    score.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    score.sinks = {-1.0f, 0.0f, 1.0f, 2.0f};
    score.bias.values = random.Uniforms(20 * 300);
    score.mask.by_sequence = score.mask.by_head = true;
    score.mask.by_row = false;
    for (int64_t i = 0; i < 2 * 4 * 300; i++) score.mask.values.push_back(random.Below(4) != 0);
    problem.score = score;
    Attention("attention with all options of scores", problem);
    AttentionProblem relative = problem;
    Random own(302);
    relative.score->relative_left = 200;
    relative.score->relative_right = 10;
    relative.score->relative_bias = own.Uniforms(4 * 211);
    relative.score->q_scales = own.Uniforms(2 * 20);
    Attention("attention with a relative bias and scales of queries", relative);
    relative.score->relative_bias.clear();
    relative.score->relative_rows = {true, true, true, own.Uniforms(2 * 4 * 20 * 211), 211};
    Attention("attention with a relative bias of each query", relative);
    AttentionProblem chosen = problem;
    for (const int64_t block : {1, 16}) {
      chosen.score->chosen = {};
      chosen.score->chosen.heads = 2;
      chosen.score->chosen.columns = 9;
      chosen.score->chosen_block = block;
      for (int32_t n = 0; n < 20 * 9; n++)
        chosen.score->chosen.values.push_back(n * 77 % (block == 1 ? 300 : 19) - 1);
      const std::string name = "attention to chosen keys by " + std::to_string(block);
      RecordOutputs(name, Attend(Filled(chosen, name), Form(false)));
    }
    for (const bool add_keys : {false, true}) {
      AttentionProblem grouped = problem;
      grouped.score = ScoreArrays();
      Segments &segments = grouped.score->segments;
      segments.add_keys = add_keys;
      for (int64_t i = 0; i < 2 * 20; i++) segments.of_queries.push_back(i % 20 / 6 - 1);
      for (int64_t j = 0; j < 2 * 290; j++) segments.of_keys.push_back(j % 290 / 70 - 1);
      grouped.score->num_columns = 290;
      Attention(add_keys ? "attention to groups also" : "attention within groups", grouped);
    }

    Sum normalised;
    for (const bool is_of_all_heads : {false, true}) {
      problem = Filled(Sizes(2, 20, 300, 4, 2, 22, 12), 301);
      problem.rope = RopeOf(RopeConfig(22, 0, 300));
      NormArrays norm;
      norm.is_layer = norm.is_after_rotation = norm.is_of_all_heads = is_of_all_heads;
      norm.is_of_values = true;
      norm.epsilon = 0x1p-20f;
      norm.head_stride = is_of_all_heads ? 22 : 0;
      const int64_t heads = is_of_all_heads ? 4 : 1;
      norm.q_weight = random.Uniforms(heads * 22);
      norm.k_weight = random.Uniforms(heads * 22);
      if (is_of_all_heads) norm.q_bias = norm.k_bias = random.Uniforms(heads * 22);
      problem.norm = norm;
      normalised.Add(Attend(problem, Form()).y);
    }
    Record("attention with norms", normalised);
    // The last of these, of heads of more than one piece, too.
    problem.is_in_integers = true;
    Sum in_integers;
    in_integers.Add(Attend(problem, Form()).y);
    problem = Filled(Sizes(1, 9, 300, 2, 1, 530, 12), 302);
    problem.is_in_integers = true;
    in_integers.Add(Attend(problem, Form()).y);
    Record("attention in integers", in_integers);

    problem = Sizes(2, 20, 300, 4, 2, 16, 12);
#define MHA_RECORD(array, ...)                                  \
  if (score.array.empty()) { /* not among all options above */  \
    problem.score.emplace().array = {0.75f, 0.0f, -1.0f, 3.0f}; \
    std::string name = "attention with " #array;                \
    std::replace(name.begin(), name.end(), '_', ' ');           \
    Attention(name, problem);                                   \
  }
    MHA_EACH_HEAD_ARRAY(MHA_RECORD)

    for (const uint32_t type : {MHA_TYPE_F16, MHA_TYPE_BF16}) {
      const std::string name =
          std::string("attention to keys and values given in ") + kTypeNames[type];
      Random random(type - 1);
      const std::vector<uint16_t> k = Halves(&random, 300 * 20, type),
                                  v = Halves(&random, 300 * 12, type);
      AttentionData data(Filled(Sizes(1, 7, 300, 2, 1, 20, 12), name), Form());
      data.args.k.type = data.args.v.type = type;
      data.args.k.data = k.data();
      data.args.v.data = v.data();
      RecordOutputs(name, data.Compute());
    }
    {
      const std::string name =
          "attention of queries in bf16 to an output in f16, with a bias in f16";
      problem = Filled(Sizes(1, 7, 300, 2, 1, 20, 12), name);
      problem.score.emplace();
      problem.score->bias_is_f16 = true;
      for (int64_t n = 0; n < 7 * 300; n++)
        problem.score->bias.values.push_back(static_cast<float>(n * 37 % 65 - 32) / 16);
      const std::vector<uint16_t> q = Halves(&random, 7 * 40, MHA_TYPE_BF16);
      AttentionCall call = Form();
      call.output_array = Storage::kF16;
      AttentionData data(problem, call);
      data.args.q.type = MHA_TYPE_BF16;
      data.args.q.data = q.data();
      RecordOutputs(name, data.Compute());
    }
    std::vector<float> slopes(40);
    Sum alibi;
    mha_error error;
    for (int64_t heads = 1; heads <= 40; heads++)
      Check(mha_alibi_slopes(heads, slopes.data(), &error), error), alibi.Add(slopes);
    Record("slopes of ALiBi", alibi);
  }

  // Three parts of the keys, merged and finished.
  void States() {
    AttentionProblem whole = Filled(Sizes(1, 5, 600, 4, 2, 20, 12), "states");
    whole.is_causal = true;
    whole.q_start = {590};
    whole.score.emplace();
    whole.score->alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    constexpr int64_t rows = 4 * 5, width = 12 + 2;
    std::vector<float> states, y(rows * 12), lse(rows);
    Sum sum;
    mha_error error;
    for (int64_t first = 0; first < 600; first += 256) {
      AttentionProblem part = whole;
      part.kv_position = first;
      part.n_kv = std::min<int64_t>(256, 600 - first);
      part.k = SliceRows(whole.k, 0, 600, 40, first, part.n_kv);
      part.v = SliceRows(whole.v, 0, 600, 24, first, part.n_kv);
      AttentionCall call = Form();
      call.asked = kAskNothing;
      AttentionData data(part, call);
      std::vector<float> of_part(rows * width);
      data.args.output = {};
      data.outputs.partials = of_part.data();
      std::vector<unsigned char> workspace(data.WorkspaceBytes());
      Check(data.Run(workspace.data(), workspace.size(), &error), error);
      sum.Add(of_part);
      if (first == 0) states = of_part;
      if (first > 0)
        Check(mha_partials_merge(rows, 12, states.data(), of_part.data(), states.data(),
                                 instruction_set_, &error),
              error);
    }
    const std::vector<float> sinks = {-1.0f, 0.0f, 1.0f, 2.0f};
    mha_partials_args args = Zeroed<mha_partials_args>();
    args.batch = 1;
    args.num_heads = 4;
    args.n_q = 5;
    args.head_dim_v = 12;
    args.partials = states.data();
    args.sinks = sinks.data();
    args.output.data = y.data();
    args.lse = lse.data();
    args.instruction_set = instruction_set_;
    Check(mha_partials_finish(&args, &error), error);
    Record("states of three parts, merged and finished", sum.Add(states).Add(y).Add(lse));
  }

  void Choices() {
    for (const Storage type : kKeyTypes) {
      const std::string name = std::string("chosen keys, stored as ") + NameOf(type);
      ChoiceProblem problem;
      static_cast<AttentionProblem &>(problem) = Filled(Sizes(2, 5, 700, 6, 1, 40, 1), 40);
      problem.is_causal = true;
      problem.num_chosen = 90;
      problem.weights = Random(41).Uniforms(2 * 5 * 6);
      problem.k_type = type;
      Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 2, 700));
      for (int64_t b = 0; b < 2; b++)
        cache.Append(b, {SliceRows(problem.k, b, 700, 40, 0, 700), std::vector<float>(700)});
      AttentionCall call = Form();
      call.cache.cache = cache.get();
      call.cache.columns = 700;
      call.cache.read = true;
      problem.n_kv = 0;
      const Outputs outputs = ChoiceData(problem, call).Compute();
      Record(name, Sum().Add(outputs.scores).Add(outputs.lse));
    }
  }

  // mha_linear: rows of 16 bits, with a bias and a residual.
  void Products() {
    constexpr int64_t rows = 30, in = 270, out = 50;
    for (const WeightFormat &format : kWeightFormats) {
      const auto weight_type = static_cast<uint32_t>(format.stored),
                 arithmetic = static_cast<uint32_t>(format.arithmetic);
      Random random(89 + weight_type);
      const std::vector<float> w = random.Uniforms(in * out, 0.0625f), bias = random.Uniforms(out);
      mha_linear_weights weights = Zeroed<mha_linear_weights>();
      weights.input_dim = in;
      weights.output_dim = out;
      weights.w.data = w.data();
      weights.w.bias = bias.data();
      weights.format.type = weight_type;
      weights.format.arithmetic = arithmetic;
      const mha_layer_options options = Options(instruction_set_);
      mha_layer *made = nullptr;
      mha_error error;
      Check(mha_linear_create(&weights, &options, &made, &error), error);
      const Layer layer(made);
      for (const uint32_t type : {MHA_TYPE_F16, MHA_TYPE_BF16}) {
        const std::vector<uint16_t> x = Halves(&random, rows * in, type);
        std::vector<uint16_t> y = Halves(&random, rows * out, type);
        mha_linear_args args = Zeroed<mha_linear_args>();
        args.rows = rows;
        args.x.data = x.data();
        args.residual.data = args.output.data = y.data();
        args.x.type = args.output.type = type;
        args.scheduler = scheduler_;
        size_t bytes = 0;
        Check(mha_linear_workspace(layer.get(), &args, &bytes, &error), error);
        std::vector<unsigned char> workspace(bytes);
        Check(mha_linear(layer.get(), &args, workspace.data(), bytes, &error), error);
        const char *const inputs =
            arithmetic == MHA_ARITHMETIC_INT8    ? ", in integers, inputs of 8 bits"
            : arithmetic == MHA_ARITHMETIC_INT16 ? ", in integers, inputs of 16 bits"
            : arithmetic == MHA_ARITHMETIC_BF16  ? ", in bf16"
                                                 : "";
        Record(std::string("product of ") + kTypeNames[type] + " with weights of " +
                   kTypeNames[weight_type] + inputs,
               Sum().Add(y));
      }
    }
  }

  // Codes of a quantiser in groups of every size, with offsets that have a short last group.
  void GroupProducts() {
    constexpr int64_t rows = 19, in = 1101, out = 50;
    const std::tuple<uint32_t, bool, const char *> formats[] = {
        {MHA_TYPE_INT8, false, "int8"}, {MHA_TYPE_INT4, false, "int4"},
        {MHA_TYPE_INT5, false, "int5"}, {MHA_TYPE_INT6, false, "int6"},
        {MHA_TYPE_INT4, true, "int4"},  {MHA_TYPE_INT6, true, "int6"}};
    for (const auto &[type, are_in_blocks, name] : formats) {
      for (const uint32_t arithmetic :
           {MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8, MHA_ARITHMETIC_INT16}) {
        const bool is_given_as_int8 = type >= MHA_TYPE_INT5;
        if ((is_given_as_int8 || are_in_blocks) && arithmetic == MHA_ARITHMETIC_F32) continue;
        Sum sum;
        for (const uint32_t group : {16, 32, 64, 128}) {
          Random random(97 + group);
          const auto of_groups = [&](float unit, int64_t inputs, int64_t most) {  // f16 holds them
            std::vector<float> numbers((in + inputs - 1) / inputs * out);
            for (float &x : numbers) x = unit * static_cast<float>(random.Between(-most, most));
            return numbers;
          };
          std::vector<unsigned char> codes = RandomBytes(&random, in * out);
          for (unsigned char &code : codes)
            code = type == MHA_TYPE_INT5 ? code & 31 : type == MHA_TYPE_INT6 ? code & 63 : code;
          const int64_t most = are_in_blocks ? 127 : 1000;
          const std::vector<float> scales = of_groups(are_in_blocks ? 1.0f : 0x1p-18f, group, most),
                                   offsets =
                                       of_groups(are_in_blocks ? 1.0f : 0x1p-14f, group, most),
                                   x = random.Uniforms(rows * in),
                                   factors = of_groups(0x1p-18f, 256, 1000);
          mha_linear_weights weights = Zeroed<mha_linear_weights>();
          weights.input_dim = in;
          weights.output_dim = out;
          const float *const given = are_in_blocks ? factors.data() : nullptr;
          weights.w = {codes.data(), nullptr, scales.data(), offsets.data(), given, given, 0};
          weights.layout = MHA_LAYOUT_OUT_IN;
          weights.type = is_given_as_int8 ? MHA_TYPE_INT8 : type;
          weights.format.type = type;
          weights.format.group_size = group;
          weights.format.scale_type = are_in_blocks ? MHA_TYPE_INT8
                                      : group == 64 ? MHA_TYPE_F32
                                                    : MHA_TYPE_F16;
          weights.format.arithmetic = arithmetic;
          const mha_layer_options options = Options(instruction_set_);
          mha_layer *made = nullptr;
          mha_error error;
          Check(mha_linear_create(&weights, &options, &made, &error), error);
          const Layer layer(made);
          std::vector<float> y(rows * out);
          mha_linear_args args = Zeroed<mha_linear_args>();
          args.rows = rows;
          args.x.data = x.data();
          args.output.data = y.data();
          args.scheduler = scheduler_;
          size_t bytes = 0;
          Check(mha_linear_workspace(layer.get(), &args, &bytes, &error), error);
          std::vector<unsigned char> workspace(bytes);
          Check(mha_linear(layer.get(), &args, workspace.data(), bytes, &error), error);
          sum.Add(y);
          Check(mha_linear_pack_size(&weights, &options, &bytes, &error), error);
          const Memory packed(bytes, Place::kAnywhere, 64);
          Check(mha_linear_pack(&weights, &options, packed.data(), bytes, &error), error);
          sum.Add(packed.data() + kHeaderBytes, packed.size() - kHeaderBytes);
        }
        Record(std::string("product of groups of ") + name + " with offsets" +
                   (are_in_blocks ? ", scales in blocks" : "") +
                   (arithmetic == MHA_ARITHMETIC_INT8    ? ", in integers, inputs of 8 bits"
                    : arithmetic == MHA_ARITHMETIC_INT16 ? ", in integers, inputs of 16 bits"
                                                         : ""),
               sum);
      }
    }
  }

  void NotFinite() {
    AttentionProblem sizes = Sizes(1, 40, 300, 2, 1, 8, 8);
    sizes.is_causal = true;
    const uint32_t special[] = {kNaN, kOtherNaN, kInfinity, kNegativeInfinity};
    const char *const names[] = {"NaN", "another NaN", "infinity", "-infinity"};
    for (int n = 0; n < 4; n++) {
      AttentionProblem problem = Filled(sizes, 77);
      problem.q[5 * 16 + 3] = problem.k[270 * 8 + 1] = problem.k[290 * 8 + 7] =
          problem.v[280 * 8 + 2] = FromBits(special[n]);
      RecordOutputs(std::string("attention with ") + names[n], Attend(problem, Form()));
    }
    AttentionProblem problem = Filled(sizes, 78);
    for (size_t i = 0; i < 256 * 8; i++) problem.k[i] = std::numeric_limits<float>::quiet_NaN();
    RecordOutputs("attention with a chunk of NaN", Attend(problem, Form()));
    for (size_t i = 0; i < 300 * 8; i++)
      problem.k[i] = i % 8 == 0 ? FromBits(kNegativeInfinity) : 0.0f;
    for (size_t i = 0; i < problem.q.size(); i += 8) problem.q[i] = i % 3 == 0 ? 1.0f : -1.0f;
    RecordOutputs("attention with scores of -infinity and infinity alone", Attend(problem, Form()));

    problem = Filled(sizes, 79);
    Random random(79);
    ScoreArrays score;
    score.bias.values = random.Uniforms(40 * 300);
    score.relative_left = score.relative_right = 300;
    score.relative_bias = random.Uniforms(2 * 601);
    for (size_t i = 0; i < 40 * 300; i++) {
      if (i % 300 % 7 == 3 || i % 300 > 290) score.bias.values[i] = FromBits(kNegativeInfinity);
    }
    for (size_t d = 0; d < 601; d += 5) score.relative_bias[d] = FromBits(kNegativeInfinity);
    for (size_t j = 3; j < 300; j += 7) problem.k[j * 8] = problem.v[j * 8] = FromBits(kNaN);
    problem.score = score;
    RecordOutputs("attention with biases of -infinity", Attend(problem, Form()));
  }

  // ---- mha_rope_tables

  mha_rope_config RopeConfig(int64_t dims, int64_t first, int64_t positions) const {
    mha_rope_config config = Zeroed<mha_rope_config>();
    config.dims = dims;
    config.first_position = first;
    config.num_positions = positions;
    return config;
  }

  Rope RopeOf(const mha_rope_config &config, bool is_interleaved = false) const {
    Rope rope;
    rope.is_interleaved = is_interleaved;
    rope.dims = config.dims;
    rope.num_positions = config.num_positions;
    rope.table_stride = config.dims / 2;
    rope.cos.resize(config.num_positions * config.dims / 2);
    rope.sin = rope.cos;
    mha_error error;
    Check(mha_rope_tables(&config, rope.cos.data(), rope.sin.data(), &error), error);
    return rope;
  }

  void RecordTables(const std::string &name, const mha_rope_config &config) {
    const Rope rope = RopeOf(config);
    Sum sum;
    Record(name, sum.Add(rope.cos).Add(rope.sin));
  }

  void Rotations() {
    RecordTables("rope tables", RopeConfig(128, 0, 300));
    RecordTables("rope tables at the last positions", RopeConfig(64, (int64_t{1} << 31) - 40, 40));
    mha_rope_config config = RopeConfig(80, 1000, 100);
    config.base = 500000.0;
    config.linear_factor = 3.7;
    RecordTables("rope tables with a base and a linear factor", config);
    config = RopeConfig(128, 4000, 100);
    config.yarn_factor = 4.0;
    config.original_positions = 4096;
    RecordTables("rope tables with YaRN", config);
    config.base = 1000000.0;
    config.yarn_factor = 7.3;
    config.yarn_beta_fast = 20.0;
    config.yarn_beta_slow = 0.5;
    config.attention_factor = 1.25;
    RecordTables("rope tables with all of YaRN's numbers", config);
    config.yarn_unrounded = 1;
    RecordTables("rope tables with YaRN unrounded", config);
    config = RopeConfig(128, 4000, 100);
    config.base = 500000.0;
    config.llama3_factor = 8.0;
    config.original_positions = 8192;
    RecordTables("rope tables as Llama 3", config);
    config = RopeConfig(128, 4000, 100);
    config.ntk_factor = 2.5;
    config.original_positions = 2048;
    config.ntk_positions = 5000;
    RecordTables("rope tables with dynamic NTK", config);
    std::vector<double> pair_factors;
    for (int i = 0; i < 64; i++) pair_factors.push_back(0.9 + 0.3 * i);
    config = RopeConfig(128, 4000, 100);
    config.pair_factors = pair_factors.data();
    config.attention_factor = 1.19;
    RecordTables("rope tables with factors of pairs", config);
    config = RopeConfig(128, 0, 30);
    const int64_t in_order[] = {16, 24, 24}, in_turn[] = {24, 20, 20};  // of Qwen2-VL and Qwen3-VL
    std::vector<int64_t> mrope_positions;
    for (int64_t i = 0; i < 90; i++) mrope_positions.push_back(i * 997 % 4001);
    config.mrope_positions = mrope_positions.data();
    config.mrope_section = in_order;
    RecordTables("rope tables with M-RoPE", config);
    config.mrope_section = in_turn;
    config.mrope_interleaved = 1;
    RecordTables("rope tables with M-RoPE interleaved", config);
    std::vector<float> embedding(32 * 3), relative_bias(2 * 3 * 401);
    for (size_t n = 0; n < embedding.size(); n++) embedding[n] = static_cast<float>(n);
    for (uint32_t n = 0; n < 2; n++) {
      mha_error error;
      Check(mha_t5_relative_bias(embedding.data(), 0, 0, n, 3, 200, 200,
                                 relative_bias.data() + n * 3 * 401, &error),
            error);
    }
    Sum t5;
    Record("relative biases of T5", t5.Add(relative_bias));

    const int64_t n = 64;
    config = RopeConfig(16, 0, 2 * n);
    config.yarn_factor = 4.0;
    config.original_positions = 64;
    std::vector<int64_t> positions;
    Random random(9);
    for (int64_t i = 0; i < n; i++) positions.push_back(random.Below(2 * n));
    AttentionProblem problem = Sizes(1, n, n, 4, 2, 18, 10);
    problem.is_causal = true;
    for (const bool is_interleaved : {false, true}) {
      const std::string name =
          std::string("attention rotated ") + (is_interleaved ? "interleaved" : "by halves");
      problem.rope = RopeOf(RopeConfig(16, 0, 2 * n), is_interleaved);
      Attention(name, problem);
      problem.rope->q_positions = problem.rope->k_positions = positions;
      Attention(name + " at given positions", problem);
      problem.rope = RopeOf(config, is_interleaved);
      Attention(name + " with YaRN", problem);
      AttentionProblem part = problem;
      part.rope = RopeOf(RopeConfig(10, 0, 2 * n), is_interleaved);
      part.rope->offset = 7;
      Attention(name + " from an offset", part);
    }
  }

  // ---- mha_forward

  LayerProblem ModelOf(uint64_t seed, int64_t dim, int64_t heads, int64_t kv_heads,
                       int64_t head_dim, int64_t head_dim_v, int64_t output_dim,
                       bool has_biases) const {
    Random random(seed);
    // [in, out], smaller the more of them are added up.
    const auto matrix = [&](int64_t in, int64_t out) {
      return random.Uniforms(in * out, in > 128 ? 0.125f : in > 32 ? 0.25f : 0.5f);
    };
    LayerProblem m;
    m.query_dim = m.key_dim = m.value_dim = dim;
    m.output_dim = output_dim;
    m.num_heads = heads;
    m.num_kv_heads = kv_heads;
    m.head_dim = head_dim;
    m.head_dim_v = head_dim_v;
    m.w_q = matrix(dim, heads * head_dim);
    m.w_k = matrix(dim, kv_heads * head_dim);
    m.w_v = matrix(dim, kv_heads * head_dim_v);
    if (output_dim > 0) m.w_o = matrix(heads * head_dim_v, output_dim);
    if (has_biases) {
      m.b_q = random.Uniforms(heads * head_dim);
      m.b_k = random.Uniforms(kv_heads * head_dim);
      m.b_v = random.Uniforms(kv_heads * head_dim_v);
      m.b_o = random.Uniforms(output_dim);
    }
    return m;
  }

  LayerData DataOf(const LayerProblem &m, uint32_t weight_type) const {
    LayerForm form;
    form.weight_type = static_cast<Stored>(weight_type);
    return LayerData(m, Place::kAnywhere, form);
  }

  // y, lse and all that lies between, but for the outputs with one number per pair.
  void Run(const Layer &layer, const LayerProblem &problem, Sum *sum,
           const CacheUse &cache = {}) const {
    LayerCall call;
    call.asked = kAskQ | kAskK | kAskV | kAskContext | kAskLse;
    call.scheduler = scheduler_;
    call.cache = cache;
    const Outputs outputs = Forward(layer.get(), problem, call);
    sum->Add(outputs.q)
        .Add(outputs.k)
        .Add(outputs.v)
        .Add(outputs.context)
        .Add(outputs.lse)
        .Add(outputs.y);
  }

  // Self-attention of few rows, which widen weights in registers, and of many.
  void RecordLayer(const std::string &name, LayerProblem m, const LayerData &data) {
    const Layer layer = Create(data, instruction_set_);
    Sum sum;
    m.is_causal = true;
    for (const int64_t n : {1, 2, 5, 60}) {
      m.n_q = m.n_kv = n;
      m.query = Random(static_cast<uint64_t>(n)).Uniforms(n * m.query_dim);
      Run(layer, m, &sum);
    }
    Record(name, sum);
  }

  void Layers() {
    for (const Storage stored : kWeightTypes) {
      const auto type = static_cast<uint32_t>(stored);
      const std::string of_type = std::string(" of ") + kTypeNames[type];
      LayerProblem m = ModelOf(100, 75, 4, 2, 12, 9, 70, true);
      RecordLayer("layer" + of_type, m, DataOf(m, type));
      const Memory packed = DataOf(m, type).Pack();
      RecordBytes("packed layer" + of_type, packed);
      Record("packed layer" + of_type + " with its header" + FormatOf(packed),
             Sum().Add(packed.data(), packed.size()));
      m = ModelOf(101, 517, 2, 1, 24, 24, 0,
                  false);  // three blocks of 256 terms; neither W_O nor biases
      RecordLayer("layer of width 517" + of_type, m, DataOf(m, type));
      m = ModelOf(102, 40, 2, 2, 8, 8, 40, true);
      m.w_q[3] = FromBits(kNaN);
      m.w_v[5] = FromBits(kInfinity);
      m.w_o[7] = FromBits(kNegativeInfinity);
      m.w_o[11] = FromBits(kOtherNaN);
      for (size_t i = 0; i < m.w_k.size(); i++)
        m.w_k[i] = i % 16 < 4 ? m.w_k[i] * 0x1p-110f : i % 16 < 8 ? m.w_k[i] * 0x1p-12f : m.w_k[i];
      RecordLayer("layer with special weights" + of_type, m, DataOf(m, type));
    }
    {
      LayerProblem m = ModelOf(105, 75, 4, 2, 12, 9, 70, true);
      Random gate(105);
      m.gate = GateKind::kSigmoid;
      m.gate_dim = 9;
      m.w_g = gate.Uniforms(75 * 36);
      m.b_g = gate.Uniforms(36);
      RecordLayer("layer with a gate", m, DataOf(m, MHA_TYPE_F32));
      RecordBytes("packed layer with a gate", DataOf(m, MHA_TYPE_INT4).Pack());
      for (const bool is_after_gate : {false, true}) {
        ContextNormArrays norm;
        norm.is_layer = norm.is_of_all_heads = norm.is_after_gate = is_after_gate;
        norm.epsilon = 0x1p-20f;
        norm.head_stride = is_after_gate ? 9 : 0;
        norm.weight = gate.Uniforms(is_after_gate ? 36 : 9);
        if (is_after_gate) norm.bias = gate.Uniforms(36);
        m.context_norm = norm;
        RecordLayer(is_after_gate ? "layer with a norm behind its gate"
                                  : "layer with a norm before its gate",
                    m, DataOf(m, MHA_TYPE_F32));
      }
    }
    for (const uint32_t type : {MHA_TYPE_INT8, MHA_TYPE_INT4}) {
      for (const Arithmetic arithmetic : {Arithmetic::kInt8, Arithmetic::kInt16}) {
        LayerProblem m = ModelOf(106, 139, 4, 2, 12, 9, 70, true);
        m.arithmetic = arithmetic;
        m.gate = GateKind::kSoftplus;
        m.gate_dim = 1;
        m.w_g = Random(107).Uniforms(139 * 4);
        RecordLayer(std::string("layer of ") + kTypeNames[type] +
                        " with gates of heads, in integers, inputs of " +
                        (arithmetic == Arithmetic::kInt8 ? "8 bits" : "16 bits"),
                    m, DataOf(m, type));
      }
    }
    LayerProblem of_bf16 = ModelOf(106, 139, 4, 2, 12, 9, 70, true);
    of_bf16.arithmetic = Arithmetic::kBf16;
    RecordLayer("layer of bf16, in bf16", of_bf16, DataOf(of_bf16, MHA_TYPE_BF16));
    // Weights as given in 16 bits, and codes of a quantiser.
    for (const uint32_t type : {MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8, MHA_TYPE_INT4}) {
      const LayerProblem m = ModelOf(103, 67, 2, 2, 8, 8, 30, false);
      LayerData data = DataOf(m, type);
      Random random(type - 1);
      const int64_t in[] = {67, 67, 67, 16}, out[] = {16, 16, 16, 30};
      mha_layer_weights &weights = data.weights;
      mha_matrix *const matrices[] = {&weights.w_q, &weights.w_k, &weights.w_v, &weights.w_o};
      const auto keep = [&](const auto &values) {
        data.arrays.push_back(CopyOf(values, Place::kAnywhere));
        return data.arrays.back().data();
      };
      weights.type = type;
      weights.layout = MHA_LAYOUT_OUT_IN;
      for (int i = 0; i < 4; i++) {
        if (type == MHA_TYPE_F16 || type == MHA_TYPE_BF16) {
          matrices[i]->data = keep(Halves(&random, in[i] * out[i], type));
        } else {
          const bool is_int8 = type == MHA_TYPE_INT8;
          matrices[i]->data =
              keep(RandomBytes(&random, out[i] * (is_int8 ? in[i] : (in[i] + 1) / 2)));
          const std::vector<float> factors = random.Uniforms(
              out[i] * (is_int8 ? 1 : (in[i] + 31) / 32), is_int8 ? 0x1p-9f : 0x1p-5f);
          matrices[i]->scales = reinterpret_cast<const float *>(keep(factors));
        }
      }
      RecordLayer(std::string("layer of weights given in ") + kTypeNames[type], m, data);
      RecordBytes(std::string("packed layer of weights given in ") + kTypeNames[type], data.Pack());
    }

    LayerProblem m = ModelOf(104, 48, 4, 2, 12, 12, 48, true);
    const Layer layer = Create(DataOf(m, MHA_TYPE_F32), instruction_set_);
    Random random(104);
    m.batch = 3;
    m.n_q = 50;
    m.n_kv = 90;
    m.has_key = true;
    m.query = random.Uniforms(3 * 50 * 48);
    m.key = random.Uniforms(3 * 90 * 48);
    Sum sum;
    Run(layer, m, &sum);
    Record("cross-attention", sum);
    m.q_lengths = {50, 0, 13};
    m.kv_lengths = {1, 90, 70};
    PadLeft(true, &m);
    sum = Sum();
    Run(layer, m, &sum);
    Record("cross-attention with padding on the left", sum);

    m.n_kv = 50;
    m.has_key = false;
    m.kv_lengths.clear();
    m.q_first.clear();
    m.kv_start.clear();
    m.is_causal = true;
    m.rope = RopeOf(RopeConfig(12, 0, 50));
    m.window_left = 11;
    sum = Sum();
    Run(layer, m, &sum);
    Record("layer rotated, with padding, in a window", sum);
  }

  // ---- Caches

  void Caches() {
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = 2;
    config.num_kv_heads = 1;
    config.head_dim = 20;
    config.head_dim_v = 12;
    for (const uint32_t kind :
         {MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_RING, MHA_CACHE_KIND_PAGED}) {
      const bool is_ring = kind == MHA_CACHE_KIND_RING, is_paged = kind == MHA_CACHE_KIND_PAGED;
      for (const Storage type : kKeyTypes) {
        config.capacity = is_ring ? 64 : 288;
        config.k_type = config.v_type = static_cast<uint32_t>(type);
        config.kind = kind;
        config.block_positions = is_paged ? 32 : 0;
        config.num_blocks = is_paged ? 20 : 0;
        RecordCache(std::string(is_ring    ? "ring"
                                : is_paged ? "paged"
                                           : "contiguous") +
                        " cache of " + NameOf(type),
                    config);
      }
    }
    config.capacity = 270;
    config.kind = MHA_CACHE_KIND_CONTIGUOUS;
    config.block_positions = config.num_blocks = 0;
    config.k_type = MHA_TYPE_INT8;
    config.v_type = MHA_TYPE_BF16;
    RecordCache("contiguous cache of int8 keys and bf16 values", config);
    config.v_type = MHA_TYPE_INT4;
    for (const int64_t width : {12, 80, 128, 576}) {
      config.head_dim_v = width;
      RecordCache("contiguous cache of int8 keys and int4 values of " + std::to_string(width),
                  config);
    }
    config.head_dim_v = 12;
    config.v_type = MHA_TYPE_BF16;
    config.head_dim = 72;  // scores of three blocks of terms
    for (const Storage type : kKeyTypes) {
      config.k_type = static_cast<uint32_t>(type);
      RecordCache(std::string("contiguous cache of heads of 72, keys of ") + NameOf(type), config);
    }
    config.kind = MHA_CACHE_KIND_PAGED;
    config.capacity = 288;
    config.block_positions = 32;
    config.num_blocks = 20;
    config.head_dim = 40;
    config.head_dim_v = 24;
    config.value_place = MHA_CACHE_VALUES_IN_KEYS;
    config.v_type = 0;
    for (const Storage type : kKeyTypes) {
      config.k_type = static_cast<uint32_t>(type);
      RecordCache(std::string("latent cache of ") + NameOf(type), config);
    }
    LayerWithCache();
  }

  void RecordRead(const std::string &name, const Cache &cache) {
    Sum read;
    for (int64_t s = 0; s < 2; s++) {
      const int64_t length = cache.Length(s), capacity = cache.config().capacity;
      const int64_t first =
          cache.config().kind == MHA_CACHE_KIND_RING && length > capacity ? length - capacity : 0;
      const KeysAndValues rows = cache.Read(s, first, length - first);
      read.Add(rows.k).Add(rows.v);
    }
    Record(name + ", read back", read);
    RecordBytes(name + ", bytes,", cache.buffer());
  }

  // Two sequences of different lengths in pieces of several sizes, rotated, a few numbers of them
  // not finite.
  void RecordCache(const std::string &name, const mha_kv_cache_config &config) {
    RecordCalls(name, config, false);
    if (config.k_type == MHA_TYPE_INT8 &&
        (config.v_type == 0 || config.v_type == MHA_TYPE_INT8 || config.v_type == MHA_TYPE_INT4))
      RecordCalls(name + ", in integers", config, true);
  }

  void RecordCalls(const std::string &name, const mha_kv_cache_config &config, bool in_integers) {
    Cache cache(config, Place::kAnywhere, 0);
    if (config.kind == MHA_CACHE_KIND_PAGED) {
      cache.SetBlocks(0, {3, 19, 4, 0, 11, 8, 2, 17, 6});
      cache.SetBlocks(1, {1, 5, 18, 7, 9, 16, 10, 12, 15});
    }
    const bool is_ring = config.kind == MHA_CACHE_KIND_RING;
    Sum sum;
    int64_t longest = 0;
    uint64_t seed = 500;
    for (const int64_t n : {40, 1, 1, 7, 210}) {
      longest += n;
      AttentionProblem problem = Filled(
          Sizes(2, n, n, 2, config.num_kv_heads, config.head_dim, config.head_dim_v), ++seed);
      if (n == 7) {
        problem.k[3 * 20] = FromBits(kOtherNaN);
        problem.v[4 * 12 + 1] = FromBits(kInfinity);
        problem.v[5 * 12 + 2] = 70000.0f;
        for (size_t i = 0; i < 12; i++) problem.v[6 * 12 + i] *= 0x1p-110f;
      }
      problem.is_causal = true;
      problem.q_lengths = problem.kv_lengths = {n, n > 9 ? n - 9 : n};
      problem.rope = RopeOf(RopeConfig(16, 0, 288), true);
      problem.values_in_keys = config.value_place == MHA_CACHE_VALUES_IN_KEYS;
      problem.is_in_integers = in_integers;
      if (is_ring) problem.window_left = 30;
      AttentionCall call = Form(!is_ring && n <= 40);
      call.cache = {cache.get(), {1, 0}, longest};
      Add(Attend(problem, call), &sum);
    }
    Record(name, sum);
    if (!in_integers) RecordRead(name, cache);
  }

  void LayerWithCache() {
    LayerProblem m = ModelOf(105, 48, 4, 2, 12, 12, 48, true);
    const Layer layer = Create(DataOf(m, MHA_TYPE_INT8), instruction_set_);
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = 2;
    config.capacity = 300;
    config.num_kv_heads = 2;
    config.head_dim = config.head_dim_v = 12;
    config.k_type = MHA_TYPE_F16;
    config.v_type = MHA_TYPE_INT8;
    const Cache cache(config, Place::kAnywhere, 0);
    m.batch = 2;
    m.is_causal = true;
    m.rope = RopeOf(RopeConfig(12, 0, 300));
    Sum sum;
    Random random(105);
    for (const int64_t n : {250, 1, 12, 1}) {
      m.n_q = m.n_kv = n;
      m.query = random.Uniforms(2 * n * 48);
      Run(layer, m, &sum, {cache.get()});
    }
    Record("layer of int8 with a cache", sum);
    RecordRead("layer of int8 with a cache", cache);

    LayerData asking = DataOf(m, MHA_TYPE_F32);
    asking.weights.w_k = asking.weights.w_v = {};
    asking.config.key_dim = asking.config.value_dim = 0;
    LayerCall call;
    call.asked = kAskQ | kAskContext | kAskLse;
    call.scheduler = scheduler_;
    call.cache.cache = cache.get();
    call.cache.read = true;
    const Outputs outputs = Forward(Create(asking, instruction_set_).get(), m, call);
    Record("layer of W_Q alone, over that cache",
           Sum().Add(outputs.q).Add(outputs.context).Add(outputs.lse).Add(outputs.y));
  }

  // ---- mha_recurrent_attention and mha_causal_conv

  template <typename Problem>
  void RecordStateful(const std::string &name, const Problem &problem) {
    const StatefulResults results = support::Compute(problem, {instruction_set_, scheduler_});
    Record(name, Sum().Add(results.y).Add(results.state).Add(results.snapshots));
  }

  // The gates of the problem are functions of what is given.
  static RecurrentProblem WithRawGates(RecurrentProblem problem, uint64_t seed) {
    Random random(seed);
    problem.norm_epsilon = 1e-6f;
    problem.a_log = random.Uniforms(problem.v.extents[2]);
    problem.dt_bias = random.Uniforms(problem.v.extents[2] * problem.decay.width);
    problem.beta_is_raw = !problem.beta.x.empty();
    return problem;
  }

  void Recurrences() {
    Random random(700);
    RecordStateful("linear attention", MakeRecurrent(&random, 2, 9, 2, 2, 2, 24, 40, 0, false));
    RecordStateful("delta rule", MakeRecurrent(&random, 2, 9, 2, 2, 2, 33, 17, 0, true));
    RecordStateful("gated rule of 6 heads that share 2 keys, raw",
                   WithRawGates(MakeRecurrent(&random, 1, 30, 2, 2, 6, 64, 48, 1, false), 701));
    RecurrentProblem delta =
        WithRawGates(MakeRecurrent(&random, 1, 70, 2, 2, 4, 128, 128, 1, true), 702);
    delta.state = random.Uniforms(3 * delta.state_size());
    delta.cu_seqlens = {0, 20, 20, 70};
    delta.num_snapshots = 4;
    RecordStateful("gated delta rule of packed sequences, raw", delta);
    RecordStateful("gated delta rule of key dimensions, raw",
                   WithRawGates(MakeRecurrent(&random, 1, 40, 3, 3, 3, 64, 64, 64, true), 703));
    RecurrentProblem grows = MakeRecurrent(&random, 1, 12, 6, 1, 2, 16, 20, 1, true);
    for (float &decay : grows.decay.x) decay = 0 - decay;
    grows.scale = 0.5f;
    grows.k.x[16 * 5] = FromBits(kOtherNaN);
    grows.v.x[20] = FromBits(kInfinity);
    RecordStateful("gated delta rule that grows, of 3 queries for a state, not finite", grows);
    delta = MakeRecurrent(&random, 2, 5, 2, 2, 2, 32, 32, 1, true);
    delta.first_rows = {0, 3};
    for (Tensor *x : {&delta.q, &delta.k, &delta.v, &delta.output}) {
      x->type = x == &delta.output ? Storage::kF16 : Storage::kBf16;
      for (float &number : x->x) {
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        number = FromBits(bits & 0xffff0000u);
      }
    }
    RecordStateful("gated delta rule of padded sequences, from bf16 to f16", delta);
    for (const int64_t kernel_size : {2, 4, 8}) {
      ConvolutionProblem conv = MakeConvolution(&random, 2, 9, 70, kernel_size);
      if (kernel_size > 2) conv.bias = random.Uniforms(70);
      if (kernel_size > 2) conv.state = random.Uniforms(2 * conv.state_size());
      conv.is_silu = kernel_size != 8;
      RecordStateful("causal convolution of " + std::to_string(kernel_size) + " rows", conv);
    }
  }

  uint32_t instruction_set_;
  const mha_scheduler *scheduler_;
  Checksums checksums_;
};

}  // namespace

Checksums Compute(uint32_t instruction_set, const mha_scheduler *scheduler) {
  return Cases(instruction_set, scheduler).Run();
}

int PublishedContract() { return MHA_PUBLISHED_CONTRACT; }

const Checksums &Published() {
  static const Checksums published = {
#include "published.h"
  };
  return published;
}

}  // namespace results
