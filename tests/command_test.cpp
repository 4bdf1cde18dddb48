// The command, run as its users run it: files in, files out, and one sentence for everything that is wrong.
#include "command_test.h"

#include <gtest/gtest.h>
#include <mha.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oracle/oracle.h"
#include "support/random.h"
#include "support/shapes.h"

namespace {

using namespace command_test;
using support::Random;

// ---- Layers ---------------------------------------------------------------------------------------------------------------------

// A layer with random weights, dense and [in, out], and the sizes of its inputs.
struct Problem {
  int64_t batch = 2, n_q = 7, n_kv = 7;
  int64_t query_dim = 24, key_dim = 24, value_dim = 24, output_dim = 24;
  int64_t num_heads = 4, num_kv_heads = 4, head_dim = 6, head_dim_v = 6;
  bool is_causal = true;
  bool has_bias = true, has_output = true;
  std::vector<float> w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o;
  std::vector<float> query, key, value;

  int64_t q_out() const { return num_heads * head_dim; }
  int64_t k_out() const { return num_kv_heads * head_dim; }
  int64_t v_out() const { return num_kv_heads * head_dim_v; }
  int64_t merged() const { return num_heads * head_dim_v; }
  int64_t y_width() const { return has_output ? output_dim : merged(); }
};

void Fill(Problem *p, uint64_t seed = 1) {
  Random random(seed);
  p->w_q = random.Normals(p->query_dim * p->q_out(), 0.3f);
  p->w_k = random.Normals(p->key_dim * p->k_out(), 0.3f);
  p->w_v = random.Normals(p->value_dim * p->v_out(), 0.3f);
  p->w_o = random.Normals(p->merged() * p->output_dim, 0.3f);
  p->b_q = random.Normals(p->q_out());
  p->b_k = random.Normals(p->k_out());
  p->b_v = random.Normals(p->v_out());
  p->b_o = random.Normals(p->output_dim);
  p->query = random.Normals(p->batch * p->n_q * p->query_dim);
  p->key = random.Normals(p->batch * p->n_kv * p->key_dim);
  p->value = random.Normals(p->batch * p->n_kv * p->value_dim);
}

// Matrices beside each other: [rows, a], [rows, b], [rows, c] to [rows, a + b + c].
std::vector<float> Beside(int64_t rows, const std::vector<const std::vector<float> *> &matrices) {
  std::vector<float> out;
  for (int64_t row = 0; row < rows; row++) {
    for (const std::vector<float> *matrix : matrices) {
      const int64_t columns = static_cast<int64_t>(matrix->size()) / rows;
      out.insert(out.end(), matrix->begin() + row * columns, matrix->begin() + (row + 1) * columns);
    }
  }
  return out;
}

std::vector<float> BesideQkv(const Problem &p) { return Beside(p.query_dim, {&p.w_q, &p.w_k, &p.w_v}); }
std::vector<float> BiasQkv(const Problem &p) { return Beside(1, {&p.b_q, &p.b_k, &p.b_v}); }

void AddBias(const Problem &p, const std::string &name, const std::vector<float> &values, std::vector<Stored> *tensors) {
  if (p.has_bias) tensors->push_back(Store(name, {static_cast<int64_t>(values.size())}, values));
}

// q, k and v as nn.Linear stores them, and o.
void AddLinears(const Problem &p, const std::string &q, const std::string &k, const std::string &v, const std::string &o,
                std::vector<Stored> *tensors) {
  tensors->push_back(StoreTransposed(q + ".weight", p.query_dim, p.q_out(), p.w_q));
  tensors->push_back(StoreTransposed(k + ".weight", p.key_dim, p.k_out(), p.w_k));
  tensors->push_back(StoreTransposed(v + ".weight", p.value_dim, p.v_out(), p.w_v));
  AddBias(p, q + ".bias", p.b_q, tensors);
  AddBias(p, k + ".bias", p.b_k, tensors);
  AddBias(p, v + ".bias", p.b_v, tensors);
  if (!p.has_output) return;
  tensors->push_back(StoreTransposed(o + ".weight", p.merged(), p.output_dim, p.w_o));
  AddBias(p, o + ".bias", p.b_o, tensors);
}

std::vector<Stored> Linears(const Problem &p, const std::string &q, const std::string &k, const std::string &v, const std::string &o) {
  std::vector<Stored> tensors;
  AddLinears(p, q, k, v, o, &tensors);
  return tensors;
}

std::vector<Stored> Gpt2(const Problem &p, const std::string &prefix = "") {
  std::vector<Stored> tensors = {
      Store(prefix + "c_attn.weight", {p.query_dim, p.q_out() + p.k_out() + p.v_out()}, BesideQkv(p)),
      Store(prefix + "c_proj.weight", {p.merged(), p.output_dim}, p.w_o),
  };
  AddBias(p, prefix + "c_attn.bias", BiasQkv(p), &tensors);
  AddBias(p, prefix + "c_proj.bias", p.b_o, &tensors);
  return tensors;
}

std::string WriteLayer(const Folder &folder, const std::vector<Stored> &tensors, const std::string &name = "layer.safetensors") {
  return folder.Write(name, Safetensors(tensors));
}

std::string WriteInput(const Folder &folder, const Problem &p) {
  return folder.Write("x.npy", Npy({p.batch, p.n_q, p.query_dim}, p.query));
}

Arguments RunArguments(const Folder &folder, const Problem &p, const Arguments &more = {}) {
  Arguments arguments = {
      "run",      "--weights",     folder / "layer.safetensors", "--heads", std::to_string(p.num_heads), "--input", folder / "x.npy",
      "--output", folder / "y.npy"};
  if (p.is_causal) arguments.push_back("--causal");
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// Whether y is what the layer gives, within what float32 allows. key and value are the query's where they are not given to the command.
void ExpectLayer(const Problem &p, const std::vector<float> &y, bool has_key = false, bool has_value = false, float scale = 0) {
  const std::vector<float> none;
  const support::LayerWeights weights = {
      p.w_q.data(),
      p.w_k.data(),
      p.w_v.data(),
      p.has_output ? p.w_o.data() : nullptr,
      p.has_bias ? p.b_q.data() : nullptr,
      p.has_bias ? p.b_k.data() : nullptr,
      p.has_bias ? p.b_v.data() : nullptr,
      p.has_bias && p.has_output ? p.b_o.data() : nullptr,
  };
  const int64_t n_kv = has_key || has_value ? p.n_kv : p.n_q;
  const support::LayerShape shape = {
      p.query_dim,
      p.key_dim,
      p.value_dim,
      p.output_dim,
      {p.n_q, n_kv, p.num_heads, p.num_kv_heads, p.head_dim, p.head_dim_v, scale, p.is_causal, n_kv - p.n_q},
  };
  ASSERT_EQ(static_cast<int64_t>(y.size()), p.batch * p.n_q * p.y_width());
  double worst = 0;
  for (int64_t b = 0; b < p.batch; b++) {
    const float *query = p.query.data() + b * p.n_q * p.query_dim;
    const float *key = has_key ? p.key.data() + b * n_kv * p.key_dim : query;
    const float *value = has_value ? p.value.data() + b * n_kv * p.value_dim : key;
    const oracle::Layer<double> exact = oracle::LayerForward<double>(shape, weights, query, key, value);
    const oracle::LayerBound bound = oracle::BoundLayer(shape, weights, query, key, value, exact);
    for (int64_t i = 0; i < p.n_q * p.y_width(); i++) {
      const double error = std::fabs(static_cast<double>(y[b * p.n_q * p.y_width() + i]) - exact.y[i]);
      worst = std::max(worst, error / bound.y[i]);
    }
  }
  EXPECT_LE(worst, 1) << "the error, in units of its bound";
}

// Runs the layer of these tensors, and expects the result that the problem has.
void ExpectRun(const Problem &p, const std::vector<Stored> &tensors, const Arguments &more = {}, float scale = 0) {
  Folder folder;
  WriteLayer(folder, tensors);
  WriteInput(folder, p);
  const bool has_key = std::count(more.begin(), more.end(), "k.npy") > 0;
  const bool has_value = std::count(more.begin(), more.end(), "v.npy") > 0;
  Arguments arguments = RunArguments(folder, p, more);
  for (std::string &argument : arguments) {
    if (argument == "k.npy") argument = folder.Write("k.npy", Npy({p.batch, p.n_kv, p.key_dim}, p.key));
    if (argument == "v.npy") argument = folder.Write("v.npy", Npy({p.batch, p.n_kv, p.value_dim}, p.value));
  }
  const Result result = Mha(arguments);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(Lines(result.err).size(), 1u) << result.err;
  std::vector<float> y;
  ExpectNpy(folder / "y.npy", {p.batch, p.n_q, p.y_width()}, &y);
  ExpectLayer(p, y, has_key, has_value, scale);
}

// ---- The families of names ------------------------------------------------------------------------------------------------------

TEST(Families, WQueryAsLinear) {
  Problem p;
  p.query_dim = p.key_dim = p.value_dim = 20;
  Fill(&p);
  ExpectRun(p, Linears(p, "W_query", "W_key", "W_value", "out_proj"));
  ExpectRun(p, Linears(p, "att.W_query", "att.W_key", "att.W_value", "att.out_proj"));
  p.has_bias = false;
  ExpectRun(p, Linears(p, "W_query", "W_key", "W_value", "out_proj"));
}

TEST(Families, WQueryAsMatrices) {
  Problem p;
  p.query_dim = p.key_dim = p.value_dim = 20;
  p.has_bias = false;
  Fill(&p);
  std::vector<Stored> tensors = {Store("W_query", {20, 24}, p.w_q), Store("W_key", {20, 24}, p.w_k), Store("W_value", {20, 24}, p.w_v)};
  const std::vector<Stored> matrices = tensors;
  tensors.push_back(Store("out_proj", {24, 24}, p.w_o));
  ExpectRun(p, tensors);
  // The output projection of the same class may be an nn.Linear, which lies the other way.
  tensors = matrices;
  tensors.push_back(StoreTransposed("out_proj.weight", 24, 24, p.w_o));
  ExpectRun(p, tensors);
  // Without one, the merged heads are the output.
  p.has_output = false;
  ExpectRun(p, matrices);
}

TEST(Families, MultiheadAttention) {
  Problem p;
  Fill(&p);
  std::vector<Stored> tensors = {
      StoreTransposed("in_proj_weight", 24, 72, BesideQkv(p)),
      Store("in_proj_bias", {72}, BiasQkv(p)),
      StoreTransposed("out_proj.weight", 24, 24, p.w_o),
      Store("out_proj.bias", {24}, p.b_o),
  };
  ExpectRun(p, tensors);
}

TEST(Families, MultiheadAttentionWithOtherWidthsOfKeyAndValue) {
  Problem p;
  p.key_dim = 10;
  p.value_dim = 14;
  p.n_kv = 9;
  Fill(&p);
  const std::vector<Stored> tensors = {
      StoreTransposed("q_proj_weight", 24, 24, p.w_q),   StoreTransposed("k_proj_weight", 10, 24, p.w_k),
      StoreTransposed("v_proj_weight", 14, 24, p.w_v),   Store("in_proj_bias", {72}, BiasQkv(p)),
      StoreTransposed("out_proj.weight", 24, 24, p.w_o), Store("out_proj.bias", {24}, p.b_o),
  };
  ExpectRun(p, tensors, {"--key", "k.npy", "--value", "v.npy"});
}

TEST(Families, LlamaWithGroupedHeads) {
  Problem p;
  p.num_kv_heads = 2;
  p.query_dim = p.key_dim = p.value_dim = p.output_dim = 16;  // the heads are wider together
  Fill(&p);
  const std::vector<Stored> tensors = Linears(p, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj");
  ExpectRun(p, tensors, {"--no-rope"});
  ExpectRun(p, tensors, {"--no-rope", "--head-dim", "6", "--kv-heads", "2"});
  p.has_bias = false;
  ExpectRun(p, Linears(p, "q_proj", "k_proj", "v_proj", "o_proj"), {"--no-rope"});
}

// ---- RoPE

struct Rope {
  double base = 10000;
  bool is_interleaved = false;
  int64_t dims = 6;
};

// Rotates rows [n, heads, head_dim], the first of them at position 0.
void Rotate(const Rope &rope, int64_t heads, int64_t head_dim, std::vector<double> *rows) {
  const int64_t width = heads * head_dim, pairs = rope.dims / 2;
  for (int64_t at = 0; at < static_cast<int64_t>(rows->size()); at += head_dim) {
    for (int64_t i = 0; i < pairs; i++) {
      const double angle =
          static_cast<double>(at / width) * std::pow(rope.base, -2.0 * static_cast<double>(i) / static_cast<double>(rope.dims));
      double &a = (*rows)[at + (rope.is_interleaved ? 2 * i : i)];
      double &b = (*rows)[at + (rope.is_interleaved ? 2 * i + 1 : i + pairs)];
      const double rotated_a = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = rotated_a;
    }
  }
}

// Whether y is what the layer gives with its queries and keys rotated: within twice the bound of the layer without, since rotating pairs
// adds up errors of two elements.
void ExpectRotatedLayer(const Problem &p, const Rope &rope, const std::vector<float> &y) {
  const support::LayerWeights weights = {p.w_q.data(), p.w_k.data(), p.w_v.data(), p.w_o.data(),
                                         p.b_q.data(), p.b_k.data(), p.b_v.data(), p.b_o.data()};
  const support::LayerShape shape = {p.query_dim,
                                     p.key_dim,
                                     p.value_dim,
                                     p.output_dim,
                                     {p.n_q, p.n_q, p.num_heads, p.num_kv_heads, p.head_dim, p.head_dim_v, 0, p.is_causal, 0}};
  ASSERT_EQ(static_cast<int64_t>(y.size()), p.batch * p.n_q * p.output_dim);
  double worst = 0;
  for (int64_t b = 0; b < p.batch; b++) {
    const float *x = p.query.data() + b * p.n_q * p.query_dim;
    oracle::Layer<double> exact = oracle::LayerForward<double>(shape, weights, x, x, x);
    Rotate(rope, p.num_heads, p.head_dim, &exact.q);
    Rotate(rope, p.num_kv_heads, p.head_dim, &exact.k);
    exact.attention = oracle::AttentionForward<double>(shape.attention, exact.q, exact.k, exact.v);
    for (int64_t i = 0; i < p.n_q; i++) {
      for (int64_t n = 0; n < p.output_dim; n++) {
        double sum = p.b_o[n];
        for (int64_t k = 0; k < p.merged(); k++) sum += exact.attention.context[i * p.merged() + k] * p.w_o[k * p.output_dim + n];
        exact.y[i * p.output_dim + n] = sum;
      }
    }
    const oracle::LayerBound bound = oracle::BoundLayer(shape, weights, x, x, x, exact);
    for (int64_t i = 0; i < p.n_q * p.output_dim; i++) {
      worst = std::max(worst, std::fabs(static_cast<double>(y[b * p.n_q * p.output_dim + i]) - exact.y[i]) / bound.y[i]);
    }
  }
  EXPECT_LE(worst, 2) << "the error, in units of the bound without rotation";
}

class Rotated : public testing::Test {
 protected:
  Rotated() {
    p_.num_kv_heads = 2;
    Fill(&p_);
    WriteInput(folder_, p_);
  }

  void Write(const std::string &output_name) {
    const std::string prefix = "model.layers.0.self_attn.";
    WriteLayer(folder_, Linears(p_, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj", prefix + output_name));
  }

  // Runs the layer, and expects it rotated so, and a line that says so.
  void Expect(const Arguments &arguments, const Rope &rope, const std::string &words) {
    const Result result = Mha(arguments);
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
    std::vector<float> y;
    ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.output_dim}, &y);
    ExpectRotatedLayer(p_, rope, y);
  }

  Problem p_;
  Folder folder_;
};

TEST_F(Rotated, LayersOfLlamaAreByDefaultInHalvesAndBase10000) {
  Write("o_proj");
  Expect(RunArguments(folder_, p_), {}, ", rotated (half, base 10000), ");
}

TEST_F(Rotated, LayersAreAsTheOptionsSay) {
  Write("o_proj");
  Expect(RunArguments(folder_, p_, {"--rope-base", "500000"}), {500000, false, 6}, ", rotated (half, base 500000), ");
  Expect(RunArguments(folder_, p_, {"--rope-style", "half"}), {10000, false, 6}, ", rotated (half, base 10000), ");
  Expect(RunArguments(folder_, p_, {"--rope-style", "interleaved"}), {10000, true, 6}, ", rotated (interleaved, base 10000), ");
  Expect(RunArguments(folder_, p_, {"--rope-dims", "4", "--rope-base", "100.5"}), {100.5, false, 4},
         ", rotated (half, base 100.5, 4 elements), ");
}

TEST_F(Rotated, OtherLayersAreOnlyWhereAnOptionSaysSo) {
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  EXPECT_EQ(Mha(RunArguments(folder_, p_)).err.find("rotated"), std::string::npos);
  Expect(RunArguments(folder_, p_, {"--rope-base", "10000"}), {}, ", rotated (half, base 10000), ");
}

TEST_F(Rotated, PackedLayersAreOnlyWhereAnOptionSaysSo) {
  Write("o_proj");
  const std::string packed = folder_ / "layer.mha";
  ASSERT_EQ(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--no-rope", "--output", packed}).status, 0);
  const Arguments run = {"run", "--packed", packed, "--input", folder_ / "x.npy", "--output", folder_ / "y.npy", "--causal"};
  EXPECT_EQ(Mha(run).err.find("rotated"), std::string::npos);
  Arguments rotated = run;
  rotated.insert(rotated.end(), {"--rope-style", "interleaved"});
  Expect(rotated, {10000, true, 6}, ", rotated (interleaved, base 10000), ");
}

TEST_F(Rotated, LayersWhoseOutputHasAnotherNameThanLlamasAreRefusedUntilAnOptionSaysHow) {
  for (const char *name : {"out_proj", "dense"}) {
    Write(name);
    ExpectRefusal(Mha(RunArguments(folder_, p_)),
                  {"layer.safetensors", "model.layers.0.self_attn.q_proj.weight", "RoPE", "--rope-base", "--no-rope"});
    Expect(RunArguments(folder_, p_, {"--rope-style", "half"}), {}, ", rotated (half, base 10000), ");
    EXPECT_EQ(Mha(RunArguments(folder_, p_, {"--no-rope"})).status, 0);
  }
}

TEST_F(Rotated, LayersAreRefusedByCommandsThatDoNotRotate) {
  Write("o_proj");
  const std::string weights = folder_ / "layer.safetensors";
  const std::vector<std::string> words = {"layer.safetensors", "model.layers.0.self_attn.q_proj.weight", "RoPE", "--no-rope"};
  ExpectRefusal(Mha({"pack", "--weights", weights, "--heads", "4", "--output", folder_ / "layer.mha"}), words);
  ExpectRefusal(Mha({"explain", "--weights", weights, "--heads", "4", "--input", folder_ / "x.npy"}), words);
}

TEST_F(Rotated, LayersWithOptionsThatContradictEachOtherAreRefused) {
  Write("o_proj");
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--no-rope", "--rope-base", "10000"})), {"--no-rope", "--rope-base"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--rope-base", "0.5"})), {"--rope-base", "base is 0.5"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--rope-base", "nan"})), {"--rope-base", "a finite number"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--rope-style", "other"})), {"--rope-style", "half or interleaved"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--rope-dims", "3"})), {"--rope-dims", "even"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--rope-dims", "8"})), {"--rope-dims", "a head has 6"});
}

// ---- More families

TEST(Families, Bert) {
  Problem p;
  p.is_causal = false;
  Fill(&p);
  const std::string at = "bert.encoder.layer.0.attention.";
  std::vector<Stored> tensors = Linears(p, at + "self.query", at + "self.key", at + "self.value", at + "output.dense");
  tensors.push_back(Store("bert.encoder.layer.0.output.dense.weight", {2, 2}, {1, 2, 3, 4}));  // of the feed-forward part
  ExpectRun(p, tensors);
}

TEST(Families, Gpt2) {
  Problem p;
  Fill(&p);
  std::vector<Stored> tensors = Gpt2(p, "h.0.attn.");
  tensors.push_back(Store("h.0.attn.bias", {1, 1, 2, 2}, {1, 0, 1, 1}));  // the mask
  tensors.push_back(Store("h.0.mlp.c_proj.weight", {2, 2}, {1, 2, 3, 4}));
  tensors.push_back(Store("h.0.mlp.c_proj.bias", {2}, {1, 2}));
  ExpectRun(p, tensors);
}

TEST(Families, Gpt2RewrittenWithLinears) {
  Problem p;
  p.has_bias = false;
  Fill(&p);
  const std::vector<Stored> tensors = {StoreTransposed("c_attn.weight", 24, 72, BesideQkv(p)),
                                       StoreTransposed("c_proj.weight", 24, 24, p.w_o)};
  ExpectRun(p, tensors, {"--layout", "out-in"});
  Folder folder;
  WriteLayer(folder, tensors);
  WriteInput(folder, p);
  ExpectRefusal(Mha(RunArguments(folder, p)), {"layer.safetensors", "c_attn.weight", "(72, 24)", "--layout out-in"});
}

TEST(Families, NamesThatTheUserGives) {
  Problem p;
  p.query_dim = p.key_dim = p.value_dim = 20;
  p.head_dim_v = 5;
  Fill(&p);
  ExpectRun(p, Linears(p, "a", "b", "c", "d"), {"--names", "q=a.weight,k=b.weight,v=c.weight,o=d.weight", "--layout", "out-in"});
  ExpectRun(p, Linears(p, "m.a", "m.b", "m.c", "m.d"),
            {"--names", "q=a.weight,k=b.weight,v=c.weight,o=d.weight", "--layout", "out-in", "--layer", "m"});
  const std::vector<Stored> tensors = {
      Store("wq", {20, 24}, p.w_q), Store("wk", {20, 24}, p.w_k), Store("wv", {20, 20}, p.w_v), Store("wo", {20, 24}, p.w_o),
      Store("bq", {24}, p.b_q),     Store("bk", {24}, p.b_k),     Store("bv", {20}, p.b_v),     Store("bo", {24}, p.b_o),
  };
  ExpectRun(p, tensors, {"--names", "q=wq,k=wk,v=wv,o=wo,bq=bq,bk=bk,bv=bv,bo=bo", "--layout", "in-out"});
  ExpectRun(p, tensors, {"--names", "q=wq,k=wk,v=wv,o=wo,bq=bq,bk=bk,bv=bv,bo=bo", "--layout", "in-out", "--scale", "-0.25"}, -0.25f);
}

TEST(Families, FusedMatrixOfGroupedHeads) {
  Problem p;
  p.num_kv_heads = 2;
  p.has_bias = false;
  Fill(&p);
  const std::vector<Stored> tensors = {StoreTransposed("qkv", 24, 48, BesideQkv(p)), StoreTransposed("o", 24, 24, p.w_o)};
  ExpectRun(p, tensors, {"--names", "qkv=qkv,o=o", "--layout", "out-in", "--kv-heads", "2"});
  ExpectRun(p, tensors, {"--names", "qkv=qkv,o=o", "--layout", "out-in", "--head-dim", "6"});
}

// As in one part of a model that is stored in several files.
TEST(Families, AMissingOutputProjectionIsNoticed) {
  Problem p;
  Fill(&p);
  const std::map<std::string, std::vector<Stored>> families = {
      {"c_proj.weight", Gpt2(p)},
      {"output.dense.weight", Linears(p, "self.query", "self.key", "self.value", "output.dense")},
      {"o_proj.weight", Linears(p, "q_proj", "k_proj", "v_proj", "o_proj")},
  };
  for (const auto &[name, complete] : families) {
    Folder folder;
    std::vector<Stored> tensors;
    for (const Stored &tensor : complete) {
      if (tensor.name != name) tensors.push_back(tensor);
    }
    WriteLayer(folder, tensors);
    WriteInput(folder, p);
    ExpectRefusal(Mha(RunArguments(folder, p, {"--no-rope"})), {"layer.safetensors", "'" + name + "'"});
  }
}

TEST(Families, WhatChangesTheArithmeticIsRefused) {
  Problem p;
  Fill(&p);
  for (const std::string name : {"bias_k", "q_norm.weight", "q_attn.weight", "sinks"}) {
    Folder folder;
    std::vector<Stored> tensors = Gpt2(p, "h.0.attn.");
    tensors.push_back(Store("h.0.attn." + name, {2}, {1, 2}));
    WriteLayer(folder, tensors);
    WriteInput(folder, p);
    ExpectRefusal(Mha(RunArguments(folder, p)), {"layer.safetensors", "h.0.attn." + name});
  }
}

// ---- Types of weights -----------------------------------------------------------------------------------------------------------

// Numbers that F16 and BF16 both hold exactly, and their encodings.
float SmallNumber(int64_t n) { return static_cast<float>(n % 255 - 127) / 128; }

std::string EncodedAs(const std::string &dtype, const std::vector<float> &values) {
  if (dtype == "F32") return BytesOf(values);
  std::string bytes;
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t half = bits >> 16;
    if (dtype == "F16") {
      const int exponent = static_cast<int>(bits >> 23 & 255) - 127;
      const uint32_t fraction = bits & 0x7fffff;
      half = bits >> 16 & 0x8000;
      if (value != 0 && exponent >= -14) half |= static_cast<uint32_t>(exponent + 15) << 10 | fraction >> 13;
      if (value != 0 && exponent < -14) half |= (fraction | 0x800000) >> (-1 - exponent);  // subnormal
    }
    bytes += static_cast<char>(half & 255);
    bytes += static_cast<char>(half >> 8);
  }
  return bytes;
}

TEST(Weights, AreWidenedExactlyFromF16AndBf16) {
  Problem p;
  p.has_bias = false;
  Fill(&p);
  int64_t n = 0;
  for (std::vector<float> *matrix : {&p.w_q, &p.w_k, &p.w_v, &p.w_o}) {
    for (float &value : *matrix) value = SmallNumber(n++);
  }
  std::map<std::string, std::string> outputs;
  for (const std::string dtype : {"F32", "F16", "BF16"}) {
    Folder folder;
    WriteInput(folder, p);
    std::vector<Stored> tensors = Linears(p, "W_query", "W_key", "W_value", "out_proj");
    for (Stored &tensor : tensors) {
      std::vector<float> values(tensor.bytes.size() / 4);
      std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
      tensor.bytes = EncodedAs(dtype, values);
      tensor.dtype = dtype;
    }
    WriteLayer(folder, tensors);
    ASSERT_EQ(Mha(RunArguments(folder, p)).status, 0);
    outputs[dtype] = ReadFile(folder / "y.npy");
  }
  EXPECT_EQ(outputs["F16"], outputs["F32"]);
  EXPECT_EQ(outputs["BF16"], outputs["F32"]);
}

// A layer of one head whose output is its values: what W_v holds comes out as it is.
std::vector<float> ThroughValues(const std::string &dtype, const std::string &encoded, int64_t count) {
  Folder folder;
  const std::vector<float> zeros(count, 0.0f);
  folder.Write(
      "layer.safetensors",
      Safetensors({Store("W_query", {1, count}, zeros), Store("W_key", {1, count}, zeros), {"W_value", {1, count}, encoded, dtype}}));
  folder.Write("x.npy", Npy({1, 1}, {1}));
  const Result result =
      Mha({"run", "--weights", folder / "layer.safetensors", "--heads", "1", "--input", folder / "x.npy", "--output", folder / "y.npy"});
  EXPECT_EQ(result.status, 0) << result.err;
  std::vector<float> y;
  ExpectNpy(folder / "y.npy", {1, count}, &y);
  return y;
}

TEST(Weights, EveryFiniteF16KeepsItsValue) {
  std::string encoded;
  std::vector<float> expected;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const int exponent = static_cast<int>(bits >> 10 & 31);
    if (exponent == 31) continue;
    const float fraction = static_cast<float>(bits & 1023);
    const float magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    expected.push_back((bits & 0x8000) != 0 && magnitude != 0 ? -magnitude : magnitude);  // finished values have no -0
    encoded += static_cast<char>(bits & 255);
    encoded += static_cast<char>(bits >> 8);
  }
  EXPECT_EQ(ThroughValues("F16", encoded, static_cast<int64_t>(expected.size())), expected);
}

TEST(Weights, InfinitiesAndNansOfF16AndBf16StayWhatTheyAre) {
  for (const std::string dtype : {"F16", "BF16"}) {
    const std::string encoded = dtype == "F16" ? std::string("\x00\x7c\x00\xfc\x01\x7e", 6) : std::string("\x80\x7f\x80\xff\xc1\x7f", 6);
    const std::vector<float> y = ThroughValues(dtype, encoded, 3);
    ASSERT_EQ(y.size(), 3u);
    EXPECT_EQ(y[0], std::numeric_limits<float>::infinity());
    EXPECT_EQ(y[1], -std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(y[2]));
  }
}

TEST(Weights, OfAnyAlignmentGiveTheSameBytes) {
  Problem p;
  Fill(&p);
  std::set<std::string> outputs;
  for (const size_t misalignment : {0, 1, 2, 4, 7}) {
    Folder folder;
    WriteInput(folder, p);
    folder.Write("layer.safetensors", Safetensors(Gpt2(p), misalignment));
    ASSERT_EQ(Mha(RunArguments(folder, p)).status, 0);
    outputs.insert(ReadFile(folder / "y.npy"));
  }
  EXPECT_EQ(outputs.size(), 1u);
}

// ---- Models of several layers ---------------------------------------------------------------------------------------------------

class Model : public testing::Test {
 protected:
  Model() {
    std::vector<Stored> tensors = {Store("wte.weight", {3, 2}, {1, 2, 3, 4, 5, 6})};
    for (const int layer : {0, 1, 2, 10}) {
      Fill(&p_, static_cast<uint64_t>(layer + 1));
      for (const Stored &tensor : Gpt2(p_, "h." + std::to_string(layer) + ".attn.")) tensors.push_back(tensor);
    }
    Fill(&p_, 2);  // layer 1
    WriteLayer(folder_, tensors);
    WriteInput(folder_, p_);
  }

  Problem p_;
  Folder folder_;
};

TEST_F(Model, LayersAreListedWhereOneIsToBeChosen) {
  const Result result = Mha(RunArguments(folder_, p_));
  EXPECT_EQ(result.status, 2);
  const std::vector<std::string> lines = Lines(result.err);
  ASSERT_EQ(lines.size(), 5u) << result.err;
  EXPECT_NE(lines[0].find("layer.safetensors: holds 4 layers; choose one by --layer:"), std::string::npos) << lines[0];
  EXPECT_EQ(lines[1].rfind("  h.0.attn ", 0), 0u) << lines[1];
  EXPECT_EQ(lines[4].rfind("  h.10.attn ", 0), 0u) << lines[4];
  EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.safetensors", "x.npy"}));
}

TEST_F(Model, OneLayerIsChosenByItsPrefixOrAPartOfIt) {
  for (const std::string prefix : {"h.1.attn", "h.1", "1"}) {
    const Result result = Mha(RunArguments(folder_, p_, {"--layer", prefix}));
    ASSERT_EQ(result.status, 0) << result.err;
    std::vector<float> y;
    ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
    ExpectLayer(p_, y);
  }
}

TEST_F(Model, AnUnknownOrUnclearLayerIsRefusedWithAList) {
  Result result = Mha(RunArguments(folder_, p_, {"--layer", "h.3"}));
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(Lines(result.err).size(), 5u) << result.err;
  EXPECT_NE(result.err.find("has no layer 'h.3'"), std::string::npos) << result.err;
  result = Mha(RunArguments(folder_, p_, {"--layer", "attn"}));
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(Lines(result.err).size(), 5u) << result.err;
}

// ---- Running --------------------------------------------------------------------------------------------------------------------

class Run : public testing::Test {
 protected:
  Run() {
    p_.batch = 3;
    Fill(&p_);
    WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
    WriteInput(folder_, p_);
  }

  std::string Output(const Arguments &more = {}) {
    const Result result = Mha(RunArguments(folder_, p_, more));
    EXPECT_EQ(result.status, 0) << result.err;
    const std::string bytes = ReadFile(folder_ / "y.npy");
    unlink((folder_ / "y.npy").c_str());
    return bytes;
  }

  Problem p_;
  Folder folder_;
};

TEST_F(Run, BytesDoNotDependOnThreadsOrInstructionSet) {
  const std::string expected = Output();
  for (const std::string threads : {"2", "3", "16"}) EXPECT_EQ(Output({"--threads", threads}), expected) << threads;
  EXPECT_EQ(Output({"--isa", "auto"}), expected);
  for (const std::string set : {"scalar", "avx2", "avx512", "neon"}) {
    const Result result = Mha(RunArguments(folder_, p_, {"--isa", set}));
    const std::string here = Mha({"info"}).out;
    if (here.find(set) == std::string::npos) {
      ExpectRefusal(result, {"--isa", set});
    } else {
      EXPECT_EQ(result.status, 0) << result.err;
      EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << set;
    }
  }
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--isa", "sse9"})), {"--isa", "sse9"});
}

TEST_F(Run, OutputHasTheRankOfTheInput) {
  folder_.Write("x.npy", Npy({p_.n_q, p_.query_dim}, std::vector<float>(p_.query.begin(), p_.query.begin() + p_.n_q * p_.query_dim)));
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.n_q, p_.y_width()}, &y);
  p_.batch = 1;
  ExpectLayer(p_, y);
}

TEST_F(Run, NoRowsGiveNoRows) {
  std::vector<float> y;
  folder_.Write("x.npy", Npy({0, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, p_.y_width()}, &y);
  folder_.Write("x.npy", Npy({0, 5, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, 5, p_.y_width()}, &y);
  folder_.Write("x.npy", Npy({int64_t{1} << 60, 0, p_.query_dim}, {}));
  const Result result = Mha(RunArguments(folder_, p_));
  EXPECT_TRUE(result.status == 0 || result.status == 2) << result.err;
}

TEST_F(Run, CausalCrossAttentionSeesAllKeysFromTheLastRow) {
  p_.n_kv = 11;
  Fill(&p_);
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  WriteInput(folder_, p_);
  folder_.Write("k.npy", Npy({p_.batch, p_.n_kv, p_.key_dim}, p_.key));
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--key", folder_ / "k.npy"})).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
  ExpectLayer(p_, y, true);
}

TEST_F(Run, OpenBlasGivesTheSameWithinTheBound) {
  if (Mha({"info"}).out.find("openblas") == std::string::npos) GTEST_SKIP() << "built without OpenBLAS";
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--back-end", "openblas"})).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
  ExpectLayer(p_, y);
}

TEST_F(Run, InputsThatAreNotAlignedAreRead) {
  const std::string expected = Output();
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24)} \n";
  ASSERT_NE((header.size() + 10) % 4, 0u);
  folder_.Write("x.npy", NpyWithHeader(header, BytesOf(p_.query)));
  EXPECT_EQ(Output(), expected);
}

TEST_F(Run, VersionsTwoAndThreeOfNpyAreRead) {
  const std::string expected = Output();
  const std::string header = NpyHeader("'<f4'", "False", "(3, 7, 24)");
  for (const char version : {'\x02', '\x03'}) {
    const std::string length = {static_cast<char>(header.size()), 0, 0, 0};
    folder_.Write("x.npy", std::string("\x93NUMPY") + version + std::string(1, '\0') + length + header + BytesOf(p_.query));
    EXPECT_EQ(Output(), expected);
  }
}

TEST_F(Run, SaysWhatItDidInOneLineUnlessQuiet) {
  const Result result = Mha(RunArguments(folder_, p_));
  ASSERT_EQ(Lines(result.err).size(), 1u);
  for (const std::string word : {"(3, 7, 24)", "1 thread", "GFLOP/s"}) EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
  EXPECT_EQ(Mha(RunArguments(folder_, p_, {"--quiet"})).err, "");
}

TEST_F(Run, ReplacesAFileBehindALinkAndKeepsTheLink) {
  folder_.Write("old.npy", "old");
  ASSERT_EQ(symlink((folder_ / "old.npy").c_str(), (folder_ / "y.npy").c_str()), 0);
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  struct stat status;
  ASSERT_EQ(lstat((folder_ / "y.npy").c_str(), &status), 0);
  EXPECT_TRUE(S_ISLNK(status.st_mode));
  std::vector<float> y;
  ExpectNpy(folder_ / "old.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
}

TEST_F(Run, SaysTheHeads) {
  EXPECT_NE(Mha(RunArguments(folder_, p_)).err.find(", 4 heads of 6, "), std::string::npos);
  p_.num_kv_heads = 2;
  Fill(&p_);
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  const std::string heads = ", 4 query heads of 6, 2 key heads, ";
  EXPECT_NE(Mha(RunArguments(folder_, p_)).err.find(heads), std::string::npos);
  const Result packed = Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"});
  EXPECT_NE(packed.err.find(heads), std::string::npos) << packed.err;
}

TEST_F(Run, NeverWritesOverAnInput) {
  folder_.Write("k.npy", ReadFile(folder_ / "x.npy"));
  folder_.Write("v.npy", ReadFile(folder_ / "x.npy"));
  ASSERT_EQ(symlink((folder_ / "x.npy").c_str(), (folder_ / "soft.npy").c_str()), 0);
  ASSERT_EQ(link((folder_ / "x.npy").c_str(), (folder_ / "hard.npy").c_str()), 0);
  ASSERT_EQ(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha", "--quiet"}).status,
            0);
  std::map<std::string, std::string> before;
  for (const std::string &name : folder_.Names()) before[name] = ReadFile(folder_ / name);

  const auto expect_refused = [&](Arguments arguments, const std::string &output, const std::string &option) {
    arguments.insert(arguments.end(), {"--output", folder_ / output});
    ExpectRefusal(Mha(arguments), {"mha: --output: " + (folder_ / output) + " is also the " + option + "; name another file\n"});
    std::map<std::string, std::string> after;
    for (const std::string &name : folder_.Names()) after[name] = ReadFile(folder_ / name);
    EXPECT_TRUE(after == before) << output;
  };
  const Arguments inputs = {"--input", folder_ / "x.npy", "--key", folder_ / "k.npy", "--value", folder_ / "v.npy"};
  Arguments run = {"run", "--weights", folder_ / "layer.safetensors", "--heads", "4"};
  run.insert(run.end(), inputs.begin(), inputs.end());
  expect_refused(run, "x.npy", "--input");
  expect_refused(run, "soft.npy", "--input");
  expect_refused(run, "hard.npy", "--input");
  expect_refused(run, "./x.npy", "--input");
  expect_refused(run, "k.npy", "--key");
  expect_refused(run, "v.npy", "--value");
  expect_refused(run, "layer.safetensors", "--weights");
  run = {"run", "--packed", folder_ / "layer.mha"};
  run.insert(run.end(), inputs.begin(), inputs.end());
  expect_refused(run, "layer.mha", "--packed");
  expect_refused({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4"}, "layer.safetensors", "--weights");
}

TEST_F(Run, DoesNotWriteToStandardOutput) {
  const std::set<std::string> before = folder_.Names();
  ExpectRefusal(Mha({"run", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--input", folder_ / "x.npy", "--output", "-"}),
                {"--output", "standard output", "name a file"});
  ExpectRefusal(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", "-"}),
                {"--output", "standard output"});
  EXPECT_EQ(folder_.Names(), before);
}

TEST_F(Run, WritesThroughAPipe) {
  const std::string expected = Output();
  ASSERT_EQ(mkfifo((folder_ / "y.npy").c_str(), 0600), 0);
  const pid_t child = StartMha(RunArguments(folder_, p_));
  const int pipe = open((folder_ / "y.npy").c_str(), O_RDONLY);
  EXPECT_EQ(ReadAll(pipe), expected);
  close(pipe);
  EXPECT_EQ(ExitStatus(child), 0);
}

TEST_F(Run, ProgressIsShownOnATerminalOnlyAndIsGoneAtTheEnd) {
  const Result result = MhaOnTerminal(RunArguments(folder_, p_), 80);
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(result.out.find("packing "), std::string::npos);
  EXPECT_NE(result.out.find("\r\x1b[K"), std::string::npos);
  const size_t last = result.out.rfind("\x1b[K");
  EXPECT_NE(result.out.find("GFLOP/s", last), std::string::npos) << "the line was not cleared before the summary";
  EXPECT_EQ(MhaOnTerminal(RunArguments(folder_, p_, {"--quiet"}), 80).out, "");
  EXPECT_EQ(Mha(RunArguments(folder_, p_)).err.find('\x1b'), std::string::npos);
}

TEST_F(Run, AnInterruptedRunLeavesNothing) {
  // Long enough that the signal comes before the end.
  Problem p;
  p.batch = 1;
  p.n_q = 12000;
  Fill(&p);
  WriteInput(folder_, p);
  for (const int number : {SIGTERM, SIGINT}) {
    const pid_t child = StartMha(RunArguments(folder_, p, {"--isa", "scalar"}));
    for (int tries = 0; tries < 20000 && folder_.Names().size() < 3; tries++) usleep(1000);
    EXPECT_EQ(folder_.Names().size(), 3u) << "no temporary file was seen";
    kill(child, number);
    EXPECT_EQ(ExitStatus(child), -1);
    EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.safetensors", "x.npy"}));
  }
}

// ---- Packed layers --------------------------------------------------------------------------------------------------------------

class Packed : public Run {
 protected:
  Arguments PackArguments(const Arguments &more = {}) {
    Arguments arguments = {"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  Arguments RunPackedArguments(const Arguments &more = {}) {
    Arguments arguments = {"run",     "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy", "--output", folder_ / "y.npy",
                           "--causal"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
};

TEST_F(Packed, GivesTheBytesOfTheUnpackedLayer) {
  const std::string expected = Output();
  const Result packed = Mha(PackArguments());
  ASSERT_EQ(packed.status, 0) << packed.err;
  EXPECT_EQ(Lines(packed.err).size(), 1u) << packed.err;
  const Result result = Mha(RunPackedArguments());
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected);
}

TEST_F(Packed, KeepsItsScale) {
  const std::string expected = Output({"--scale", "0.125"});
  ASSERT_EQ(Mha(PackArguments({"--scale", "0.125"})).status, 0);
  ASSERT_EQ(Mha(RunPackedArguments()).status, 0);
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected);
}

TEST_F(Packed, KeepsTheTypeOfItsWeights) {
  const std::string of_floats = Output();
  for (const char *type : {"f16", "bf16", "int8", "int4"}) {
    const std::string expected = Output({"--weight-type", type});
    EXPECT_NE(expected, of_floats) << type;
    ASSERT_EQ(Mha(PackArguments({"--weight-type", type})).status, 0) << type;
    ASSERT_EQ(Mha({"verify", folder_ / "layer.mha"}).status, 0) << type;
    const Result result = Mha(RunPackedArguments());
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << type;
  }
  ASSERT_EQ(Mha(PackArguments({"--weight-type", "f32"})).status, 0);
  ASSERT_EQ(Mha(RunPackedArguments()).status, 0);
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), of_floats);
  ExpectRefusal(Mha(PackArguments({"--weight-type", "int5"})), {"--weight-type", "int4", "'int5'"});
  ExpectRefusal(Mha(RunPackedArguments({"--weight-type", "int8"})), {"--weight-type", "--packed"});
}

TEST_F(Packed, ForOpenBlasRunsWithOpenBlasOnly) {
  if (Mha({"info"}).out.find("openblas") == std::string::npos) GTEST_SKIP() << "built without OpenBLAS";
  const std::string expected = Output({"--back-end", "openblas"});
  ASSERT_EQ(Mha(PackArguments({"--back-end", "openblas"})).status, 0);
  ExpectRefusal(Mha(RunPackedArguments()), {"layer.mha", "--back-end openblas"});
  ASSERT_EQ(Mha(RunPackedArguments({"--back-end", "openblas"})).status, 0);
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected);
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  ExpectRefusal(Mha(RunPackedArguments({"--back-end", "openblas"})), {"layer.mha", "--back-end native"});
}

TEST_F(Packed, IsVerified) {
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  const Result good = Mha({"verify", folder_ / "layer.mha"});
  EXPECT_EQ(good.status, 0) << good.err;
  EXPECT_NE(good.out.find("layer.mha"), std::string::npos) << good.out;
  std::string bytes = ReadFile(folder_ / "layer.mha");
  bytes[bytes.size() / 2] ^= 1;
  folder_.Write("layer.mha", bytes);
  ExpectRefusal(Mha({"verify", folder_ / "layer.mha"}), {"layer.mha"});
}

TEST_F(Packed, ThatIsNoneIsRefused) {
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  const std::string bytes = ReadFile(folder_ / "layer.mha");
  for (const size_t length : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, bytes.size() / 2, bytes.size() - 1}) {
    folder_.Write("layer.mha", bytes.substr(0, length));
    ExpectRefusal(Mha(RunPackedArguments()), {"layer.mha"});
    ExpectRefusal(Mha({"verify", folder_ / "layer.mha"}), {"layer.mha"});
  }
  folder_.Write("layer.mha", ReadFile(folder_ / "layer.safetensors"));
  const std::string sentence = "layer.mha: is no packed layer; mha pack writes one\n";
  ExpectRefusal(Mha(RunPackedArguments()), {sentence});
  ExpectRefusal(Mha({"verify", folder_ / "layer.mha"}), {sentence});
  ExpectRefusal(Mha({"explain", "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy"}), {sentence});
  ExpectRefusal(Mha(RunPackedArguments({"--heads", "4"})), {"--packed", "--heads"});
  EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.mha", "layer.safetensors", "x.npy"}));
}

// What /proc says of one file's mapping in a process, in KiB: {"Rss", 4096}, {"Shared_Clean", ...}, ... Empty = the file is not mapped.
std::map<std::string, int64_t> MappingOf(const std::string &path, pid_t process) {
  std::map<std::string, int64_t> fields;
  std::ifstream smaps("/proc/" + std::to_string(process) + "/smaps");
  bool is_it = false;
  for (std::string line; std::getline(smaps, line);) {
    const size_t colon = line.find(": ");
    const bool is_field = colon != std::string::npos && line.find(' ') > colon;
    if (!is_field) {
      is_it = line.size() > path.size() && line.compare(line.size() - path.size(), path.size(), path) == 0;
      if (is_it) fields["is read-only"] = line.find(" r--") != std::string::npos;
    } else if (is_it) {
      fields[line.substr(0, colon)] += std::strtoll(line.c_str() + colon + 1, nullptr, 10);
    }
  }
  return fields;
}

int64_t AnonymousMemoryOf(pid_t process) {
  std::ifstream rollup("/proc/" + std::to_string(process) + "/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (line.rfind("Anonymous:", 0) == 0) return std::strtoll(line.c_str() + 10, nullptr, 10);
  }
  return -1;
}

// Two commands over one packed file, both caught after their work: each writes its output into a pipe that nobody empties.
TEST_F(Packed, IsMappedAndSharedByProcessesWithoutACopy) {
  p_ = {};
  p_.batch = 1;
  p_.n_q = 64;  // 256 KiB of output, more than a pipe holds
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 1024;
  p_.head_dim = p_.head_dim_v = 256;
  p_.has_bias = false;
  Fill(&p_);
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  WriteInput(folder_, p_);
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  const std::string expected = Output();
  const std::string path = folder_ / "layer.mha";
  struct stat status;
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  const int64_t kib = status.st_size / 1024;
  ASSERT_GE(kib, 16 * 1024);

  pid_t children[2];
  int pipes[2];
  for (int i = 0; i < 2; i++) {
    const std::string pipe = folder_ / ("pipe" + std::to_string(i));
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    Arguments arguments = RunPackedArguments();
    for (std::string &argument : arguments) {
      if (argument == folder_ / "y.npy") argument = pipe;
    }
    children[i] = StartMha(arguments);
    pipes[i] = open(pipe.c_str(), O_RDONLY);
  }
  // The first bytes come when the work is done.
  char first[2];
  for (int i = 0; i < 2; i++) ASSERT_EQ(read(pipes[i], &first[i], 1), 1);

  for (int i = 0; i < 2; i++) {
    std::map<std::string, int64_t> mapping = MappingOf(path, children[i]);
    ASSERT_FALSE(mapping.empty()) << "the packed file is not mapped";
    EXPECT_EQ(mapping["is read-only"], 1);
    EXPECT_GE(mapping["Rss"], kib * 95 / 100) << "the weights are read in the mapping";
    EXPECT_EQ(mapping["Anonymous"], 0);
    EXPECT_EQ(mapping["Private_Dirty"], 0);
    EXPECT_LE(mapping["Private_Clean"], kib / 20) << "both processes use the same memory";
    EXPECT_LE(mapping["Pss"], kib * 55 / 100) << "each answers for half of it";
    const int64_t anonymous = AnonymousMemoryOf(children[i]);
    EXPECT_GE(anonymous, 0);
    if (!MHA_COMMAND_SANITIZED) {
      EXPECT_LE(anonymous, kib / 2) << "a copy would be here";
    }
    std::printf("process %d: of %lld KiB of packed weights %lld resident, %lld shared, %lld proportional; anonymous memory %lld KiB\n",
                i + 1, static_cast<long long>(kib), static_cast<long long>(mapping["Rss"]),
                static_cast<long long>(mapping["Shared_Clean"] + mapping["Shared_Dirty"]), static_cast<long long>(mapping["Pss"]),
                static_cast<long long>(anonymous));
  }
  for (int i = 0; i < 2; i++) {
    EXPECT_EQ(first[i] + ReadAll(pipes[i]), expected);
    close(pipes[i]);
    EXPECT_EQ(ExitStatus(children[i]), 0);
  }
}

// ---- Decoding -------------------------------------------------------------------------------------------------------------------

class Decode : public Packed {
 protected:
  static Arguments Decoding(const Arguments &more = {}) {
    Arguments arguments = {"--decode"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // The layer anew, of so many rows.
  void Write(int64_t n) {
    p_.n_q = p_.n_kv = n;
    Fill(&p_);
    WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
    WriteInput(folder_, p_);
  }
};

TEST_F(Decode, GivesTheBytesOfARunWithoutIt) {
  const std::string expected = Output({"--quiet"});
  EXPECT_EQ(Output(Decoding()), expected);
  for (const std::string prompt : {"1", "2", "6", "7"}) EXPECT_EQ(Output(Decoding({"--quiet", "--prompt", prompt})), expected) << prompt;
  EXPECT_EQ(Output(Decoding({"--quiet", "--cache-type", "f32"})), expected);
  for (const std::string threads : {"2", "3", "64"})
    EXPECT_EQ(Output(Decoding({"--threads", threads, "--prompt", "3"})), expected) << threads;
}

TEST_F(Decode, GivesTheBytesOfARunWithoutItForSeveralChunksOfKeys) {
  Write(530);
  const std::string expected = Output({"--quiet"});
  for (const std::string prompt : {"1", "255", "256", "400"}) {
    EXPECT_EQ(Output(Decoding({"--quiet", "--prompt", prompt})), expected) << prompt;
  }
  EXPECT_EQ(Output(Decoding({"--quiet", "--prompt", "256", "--threads", "2"})), expected);
}

// So wide that every step is shared out.
TEST_F(Decode, GivesTheSameBytesOnThreadsThatAllHaveWorkToDo) {
  p_.batch = 1;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 512;
  p_.num_heads = p_.num_kv_heads = 8;
  p_.head_dim = p_.head_dim_v = 64;
  Write(80);
  const std::string expected = Output({"--quiet"});
  for (const std::string threads : {"2", "5"}) {
    const Result result = Mha(RunArguments(folder_, p_, {"--decode", "--prompt", "40", "--threads", threads}));
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.err.find(threads + " threads"), std::string::npos) << result.err;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << threads;
  }
}

TEST_F(Decode, TakesOneSequenceAsItTakesABatch) {
  folder_.Write("x.npy", Npy({p_.n_q, p_.query_dim}, std::vector<float>(p_.query.begin(), p_.query.begin() + p_.n_q * p_.query_dim)));
  const std::string expected = Output();
  EXPECT_EQ(Output(Decoding()), expected);
  std::vector<float> y;
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode", "--quiet"})).status, 0);
  ExpectNpy(folder_ / "y.npy", {p_.n_q, p_.y_width()}, &y);
}

TEST_F(Decode, NoRowsGiveNoRows) {
  std::vector<float> y;
  folder_.Write("x.npy", Npy({0, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode"})).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, p_.y_width()}, &y);
  folder_.Write("x.npy", Npy({0, 5, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode"})).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, 5, p_.y_width()}, &y);
}

TEST_F(Decode, RotatesByThePositionInTheSequence) {
  const std::string prefix = "model.layers.0.self_attn.";
  WriteLayer(folder_, Linears(p_, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj", prefix + "o_proj"));
  const std::string plain = Output({"--no-rope", "--quiet"});
  for (const Arguments &rope : {Arguments{}, {"--rope-style", "interleaved"}, {"--rope-base", "500000", "--rope-dims", "4"}}) {
    const std::string expected = Output(rope);
    EXPECT_NE(expected, plain);
    Arguments decoding = {"--decode", "--prompt", "3"};
    decoding.insert(decoding.end(), rope.begin(), rope.end());
    EXPECT_EQ(Output(decoding), expected);
  }
}

TEST_F(Decode, TakesWeightsOfEveryType) {
  for (const std::string type : {"f16", "bf16", "int8", "int4"}) {
    const std::string expected = Output({"--weight-type", type});
    EXPECT_EQ(Output(Decoding({"--weight-type", type})), expected) << type;
    ASSERT_EQ(Mha(PackArguments({"--weight-type", type})).status, 0) << type;
    ASSERT_EQ(Mha(RunPackedArguments({"--decode", "--prompt", "2"})).status, 0) << type;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << type;
  }
}

// What the library gives for all rows at once over a cache of this type.
std::vector<float> ForwardOverACache(const Problem &p, uint32_t type) {
  mha_error error;
  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = p.query_dim;
  config.num_heads = p.num_heads;
  config.head_dim = p.head_dim;
  mha_layer_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.w_q = p.w_q.data(), weights.w_k = p.w_k.data(), weights.w_v = p.w_v.data(), weights.w_o = p.w_o.data();
  weights.b_q = p.b_q.data(), weights.b_k = p.b_k.data(), weights.b_v = p.b_v.data(), weights.b_o = p.b_o.data();
  mha_layer *layer = nullptr;
  EXPECT_EQ(mha_layer_create(&config, &weights, nullptr, &layer, &error), MHA_OK) << error.message;

  mha_kv_cache_config room = {};
  room.struct_size = sizeof room;
  room.num_sequences = p.batch;
  room.capacity = p.n_q;
  room.num_kv_heads = p.num_heads;
  room.head_dim = p.head_dim;
  room.k_type = room.v_type = type;
  size_t bytes = 0;
  EXPECT_EQ(mha_kv_cache_size(&room, &bytes, &error), MHA_OK) << error.message;
  void *memory = nullptr;
  EXPECT_EQ(posix_memalign(&memory, 64, bytes), 0);
  mha_kv_cache *cache = nullptr;
  EXPECT_EQ(mha_kv_cache_init(&room, memory, bytes, &cache, &error), MHA_OK) << error.message;

  std::vector<float> y(p.batch * p.n_q * p.output_dim);
  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.batch = p.batch;
  args.n_q = p.n_q;
  args.query = p.query.data();
  args.output = y.data();
  args.is_causal = 1;
  args.cache = cache;
  EXPECT_EQ(mha_forward_workspace(layer, &args, &bytes, &error), MHA_OK) << error.message;
  std::vector<unsigned char> workspace(bytes);
  EXPECT_EQ(mha_forward(layer, &args, workspace.data(), bytes, &error), MHA_OK) << error.message;
  mha_layer_destroy(layer);
  free(memory);
  return y;
}

TEST_F(Decode, OverACacheOfFewerBitsGivesTheBitsOfThatType) {
  const std::pair<const char *, uint32_t> types[] = {
      {"f32", MHA_TYPE_F32}, {"f16", MHA_TYPE_F16}, {"bf16", MHA_TYPE_BF16}, {"int8", MHA_TYPE_INT8}};
  std::set<std::string> different;
  for (const auto &[name, type] : types) {
    const std::vector<float> expected = ForwardOverACache(p_, type);
    for (const std::string prompt : {"1", "4", "7"}) {
      ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode", "--quiet", "--cache-type", name, "--prompt", prompt})).status, 0);
      std::vector<float> y;
      ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
      EXPECT_EQ(BytesOf(y), BytesOf(expected)) << name << ", prompt of " << prompt;
    }
    different.insert(BytesOf(expected));
  }
  EXPECT_EQ(different.size(), std::size(types));
}

TEST_F(Decode, TellsTokensPerSecondAndTheShareOfTheReadBandwidth) {
  const auto told = [this](const Arguments &arguments) { return Mha(RunArguments(folder_, p_, arguments)).err; };
  const std::string line = told({"--decode", "--prompt", "3", "--cache-type", "int8"});
  ASSERT_EQ(Lines(line).size(), 1u) << line;
  for (const std::string word : {"(3, 7, 24)", "1 thread", "cache of int8", "prompt of 3 rows in ", "12 tokens in ", " tokens/s, ",
                                 "% of the read bandwidth (", " GB/s)"}) {
    EXPECT_NE(line.find(word), std::string::npos) << word << " is missing in: " << line;
  }
  const size_t share = line.rfind(' ', line.find("% of the read")), bandwidth = line.find("bandwidth (");
  EXPECT_GE(std::stod(line.substr(share)), 0) << line;
  EXPECT_LE(std::stod(line.substr(share)), 110) << line;
  EXPECT_GT(std::stod(line.substr(bandwidth + 11)), 0.1) << line;
  EXPECT_NE(told({"--decode"}).find("cache of f32, prompt of 1 row in "), std::string::npos);
  EXPECT_EQ(told({"--decode", "--prompt", "7"}).find("tokens"), std::string::npos) << "there are none after the prompt";
  EXPECT_EQ(told({"--decode", "--quiet"}), "");
}

TEST_F(Decode, OptionsThatContradictEachOtherAreRefused) {
  const auto refused = [this](const Arguments &arguments) { return Mha(RunArguments(folder_, p_, arguments)); };
  ExpectRefusal(refused({"--prompt", "3"}), {"mha: --prompt: is an option of --decode, which is not given\n"});
  ExpectRefusal(refused({"--cache-type", "f16"}), {"mha: --cache-type: is an option of --decode, which is not given\n"});
  ExpectRefusal(refused({"--decode", "--cache-type", "int4"}), {"mha: --cache-type: f32, f16, bf16 or int8 is expected, not 'int4'\n"});
  ExpectRefusal(refused({"--decode", "--prompt", "0"}), {"--prompt", "a whole number of at least 1", "'0'"});
  for (const std::string threads : {"1", "2", "64"}) {  // which are there by then, and end
    ExpectRefusal(refused({"--decode", "--prompt", "8", "--threads", threads}), {"mha: --prompt: 8 rows are more than the 7 of ", "x.npy"});
  }
  ExpectRefusal(refused({"--decode", "--key", folder_ / "x.npy"}), {"--decode", "leave out --key"});
  ExpectRefusal(refused({"--decode", "--value", folder_ / "x.npy"}), {"--decode", "leave out --value"});
  p_.is_causal = false;
  ExpectRefusal(refused({"--decode"}), {"mha: --decode: ", "give --causal too"});
  EXPECT_EQ(folder_.Names().count("y.npy"), 0u);
}

// ---- Bad input ------------------------------------------------------------------------------------------------------------------

class BadInput : public Run {
 protected:
  // Runs, and expects a refusal with these words that leaves the folder as it was.
  void ExpectRefused(const std::vector<std::string> &words, const Arguments &more = {}) {
    const std::set<std::string> before = folder_.Names();
    ExpectRefusal(Mha(RunArguments(folder_, p_, more)), words);
    EXPECT_EQ(folder_.Names(), before);
  }

  void ExpectNpyRefused(const std::string &bytes, const std::vector<std::string> &words) {
    folder_.Write("x.npy", bytes);
    std::vector<std::string> all = words;
    all.push_back("x.npy");
    ExpectRefused(all);
  }

  void ExpectWeightsRefused(const std::string &bytes, const std::vector<std::string> &words, const Arguments &more = {}) {
    folder_.Write("layer.safetensors", bytes);
    std::vector<std::string> all = words;
    all.push_back("layer.safetensors");
    ExpectRefused(all, more);
  }
};

TEST_F(BadInput, FilesThatCannotBeRead) {
  unlink((folder_ / "x.npy").c_str());
  ExpectRefused({"x.npy", "No such file"});
  ASSERT_EQ(mkdir((folder_ / "x.npy").c_str(), 0700), 0);
  ExpectRefused({"x.npy", "directory"});
  rmdir((folder_ / "x.npy").c_str());
  ASSERT_EQ(mkfifo((folder_ / "x.npy").c_str(), 0600), 0);
  ExpectRefused({"x.npy", "pipe"});
  unlink((folder_ / "x.npy").c_str());
  WriteInput(folder_, p_);
  unlink((folder_ / "layer.safetensors").c_str());
  ExpectRefused({"layer.safetensors", "No such file"});
}

TEST_F(BadInput, FilesThatAreNoNpy) {
  const std::string good = ReadFile(folder_ / "x.npy");
  ExpectNpyRefused("", {"not a .npy file"});
  ExpectNpyRefused("0.1 0.2 0.3\n", {"not a .npy file"});
  ExpectNpyRefused("PK\x03\x04 and more", {".npz"});
  ExpectNpyRefused(std::string("\x93NUMPY\x09\x00", 8) + good.substr(8), {"version 9"});
  for (const size_t length : {6, 7, 8, 9, 10, 11, 40}) ExpectNpyRefused(good.substr(0, length), {"header"});
  ExpectNpyRefused(good.substr(0, good.size() - 1), {"truncated", "(3, 7, 24)"});
  ExpectNpyRefused(good.substr(0, 128), {"truncated"});
  ExpectNpyRefused(good + "x", {"2017", "2016"});
}

TEST_F(BadInput, NpyHeadersThatLieOrMakeNoSense) {
  const std::string data(2016, '\0');
  const auto with = [&](const std::string &header) { return NpyWithHeader(header, data); };
  ExpectNpyRefused(with(""), {"header"});
  ExpectNpyRefused(with("{}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24)}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24), 'more': 1}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24)} x"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': None, 'shape': (3, 7, 24)}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, -7, 24)}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 24)}"), {"header", "64 bits"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 24)}"), {"no file can hold"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 7, 24)}"), {"(4, 7, 24)", "2016", "2688"});
  ExpectNpyRefused(with("{'descr': '\x1b[31m\n', 'fortran_order': False, 'shape': (3, 7, 24)}"), {"dtype"});
}

TEST_F(BadInput, ArraysOfAnotherKind) {
  const auto of = [](const std::string &descr, const std::string &order, const std::string &shape, size_t bytes) {
    return NpyWithHeader(NpyHeader(descr, order, shape), std::string(bytes, '\0'));
  };
  ExpectNpyRefused(of("'<f8'", "False", "(3, 7, 24)", 4032), {"float64", "float32", "astype"});
  ExpectNpyRefused(of("'<f2'", "False", "(3, 7, 24)", 1008), {"float16", "float32", "astype"});
  ExpectNpyRefused(of("'>f4'", "False", "(3, 7, 24)", 2016), {"big-endian"});
  ExpectNpyRefused(of("'<i4'", "False", "(3, 7, 24)", 2016), {"<i4", "float32"});
  ExpectNpyRefused(of("[('a', '<f4'), ('b', '<f4')]", "False", "(3, 7, 12)", 2016), {"structured"});
  ExpectNpyRefused(of("'<f4'", "True", "(21, 24)", 2016), {"Fortran"});
  ExpectNpyRefused(of("'<f4'", "False", "(504,)", 2016), {"(504,)"});
  ExpectNpyRefused(of("'<f4'", "False", "()", 4), {"()"});
  ExpectNpyRefused(of("'<f4'", "False", "(1, 3, 7, 24)", 2016), {"(1, 3, 7, 24)"});
  ExpectNpyRefused(of("'<f4'", "False", "(3, 6, 28)", 2016), {"28", "24", "layer.safetensors"});
}

TEST_F(BadInput, KeysAndValuesThatDoNotFit) {
  const auto write = [&](const std::string &name, const std::vector<int64_t> &shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return folder_.Write(name, Npy(shape, std::vector<float>(static_cast<size_t>(count), 0.5f)));
  };
  ExpectRefused({"k.npy", "(2, 7, 24)", "(3, 7, 24)"}, {"--key", write("k.npy", {2, 7, 24})});
  ExpectRefused({"k.npy", "(7, 24)", "(3, 7, 24)"}, {"--key", write("k.npy", {7, 24})});
  ExpectRefused({"k.npy", "23", "24"}, {"--key", write("k.npy", {3, 7, 23})});
  ExpectRefused({"x.npy", "7", "5"}, {"--key", write("k.npy", {3, 5, 24})});  // causal
  ExpectRefused({"v.npy", "8", "7"}, {"--key", write("k.npy", {3, 7, 24}), "--value", write("v.npy", {3, 8, 24})});
  ExpectRefused({"v.npy", "8", "7"}, {"--value", write("v.npy", {3, 8, 24})});
  ExpectRefused({"v.npy", "25", "24"}, {"--value", write("v.npy", {3, 7, 25})});
}

TEST_F(BadInput, FilesThatAreNoSafetensors) {
  const std::string good = ReadFile(folder_ / "layer.safetensors");
  ExpectWeightsRefused("", {"too short"});
  ExpectWeightsRefused(good.substr(0, 7), {"too short"});
  ExpectWeightsRefused(good.substr(0, 8), {"not a .safetensors"});
  ExpectWeightsRefused("PK\x03\x04 this is a file of PyTorch's", {"not a .safetensors"});
  ExpectWeightsRefused(good.substr(0, 100), {"truncated"});
  ExpectWeightsRefused(good.substr(0, good.size() - 1), {"truncated"});
  ExpectWeightsRefused(good + "x", {"1 bytes behind"});
  for (const int byte : {2, 3, 6, 7}) {  // header lengths beyond the file, up to 2^63 and more
    std::string bytes = good;
    bytes[byte] = '\xff';
    ExpectWeightsRefused(bytes, {"header", "bytes"});
  }
}

TEST_F(BadInput, HeadersThatAreNotOnesOfSafetensors) {
  const auto of = [](const std::string &header) { return SafetensorsWithHeader(header, "12345678"); };
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  ExpectWeightsRefused(of("[" + a + "]"), {"not a .safetensors"});
  ExpectWeightsRefused(of("{" + a), {"not JSON"});
  ExpectWeightsRefused(of("{" + a + "} x"), {"not JSON"});
  ExpectWeightsRefused(of("{" + a + ",}"), {"not JSON"});
  ExpectWeightsRefused(of("{\"\xff\":{}}"), {"not JSON"});
  ExpectWeightsRefused(of("{" + std::string(1, '\0') + "}"), {"not JSON"});
  ExpectWeightsRefused(of("{" + a + "," + a + "}"), {"'a' twice"});
  ExpectWeightsRefused(of(R"({"__metadata__":{},"__metadata__":{},)" + a + "}"), {"twice"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})"), {"'a'", "'dtype' twice"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2]}})"), {"'a'", "lacks"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})"), {"'a'", "'more'"});
  ExpectWeightsRefused(of(R"({"a":3})"), {"'a'"});
  ExpectWeightsRefused(of(R"({"a":[]})"), {"'a'"});
  ExpectWeightsRefused(of(R"({"a":null})"), {"'a'"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})"), {"'a'", "dtype"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[99999999999999999999999],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})"), {"'a'", "data_offsets"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})"), {"'a'", "data_offsets"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"__metadata__":{"a":{}}})"), {"__metadata__"});
  ExpectWeightsRefused(of(R"({"__metadata__":{"a":1}})"), {"__metadata__"});
  ExpectWeightsRefused(of(R"({"__metadata__":"a"})"), {"__metadata__"});
  ExpectWeightsRefused(of("{\"a\":" + std::string(1000000, '[')), {"'a'"});
  std::string nested = "{\"a\":";
  for (int i = 0; i < 200000; i++) nested += "{\"a\":";
  ExpectWeightsRefused(of(nested), {"'a'"});
  std::string long_shape = "1";
  for (int i = 0; i < 100000; i++) long_shape += ",1";
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[)" + long_shape + R"(],"data_offsets":[0,8]}})"), {"'a'", "shape"});
}

TEST_F(BadInput, OffsetsThatLie) {
  const auto tensor = [](const std::string &name, const std::string &shape, const std::string &offsets) {
    return "\"" + name + R"(":{"dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]}";
  };
  const auto of = [](const std::string &tensors) { return SafetensorsWithHeader("{" + tensors + "}", std::string(16, '\0')); };
  ExpectWeightsRefused(of(tensor("a", "2", "8,0")), {"'a'", "before"});
  ExpectWeightsRefused(of(tensor("a", "2", "0,16")), {"'a'", "16 bytes", "(2,)"});
  ExpectWeightsRefused(of(tensor("a", "5", "0,20")), {"'a'", "truncated"});
  ExpectWeightsRefused(of(tensor("a", "2", "9223372036854775799,9223372036854775807")), {"'a'", "truncated"});
  ExpectWeightsRefused(of(tensor("a", "4611686018427387906", "0,8")), {"'a'"});  // times 4 is 8, modulo 2^64
  ExpectWeightsRefused(of(tensor("a", "4294967296,4294967296", "0,0")), {"'a'"});
  ExpectWeightsRefused(of(tensor("a", "3", "0,12") + "," + tensor("b", "2", "8,16")), {"'a'", "'b'", "overlap"});
  ExpectWeightsRefused(of(tensor("a", "4", "0,16") + "," + tensor("b", "4", "0,16")), {"'a'", "'b'", "overlap"});
  ExpectWeightsRefused(of(tensor("a", "1", "0,4") + "," + tensor("b", "2", "8,16")), {"4 to 8"});
  ExpectWeightsRefused(of(tensor("a", "2", "0,8")), {"8 bytes behind"});
}

TEST_F(BadInput, NamesCannotAddLinesOrSteerTheTerminal) {
  const auto of = [](const std::string &name) {
    return SafetensorsWithHeader("{\"" + name + R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  };
  ExpectWeightsRefused(of(R"(a\nmha: all is well\u001b[2J)"), {"no attention layer"});
  ExpectWeightsRefused(of(std::string(100000, 'a')), {"no attention layer", "..."});
}

TEST_F(BadInput, TensorsThatAreMissingOrOfAnotherKind) {
  const auto without = [&](const std::string &name) {
    std::vector<Stored> tensors = Linears(p_, "W_query", "W_key", "W_value", "out_proj");
    tensors.erase(std::find_if(tensors.begin(), tensors.end(), [&](const Stored &tensor) { return tensor.name == name; }));
    return tensors;
  };
  const auto with = [&](const Stored &replacement) {
    std::vector<Stored> tensors = without(replacement.name);
    tensors.push_back(replacement);
    return Safetensors(tensors);
  };
  const auto zeros = [](const std::string &name, const std::vector<int64_t> &shape, const std::string &dtype = "F32", size_t size = 4) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    return Stored{name, shape, std::string(count * size, '\0'), dtype};
  };
  ExpectWeightsRefused(Safetensors({}), {"no attention layer"});
  ExpectWeightsRefused(Safetensors(without("W_query.weight")), {"no attention layer"});
  ExpectWeightsRefused(Safetensors(without("W_value.weight")), {"'W_value.weight'"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 24}, "F64", 8)), {"'W_key.weight'", "F64", "F32"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 24}, "I8", 1)), {"'W_key.weight'", "I8", "F32"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 24}, "F4_NEW", 1)), {"'W_key.weight'", "F4_NEW", "F32"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {576})), {"'W_key.weight'", "(576,)"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {2, 12, 24})), {"'W_key.weight'", "(2, 12, 24)"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {0, 24})), {"'W_key.weight'", "(0, 24)"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {23, 24})), {"'W_key.weight'", "23", "6"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {18, 24})), {"'W_key.weight'", "3 key and value heads", "4 query heads"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {48, 24})), {"'W_key.weight'", "8 key and value heads", "4 query heads"});
  ExpectWeightsRefused(with(zeros("W_value.weight", {22, 24})), {"'W_value.weight'", "22", "4"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 23})), {"x.npy", "24", "23"});
  ExpectWeightsRefused(with(zeros("out_proj.weight", {24, 23})), {"'out_proj.weight'", "23", "24"});
  ExpectWeightsRefused(with(zeros("W_query.bias", {23})), {"'W_query.bias'", "(23,)", "(24,)"});
  ExpectWeightsRefused(with(zeros("out_proj.bias", {1, 24})), {"'out_proj.bias'", "(1, 24)", "(24,)"});
}

TEST_F(BadInput, HeadsThatDoNotFit) {
  p_.num_heads = 5;
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "5 heads"});
  p_.num_heads = INT64_MAX;
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "9223372036854775807 heads"});
  p_.num_heads = 4;
  ExpectRefused({"layer.safetensors", "'W_key.weight'", "--kv-heads says 2"}, {"--kv-heads", "2"});
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "5"}, {"--head-dim", "5"});
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "12"}, {"--head-dim", "12"});
  WriteLayer(folder_, Gpt2(p_));
  p_.num_heads = 5;
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "5 + 5 + 5 heads"});
  p_.num_heads = INT64_MAX;
  ExpectRefused({"layer.safetensors", "'c_attn.weight'"});
  p_.num_heads = 4;
  ExpectRefused({"layer.safetensors", "'c_attn.weight'"}, {"--kv-heads", "9223372036854775807"});
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "3"}, {"--kv-heads", "3"});
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "7"}, {"--head-dim", "7"});
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "12"}, {"--head-dim", "12", "--kv-heads", "4"});
}

TEST_F(BadInput, AWrongNumberOfHeadsSeenAtTheOutputProjection) {
  p_.num_kv_heads = 2;
  p_.head_dim = p_.head_dim_v = 6;
  p_.output_dim = 16;
  p_.w_o.resize(36 * 16);
  const std::vector<Stored> tensors = {StoreTransposed("q", 24, 48, std::vector<float>(24 * 48)),
                                       StoreTransposed("k", 24, 24, std::vector<float>(24 * 24)),
                                       StoreTransposed("v", 24, 24, std::vector<float>(24 * 24)), StoreTransposed("o", 36, 16, p_.w_o)};
  WriteLayer(folder_, tensors);
  const Arguments names = {"--names", "q=q,k=k,v=v,o=o", "--layout", "out-in"};
  ExpectRefused({"'o'", "36 columns", "; --heads 4 makes heads of 12, check it\n"}, names);
  Arguments more = names;
  more.insert(more.end(), {"--kv-heads", "2"});
  ExpectRefused({"'o'", "36 columns", "; --heads 4 --kv-heads 2 make heads of 12, check them\n"}, more);
}

// Read the wrong way, grouped heads look like a cross-attention.
TEST_F(BadInput, AWrongLayoutIsBlamed) {
  p_.batch = 2;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 32;
  p_.num_heads = 8;
  p_.num_kv_heads = 2;
  p_.head_dim = p_.head_dim_v = 4;
  Fill(&p_);
  WriteInput(folder_, p_);
  const auto store = [&](bool is_in_out) {
    if (is_in_out) {
      WriteLayer(folder_, {Store("wq", {32, 32}, p_.w_q), Store("wk", {32, 8}, p_.w_k), Store("wv", {32, 8}, p_.w_v)});
    } else {
      WriteLayer(folder_,
                 {StoreTransposed("wq", 32, 32, p_.w_q), StoreTransposed("wk", 32, 8, p_.w_k), StoreTransposed("wv", 32, 8, p_.w_v)});
    }
  };
  const Arguments wrong = {"--names", "q=wq,k=wk,v=wv", "--layout", "out-in"};
  const std::string sentence = "'wk' is (32, 8); read as out-in it takes rows of 8, but 'wq' takes 32; is it --layout in-out?\n";
  store(true);
  ExpectRefused({"layer.safetensors", sentence}, wrong);
  ExpectRefused({"layer.safetensors", sentence}, {"--names", "q=wq,k=wk,v=wv", "--layout", "out-in", "--kv-heads", "2"});
  ExpectRefusal(Mha({"explain", "--weights", folder_ / "layer.safetensors", "--heads", "8", "--input", folder_ / "x.npy", "--names",
                     "q=wq,k=wk,v=wv", "--layout", "out-in"}),
                {sentence});
  // Rows of 8 for the keys and values show that the layer is a cross-attention indeed.
  const std::string key = folder_.Write("k.npy", Npy({2, p_.n_q, 8}, std::vector<float>(2 * p_.n_q * 8)));
  Arguments cross = wrong;
  cross.insert(cross.end(), {"--key", key});
  EXPECT_EQ(Mha(RunArguments(folder_, p_, cross)).status, 0);
  unlink((folder_ / "y.npy").c_str());
  unlink(key.c_str());

  p_.num_heads = 5;  // whatever does not fit, the layout comes first
  ExpectRefused({sentence}, wrong);
  p_.num_heads = 8;
  store(false);
  ExpectRefused({"'wk' is (8, 32); read as in-out it takes rows of 8, but 'wq' takes 32; is it --layout out-in?\n"},
                {"--names", "q=wq,k=wk,v=wv", "--layout", "in-out"});
}

TEST_F(BadInput, NamesThatMakeNoSense) {
  for (const std::string names : {"", "q", "q=", "=a", "q=a,q=b", "z=a", "q=W_query.weight", "qkv=W_query.weight,q=W_query.weight"}) {
    if (names.empty()) continue;
    ExpectRefusal(Mha(RunArguments(folder_, p_, {"--names", names, "--layout", "in-out"})), {});
  }
  ExpectRefused({"layer.safetensors", "'nothing'"}, {"--names", "q=nothing,k=W_key.weight,v=W_value.weight", "--layout", "in-out"});
  ExpectRefused({"--layout"}, {"--names", "q=W_query.weight,k=W_key.weight,v=W_value.weight"});
}

TEST_F(BadInput, OutputsThatCannotBeWritten) {
  const auto to = [&](const std::string &output) {
    const std::set<std::string> before = folder_.Names();
    Arguments arguments = RunArguments(folder_, p_);
    for (std::string &argument : arguments) {
      if (argument == folder_ / "y.npy") argument = output;
    }
    const Result result = Mha(arguments);
    EXPECT_EQ(folder_.Names(), before);
    return result;
  };
  ExpectRefusal(to(folder_ / "missing/y.npy"), {"missing/y.npy", "cannot be written"});
  ExpectRefusal(to(folder_ / "x.npy/y.npy"), {"x.npy/y.npy", "cannot be written"});
  ExpectRefusal(to(folder_ / ""), {"directory"});
  ExpectRefusal(to("/dev/full"), {"/dev/full", "cannot be written"});
  EXPECT_EQ(to("/dev/null").status, 0);
}

TEST_F(BadInput, AFailedRunKeepsTheOldOutput) {
  folder_.Write("y.npy", "old");
  p_.num_heads = 5;
  ExpectRefused({"W_query"});
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), "old");
}

TEST_F(BadInput, DamagedFilesNeverCrashTheCommand) {
  Random random(7);
  const std::string weights = ReadFile(folder_ / "layer.safetensors");
  const std::string input = ReadFile(folder_ / "x.npy");
  const size_t header = weights.find("}}") + 2;
  for (int round = 0; round < 150; round++) {
    const bool damages_weights = round % 3 != 0;
    std::string bytes = damages_weights ? weights : input;
    const size_t end = damages_weights ? header : 128;
    for (int64_t changes = random.Between(1, 3); changes > 0; changes--) {
      const size_t at = static_cast<size_t>(random.Between(0, static_cast<int64_t>(end) - 1));
      switch (random.Between(0, 3)) {
        case 0:
          bytes[at] = static_cast<char>(random.Next());
          break;
        case 1:
          bytes[at] = random.Pick({'0', '9', '-', '"', '{', '[', ']', '}', ',', ':'});
          break;
        case 2:
          bytes.erase(at, 1);
          break;
        default:
          bytes.insert(at, 1, random.Pick({'0', '9', '[', '{', '"'}));
      }
    }
    folder_.Write("layer.safetensors", damages_weights ? bytes : weights);
    folder_.Write("x.npy", damages_weights ? input : bytes);
    const Result result = Mha(RunArguments(folder_, p_));
    if (result.status != 0) ExpectRefusal(result, {damages_weights ? "layer.safetensors" : "x.npy"});
    if (result.status == 0) unlink((folder_ / "y.npy").c_str());
    EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.safetensors", "x.npy"}));
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

// ---- Usage ----------------------------------------------------------------------------------------------------------------------

TEST(Usage, HelpOfEachSubCommandHasAnExample) {
  for (const Arguments &arguments : {Arguments{}, {"explain"}, {"run"}, {"pack"}, {"verify"}, {"info"}}) {
    Arguments with_help = arguments;
    with_help.push_back("--help");
    const Result result = Mha(with_help);
    EXPECT_EQ(result.status, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("Usage: mha"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("Example"), std::string::npos) << result.out;
    for (const std::string &line : Lines(result.out)) EXPECT_LE(line.size(), 132u) << line;
  }
}

TEST(Usage, WrongArgumentsGetASentence) {
  ExpectRefusal(Mha({}), {"run", "--help"});
  ExpectRefusal(Mha({"rnu"}), {"'rnu'", "run"});
  ExpectRefusal(Mha({"run", "--foo"}), {"--foo"});
  ExpectRefusal(Mha({"--foo"}), {"--foo"});
  ExpectRefusal(Mha({"run", "--heads", "x"}), {"--heads", "'x'"});
  ExpectRefusal(Mha({"run", "--heads", "0"}), {"--heads", "'0'"});
  ExpectRefusal(Mha({"run", "--heads", "-3"}), {"--heads", "'-3'"});
  ExpectRefusal(Mha({"run", "--heads", "1.5"}), {"--heads", "'1.5'"});
  ExpectRefusal(Mha({"run", "--heads", "99999999999999999999"}), {"--heads", "'99999999999999999999'"});
  ExpectRefusal(Mha({"run", "--threads", "0"}), {"--threads", "'0'"});
  ExpectRefusal(Mha({"run", "--threads", "1025"}), {"--threads", "'1025'", "from 1 to 1024"});
  ExpectRefusal(Mha({"run", "--scale", "x"}), {"--scale", "x"});
  ExpectRefusal(Mha({"run", "--layout", "diagonal"}), {"--layout", "'diagonal'", "in-out"});
  ExpectRefusal(Mha({"run", "--back-end", "gpu"}), {"--back-end", "'gpu'", "native"});
  ExpectRefusal(Mha({"run"}), {"--output"});
  ExpectRefusal(Mha({"run", "--output", "y"}), {"--input"});
  ExpectRefusal(Mha({"pack", "--output", "y"}), {"--weights"});
  ExpectRefusal(Mha({"verify"}), {"file"});
}

TEST(Usage, OptionsThatCannotBeRead) {
  ExpectRefusal(Mha({"run", "--wieghts", "x"}), {"mha: there is no option '--wieghts'; mha run --help says more\n"});
  ExpectRefusal(Mha({"verify", "a.mha", "-q"}), {"mha: there is no option '-q'; mha verify --help says more\n"});
  ExpectRefusal(Mha({"--wieghts"}), {"mha: there is no option '--wieghts'; mha --help says more\n"});
  ExpectRefusal(Mha({"run", "x.npy"}), {"mha: 'x.npy' is not expected here; mha run --help says more\n"});
  ExpectRefusal(Mha({"run", "--heads", "4", "--heads", "8"}), {"mha: --heads: is given twice\n"});
  ExpectRefusal(Mha({"pack", "--output", "a", "--output", "b"}), {"mha: --output: is given twice\n"});
  ExpectRefusal(Mha({"run", "--weights"}), {"mha: --weights: a value is expected after it\n"});
  ExpectRefusal(Mha({"run", "--weights", "--heads", "4"}), {"mha: --weights: a value is expected after it\n"});
  ExpectRefusal(Mha({"run", "--weights", "--heads=4"}), {"mha: --weights: a value is expected after it\n"});
  ExpectRefusal(Mha({"run", "--causal=maybe"}), {"mha: --causal: takes no value\n"});
  ExpectRefusal(Mha({"run", "explain"}), {"mha: 'explain' is not expected here; mha run --help says more\n"});
  ExpectRefusal(Mha({"verify", "run"}), {"mha: run: cannot be read"});
  ExpectRefusal(Mha({"run", "--scale", "x"}), {"mha: --scale: a finite number is expected, not 'x'\n"});
}

TEST(Usage, EverythingThatIsMissingIsNamedAtOnce) {
  ExpectRefusal(Mha({"run"}), {"mha: --weights (or --packed), --input and --output are needed\n"});
  ExpectRefusal(Mha({"run", "--packed", "x", "--input", "x"}), {"mha: --output is needed\n"});
  ExpectRefusal(Mha({"run", "--weights", "x", "--output", "y"}), {"mha: --heads and --input are needed; ", "number of heads"});
  ExpectRefusal(Mha({"pack"}), {"mha: --weights, --heads and --output are needed; ", "number of heads"});
  ExpectRefusal(Mha({"explain", "--packed", "x"}), {"mha: --input is needed\n"});
  ExpectRefusal(Mha({"explain", "--input", "x"}), {"mha: --weights (or --packed) is needed\n"});
  ExpectRefusal(Mha({"verify"}), {"mha: the packed file is needed: mha verify FILE\n"});
}

TEST(Usage, HelpIsASubCommandToo) {
  EXPECT_EQ(Mha({"help"}).status, 0);
  EXPECT_EQ(Mha({"help"}).out, Mha({"--help"}).out);
  for (const std::string name : {"explain", "run", "pack", "verify", "info"}) {
    EXPECT_EQ(Mha({"help", name}).status, 0);
    EXPECT_EQ(Mha({"help", name}).out, Mha({name, "--help"}).out);
  }
  ExpectRefusal(Mha({"help", "rnu"}), {"'rnu'"});
  const std::string run = Mha({"help", "run"}).out;
  EXPECT_NE(run.find("No row attends to rows after its own"), std::string::npos) << run;
  EXPECT_NE(run.find("0, which stands for 1 / sqrt(head_dim)"), std::string::npos) << run;
}

TEST(Usage, ScaleMustBeFinite) {
  ExpectRefusal(Mha({"pack", "--output", "y", "--weights", "x", "--heads", "1", "--scale", "nan"}), {"--scale"});
  ExpectRefusal(Mha({"pack", "--output", "y", "--weights", "x", "--heads", "1", "--scale", "inf"}), {"--scale"});
}

TEST(Usage, VersionAndInfo) {
  const Result version = Mha({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out.rfind("mha ", 0), 0u) << version.out;
  EXPECT_NE(version.out.find("contract"), std::string::npos) << version.out;
  const Result info = Mha({"info"});
  EXPECT_EQ(info.status, 0);
  EXPECT_EQ(info.err, "");
  for (const std::string word :
       {"version", "contract", "processor", "caches", "instruction sets", "scalar", "used", "back ends", "native"}) {
    EXPECT_NE(info.out.find(word), std::string::npos) << word;
  }
}

TEST(Usage, OutputThatCannotBePrintedIsAnError) {
  for (const std::string sub_command : {"explain", "info"}) {
    const Result result = Mha({sub_command}, "/dev/full");
    EXPECT_EQ(result.status, 2);
    EXPECT_NE(result.err.find("standard output"), std::string::npos) << result.err;
  }
}

// ---- explain --------------------------------------------------------------------------------------------------------------------

// The lines of one step, from its title to the next; the last occurrence where steps are shown twice.
std::vector<std::string> StepOf(const std::string &text, const std::string &number) {
  const std::string title = "\nStep " + number + " ";
  const size_t begin = text.rfind(title);
  if (begin == std::string::npos) return {};
  return Lines(text.substr(begin + 1, text.find("\nStep ", begin + 1) - begin - 1));
}

bool Contains(const std::vector<std::string> &lines, const std::string &text) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string &line) { return line.find(text) != std::string::npos; });
}

TEST(Explain, ShowsTheWorkedExampleStepByStep) {
  const Result result = Mha({"explain"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (const std::string number : {"1", "2", "3", "4", "5", "6", "7", "8a", "8b", "8c", "9", "10", "11", "12"}) {
    EXPECT_FALSE(StepOf(result.out, number).empty()) << "step " << number;
  }
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "(6, 18)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "fused projection"));
  EXPECT_TRUE(Contains(StepOf(result.out, "5"), "(1, 3, 6) -> (1, 3, 2, 3)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "6"), "(1, 3, 2, 3) -> (1, 2, 3, 3)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "11"), "(1, 3, 2, 3) -> (1, 3, 6)"));
  // X times W_Q, by hand: 1 * 0.4993 + 2 * 0.4096 + 3 * 0.2798 + 4 * 0.5394 + 5 * 0.9705 + 6 * 0.1674 = 10.1724.
  EXPECT_TRUE(Contains(StepOf(result.out, "4"), "10.1724  11.6849  11.5060   9.7377   5.3125   8.6791"));
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos) << "colours off a terminal";
}

// The numbers as the worked example prints them, but for its last digits: it rounded numbers that it had not shown.
TEST(Explain, ShowsTheNumbersOfTheGroupedExample) {
  const std::string out = Mha({"explain"}).out;
  const std::vector<std::string> scores = StepOf(out, "7");
  EXPECT_TRUE(Contains(scores, "0.6404  0.4114  0.1614    1.1733  1.3573  0.6858"));
  EXPECT_TRUE(Contains(scores, "0.8138  0.8505  0.3914    1.5600  1.6706  0.7266"));
  EXPECT_TRUE(Contains(scores, "1.3846  1.5269  0.6605    1.4567  1.5143  0.5443"));
  const std::vector<std::string> masked = StepOf(out, "8b");
  EXPECT_TRUE(Contains(masked, "0.3697    -inf    -inf    0.6774    -inf    -inf"));
  const std::vector<std::string> weights = StepOf(out, "8c");
  EXPECT_TRUE(Contains(weights, "1.0000  0.0000  0.0000    1.0000  0.0000  0.0000"));
  EXPECT_TRUE(Contains(weights, "0.4947  0.5053  0.0000    0.4841  0.5159  0.0000"));
  EXPECT_TRUE(Contains(weights, "0.3644  0.3956  0.2399    0.3811  0.3939  0.2250"));
  const std::vector<std::string> context = StepOf(out, "9");
  EXPECT_TRUE(Contains(context, "0.8375  0.7430  0.8563    0.7458  0.6515  0.1220"));
  EXPECT_TRUE(Contains(context, "0.4757  0.4464  0.4604    0.7119  0.5406  0.4058"));
  EXPECT_TRUE(Contains(context, "0.3985  0.5703  0.3803    0.7352  0.5740  0.4750"));
  const std::vector<std::string> merged = StepOf(out, "11");
  EXPECT_TRUE(Contains(merged, "0.3985  0.5703  0.3803  0.7352  0.5740  0.4750"));
  EXPECT_TRUE(Contains({Lines(out).back()}, "without an output projection"));
}

TEST(Explain, HasColoursOnATerminalUnlessToldOtherwise) {
  const Result with = MhaOnTerminal({"explain"}, 100);
  EXPECT_EQ(with.status, 0);
  EXPECT_NE(with.out.find("\x1b[1;36mStep 1 "), std::string::npos);
  EXPECT_EQ(MhaOnTerminal({"explain"}, 100, "1").out.find('\x1b'), std::string::npos);
  EXPECT_NE(MhaOnTerminal({"explain"}, 100, "").out.find('\x1b'), std::string::npos) << "an empty NO_COLOR does not count";
}

TEST(Explain, FitsIntoATerminalOfEightyColumns) {
  for (const std::string &line : Lines(MhaOnTerminal({"explain"}, 80, "1").out)) EXPECT_LE(line.size(), 81u) << line;  // with \r
}

class ExplainFile : public testing::Test {
 protected:
  Result Explain(const std::vector<Stored> &tensors, const Arguments &more = {}) {
    WriteLayer(folder_, tensors);
    WriteInput(folder_, p_);
    Arguments arguments = {"explain", "--weights",      folder_ / "layer.safetensors", "--heads", std::to_string(p_.num_heads),
                           "--input", folder_ / "x.npy"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Mha(arguments);
  }

  Problem p_;
  Folder folder_;
};

TEST_F(ExplainFile, ShowsTheCornersOfLargeMatrices) {
  p_.n_q = 40;
  p_.num_heads = p_.num_kv_heads = 12;
  p_.head_dim = p_.head_dim_v = 16;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 192;
  Fill(&p_);
  const Result result = Explain(Gpt2(p_, "h.0.attn."), {"--causal"});
  ASSERT_EQ(result.status, 0) << result.err;
  for (const std::string &line : Lines(result.out)) EXPECT_LE(line.size(), 140u) << line;
  EXPECT_LE(Lines(result.out).size(), 420u);
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "(192, 576)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "3"), "b_Q"));
  EXPECT_TRUE(Contains(StepOf(result.out, "7"), "..."));
  EXPECT_TRUE(Contains(StepOf(result.out, "7"), "head 12"));
  EXPECT_FALSE(Contains(StepOf(result.out, "7"), "head 3"));
  EXPECT_TRUE(Contains(StepOf(result.out, "12"), "W_O"));
  EXPECT_TRUE(Contains(StepOf(result.out, "1"), "first of 2 sequences"));
}

TEST_F(ExplainFile, ShowsTheSameOutputAsRun) {
  Fill(&p_);
  p_.is_causal = true;
  const Result result = Explain(Linears(p_, "W_query", "W_key", "W_value", "out_proj"), {"--causal"});
  ASSERT_EQ(result.status, 0) << result.err;
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {2, 7, 24}, &y);
  for (int64_t row = 0; row < p_.n_q; row++) {
    char start[64];
    std::snprintf(start, sizeof start, "%.4f", static_cast<double>(y[row * 24]));
    EXPECT_TRUE(Contains(StepOf(result.out, "12"), start)) << start;
  }
}

TEST_F(ExplainFile, ShowsGroupedHeadsCrossAttentionAndPackedLayers) {
  p_.num_kv_heads = 2;
  p_.n_kv = 5;
  p_.is_causal = false;
  Fill(&p_);
  const std::vector<Stored> tensors = Linears(p_, "q_proj", "k_proj", "v_proj", "o_proj");
  const std::string key = folder_.Write("k.npy", Npy({p_.batch, p_.n_kv, p_.key_dim}, p_.key));
  const Result result = Explain(tensors, {"--no-rope", "--key", key});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(Contains(StepOf(result.out, "2"), "2 key and value heads"));
  EXPECT_TRUE(Contains(StepOf(result.out, "7"), "(1, 4, 7, 6) x (1, 2, 5, 6)^T -> (1, 4, 7, 5)"));
  EXPECT_TRUE(Contains(StepOf(result.out, "8b"), "Nothing is masked"));

  ASSERT_EQ(
      Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--no-rope", "--output", folder_ / "layer.mha"}).status, 0);
  const Result packed = Mha({"explain", "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy", "--key", key});
  ASSERT_EQ(packed.status, 0) << packed.err;
  EXPECT_EQ(StepOf(packed.out, "9"), StepOf(result.out, "9"));
  EXPECT_TRUE(Contains(StepOf(packed.out, "3"), "(packed: not shown)"));
  EXPECT_FALSE(Contains(StepOf(result.out, "3"), "not shown"));
}

// ---- explain --html: what a browser shows of it is in explain_html_test.py -------------------------------------------------------

int Count(const std::string &text, const std::string &part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) count++;
  return count;
}

TEST(ExplainHtml, IsOnePageThatNeedsNothingElse) {
  const Folder folder;
  const Result result = Mha({"explain", "--html", folder / "page.html", "--tokens", "the cat sleeps"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.rfind((folder / "page.html") + ": 2 attention maps of 3 x 3 weights, ", 0), 0u) << result.err;
  EXPECT_EQ(Lines(result.err).size(), 1u) << result.err;
  EXPECT_EQ(folder.Names(), std::set<std::string>{"page.html"});
  const std::string page = ReadFile(folder / "page.html");
  EXPECT_EQ(page.rfind("<!doctype html>", 0), 0u);
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  for (const std::string elsewhere : {"http://", "https://", "@import", "url(", "<link rel=stylesheet", "src=\"/"}) {
    EXPECT_EQ(page.find(elsewhere), std::string::npos) << elsewhere;
  }
}

TEST(ExplainHtml, HasTheStepsAndNumbersThatTheTerminalShows) {
  const Folder folder;
  ASSERT_EQ(Mha({"explain", "--html", folder / "page.html"}).status, 0);
  const std::string page = ReadFile(folder / "page.html"), shown = Mha({"explain"}).out;
  EXPECT_EQ(Count(page, "<section class=\"card step\">"), Count(shown, "\nStep "));
  for (const std::string number : {"10.1724", "18.8148", "0.8505", "0.3956", "0.5703"}) {
    EXPECT_NE(shown.find(number), std::string::npos) << number;
    EXPECT_NE(page.find(">" + number + "</td>"), std::string::npos) << number;
  }
  EXPECT_EQ(Count(page, "<td class=no>\u2212\u221e</td>"), 12) << "-inf in 2 examples of 2 heads";
}

TEST(ExplainHtml, TokensAreEscaped) {
  const Folder folder;
  ASSERT_EQ(Mha({"explain", "--html", folder / "page.html", "--tokens", "<script>x</script> \"'>&amp; \x01\x1b[m"}).status, 0);
  const std::string page = ReadFile(folder / "page.html");
  EXPECT_EQ(Count(page, "<script>"), 1) << "that of the page";
  EXPECT_NE(page.find("<th scope=row>&lt;script&gt;x&lt;/script&gt;</th>"), std::string::npos);
  EXPECT_NE(page.find("<th scope=row>&quot;&#39;&gt;&amp;amp;</th>"), std::string::npos);
  EXPECT_NE(page.find("<th scope=row>??[m</th>"), std::string::npos);
}

TEST(ExplainHtml, LongTokensAreShortenedBetweenLetters) {
  const Folder folder;
  const std::string twenty = "\u00e4bcdefghij\u00e4bcdefghi\u00e4";
  ASSERT_EQ(Mha({"explain", "--html", folder / "page.html", "--tokens", twenty + " " + twenty + "\u00e4 c"}).status, 0);
  const std::string page = ReadFile(folder / "page.html");
  EXPECT_NE(page.find("<th scope=row>" + twenty + "</th>"), std::string::npos);
  EXPECT_NE(page.find("<th scope=row>" + twenty + "\u2026</th>"), std::string::npos);
}

TEST(ExplainHtml, TokensThatDoNotFitAreRefused) {
  const Folder folder;
  const std::string page = folder / "page.html";
  ExpectRefusal(Mha({"explain", "--html", page, "--tokens", "the cat"}),
                {"mha: --tokens: 2 tokens for 3 rows of the worked example; one for each is expected, with blanks between them\n"});
  ExpectRefusal(Mha({"explain", "--html", page, "--tokens", "the cat sleeps well"}), {"--tokens: 4 tokens for 3 rows"});
  ExpectRefusal(Mha({"explain", "--html", page, "--tokens", ""}), {"--tokens: 0 tokens for 3 rows"});
  ExpectRefusal(Mha({"explain", "--html", page, "--key-tokens", "a b c"}), {"--key-tokens: ", "leave it out, or give --key"});
  ExpectRefusal(Mha({"explain", "--tokens", "the cat sleeps"}), {"mha: --tokens: labels the maps of --html, which is not given\n"});
  ExpectRefusal(Mha({"explain", "--key-tokens", "a"}), {"mha: --key-tokens: labels the maps of --html, which is not given\n"});
  ExpectRefusal(Mha({"explain", "--html"}), {"--html: a value is expected after it"});
  EXPECT_EQ(folder.Names(), std::set<std::string>{});
}

TEST_F(ExplainFile, HtmlLabelsKeysOfTheirOwn) {
  p_.n_kv = 2;
  p_.is_causal = false;
  Fill(&p_);
  const std::string key = folder_.Write("k.npy", Npy({p_.batch, p_.n_kv, p_.key_dim}, p_.key)), page = folder_ / "page.html";
  const auto tensors = Gpt2(p_);
  ASSERT_EQ(Explain(tensors, {"--key", key, "--html", page, "--tokens", "a b c d e f g", "--key-tokens", "left right"}).status, 0);
  EXPECT_NE(ReadFile(page).find("title=\"g \u2192 right: 0."), std::string::npos);
  EXPECT_EQ(Count(ReadFile(page), "<th scope=col>right</th>"), 4) << "one for each head";
  ExpectRefusal(Explain(tensors, {"--key", key, "--html", page, "--key-tokens", "left"}),
                {"--key-tokens: 1 token for 2 rows of ", "k.npy"});
}

TEST_F(ExplainFile, HtmlIsWrittenWholeOrNotAtAll) {
  Fill(&p_);
  const std::vector<Stored> tensors = Gpt2(p_);
  const std::string page = folder_.Write("page.html", "what was there before");
  const auto before = [&] { return std::set<std::string>{"layer.safetensors", "page.html", "x.npy"}; };
  ExpectRefusal(Explain(tensors, {"--html", page, "--tokens", "a b"}), {"--tokens"});
  ExpectRefusal(Explain(tensors, {"--html", page, "--kv-heads", "3"}), {"layer.safetensors"});  // found once the file is begun
  EXPECT_EQ(ReadFile(page), "what was there before");
  EXPECT_EQ(folder_.Names(), before());
  ASSERT_EQ(Explain(tensors, {"--html", page}).status, 0);
  EXPECT_NE(ReadFile(page).find("</html>"), std::string::npos);
  EXPECT_EQ(folder_.Names(), before());

  ExpectRefusal(Explain(tensors, {"--html", folder_ / "x.npy"}), {"mha: --html: ", "is also the --input"});
  ExpectRefusal(Explain(tensors, {"--html", folder_ / "layer.safetensors"}), {"mha: --html: ", "is also the --weights"});
  ExpectRefusal(Explain(tensors, {"--html", "-"}), {"mha: --html: ", "standard output"});
  ExpectRefusal(Explain(tensors, {"--html", folder_ / "nowhere/page.html"}), {"nowhere/page.html", "cannot be written"});
  ExpectRefusal(Explain(tensors, {"--html", "/dev/full"}), {"/dev/full", "cannot be written"});
}

TEST_F(ExplainFile, HtmlOfALongInputIsReducedAndSaysSo) {
  p_.batch = 1;
  p_.n_q = p_.n_kv = 4096;
  p_.num_heads = p_.num_kv_heads = 2;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 12;
  Fill(&p_);
  const std::string page = folder_ / "page.html";
  std::string tokens;
  for (int i = 0; i < 4096; i++) tokens += "\"<token>\" ";
  const Result result = Explain(Gpt2(p_), {"--causal", "--html", page, "--tokens", tokens});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("2 attention maps of 4096 x 4096 weights, reduced to 683 x 683 cells, each the mean of 6 x 6, "),
            std::string::npos)
      << result.err;
  const std::string html = ReadFile(page);
  EXPECT_LE(html.size(), size_t{4} << 20) << "the most that the help promises";
  EXPECT_NE(html.find("Reduced: 4096 \u00d7 4096 weights are too many to draw."), std::string::npos);
}

// As many numbers, labels and long tokens as can be.
TEST_F(ExplainFile, HtmlStaysBelowItsLimit) {
  p_.num_heads = p_.num_kv_heads = 256;
  p_.head_dim = p_.head_dim_v = 1;
  for (const int64_t n : {5, 6, 12, 40}) {
    p_.n_q = p_.n_kv = n;
    Fill(&p_);
    std::string tokens;
    for (int64_t i = 0; i < n; i++) tokens += std::string(2000, '"') + " ";
    const Result result = Explain(Gpt2(p_), {"--html", folder_ / "page.html", "--tokens", tokens});
    ASSERT_EQ(result.status, 0) << result.err;
    const std::string html = ReadFile(folder_ / "page.html");
    EXPECT_LE(html.size(), size_t{4} << 20) << n << " tokens";
    EXPECT_EQ(Count(html, "<figure class=map>"), 256);
  }
}

TEST_F(ExplainFile, HtmlOfManyHeadsDrawsTheFirst) {
  p_.n_q = p_.n_kv = 40;
  p_.num_heads = p_.num_kv_heads = 300;
  p_.head_dim = p_.head_dim_v = 1;
  Fill(&p_);
  const Result result = Explain(Gpt2(p_), {"--html", folder_ / "page.html"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("256 attention maps of 40 x 40 weights, of the first of 300 heads"), std::string::npos) << result.err;
  const std::string html = ReadFile(folder_ / "page.html");
  EXPECT_EQ(Count(html, "<figure class=map>"), 256);
  EXPECT_NE(html.find("Drawn are the first 256 of 300 heads."), std::string::npos);
  EXPECT_LE(html.size(), size_t{4} << 20);
}

TEST_F(ExplainFile, RefusesWhatIsTooLongOrEmpty) {
  Fill(&p_);
  ASSERT_EQ(Explain(Gpt2(p_)).status, 0);
  folder_.Write("x.npy", Npy({20000, 24}, std::vector<float>(20000 * 24, 0.0f)));
  const Arguments arguments = {"explain", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--input", folder_ / "x.npy"};
  ExpectRefusal(Mha(arguments), {"x.npy", "too long"});
  folder_.Write("x.npy", Npy({0, 24}, {}));
  ExpectRefusal(Mha(arguments), {"x.npy", "(0, 24)"});
  ExpectRefusal(Mha({"explain", "--weights", folder_ / "layer.safetensors", "--heads", "4"}), {"--input"});
  ExpectRefusal(Mha({"explain", "--input", folder_ / "x.npy"}), {"--weights"});
}

}  // namespace
