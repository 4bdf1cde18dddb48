// Layers of every kind as files of weights, and what the command must make of them.
#ifndef MHA_TESTS_COMMAND_LAYERS_H
#define MHA_TESTS_COMMAND_LAYERS_H

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/command_test.h"
#include "oracle/oracle.h"
#include "support/fixtures.h"

namespace command_test {

// A layer with random weights, and inputs. What it has can be left out of its files.
struct Problem : support::LayerProblem {
  Problem() {
    batch = 2;
    n_q = n_kv = 7;
    query_dim = key_dim = value_dim = output_dim = 24;
    num_heads = num_kv_heads = 4;
    head_dim = head_dim_v = 6;
    is_causal = has_key = has_value = true;
  }
  int64_t y_width() const { return has_output ? output_dim : merged_width(); }

  bool has_bias = true, has_output = true;
};

inline void Fill(Problem *p, uint64_t seed = 1) {
  support::Random random(seed);
  FillNormal(&random, support::kAllBiases, true, p);
}

// Matrices beside each other: [rows, a], [rows, b], [rows, c] to [rows, a + b + c].
inline std::vector<float> Beside(int64_t rows, const std::vector<const std::vector<float> *> &matrices) {
  std::vector<float> out;
  for (int64_t row = 0; row < rows; row++) {
    for (const std::vector<float> *matrix : matrices) {
      const int64_t columns = static_cast<int64_t>(matrix->size()) / rows;
      out.insert(out.end(), matrix->begin() + row * columns, matrix->begin() + (row + 1) * columns);
    }
  }
  return out;
}

inline std::vector<float> BesideQkv(const Problem &p) { return Beside(p.query_dim, {&p.w_q, &p.w_k, &p.w_v}); }
inline std::vector<float> BiasQkv(const Problem &p) { return Beside(1, {&p.b_q, &p.b_k, &p.b_v}); }

inline void AddBias(const Problem &p, const std::string &name, const std::vector<float> &values, std::vector<Stored> *tensors) {
  if (p.has_bias) tensors->push_back(Store(name, {static_cast<int64_t>(values.size())}, values));
}

// q, k and v as nn.Linear stores them, and o.
inline void AddLinears(const Problem &p, const std::string &q, const std::string &k, const std::string &v, const std::string &o,
                       std::vector<Stored> *tensors) {
  tensors->push_back(StoreTransposed(q + ".weight", p.query_dim, p.q_width(), p.w_q));
  tensors->push_back(StoreTransposed(k + ".weight", p.key_dim, p.k_width(), p.w_k));
  tensors->push_back(StoreTransposed(v + ".weight", p.value_dim, p.v_width(), p.w_v));
  AddBias(p, q + ".bias", p.b_q, tensors);
  AddBias(p, k + ".bias", p.b_k, tensors);
  AddBias(p, v + ".bias", p.b_v, tensors);
  if (!p.has_output) return;
  tensors->push_back(StoreTransposed(o + ".weight", p.merged_width(), p.output_dim, p.w_o));
  AddBias(p, o + ".bias", p.b_o, tensors);
}

inline std::vector<Stored> Linears(const Problem &p, const std::string &q, const std::string &k, const std::string &v,
                                   const std::string &o) {
  std::vector<Stored> tensors;
  AddLinears(p, q, k, v, o, &tensors);
  return tensors;
}

inline std::vector<Stored> Gpt2(const Problem &p, const std::string &prefix = "") {
  std::vector<Stored> tensors = {
      Store(prefix + "c_attn.weight", {p.query_dim, p.q_width() + p.k_width() + p.v_width()}, BesideQkv(p)),
      Store(prefix + "c_proj.weight", {p.merged_width(), p.output_dim}, p.w_o),
  };
  AddBias(p, prefix + "c_attn.bias", BiasQkv(p), &tensors);
  AddBias(p, prefix + "c_proj.bias", p.b_o, &tensors);
  return tensors;
}

inline std::string WriteLayer(const Folder &folder, const std::vector<Stored> &tensors, const std::string &name = "layer.safetensors") {
  return folder.Write(name, Safetensors(tensors));
}

inline std::string WriteInput(const Folder &folder, const Problem &p) {
  return folder.Write("x.npy", Npy({p.batch, p.n_q, p.query_dim}, p.query));
}

inline Arguments RunArguments(const Folder &folder, const Problem &p, const Arguments &more = {}) {
  Arguments arguments = {
      "run",      "--weights",     folder / "layer.safetensors", "--heads", std::to_string(p.num_heads), "--input", folder / "x.npy",
      "--output", folder / "y.npy"};
  if (p.is_causal) arguments.push_back("--causal");
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

// Whether y is what the layer gives, within what float32 allows. key and value are the query's where they are not given to the command.
inline void ExpectLayer(const Problem &p, const std::vector<float> &y, bool has_key = false, bool has_value = false, float scale = 0) {
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
inline void ExpectRun(const Problem &p, const std::vector<Stored> &tensors, const Arguments &more = {}, float scale = 0) {
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

// A layer and its input in files.
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

}  // namespace command_test

#endif  // MHA_TESTS_COMMAND_LAYERS_H
