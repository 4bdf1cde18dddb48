// The command reads weights under the names and in the types that models have, one layer or several.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tools/command_layers.h"

namespace {

using namespace command_test;

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
        const int64_t width = p.merged_width();
        for (int64_t k = 0; k < width; k++) sum += exact.attention.context[i * width + k] * p.w_o[k * p.output_dim + n];
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

TEST_F(Rotated, LayersAreNotPackedUnlessTheyAreTakenAsPlain) {
  Write("o_proj");
  ExpectRefusal(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"}),
                {"layer.safetensors", "model.layers.0.self_attn.q_proj.weight", "RoPE", "--no-rope"});
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

}  // namespace
