// Results of this contract number, as checksums that are checked in: tests/checksums.txt. Every instruction set, compiler and architecture,
// on one thread or several, must give them, for as long as MHA_CONTRACT is what the file says.
//
// The file is written by
//
//     build/bin/mha_test_checksums --write-checksums
//
// which adds what is new, but refuses to change a checksum within a contract number. The inputs come from integers by exact operations, so
// that nothing but the library decides about a bit.
#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/aligned.h"
#include "support/instruction_sets.h"
#include "support/schedulers.h"

namespace {

using Checksums = std::map<std::string, uint64_t>;

constexpr const char *kTypeNames[] = {"f32", "f16", "bf16", "int8", "int4"};
constexpr uint32_t kNaN = 0x7fc00000u, kOtherNaN = 0xff812345u, kInfinity = 0x7f800000u, kNegativeInfinity = 0xff800000u;

// ---- Inputs and checksums

// Integers, and numbers that are made of them exactly.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}

  // splitmix64
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // Multiples of factor * 2^-23 from -factor to below factor, a power of two.
  std::vector<float> Floats(int64_t count, float factor = 1.0f) {
    std::vector<float> x(static_cast<size_t>(count));
    for (float &value : x) value = static_cast<float>(static_cast<int32_t>(Next() >> 40) - (1 << 23)) * 0x1p-23f * factor;
    return x;
  }

  // Numbers of 16 bits between 2^-3 and 2 in magnitude.
  std::vector<uint16_t> Halves(int64_t count, uint32_t type) {
    const int mantissa_bits = type == MHA_TYPE_F16 ? 10 : 7, bias = type == MHA_TYPE_F16 ? 15 : 127;
    std::vector<uint16_t> x(static_cast<size_t>(count));
    for (uint16_t &value : x) {
      const uint64_t z = Next();
      const int exponent = bias - 3 + static_cast<int>(z >> 32 & 3);
      value = static_cast<uint16_t>((z & 0x8000u) | (z & ((1u << mantissa_bits) - 1)) | static_cast<uint32_t>(exponent << mantissa_bits));
    }
    return x;
  }

  std::vector<unsigned char> Bytes(int64_t count) {
    std::vector<unsigned char> x(static_cast<size_t>(count));
    for (unsigned char &value : x) value = static_cast<unsigned char>(Next() >> 56);
    return x;
  }

 private:
  uint64_t state_;
};

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// FNV-1a, 64 bits.
class Sum {
 public:
  Sum &Add(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) sum_ = (sum_ ^ static_cast<const unsigned char *>(data)[i]) * 1099511628211u;
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

void Check(mha_status status, const mha_error &error) { EXPECT_EQ(status, MHA_OK) << error.message; }

// Zeros, aligned to 64 bytes.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), memory_(support::NewAligned(bytes)) {
    std::memset(memory_.get(), 0, bytes);
  }
  unsigned char *data() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  size_t bytes_;
  support::Aligned memory_;
};

// A packed layer and a cache begin with 8 letters, the byte order and the version of the format, and have a header of 256 bytes, of which
// the contract number is a part.
constexpr size_t kHeaderBytes = 256;
std::string FormatOf(const Buffer &buffer) {
  uint32_t version;
  std::memcpy(&version, buffer.data() + 12, sizeof version);
  return " format " + std::to_string(version);
}

template <typename Struct>
Struct Zeroed() {
  Struct zeroed = {};
  zeroed.struct_size = sizeof zeroed;
  return zeroed;
}

// ---- The cases

// All cases on one instruction set, by one kind of threads.
class Cases {
 public:
  Cases(uint32_t instruction_set, const mha_scheduler *scheduler) : instruction_set_(instruction_set), scheduler_(scheduler) {}

  Checksums Run() {
    Functions();
    Attentions();
    NotFinite();
    Rotations();
    Layers();
    Caches();
    return std::move(checksums_);
  }

 private:
  void Record(const std::string &name, const Sum &sum) {
    EXPECT_TRUE(checksums_.emplace(name, sum.value()).second) << "two cases have the name " << name;
  }

  // ---- mha_attention

  mha_attention_args Sizes(int64_t batch, int64_t n_q, int64_t n_kv, int64_t heads, int64_t kv_heads, int64_t head_dim,
                           int64_t head_dim_v) const {
    mha_attention_args args = Zeroed<mha_attention_args>();
    args.batch = batch;
    args.n_q = n_q;
    args.n_kv = n_kv;
    args.num_heads = heads;
    args.num_kv_heads = kv_heads;
    args.head_dim = head_dim;
    args.head_dim_v = head_dim_v;
    return args;
  }

  // All outputs. columns: of those with one number per pair, 0 = none of these.
  void Attend(mha_attention_args args, int64_t columns, Sum *sum) const {
    const size_t rows = static_cast<size_t>(args.batch * args.n_q * args.num_heads), pairs = rows * static_cast<size_t>(columns);
    std::vector<float> output(rows * static_cast<size_t>(args.head_dim_v)), lse(rows), weights(pairs), scores(pairs), scaled(pairs),
        masked(pairs);
    mha_taps taps = Zeroed<mha_taps>();
    taps.scores = scores.data();
    taps.scaled_scores = scaled.data();
    taps.masked_scores = masked.data();
    args.output = output.data();
    args.lse = lse.data();
    if (columns > 0) {
      args.attention_weights = weights.data();
      args.taps = &taps;
    }
    args.scheduler = scheduler_;
    args.instruction_set = instruction_set_;
    size_t bytes = 0;
    mha_error error = {};
    Check(mha_attention_workspace(&args, &bytes, &error), error);
    std::vector<unsigned char> workspace(bytes);
    Check(mha_attention(&args, workspace.data(), bytes, &error), error);
    sum->Add(output).Add(lse).Add(weights).Add(scores).Add(scaled).Add(masked);
  }

  struct Inputs {
    std::vector<float> q, k, v;
  };

  Inputs InputsOf(const mha_attention_args &args, uint64_t seed, float factor = 1.0f) const {
    Numbers numbers(seed);
    Inputs inputs;
    inputs.q = numbers.Floats(args.batch * args.n_q * args.num_heads * args.head_dim, factor);
    inputs.k = numbers.Floats(args.batch * args.n_kv * args.num_kv_heads * args.head_dim, factor);
    inputs.v = numbers.Floats(args.batch * args.n_kv * args.num_kv_heads * args.head_dim_v);
    return inputs;
  }

  void Attention(const std::string &name, mha_attention_args args, const Inputs &inputs) {
    if (!args.q) args.q = inputs.q.data();
    if (!args.k) args.k = inputs.k.data();
    if (!args.v) args.v = inputs.v.data();
    Sum sum;
    Attend(args, args.n_kv, &sum);
    Record(name, sum);
  }

  void Attention(const std::string &name, const mha_attention_args &args, float factor = 1.0f) {
    Attention(name, args, InputsOf(args, Sum().Add(name.data(), name.size()).value(), factor));
  }

  // With queries x_i and the keys 0 and -1, weights and context show exp(-x_i); with all scores 0, lse shows log(i + 1).
  void Functions() {
    mha_attention_args args = Sizes(1, 4096, 2, 1, 1, 1, 1);
    args.scale = 1.0f;
    Inputs inputs;
    for (int i = 0; i < 4096; i++) inputs.q.push_back(static_cast<float>(i * 23) * 0x1p-10f);
    inputs.k = {0.0f, -1.0f};
    inputs.v = {0.0f, 1.0f};
    Attention("exp from 0 to -92", args, inputs);
    for (float &x : inputs.q) x = x * 0x1p-20f;
    Attention("exp next to 0", args, inputs);

    args = Sizes(1, 2000, 2000, 1, 1, 1, 1);
    args.flags |= MHA_CAUSAL;
    inputs.q.assign(2000, 1.0f);
    inputs.k.assign(2000, 0.0f);
    inputs.v.assign(2000, 1.0f);
    args.q = inputs.q.data();
    args.k = inputs.k.data();
    args.v = inputs.v.data();
    Sum sum;
    Attend(args, 0, &sum);
    Record("log from 1 to 2000", sum);
  }

  void Attentions() {
    mha_attention_args args = Sizes(2, 37, 37, 3, 3, 16, 16);
    Attention("attention", args);
    args.flags |= MHA_CAUSAL;
    Attention("attention causal", args);
    Attention("attention causal, scores far apart", args, 16.0f);
    Attention("attention causal, subnormal products", args, 0x1p-74f);
    args.scale = -0.75f;
    Attention("attention with a scale", args);
    args = Sizes(1, 21, 290, 8, 2, 33, 33);
    args.flags |= MHA_CAUSAL;
    Attention("attention of grouped heads", args);
    args = Sizes(2, 19, 45, 4, 1, 24, 7);
    Attention("attention of one kv head, narrow values", args);
    args = Sizes(1, 9, 33, 2, 2, 5, 50);
    Attention("attention of wide values", args);
    args = Sizes(1, 3, 40, 2, 1, 600, 8);
    Attention("attention of heads of 600", args);
    args = Sizes(1, 25, 300, 2, 1, 100, 16);  // scores of four blocks of terms, the last one short
    args.flags |= MHA_CAUSAL;
    Attention("attention of heads of 100", args);
    args = Sizes(2, 5, 0, 2, 1, 4, 4);
    Attention("attention to nothing", args);

    args = Sizes(1, 3, 2100, 4, 2, 16, 12);
    args.flags |= MHA_CAUSAL;
    Attention("attention to 9 chunks", args);
    args.n_q = 1;
    args.n_kv = 5000;
    Attention("attention of one row to 20 chunks", args);
    args = Sizes(1, 700, 700, 1, 1, 8, 8);
    args.flags |= MHA_CAUSAL;
    Attention("attention of 700 rows", args);
    args.flags |= MHA_WINDOW_LEFT;
    args.window_left = 130;
    Attention("attention of 700 rows in a window", args);
    args.flags &= ~MHA_CAUSAL;
    args.flags |= MHA_WINDOW_RIGHT;
    args.window_right = 30;
    Attention("attention of 700 rows in a window on both sides", args);

    const int64_t q_start[] = {0, 400, 30}, q_lengths[] = {20, 0, 7}, kv_lengths[] = {280, 300, 31};
    args = Sizes(3, 20, 300, 2, 1, 8, 8);
    args.flags |= MHA_CAUSAL;
    args.q_start = q_start;
    Attention("attention from given positions", args);
    args.q_lengths = q_lengths;
    args.kv_lengths = kv_lengths;
    Attention("attention with padding", args);
    args.flags |= MHA_PADDING_LEFT;
    Attention("attention with padding on the left", args);
    args.flags |= MHA_WINDOW_LEFT;
    args.window_left = 9;
    Attention("attention with padding on the left in a window", args);

    args = Sizes(1, 7, 300, 2, 1, 20, 12);
    for (const uint32_t type : {MHA_TYPE_F16, MHA_TYPE_BF16}) {
      Numbers numbers(type);
      const std::vector<uint16_t> k = numbers.Halves(300 * 20, type), v = numbers.Halves(300 * 12, type);
      args.k_type = args.v_type = type;
      args.k = k.data();
      args.v = v.data();
      Attention(std::string("attention to keys and values given in ") + kTypeNames[type], args);
    }
  }

  void NotFinite() {
    mha_attention_args args = Sizes(1, 40, 300, 2, 1, 8, 8);
    args.flags |= MHA_CAUSAL;
    const uint32_t special[] = {kNaN, kOtherNaN, kInfinity, kNegativeInfinity};
    const char *const names[] = {"NaN", "another NaN", "infinity", "-infinity"};
    for (int n = 0; n < 4; n++) {
      Inputs inputs = InputsOf(args, 77);
      inputs.q[5 * 16 + 3] = inputs.k[270 * 8 + 1] = inputs.k[290 * 8 + 7] = inputs.v[280 * 8 + 2] = FromBits(special[n]);
      Attention(std::string("attention with ") + names[n], args, inputs);
    }
    Inputs inputs = InputsOf(args, 78);
    for (size_t i = 0; i < 256 * 8; i++) inputs.k[i] = std::numeric_limits<float>::quiet_NaN();
    Attention("attention with a chunk of NaN", args, inputs);
    for (size_t i = 0; i < 300 * 8; i++) inputs.k[i] = i % 8 == 0 ? FromBits(kNegativeInfinity) : 0.0f;
    for (size_t i = 0; i < inputs.q.size(); i += 8) inputs.q[i] = i % 3 == 0 ? 1.0f : -1.0f;
    Attention("attention with scores of -infinity and infinity alone", args, inputs);
  }

  // ---- mha_rope_tables

  struct Tables {
    std::vector<float> cos, sin;
  };

  Tables TablesOf(const mha_rope_config &config) const {
    Tables tables;
    tables.cos.resize(static_cast<size_t>(config.num_positions * config.dims / 2));
    tables.sin = tables.cos;
    mha_error error = {};
    Check(mha_rope_tables(&config, tables.cos.data(), tables.sin.data(), &error), error);
    return tables;
  }

  mha_rope_config RopeConfig(int64_t dims, int64_t first, int64_t positions) const {
    mha_rope_config config = Zeroed<mha_rope_config>();
    config.dims = dims;
    config.first_position = first;
    config.num_positions = positions;
    return config;
  }

  mha_rope RopeOf(const Tables &tables, uint32_t style, int64_t dims, int64_t positions) const {
    mha_rope rope = Zeroed<mha_rope>();
    rope.style = style;
    rope.dims = dims;
    rope.num_positions = positions;
    rope.cos = tables.cos.data();
    rope.sin = tables.sin.data();
    return rope;
  }

  void RecordTables(const std::string &name, const mha_rope_config &config) {
    const Tables tables = TablesOf(config);
    Sum sum;
    Record(name, sum.Add(tables.cos).Add(tables.sin));
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
    config.yarn_original_positions = 4096;
    RecordTables("rope tables with YaRN", config);
    config.base = 1000000.0;
    config.yarn_factor = 7.3;
    config.yarn_beta_fast = 20.0;
    config.yarn_beta_slow = 0.5;
    config.yarn_attention_factor = 1.25;
    RecordTables("rope tables with all of YaRN's numbers", config);

    const int64_t n = 64;
    config = RopeConfig(16, 0, 2 * n);
    config.yarn_factor = 4.0;
    config.yarn_original_positions = 64;
    const Tables plain = TablesOf(RopeConfig(16, 0, 2 * n)), yarn = TablesOf(config);
    std::vector<int64_t> positions;
    Numbers numbers(9);
    for (int64_t i = 0; i < n; i++) positions.push_back(static_cast<int64_t>(numbers.Next() % static_cast<uint64_t>(2 * n)));
    mha_attention_args args = Sizes(1, n, n, 4, 2, 18, 10);
    args.flags |= MHA_CAUSAL;
    for (const uint32_t style : {MHA_ROPE_HALF, MHA_ROPE_INTERLEAVED}) {
      const std::string name = std::string("attention rotated ") + (style == MHA_ROPE_HALF ? "by halves" : "interleaved");
      mha_rope rope = RopeOf(plain, style, 16, 2 * n);
      args.rope = &rope;
      Attention(name, args);
      rope.q_positions = rope.k_positions = positions.data();
      Attention(name + " at given positions", args);
      rope = RopeOf(yarn, style, 16, 2 * n);
      Attention(name + " with YaRN", args);
    }
  }

  // ---- mha_forward

  // [in, out], smaller the more of them are added up.
  static std::vector<float> Matrix(Numbers *numbers, int64_t in, int64_t out) {
    return numbers->Floats(in * out, in > 128 ? 0.125f : in > 32 ? 0.25f : 0.5f);
  }

  struct Model {
    mha_layer_config config = Zeroed<mha_layer_config>();
    std::vector<float> w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o;
    mha_layer_weights weights = Zeroed<mha_layer_weights>();
  };

  Model ModelOf(uint64_t seed, int64_t dim, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t head_dim_v, int64_t output_dim,
                bool has_biases) const {
    Numbers numbers(seed);
    Model m;
    m.config.query_dim = dim;
    m.config.output_dim = output_dim;
    m.config.num_heads = heads;
    m.config.num_kv_heads = kv_heads;
    m.config.head_dim = head_dim;
    m.config.head_dim_v = head_dim_v;
    m.w_q = Matrix(&numbers, dim, heads * head_dim);
    m.w_k = Matrix(&numbers, dim, kv_heads * head_dim);
    m.w_v = Matrix(&numbers, dim, kv_heads * head_dim_v);
    if (output_dim > 0) m.w_o = Matrix(&numbers, heads * head_dim_v, output_dim);
    if (has_biases) {
      m.b_q = numbers.Floats(heads * head_dim);
      m.b_k = numbers.Floats(kv_heads * head_dim);
      m.b_v = numbers.Floats(kv_heads * head_dim_v);
      m.b_o = numbers.Floats(output_dim);
    }
    return m;
  }

  static void Point(Model *m) {
    const auto pointer = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
    m->weights.w_q = pointer(m->w_q);
    m->weights.w_k = pointer(m->w_k);
    m->weights.w_v = pointer(m->w_v);
    m->weights.w_o = pointer(m->w_o);
    m->weights.b_q = pointer(m->b_q);
    m->weights.b_k = pointer(m->b_k);
    m->weights.b_v = pointer(m->b_v);
    m->weights.b_o = pointer(m->b_o);
  }

  struct DestroyLayer {
    void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
  };
  using Layer = std::unique_ptr<mha_layer, DestroyLayer>;

  Layer LayerOf(const Model &m) const {
    mha_layer_options options = Zeroed<mha_layer_options>();
    options.instruction_set = instruction_set_;
    mha_layer *layer = nullptr;
    mha_error error = {};
    Check(mha_layer_create(&m.config, &m.weights, &options, &layer, &error), error);
    return Layer(layer);
  }

  // y, lse and all that lies between, but for the outputs with one number per pair. Inputs must be set, and n_kv too.
  void Forward(const mha_layer *layer, mha_forward_args args, Sum *sum) const {
    mha_layer_config shape = Zeroed<mha_layer_config>();
    mha_error error = {};
    Check(mha_layer_shape(layer, &shape, &error), error);
    const auto floats = [](int64_t count) { return std::vector<float>(static_cast<size_t>(count)); };
    const int64_t q_rows = args.batch * args.n_q, kv_rows = args.batch * args.n_kv;
    std::vector<float> y = floats(q_rows * shape.output_dim), lse = floats(q_rows * shape.num_heads);
    std::vector<float> q = floats(q_rows * shape.num_heads * shape.head_dim), context = floats(q_rows * shape.num_heads * shape.head_dim_v);
    std::vector<float> k = floats(kv_rows * shape.num_kv_heads * shape.head_dim),
                       v = floats(kv_rows * shape.num_kv_heads * shape.head_dim_v);
    mha_taps taps = Zeroed<mha_taps>();
    taps.q = q.data();
    taps.k = k.data();
    taps.v = v.data();
    taps.context = context.data();
    args.output = y.data();
    args.lse = lse.data();
    args.taps = &taps;
    args.scheduler = scheduler_;
    size_t bytes = 0;
    Check(mha_forward_workspace(layer, &args, &bytes, &error), error);
    std::vector<unsigned char> workspace(bytes);
    Check(mha_forward(layer, &args, workspace.data(), bytes, &error), error);
    sum->Add(q).Add(k).Add(v).Add(context).Add(lse).Add(y);
  }

  // Self-attention of few rows, which widen weights in registers, and of many.
  void RecordLayer(const std::string &name, const Model &m) {
    const Layer layer = LayerOf(m);
    Sum sum;
    for (const int64_t n : {1, 2, 5, 60}) {
      Numbers numbers(static_cast<uint64_t>(n));
      const std::vector<float> x = numbers.Floats(n * m.config.query_dim);
      mha_forward_args args = Zeroed<mha_forward_args>();
      args.batch = 1;
      args.n_q = args.n_kv = n;
      args.query = x.data();
      args.flags |= MHA_CAUSAL;
      Forward(layer.get(), args, &sum);
    }
    Record(name, sum);
  }

  void RecordPacked(const std::string &name, const Model &m) {
    size_t bytes = 0;
    mha_error error = {};
    Check(mha_layer_pack_size(&m.config, &m.weights, nullptr, &bytes, &error), error);
    Buffer buffer(bytes);
    Check(mha_layer_pack(&m.config, &m.weights, nullptr, buffer.data(), buffer.size(), &error), error);
    Record(name + FormatOf(buffer), Sum().Add(buffer.data() + kHeaderBytes, bytes - kHeaderBytes));
  }

  void Layers() {
    for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8, MHA_TYPE_INT4}) {
      const std::string of_type = std::string(" of ") + kTypeNames[type];
      Model m = ModelOf(100, 75, 4, 2, 12, 9, 70, true);
      m.config.weight_type = type;
      Point(&m);
      RecordLayer("layer" + of_type, m);
      RecordPacked("packed layer" + of_type, m);
      m = ModelOf(101, 517, 2, 1, 24, 24, 0, false);  // three blocks of 256 terms; neither W_O nor biases
      m.config.weight_type = type;
      Point(&m);
      RecordLayer("layer of width 517" + of_type, m);
      m = ModelOf(102, 40, 2, 2, 8, 8, 40, true);
      m.config.weight_type = type;
      m.w_q[3] = FromBits(kNaN);
      m.w_v[5] = FromBits(kInfinity);
      m.w_o[7] = FromBits(kNegativeInfinity);
      m.w_o[11] = FromBits(kOtherNaN);
      for (size_t i = 0; i < m.w_k.size(); i++) m.w_k[i] = i % 16 < 4 ? m.w_k[i] * 0x1p-110f : i % 16 < 8 ? m.w_k[i] * 0x1p-12f : m.w_k[i];
      Point(&m);
      RecordLayer("layer with special weights" + of_type, m);
    }
    // Weights as given in 16 bits, and codes of a quantiser.
    for (const uint32_t type : {MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8, MHA_TYPE_INT4}) {
      Model m = ModelOf(103, 67, 2, 2, 8, 8, 30, false);
      Point(&m);
      Numbers numbers(type);
      const int64_t in[] = {67, 67, 67, 16}, out[] = {16, 16, 16, 30};
      const void **const matrices[] = {&m.weights.w_q, &m.weights.w_k, &m.weights.w_v, &m.weights.w_o};
      const float **const scales[] = {&m.weights.w_q_scales, &m.weights.w_k_scales, &m.weights.w_v_scales, &m.weights.w_o_scales};
      std::vector<std::vector<uint16_t>> halves;
      std::vector<std::vector<unsigned char>> codes;
      std::vector<std::vector<float>> factors;
      m.weights.type = m.config.weight_type = type;
      m.weights.layout = MHA_LAYOUT_OUT_IN;
      for (int i = 0; i < 4; i++) {
        if (type == MHA_TYPE_F16 || type == MHA_TYPE_BF16) {
          halves.push_back(numbers.Halves(in[i] * out[i], type));
          *matrices[i] = halves.back().data();
        } else {
          codes.push_back(numbers.Bytes(out[i] * (type == MHA_TYPE_INT8 ? in[i] : (in[i] + 1) / 2)));
          factors.push_back(
              numbers.Floats(out[i] * (type == MHA_TYPE_INT8 ? 1 : (in[i] + 31) / 32), type == MHA_TYPE_INT8 ? 0x1p-9f : 0x1p-5f));
          *matrices[i] = codes.back().data();
          *scales[i] = factors.back().data();
        }
      }
      RecordLayer(std::string("layer of weights given in ") + kTypeNames[type], m);
      RecordPacked(std::string("packed layer of weights given in ") + kTypeNames[type], m);
    }

    Model m = ModelOf(104, 48, 4, 2, 12, 12, 48, true);
    Point(&m);
    const Layer layer = LayerOf(m);
    Numbers numbers(104);
    const std::vector<float> x = numbers.Floats(3 * 50 * 48), y = numbers.Floats(3 * 90 * 48);
    const int64_t q_lengths[] = {50, 0, 13}, kv_lengths[] = {1, 90, 70};
    mha_forward_args args = Zeroed<mha_forward_args>();
    args.batch = 3;
    args.n_q = 50;
    args.n_kv = 90;
    args.query = x.data();
    args.key = y.data();
    Sum sum;
    Forward(layer.get(), args, &sum);
    Record("cross-attention", sum);
    args.q_lengths = q_lengths;
    args.kv_lengths = kv_lengths;
    args.flags |= MHA_PADDING_LEFT;
    sum = Sum();
    Forward(layer.get(), args, &sum);
    Record("cross-attention with padding on the left", sum);

    const Tables tables = TablesOf(RopeConfig(12, 0, 50));
    const mha_rope rope = RopeOf(tables, MHA_ROPE_HALF, 12, 50);
    args = Zeroed<mha_forward_args>();
    args.batch = 3;
    args.n_q = args.n_kv = 50;
    args.query = x.data();
    args.flags |= MHA_CAUSAL;
    args.rope = &rope;
    args.q_lengths = q_lengths;
    args.flags |= MHA_WINDOW_LEFT;
    args.window_left = 11;
    sum = Sum();
    Forward(layer.get(), args, &sum);
    Record("layer rotated, with padding, in a window", sum);
  }

  // ---- Caches

  void Caches() {
    constexpr const char *kKinds[] = {"contiguous", "ring", "paged"};
    for (const uint32_t kind : {MHA_CACHE_CONTIGUOUS, MHA_CACHE_RING, MHA_CACHE_PAGED}) {
      for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8}) {
        mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
        config.num_sequences = 2;
        config.capacity = kind == MHA_CACHE_RING ? 64 : 288;
        config.num_kv_heads = 1;
        config.head_dim = 20;
        config.head_dim_v = 12;
        config.k_type = type;
        config.v_type = type;
        config.kind = kind;
        if (kind == MHA_CACHE_PAGED) {
          config.block_positions = 32;
          config.num_blocks = 20;
        }
        RecordCache(std::string(kKinds[kind]) + " cache of " + kTypeNames[type], config);
      }
    }
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = 2;
    config.capacity = 270;
    config.num_kv_heads = 1;
    config.head_dim = 20;
    config.head_dim_v = 12;
    config.k_type = MHA_TYPE_INT8;
    config.v_type = MHA_TYPE_BF16;
    RecordCache("contiguous cache of int8 keys and bf16 values", config);
    config.head_dim = 72;  // scores of three blocks of terms
    for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8}) {
      config.k_type = type;
      RecordCache(std::string("contiguous cache of heads of 72, keys of ") + kTypeNames[type], config);
    }
    LayerWithCache();
  }

  struct Cache {
    Buffer buffer;
    mha_kv_cache *cache = nullptr;
  };

  Cache CacheOf(const mha_kv_cache_config &config) const {
    size_t bytes = 0;
    mha_error error = {};
    Check(mha_kv_cache_size(&config, &bytes, &error), error);
    Cache made = {Buffer(bytes)};
    Check(mha_kv_cache_init(&config, made.buffer.data(), bytes, &made.cache, &error), error);
    if (config.kind == MHA_CACHE_PAGED) {
      const int32_t blocks[2][9] = {{3, 19, 4, 0, 11, 8, 2, 17, 6}, {1, 5, 18, 7, 9, 16, 10, 12, 15}};
      for (int64_t s = 0; s < 2; s++) Check(mha_kv_cache_set_blocks(made.cache, s, blocks[s], 9, &error), error);
    }
    return made;
  }

  void RecordRead(const std::string &name, const Cache &cache, const mha_kv_cache_config &config) {
    Sum read;
    for (int64_t s = 0; s < 2; s++) {
      int64_t length = 0;
      mha_error error = {};
      Check(mha_kv_cache_length(cache.cache, s, &length, &error), error);
      const int64_t first = config.kind == MHA_CACHE_RING && length > config.capacity ? length - config.capacity : 0,
                    count = length - first;
      std::vector<float> k(static_cast<size_t>(count * config.num_kv_heads * config.head_dim)),
          v(static_cast<size_t>(count * config.num_kv_heads * config.head_dim_v));
      Check(mha_kv_cache_read(cache.cache, s, first, count, k.data(), v.data(), &error), error);
      read.Add(k).Add(v);
    }
    Record(name + ", read back", read);
    Record(name + ", bytes," + FormatOf(cache.buffer), Sum().Add(cache.buffer.data() + kHeaderBytes, cache.buffer.size() - kHeaderBytes));
  }

  // Two sequences of different lengths in pieces of several sizes, rotated, a few numbers of them not finite.
  void RecordCache(const std::string &name, const mha_kv_cache_config &config) {
    const Cache cache = CacheOf(config);
    const Tables tables = TablesOf(RopeConfig(16, 0, 288));
    const mha_rope rope = RopeOf(tables, MHA_ROPE_INTERLEAVED, 16, 288);
    const int64_t sequences[] = {1, 0};
    const bool is_ring = config.kind == MHA_CACHE_RING;
    Sum sum;
    int64_t longest = 0;
    uint64_t seed = 500;
    for (const int64_t n : {40, 1, 1, 7, 210}) {
      const int64_t lengths[] = {n, n > 9 ? n - 9 : n};
      longest += n;
      mha_attention_args args = Sizes(2, n, n, 2, config.num_kv_heads, config.head_dim, config.head_dim_v);
      Inputs inputs = InputsOf(args, ++seed);
      if (n == 7) {
        inputs.k[3 * 20] = FromBits(kOtherNaN);
        inputs.v[4 * 12 + 1] = FromBits(kInfinity);
        inputs.v[5 * 12 + 2] = 70000.0f;
        for (size_t i = 0; i < 12; i++) inputs.v[6 * 12 + i] *= 0x1p-110f;
      }
      args.q = inputs.q.data();
      args.k = inputs.k.data();
      args.v = inputs.v.data();
      args.flags |= MHA_CAUSAL;
      args.q_lengths = args.kv_lengths = lengths;
      args.rope = &rope;
      args.cache = cache.cache;
      args.cache_sequences = sequences;
      if (is_ring) {
        args.flags |= MHA_WINDOW_LEFT;
        args.window_left = 30;
      }
      Attend(args, is_ring || n > 40 ? 0 : longest, &sum);
    }
    Record(name, sum);
    RecordRead(name, cache, config);
  }

  void LayerWithCache() {
    Model m = ModelOf(105, 48, 4, 2, 12, 12, 48, true);
    m.config.weight_type = MHA_TYPE_INT8;
    Point(&m);
    const Layer layer = LayerOf(m);
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = 2;
    config.capacity = 300;
    config.num_kv_heads = 2;
    config.head_dim = config.head_dim_v = 12;
    config.k_type = MHA_TYPE_F16;
    config.v_type = MHA_TYPE_INT8;
    const Cache cache = CacheOf(config);
    const Tables tables = TablesOf(RopeConfig(12, 0, 300));
    const mha_rope rope = RopeOf(tables, MHA_ROPE_HALF, 12, 300);
    Sum sum;
    Numbers numbers(105);
    for (const int64_t n : {250, 1, 12, 1}) {
      const std::vector<float> x = numbers.Floats(2 * n * 48);
      mha_forward_args args = Zeroed<mha_forward_args>();
      args.batch = 2;
      args.n_q = args.n_kv = n;
      args.query = x.data();
      args.flags |= MHA_CAUSAL;
      args.rope = &rope;
      args.cache = cache.cache;
      Forward(layer.get(), args, &sum);
    }
    Record("layer of int8 with a cache", sum);
    RecordRead("layer of int8 with a cache", cache, config);
  }

  uint32_t instruction_set_;
  const mha_scheduler *scheduler_;
  Checksums checksums_;
};

// ---- The file

struct File {
  long contract = -1;  // -1: there is none
  Checksums checksums;
};

File ReadFile() {
  File file;
  std::ifstream in(MHA_CHECKSUMS);
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string first, name;
    words >> first >> std::ws;
    std::getline(words, name);
    if (first == "contract")
      file.contract = std::strtol(name.c_str(), nullptr, 10);
    else
      file.checksums[name] = std::strtoull(first.c_str(), nullptr, 16);
  }
  return file;
}

int WriteFile() {
  const File old = ReadFile();
  const Checksums checksums = Cases(MHA_INSTRUCTION_SET_AUTO, nullptr).Run();
  for (const auto &[name, sum] : checksums) {
    const auto known = old.checksums.find(name);
    if (MHA_CONTRACT == 0 || old.contract != MHA_CONTRACT || known == old.checksums.end() || known->second == sum) continue;
    std::fprintf(stderr, "\"%s\" has other bits than contract %d says; they need a new number, see CONTRIBUTING.md\n", name.c_str(),
                 MHA_CONTRACT);
    return 1;
  }
  std::ofstream out(MHA_CHECKSUMS);
  out << "# Checksums of results, written by mha_test_checksums --write-checksums. Within a contract number, none of them ever changes.\n"
      << "contract " << MHA_CONTRACT << "\n";
  for (const auto &[name, sum] : checksums) {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum));
    out << digits << " " << name << "\n";
  }
  return out.flush() ? 0 : 1;
}

// ---- The tests

TEST(ChecksumsFile, IsOfThisContract) { EXPECT_EQ(ReadFile().contract, MHA_CONTRACT); }

class ChecksumsOfResults : public support::InstructionSetTest {
 protected:
  void ExpectThoseOfTheFile(const mha_scheduler *scheduler) const {
    const Checksums expected = ReadFile().checksums, actual = Cases(instruction_set(), scheduler).Run();
    for (const auto &[name, sum] : expected) {
      const auto found = actual.find(name);
      if (found == actual.end())
        ADD_FAILURE() << "\"" << name << "\" is in the file, but there is no such case";
      else
        EXPECT_EQ(found->second, sum) << name;
    }
    for (const auto &[name, sum] : actual) EXPECT_EQ(expected.count(name), 1u) << "\"" << name << "\" is not in the file";
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(ChecksumsOfResults);

TEST_P(ChecksumsOfResults, AreThoseOfTheFile) { ExpectThoseOfTheFile(nullptr); }

TEST_P(ChecksumsOfResults, AreThoseOfTheFileOnSeveralThreads) {
  const support::Scheduler scheduler(3, support::RunOnThreads);
  ExpectThoseOfTheFile(scheduler.get());
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 2 && std::strcmp(argv[1], "--write-checksums") == 0) return WriteFile();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
