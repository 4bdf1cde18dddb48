// What `mha run` and `mha explain` add to a call: norms, rotations, what changes scores, masks, groups, packed sequences, padding, heads
// left out and types of rows, from options and from the tensors of Qwen3, Gemma 3, OLMo 2 and gpt-oss. Outputs are those of the library's
// own call, bit for bit.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tools/command_layers.h"

namespace {

using namespace command_test;

const std::string kAbove = "model.layers.0.";
const std::string kPrefix = kAbove + "self_attn.";

// Tables for a whole head, and the rotation that has them.
struct Rotation {
  explicit Rotation(double base, int64_t dims, int64_t n, bool is_gpt_oss = false, mha_rope_config config = {})
      : cos(n * dims / 2), sin(n * dims / 2) {
    config.struct_size = sizeof config;
    config.dims = dims;
    config.num_positions = n;
    config.base = base;
    if (is_gpt_oss) {
      config.yarn_factor = 32;
      config.original_positions = 4096;
      config.yarn_unrounded = 1;
    }
    EXPECT_EQ(mha_rope_tables(&config, cos.data(), sin.data(), nullptr), MHA_OK);
    rope.struct_size = sizeof rope;
    rope.num_positions = n;
    rope.cos = cos.data();
    rope.sin = sin.data();
  }
  std::vector<float> cos, sin;
  mha_rope rope = {};
};

class Attention : public testing::Test {
 protected:
  Attention() {
    p_.num_kv_heads = 2;
    Fill(&p_);
    WriteInput(folder_, p_);
    norm_.struct_size = sizeof norm_;
    norm_.epsilon = 1e-6f;
    score_.struct_size = sizeof score_;
  }

  std::vector<float> Random(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float &value : values) value = random_.Normal();
    return values;
  }

  std::vector<Stored> Llama() { return Linears(p_, kPrefix + "q_proj", kPrefix + "k_proj", kPrefix + "v_proj", kPrefix + "o_proj"); }

  void WritePlain() { WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj")); }

  // Writes a layer with Llama's names and a norm of so many weights.
  void WriteWithNorm(int64_t q_width, int64_t k_width, bool is_gemma = false, const std::string &mark = "") {
    q_weight_ = Random(q_width);
    k_weight_ = Random(k_width);
    std::vector<Stored> tensors = Llama();
    tensors.push_back(Store(kPrefix + "q_norm.weight", {q_width}, q_weight_));
    tensors.push_back(Store(kPrefix + "k_norm.weight", {k_width}, k_weight_));
    if (is_gemma) tensors.push_back(Store(kAbove + "pre_feedforward_layernorm.weight", {2}, {1, 2}));
    if (!mark.empty()) tensors.push_back(Store(kAbove + mark, {1}, {1}));
    WriteLayer(folder_, tensors);
    norm_.q_weight = q_weight_.data();
    norm_.k_weight = k_weight_.data();
  }

  // What a call of the library gives once it is changed so.
  std::vector<float> Expected(const std::function<void(mha_forward_args *)> &change) {
    const support::Layer layer = MakeLayer(p_);
    std::vector<float> y(static_cast<size_t>(p_.batch * p_.n_q * p_.output_dim));
    mha_forward_args args = {};
    args.struct_size = sizeof args;
    args.batch = p_.batch;
    args.n_q = p_.n_q;
    args.query = p_.query.data();
    args.output = y.data();
    args.flags = p_.is_causal ? MHA_CAUSAL : 0;
    change(&args);
    if (args.output_type != MHA_TYPE_F32) y.resize((y.size() + 1) / 2);
    mha_error error;
    size_t bytes = 0;
    EXPECT_EQ(mha_forward_workspace(layer.get(), &args, &bytes, &error), MHA_OK) << error.message;
    std::vector<unsigned char> workspace(bytes);
    EXPECT_EQ(mha_forward(layer.get(), &args, workspace.data(), bytes, &error), MHA_OK) << error.message;
    return y;
  }

  // Runs the layer that was written, at once and row by row, and expects these bits and a line with these words.
  void ExpectBits(const std::vector<float> &expected, const std::string &words, const Arguments &more = {}, bool can_decode = true) {
    for (const bool is_decoding : {false, true}) {
      if (is_decoding && !(p_.is_causal && can_decode)) continue;
      Arguments arguments = RunArguments(folder_, p_, more);
      if (is_decoding) arguments.insert(arguments.end(), {"--decode", "--prompt", "3"});
      const Result result = Mha(arguments);
      ASSERT_EQ(result.status, 0) << result.err;
      EXPECT_NE(result.err.find("2 key heads, " + words + ", "), std::string::npos) << words << " is missing in: " << result.err;
      std::vector<float> y;
      ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.output_dim}, &y);
      EXPECT_EQ(BytesOf(y), BytesOf(expected)) << words << (is_decoding ? ", row by row" : "");
    }
  }

  // As rows and keys, for all heads or for each.
  std::string WriteBias(const std::vector<int64_t> &shape, const std::vector<float> &values) {
    return folder_.Write("bias.npy", Npy(shape, values));
  }
  std::string WriteMask(const std::vector<int64_t> &shape, const std::string &bytes, const std::string &descr = "'|b1'") {
    return folder_.Write("mask.npy", NpyWithHeader(NpyHeader(descr, "False", "(" + JoinExtents(shape) + ")"), bytes));
  }

  template <typename T>
  std::string WriteNumbers(const std::string &name, const std::vector<int64_t> &shape, const std::vector<T> &numbers) {
    const char *const descr = sizeof(T) == 8 ? "'<i8'" : sizeof(T) == 4 ? "'<i4'" : sizeof(T) == 2 ? "'<f2'" : "'|u1'";
    const std::string bytes(reinterpret_cast<const char *>(numbers.data()), numbers.size() * sizeof(T));
    const std::string extents = "(" + JoinExtents(shape) + (shape.size() == 1 ? ",)" : ")");
    return folder_.Write(name, NpyWithHeader(NpyHeader(descr, "False", extents), bytes));
  }
  std::string WriteFloats(const std::string &name, const std::vector<int64_t> &shape, const std::vector<float> &values) {
    return folder_.Write(name, Npy(shape, values));
  }

  Problem p_;
  Folder folder_;
  support::Random random_{7};
  std::vector<float> q_weight_, k_weight_;
  mha_norm norm_ = {};
  mha_score_options score_ = {};
};

// ---- Families -------------------------------------------------------------------------------------------------------------------

TEST_F(Attention, Qwen3HasANormOfEachHeadBeforeTheRotation) {
  WriteWithNorm(6, 6);
  const Rotation rotation(1000000, 6, p_.n_q);
  const auto change = [&](mha_forward_args *args) {
    args->norm = &norm_;
    args->rope = &rotation.rope;
  };
  ExpectBits(Expected(change), "normalised (RMS, epsilon 1e-06), rotated (half, base 1000000)", {"--rope-base", "1000000"});
  norm_.epsilon = 0.25f;
  ExpectBits(Expected(change), "normalised (RMS, epsilon 0.25), rotated (half, base 1000000)",
             {"--rope-base", "1000000", "--norm-epsilon", "0.25"});
}

TEST_F(Attention, Gemma3HasWeightsToWhichOneIsAdded) {
  WriteWithNorm(6, 6, /*is_gemma=*/true);
  const Rotation rotation(10000, 6, p_.n_q);
  for (std::vector<float> *weights : {&q_weight_, &k_weight_}) {
    for (float &weight : *weights) weight += 1;
  }
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->norm = &norm_;
               args->rope = &rotation.rope;
               args->flags |= MHA_WINDOW_LEFT;
               args->window_left = 2;
             }),
             "normalised (RMS, weights 1 + w, epsilon 1e-06), rotated (half, base 10000), window of 3 rows", {"--window", "3"});
}

TEST_F(Attention, Olmo2HasANormOfAllHeadsTogether) {
  WriteWithNorm(24, 12);
  const Rotation rotation(500000, 6, p_.n_q);
  norm_.flags = MHA_NORM_ALL_HEADS;
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->norm = &norm_;
               args->rope = &rotation.rope;
             }),
             "normalised (RMS of all heads together, epsilon 1e-06), rotated (half, base 500000)", {"--rope-base", "500000"});
}

TEST_F(Attention, GptOssHasSinksAndItsOwnRotation) {
  const std::vector<float> sinks = Random(4), other_sinks = Random(4);
  std::vector<Stored> tensors = Llama();
  tensors.push_back(Store(kPrefix + "sinks", {4}, sinks));
  WriteLayer(folder_, tensors);
  score_.sinks = sinks.data();
  const Rotation own(150000, 6, p_.n_q, /*is_gpt_oss=*/true), plain(10000, 6, p_.n_q);
  const mha_rope *rope = &own.rope;
  const auto change = [&](mha_forward_args *args) {
    args->score = &score_;
    args->rope = rope;
  };
  ExpectBits(Expected(change), "rotated (half, base 150000, YaRN by 32), sinks");
  rope = &plain.rope;
  ExpectBits(Expected(change), "rotated (half, base 10000), sinks", {"--rope-base", "10000"});
  rope = nullptr;
  score_.sinks = other_sinks.data();
  ExpectBits(Expected(change), "sinks", {"--no-rope", "--sinks", folder_.Write("sinks.npy", Npy({4}, other_sinks))});
}

TEST_F(Attention, Gemma4HasANormOfValuesAndWeightsAsTheyAre) {
  for (const std::string mark : {"layer_scalar", "laurel.linear_left.weight"}) {
    WriteWithNorm(6, 6, /*is_gemma=*/true, mark);
    const Rotation rotation(10000, 6, p_.n_q);
    norm_.flags = MHA_NORM_VALUES;
    for (const float scale : {0.0f, 0.25f}) {
      p_.scale = scale == 0 ? 1 : scale;  // of which the family has 1
      const std::string text = std::to_string(scale);
      ExpectBits(Expected([&](mha_forward_args *args) {
                   args->norm = &norm_;
                   args->rope = &rotation.rope;
                 }),
                 "normalised (RMS, epsilon 1e-06, values too), rotated (half, base 10000)", {"--scale", text});
    }
  }
}

TEST_F(Attention, StepAndLagunaHaveAGateInATensorOfItsOwn) {
  const auto write = [&](support::GateKind kind, int64_t gate_dim) {
    p_.gate = kind;
    p_.gate_dim = gate_dim;
    Fill(&p_);
    WriteInput(folder_, p_);
    std::vector<Stored> tensors = Llama();
    tensors.push_back(StoreTransposed(kPrefix + "g_proj.weight", 24, p_.gate_width(), p_.w_g));
    tensors.push_back(Store(kPrefix + "g_proj.bias", {p_.gate_width()}, p_.b_g));
    WriteLayer(folder_, tensors);
  };
  const Rotation rotation(10000, 6, p_.n_q);
  const auto change = [&](mha_forward_args *args) { args->rope = &rotation.rope; };
  write(support::GateKind::kSigmoid, 1);
  ExpectBits(Expected(change), "gated (sigmoid of each head), rotated (half, base 10000)", {"--gate", "sigmoid"});
  ExpectRefusal(Mha(RunArguments(folder_, p_)), {"layer.safetensors", "'" + kPrefix + "g_proj.weight'", "--gate sigmoid (Step)"});
  write(support::GateKind::kSoftplus, 6);
  ExpectBits(Expected(change), "gated (softplus), rotated (half, base 10000)", {"--gate", "softplus"});
  write(support::GateKind::kSigmoid, 3);
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--gate", "sigmoid"})), {"g_proj.weight", "3 numbers", "1 or 6 are expected"});
}

// Behind each head's columns in q_proj; norms add 1 to their weights.
TEST_F(Attention, Qwen3NextHasItsGateInTheTensorOfQueries) {
  p_.gate = support::GateKind::kSigmoid;
  p_.gate_dim = 6;
  Fill(&p_);
  WriteInput(folder_, p_);
  q_weight_ = Random(6);
  k_weight_ = Random(6);
  std::vector<Stored> tensors = Llama();
  tensors[0] = StoreTransposed(kPrefix + "q_proj.weight", 24, 48, support::WithGates(p_, p_.w_q, p_.w_g, 24));
  tensors.push_back(Store(kPrefix + "q_norm.weight", {6}, q_weight_));
  tensors.push_back(Store(kPrefix + "k_norm.weight", {6}, k_weight_));
  for (Stored &tensor : tensors) {
    if (tensor.name == kPrefix + "q_proj.bias") tensor = Store(tensor.name, {48}, support::WithGates(p_, p_.b_q, p_.b_g, 1));
  }
  WriteLayer(folder_, tensors);
  for (std::vector<float> *weights : {&q_weight_, &k_weight_}) {
    for (float &weight : *weights) weight += 1;
  }
  norm_.q_weight = q_weight_.data();
  norm_.k_weight = k_weight_.data();
  Rotation rotation(10000000, 2, p_.n_q);
  rotation.rope.dims = 2;
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->norm = &norm_;
               args->rope = &rotation.rope;
             }),
             "gated (sigmoid), normalised (RMS, weights 1 + w, epsilon 1e-06), rotated (half, base 10000000, 2 elements)",
             {"--gate", "sigmoid", "--rope-base", "10000000", "--rope-dims", "2"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--gate", "sigmoid", "--head-dim", "3"})), {"q_proj.weight", "9 numbers", "1 or 3"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--gate", "sigmoid", "--head-dim", "12"})), {"q_proj.weight", "12 columns", "twice"});
}

TEST_F(Attention, GatesHaveTheNameThatIsGivenAndArePacked) {
  p_.gate = support::GateKind::kSoftplus;
  p_.gate_dim = 1;
  Fill(&p_);
  WriteInput(folder_, p_);
  std::vector<Stored> tensors = Linears(p_, "a", "b", "c", "d");
  tensors.push_back(StoreTransposed("e.weight", 24, 4, p_.w_g));
  tensors.push_back(Store("e.bias", {4}, p_.b_g));
  WriteLayer(folder_, tensors);
  const Arguments names = {"--names", "q=a.weight,k=b.weight,v=c.weight,o=d.weight,g=e.weight", "--layout", "out-in", "--gate", "softplus"};
  const std::vector<float> expected = Expected([](mha_forward_args *) {});
  ExpectBits(expected, "gated (softplus of each head)", names);
  Arguments pack = {"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"};
  pack.insert(pack.end(), names.begin(), names.end());
  ASSERT_EQ(Mha(pack).status, 0);
  const Arguments run = {"run",      "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy",
                         "--output", folder_ / "y.npy", "--causal"};
  const Result result = Mha(run);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("2 key heads, gated (softplus of each head), "), std::string::npos) << result.err;
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.output_dim}, &y);
  EXPECT_EQ(BytesOf(y), BytesOf(expected));
  Arguments both = run;
  both.insert(both.end(), {"--gate", "sigmoid"});
  ExpectRefusal(Mha(both), {"--packed", "--gate"});
}

TEST_F(Attention, AGateThatNoTensorHoldsIsRefused) {
  WritePlain();
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--gate", "relu"})), {"mha: --gate: sigmoid or softplus is expected, not 'relu'\n"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--gate", "sigmoid"})),
                {"out_proj.weight", "24 columns", "half of the columns of 'W_query.weight' are taken for the gate"});
  WriteLayer(folder_, Gpt2(p_));
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--gate", "sigmoid", "--kv-heads", "2"})), {"--gate", "'c_attn.weight'", "g=.. in --names"});
}

TEST_F(Attention, TensorsOfNormsAndSinksThatDoNotFitAreRefused) {
  const auto refused = [&](const std::vector<Stored> &more, const std::vector<std::string> &words) {
    std::vector<Stored> tensors = Llama();
    tensors.insert(tensors.end(), more.begin(), more.end());
    WriteLayer(folder_, tensors);
    ExpectRefusal(Mha(RunArguments(folder_, p_)), words);
  };
  const auto zeros = [](const std::string &name, const std::vector<int64_t> &shape) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    return Store(kPrefix + name, shape, std::vector<float>(count));
  };
  refused({zeros("q_norm.weight", {6})}, {"layer.safetensors", "'" + kPrefix + "k_norm.weight'"});
  refused({zeros("q_norm.weight", {5}), zeros("k_norm.weight", {5})}, {"q_norm.weight", "(5,)", "(6,)", "the width of a head"});
  refused({zeros("q_norm.weight", {6}), zeros("k_norm.weight", {12})}, {"k_norm.weight", "(12,)", "(6,)", "the width of a head"});
  refused({zeros("q_norm.weight", {24}), zeros("k_norm.weight", {6})}, {"k_norm.weight", "(6,)", "(12,)", "the columns of all heads"});
  refused({zeros("q_norm.weight", {4, 6}), zeros("k_norm.weight", {2, 6})}, {"q_norm.weight", "(4, 6)", "(6,)"});
  refused({zeros("q_norm.weight", {6}), zeros("k_norm.weight", {6}), zeros("q_norm.bias", {6})},
          {kPrefix + "q_norm.bias", "can't compute"});
  refused({zeros("sinks", {5})}, {"sinks", "(5,)", "(4,)", "a sink for each head"});
  for (const char *name : {"q_layernorm.weight", "query_norm.weight", "query_layernorm.weight", "bias_k"}) {
    refused({zeros(name, {6})}, {kPrefix + name, "can't compute"});
  }
}

TEST_F(Attention, LayersWithANormOrSinksAreNotPacked) {
  WriteWithNorm(6, 6);
  const Arguments pack = {"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--no-rope",
                          "--output", folder_ / "layer.mha"};
  ExpectRefusal(Mha(pack), {"layer.safetensors", kPrefix + "q_norm.weight", "a packed layer has no place", "--weights"});
  std::vector<Stored> tensors = Llama();
  tensors.push_back(Store(kPrefix + "sinks", {4}, Random(4)));
  WriteLayer(folder_, tensors);
  ExpectRefusal(Mha(pack), {kPrefix + "sinks", "a packed layer has no place"});
  EXPECT_EQ(folder_.Names().count("layer.mha"), 0u);
}

// ---- Options --------------------------------------------------------------------------------------------------------------------

TEST_F(Attention, NormsAreAsTheOptionsSay) {
  WritePlain();
  const Rotation rotation(10000, 6, p_.n_q);
  norm_.flags = MHA_NORM_LAYER | MHA_NORM_AFTER_ROPE;
  norm_.epsilon = 0.5f;
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->norm = &norm_;
               args->rope = &rotation.rope;
             }),
             "rotated (half, base 10000), normalised (layer norm, no weights, epsilon 0.5, after RoPE)",
             {"--norm", "layer", "--norm-epsilon", "0.5", "--norm-after-rope", "--rope-base", "10000"});
  norm_.flags = 0;
  norm_.epsilon = 1e-6f;
  ExpectBits(Expected([&](mha_forward_args *args) { args->norm = &norm_; }), "normalised (RMS, no weights, epsilon 1e-06)",
             {"--norm", "rms"});
  norm_.flags = MHA_NORM_VALUES;
  ExpectBits(Expected([&](mha_forward_args *args) { args->norm = &norm_; }), "normalised (RMS, no weights, epsilon 1e-06, values too)",
             {"--norm", "rms", "--norm-values"});
}

TEST_F(Attention, ScoresAreAsTheOptionsSay) {
  WritePlain();
  const std::vector<float> sinks = Random(4);
  std::vector<float> slopes(4);
  ASSERT_EQ(mha_alibi_slopes(4, slopes.data(), nullptr), MHA_OK);
  score_.softcap = 1.5f;
  score_.alibi_slopes = slopes.data();
  score_.sinks = sinks.data();
  const auto change = [&](mha_forward_args *args) {
    args->score = &score_;
    args->flags |= MHA_WINDOW_LEFT;
    args->window_left = 0;
  };
  ExpectBits(Expected(change), "window of 1 row, softcap 1.5, ALiBi, sinks",
             {"--window", "1", "--softcap", "1.5", "--alibi", "--sinks", folder_.Write("sinks.npy", Npy({4}, sinks))});
}

TEST_F(Attention, EachOptionOfScoresCountsAlone) {
  WritePlain();
  std::vector<float> slopes(4);
  ASSERT_EQ(mha_alibi_slopes(4, slopes.data(), nullptr), MHA_OK);
  const auto change = [&](mha_forward_args *args) { args->score = &score_; };
  score_.softcap = 0.5f;
  ExpectBits(Expected(change), "softcap 0.5", {"--softcap", "0.5"});
  score_.softcap = 0;
  score_.alibi_slopes = slopes.data();
  ExpectBits(Expected(change), "ALiBi", {"--alibi"});
  score_.alibi_slopes = nullptr;
  score_.arithmetic = MHA_ARITHMETIC_INT8;
  ExpectBits(Expected(change), "scores in int8", {"--score-arithmetic", "int8"}, false);  // --decode needs a cache of int8
  score_.arithmetic = MHA_ARITHMETIC_INT16;
  ExpectBits(Expected(change), "scores in int16", {"--score-arithmetic", "int16"}, false);
  score_.context_arithmetic = MHA_ARITHMETIC_INT8;
  ExpectBits(Expected(change), "scores in int16, context in int8", {"--score-arithmetic", "int16", "--context-arithmetic", "int8"}, false);
  score_.arithmetic = MHA_ARITHMETIC_F32;
  score_.context_arithmetic = MHA_ARITHMETIC_INT16;
  ExpectBits(Expected(change), "context in int16", {"--context-arithmetic", "int16"}, false);
}

TEST_F(Attention, BiasesAndMasksAreForAllHeadsOrForEach) {
  WritePlain();
  for (const bool is_causal : {true, false}) {
    p_.is_causal = is_causal;
    for (const bool is_for_each : {false, true}) {
      const int64_t heads = is_for_each ? 4 : 1, n = p_.n_q;
      const std::vector<int64_t> shape = is_for_each ? std::vector<int64_t>{4, n, n} : std::vector<int64_t>{n, n};
      const std::vector<float> bias = Random(heads * n * n);
      std::string mask;
      for (int64_t i = 0; i < heads * n * n; i++) mask += static_cast<char>(random_.Normal() > 0 ? 0 : is_causal ? 1 : 255);
      score_.bias = bias.data();
      score_.mask = reinterpret_cast<const uint8_t *>(mask.data());
      score_.bias_row_stride = score_.mask_row_stride = n;
      score_.bias_head_stride = score_.mask_head_stride = is_for_each ? n * n : 0;
      ExpectBits(Expected([&](mha_forward_args *args) { args->score = &score_; }), "bias, mask",
                 {"--bias", WriteBias(shape, bias), "--mask", WriteMask(shape, mask, is_causal ? "'|b1'" : "'|u1'")});
    }
  }
}

// So many sequences of so many pairs that they go through several calls.
TEST_F(Attention, BiasesAndMasksMayBeForEachSequence) {
  WritePlain();
  const int64_t n = p_.n_q;
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{2, 4, n, n}, {2, 1, n, n}, {1, 4, n, n}, {1, 1, n, n}, {1, n, n}}) {
    const bool is_rank_4 = shape.size() == 4;
    const int64_t sequences = is_rank_4 ? shape[0] : 1, heads = shape[shape.size() - 3], count = sequences * heads * n * n;
    const std::vector<float> bias = Random(count);
    std::string mask;
    for (int64_t i = 0; i < count; i++) mask += static_cast<char>(random_.Normal() > 0 ? 0 : 1);
    score_.bias = bias.data();
    score_.mask = reinterpret_cast<const uint8_t *>(mask.data());
    score_.bias_row_stride = score_.mask_row_stride = n;
    score_.bias_head_stride = score_.mask_head_stride = heads > 1 ? n * n : 0;
    score_.bias_batch_stride = score_.mask_batch_stride = sequences > 1 ? heads * n * n : 0;
    ExpectBits(Expected([&](mha_forward_args *args) { args->score = &score_; }), "bias, mask",
               {"--bias", WriteBias(shape, bias), "--mask", WriteMask(shape, mask)});
  }
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--bias", WriteBias({3, 4, n, n}, Random(12 * n * n))})),
                {"bias.npy", "(3, 4, 7, 7)", "(7, 7), (4, 7, 7) or (2, 4, 7, 7) is expected"});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--bias", WriteBias({n * n}, Random(n * n))})), {"bias.npy", "(49,)", "(7, 7)"});
}

TEST_F(Attention, CrossAttentionHasAColumnForEachKey) {
  p_.is_causal = false;
  p_.n_kv = 11;
  Fill(&p_);
  WritePlain();
  WriteInput(folder_, p_);
  const std::string key = folder_.Write("k.npy", Npy({p_.batch, 11, p_.key_dim}, p_.key));
  const std::vector<float> bias = Random(7 * 11);
  score_.bias = bias.data();
  score_.bias_row_stride = 11;
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->score = &score_;
               args->n_kv = 11;
               args->key = p_.key.data();
             }),
             "bias", {"--key", key, "--bias", WriteBias({7, 11}, bias)});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--key", key, "--bias", WriteBias({7, 7}, Random(49))})),
                {"bias.npy", "(7, 7)", "(7, 11)", "(4, 7, 11)"});
}

TEST_F(Attention, GroupsAreThoseOfAllSequencesOrOfEach) {
  WritePlain();
  const int64_t n = p_.n_q;
  std::vector<int32_t> groups = {1, 1, 2, 2, 2, -1, -1, 3, 3, 3, 3, -7, 4, 4};
  for (const bool is_for_each : {false, true}) {
    score_.q_groups = score_.kv_groups = groups.data();
    score_.q_groups_stride = score_.kv_groups_stride = is_for_each ? n : 0;
    groups.resize(static_cast<size_t>(is_for_each ? 2 * n : n));
    const std::vector<int64_t> shape = is_for_each ? std::vector<int64_t>{2, n} : std::vector<int64_t>{n};
    const auto change = [&](mha_forward_args *args) { args->score = &score_; };
    score_.groups = MHA_GROUPS_WITHIN;
    ExpectBits(Expected(change), "within groups", {"--groups", WriteNumbers("groups.npy", shape, groups)});
    score_.groups = MHA_GROUPS_ALSO;
    const std::vector<int64_t> wide(groups.begin(), groups.end());
    ExpectBits(Expected(change), "also within groups", {"--groups-also", "--groups", WriteNumbers("groups.npy", shape, wide)}, false);
    groups.resize(14, 5);
  }
}

TEST_F(Attention, KeysOfTheirOwnHaveGroupsOfTheirOwn) {
  p_.is_causal = false;
  p_.n_kv = 5;
  Fill(&p_);
  WritePlain();
  WriteInput(folder_, p_);
  const std::string key = WriteFloats("k.npy", {p_.batch, 5, p_.key_dim}, p_.key);
  const std::vector<int32_t> groups = {0, 1, 2, 0, 1, 2, 9}, key_groups = {0, 0, 1, 2, 2};
  score_.q_groups = groups.data();
  score_.kv_groups = key_groups.data();
  const std::string groups_file = WriteNumbers("groups.npy", {7}, groups);
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->score = &score_;
               args->n_kv = 5;
               args->key = p_.key.data();
             }),
             "within groups", {"--key", key, "--groups", groups_file, "--key-groups", WriteNumbers("key_groups.npy", {5}, key_groups)});
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--key", key, "--groups", groups_file})), {"--key-groups: is needed", "x.npy"});
}

TEST_F(Attention, RelativeBiasesComeByDistanceOrByBuckets) {
  WritePlain();
  const auto change = [&](mha_forward_args *args) { args->score = &score_; };
  std::vector<float> table = Random(4 * 5);
  score_.relative_bias = table.data();
  score_.relative_left = score_.relative_right = 2;
  const std::string file = WriteFloats("table.npy", {4, 5}, table);
  ExpectBits(Expected(change), "relative bias", {"--relative-bias", file});
  score_.relative_left = 4;
  score_.relative_right = 0;
  ExpectBits(Expected(change), "relative bias", {"--relative-bias", file, "--relative-left", "4"});
  const std::vector<float> embedding = Random(8 * 4);
  for (const bool is_causal : {true, false}) {
    p_.is_causal = is_causal;
    score_.relative_left = 200;
    score_.relative_right = 200;
    table.resize(4 * 401);
    score_.relative_bias = table.data();
    ASSERT_EQ(mha_t5_relative_bias(embedding.data(), 8, 128, is_causal ? 0 : 1, 4, 200, 200, table.data(), nullptr), MHA_OK);
    ExpectBits(Expected(change), "relative bias (T5)", {"--t5-bias", WriteFloats("t5.npy", {8, 4}, embedding)});
  }
}

TEST_F(Attention, QueriesAndHeadsHaveScales) {
  WritePlain();
  const int64_t n = p_.n_q;
  const std::vector<float> q_scales = Random(2 * n), head_scales = {0.5f, 0, -2, 0};
  score_.q_scales = q_scales.data();
  const auto change = [&](mha_forward_args *args) { args->score = &score_; };
  const std::vector<float> of_all(q_scales.begin(), q_scales.begin() + n);
  ExpectBits(Expected(change), "query scales", {"--query-scales", WriteFloats("q.npy", {n}, of_all)});
  score_.q_scales_stride = n;
  ExpectBits(Expected(change), "query scales", {"--query-scales", WriteFloats("q.npy", {2, n}, q_scales)});
  score_.q_scales = nullptr;
  score_.q_scales_stride = 0;
  score_.head_scales = head_scales.data();
  ExpectBits(Expected(change), "head scales (2 heads left out)", {"--head-scales", WriteFloats("h.npy", {4}, head_scales)});
}

// With what a layer has for each head, and with slopes, which are those of all heads.
TEST_F(Attention, HeadsThatAreNotKeptAreLeftOutForGood) {
  const std::vector<float> sinks = Random(4);
  std::vector<Stored> tensors = Llama();
  tensors.push_back(Store(kPrefix + "sinks", {4}, sinks));
  WriteLayer(folder_, tensors);
  const std::vector<uint8_t> kept = {0, 1, 0, 1};
  const std::vector<float> kept_sinks = {sinks[1], sinks[3]};
  std::vector<float> slopes(4);
  ASSERT_EQ(mha_alibi_slopes(4, slopes.data(), nullptr), MHA_OK);
  const std::vector<float> kept_slopes = {slopes[1], slopes[3]}, head_scales = {0, 1, 0, 1};
  score_.sinks = sinks.data();
  score_.alibi_slopes = slopes.data();
  score_.head_scales = head_scales.data();
  const std::vector<float> expected = Expected([&](mha_forward_args *args) { args->score = &score_; });
  const std::string file = WriteNumbers("kept.npy", {4}, kept);
  const Arguments more = {"--no-rope", "--alibi", "--kept-heads", file};
  const Result result = Mha(RunArguments(folder_, p_, more));
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("2 heads of 6, ALiBi, sinks, "), std::string::npos) << result.err;
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.output_dim}, &y);
  EXPECT_EQ(BytesOf(y), BytesOf(expected));

  WritePlain();
  score_ = {};
  score_.struct_size = sizeof score_;
  score_.head_scales = head_scales.data();
  const Result packed = Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--kept-heads", file, "--output",
                             folder_ / "layer.mha"});
  ASSERT_EQ(packed.status, 0) << packed.err;
  EXPECT_NE(packed.err.find("without 2 heads, "), std::string::npos) << packed.err;
  const Arguments run = {"run",      "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy",
                         "--output", folder_ / "y.npy", "--causal"};
  ASSERT_EQ(Mha(run).status, 0);
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.output_dim}, &y);
  EXPECT_EQ(BytesOf(y), BytesOf(Expected([&](mha_forward_args *args) { args->score = &score_; })));

  const auto refused = [&](const Arguments &options, const std::vector<std::string> &words) {
    ExpectRefusal(Mha(RunArguments(folder_, p_, options)), words);
  };
  refused({"--kept-heads", WriteNumbers("kept.npy", {3}, std::vector<uint8_t>(3, 1))}, {"kept.npy", "(3,)", "(4,)", "each head stays"});
  refused({"--kept-heads", WriteNumbers("kept.npy", {4}, std::vector<uint8_t>{1, 1, 1, 0})}, {"layer.safetensors", "kept_heads"});
  WriteWithNorm(24, 12);
  refused({"--kept-heads", WriteNumbers("kept.npy", {4}, kept)}, {"--kept-heads: ", "q_norm.weight", "all heads"});
  Arguments both = run;
  both.insert(both.end(), {"--kept-heads", file});
  ExpectRefusal(Mha(both), {"--packed", "--kept-heads"});
}

TEST_F(Attention, RotationsAreScaledAsConfigJsonSays) {
  WritePlain();
  const double factors[] = {1.5, 2, 4};
  struct Kind {
    std::string json, words;
    std::function<void(mha_rope_config *)> set;
    double base = 10000;
    int64_t dims = 6;
  };
  const std::string length = R"("original_max_position_embeddings": 4, )";
  const Kind kinds[] = {
      {R"({"rope_type": "default", "rope_theta": 500})", "base 500", [](mha_rope_config *) {}, 500},
      {R"({"type": "linear", "factor": 8.0})", "base 10000, linear by 8", [](mha_rope_config *c) { c->linear_factor = 8; }},
      {"{" + length + R"("rope_type": "llama3", "factor": 8, "low_freq_factor": 0.5, "high_freq_factor": 3})", "base 10000, Llama 3 by 8",
       [](mha_rope_config *c) {
         c->llama3_factor = 8;
         c->llama3_low_freq_factor = 0.5;
         c->llama3_high_freq_factor = 3;
         c->original_positions = 4;
       }},
      {"{" + length + R"("type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 0.25, "truncate": false, "attention_factor": null})",
       "base 10000, YaRN by 4",
       [](mha_rope_config *c) {
         c->yarn_factor = 4;
         c->yarn_beta_fast = 1;
         c->yarn_beta_slow = 0.25;
         c->yarn_unrounded = 1;
         c->original_positions = 4;
       }},
      {"{" + length + R"("rope_type": "yarn", "factor": 4, "mscale": 0.707, "mscale_all_dim": 0.5})", "base 10000, YaRN by 4",
       [](mha_rope_config *c) {
         c->yarn_factor = 4;
         c->attention_factor = (0.1 * std::log(4.0) * 0.707 + 1) / (0.1 * std::log(4.0) * 0.5 + 1);
         c->original_positions = 4;
       }},
      {"{" + length + R"("rope_type": "longrope", "factor": 16, "short_factor": [1, 1, 1], "long_factor": [1.5, 2, 4]})",
       "base 10000, LongRoPE, long_factor",
       [&](mha_rope_config *c) {
         c->pair_factors = factors;
         c->attention_factor = std::sqrt(1 + std::log(16.0) / std::log(4.0));
       }},
      {R"({"rope_type": "longrope", "original_max_position_embeddings": 7, "attention_factor": 1.25, "short_factor": [1.5, 2, 4]})",
       "base 10000, LongRoPE, short_factor",
       [&](mha_rope_config *c) {
         c->pair_factors = factors;
         c->attention_factor = 1.25;
       }},
      {"{" + length + R"("rope_type": "dynamic", "factor": 2, "rope_theta": 99, "partial_rotary_factor": 0.67})",
       "base 99, dynamic NTK by 2, 4 elements",
       [](mha_rope_config *c) {
         c->ntk_factor = 2;
         c->ntk_positions = 7;
         c->original_positions = 4;
       },
       99, 4},
  };
  for (const Kind &kind : kinds) {
    mha_rope_config config = {};
    kind.set(&config);
    Rotation rotation(kind.base, kind.dims, p_.n_q, false, config);
    rotation.rope.dims = kind.dims;
    ExpectBits(Expected([&](mha_forward_args *args) { args->rope = &rotation.rope; }), "rotated (half, " + kind.words + ")",
               {"--rope-scaling", kind.json});
  }
  const std::pair<std::string, std::vector<std::string>> bad[] = {
      {"llama3", {"a JSON object", "not 'llama3'"}},
      {R"({"rope_type": "ntk"})", {"linear, yarn, llama3", "ntk"}},
      {R"({"rope_type": 3})", {"linear, yarn, llama3", "'3'"}},
      {R"({"rope_type": "linear"})", {"'factor' is needed"}},
      {R"({"rope_type": "linear", "factor": "8"})", {"'factor' is not a number"}},
      {R"({"rope_type": "linear", "factor": 8, "beta_fast": 32})", {"'beta_fast'", "'linear'"}},
      {R"({"rope_type": "linear", "factor": 0.5})", {"--rope-scaling: ", "linear_factor"}},
      {R"({"rope_type": "yarn", "factor": 4})", {"'original_max_position_embeddings' is needed"}},
      {R"({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1e30})", {"from 1 to 2^31 - 1"}},
      {"{" + length + R"("rope_type": "longrope", "factor": 2})", {"'long_factor' is needed"}},
      {"{" + length + R"("rope_type": "longrope", "factor": 2, "long_factor": [1, 2]})", {"2 factors", "3 pairs"}},
      {"{" + length + R"("rope_type": "longrope", "long_factor": [1, 2, 3]})", {"factor", "max_position_embeddings"}},
      {R"({"rope_type": "default", "partial_rotary_factor": 2})", {"--rope-scaling: 12 elements", "a head has 6"}},
  };
  for (const auto &[json, words] : bad) {
    std::vector<std::string> all = words;
    all.push_back("mha: --rope-scaling: ");
    ExpectRefusal(Mha(RunArguments(folder_, p_, {"--rope-scaling", json})), all);
  }
}

TEST_F(Attention, PackedSequencesDoNotSeeEachOther) {
  p_.batch = 1;
  Fill(&p_);
  WriteInput(folder_, p_);
  WritePlain();
  const Rotation rotation(10000, 6, p_.n_q);
  const std::vector<int64_t> starts = {0, 3, 3, 7}, key_starts = {0, 4, 5, 9};
  const std::string file = WriteNumbers("starts.npy", {4}, starts);
  const auto change = [&](mha_forward_args *args) {
    args->batch = 3;
    args->cu_seqlens_q = starts.data();
    args->rope = &rotation.rope;
  };
  ExpectBits(Expected(change), "rotated (half, base 10000), 3 packed sequences", {"--cu-seqlens", file, "--rope-base", "10000"}, false);
  const auto refused = [&](const Arguments &options, const std::vector<std::string> &words) {
    ExpectRefusal(Mha(RunArguments(folder_, p_, options)), words);
  };
  refused({"--cu-seqlens", file, "--key-cu-seqlens", file}, {"--key-cu-seqlens: ", "x.npy", "--key"});
  refused({"--cu-seqlens", WriteNumbers("bad.npy", {3}, std::vector<int32_t>{0, 5, 4})}, {"x.npy", "cu_seqlens_q"});
  refused({"--cu-seqlens", WriteNumbers("bad.npy", {2}, std::vector<int32_t>{0, 8})}, {"x.npy", "cu_seqlens_q"});
  refused({"--cu-seqlens", WriteNumbers("bad.npy", {1, 2}, std::vector<int32_t>{0, 7})}, {"bad.npy", "(1, 2)", "(count + 1,)"});
  refused({"--cu-seqlens", file, "--decode"}, {"--decode: ", "--cu-seqlens"});
  p_.n_kv = 9;
  p_.batch = 1;
  Fill(&p_);
  WriteInput(folder_, p_);
  WritePlain();
  const std::string key = WriteFloats("k.npy", {1, 9, p_.key_dim}, p_.key), key_file = WriteNumbers("key_starts.npy", {4}, key_starts);
  ExpectBits(Expected([&](mha_forward_args *args) {
               change(args);
               args->rope = nullptr;
               args->key = p_.key.data();
               args->n_kv = 9;
               args->cu_seqlens_kv = key_starts.data();
             }),
             "3 packed sequences", {"--cu-seqlens", file, "--key", key, "--key-cu-seqlens", key_file}, false);
  refused({"--key", key, "--key-cu-seqlens", key_file}, {"--key-cu-seqlens: goes with --cu-seqlens"});
  refused({"--cu-seqlens", WriteNumbers("bad.npy", {2}, std::vector<int32_t>{0, 7}), "--key", key, "--key-cu-seqlens", key_file},
          {"key_starts.npy: has 4 numbers", "has 2"});
  p_.batch = 2;
  Fill(&p_);
  WriteInput(folder_, p_);
  refused({"--cu-seqlens", file}, {"mha: --cu-seqlens: ", "(2, 7, 24)", "(n, width)"});
}

TEST_F(Attention, PaddingIsOnEitherSideOfEachSequence) {
  WritePlain();
  const std::vector<int64_t> lengths = {4, 5}, starts = {3, 1};
  const std::string of_lengths = WriteNumbers("lengths.npy", {2}, lengths), of_starts = WriteNumbers("starts.npy", {2}, starts);
  ExpectBits(Expected([&](mha_forward_args *args) { args->q_lengths = lengths.data(); }), "padding", {"--lengths", of_lengths}, false);
  ExpectBits(Expected([&](mha_forward_args *args) { args->kv_start = starts.data(); }), "padding", {"--starts", of_starts}, false);
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->q_lengths = lengths.data();
               args->kv_start = starts.data();
             }),
             "padding", {"--lengths", of_lengths, "--starts", of_starts}, false);
  p_.is_causal = false;
  const std::string key = WriteFloats("k.npy", {2, 7, p_.key_dim}, p_.key);
  ExpectBits(Expected([&](mha_forward_args *args) {
               args->key = p_.key.data();
               args->n_kv = 7;
               args->kv_lengths = lengths.data();
             }),
             "padding", {"--key", key, "--key-lengths", of_lengths});
  const auto refused = [&](const Arguments &options, const std::vector<std::string> &words) {
    ExpectRefusal(Mha(RunArguments(folder_, p_, options)), words);
  };
  refused({"--lengths", WriteNumbers("bad.npy", {2}, std::vector<int64_t>{4, 8})}, {"x.npy", "q_lengths[1]"});
  refused({"--lengths", WriteNumbers("bad.npy", {3}, std::vector<int64_t>{4, 4, 4})}, {"bad.npy", "(3,)", "(2,)", "each sequence"});
  refused({"--lengths", WriteFloats("bad.npy", {2}, {4, 4})}, {"bad.npy", "'<f4'", "int32 or int64"});
  refused({"--key-lengths", of_lengths}, {"--key-lengths: ", "--key"});
  p_.is_causal = true;
  refused({"--decode", "--lengths", of_lengths}, {"--decode: ", "--lengths"});
  refused({"--decode", "--starts", of_starts}, {"--decode: ", "--starts"});
}

TEST_F(Attention, RowsBiasesAndResultsMayHave16Bits) {
  WritePlain();
  const auto bits_of = [](const std::vector<float> &values, support::Storage type) {
    std::vector<uint16_t> bits;
    for (const float value : values) bits.push_back(support::BitsIn16(type, value));
    return bits;
  };
  const struct {
    support::Storage type;
    uint32_t number;
    std::string name, descr;
  } types[] = {{support::Storage::kF16, MHA_TYPE_F16, "f16", "'<f2'"}, {support::Storage::kBf16, MHA_TYPE_BF16, "bf16", "'<V2'"}};
  for (const auto &type : types) {
    const std::vector<uint16_t> x = bits_of(p_.query, type.type), bias = bits_of(Random(49), support::Storage::kF16);
    const std::string header = NpyHeader(type.descr, "False", "(2, 7, 24)");
    folder_.Write("x.npy", NpyWithHeader(header, std::string(reinterpret_cast<const char *>(x.data()), 2 * x.size())));
    score_.bias = bias.data();
    score_.bias_type = MHA_TYPE_F16;
    score_.bias_row_stride = 7;
    for (const bool is_short : {false, true}) {
      const std::vector<float> expected = Expected([&](mha_forward_args *args) {
        args->query = x.data();
        args->input_type = type.number;
        args->output_type = is_short ? type.number : MHA_TYPE_F32;
        args->score = &score_;
      });
      const Arguments options = {"--bias", WriteNumbers("bias.npy", {7, 7}, bias), "--output-type", is_short ? type.name : "f32"};
      if (!is_short) {
        ExpectBits(expected, "bias", options);
        continue;
      }
      for (const bool is_decoding : {false, true}) {
        Arguments arguments = RunArguments(folder_, p_, options);
        if (is_decoding) arguments.push_back("--decode");
        ASSERT_EQ(Mha(arguments).status, 0);
        EXPECT_EQ(ReadFile(folder_ / "y.npy"), NpyWithHeader(header, BytesOf(expected)));
      }
    }
  }
  WriteInput(folder_, p_);
  const auto refused = [&](const Arguments &options, const std::vector<std::string> &words) {
    ExpectRefusal(Mha(RunArguments(folder_, p_, options)), words);
  };
  refused({"--output-type", "int8"}, {"mha: --output-type: f32, f16 or bf16 is expected, not 'int8'\n"});
  refused({"--key", WriteNumbers("k.npy", {2, 7, 24}, std::vector<uint16_t>(2 * 7 * 24))}, {"k.npy", "another type", "x.npy"});
}

TEST_F(Attention, PackedLayersTakeTheOptionsToo) {
  WritePlain();
  ASSERT_EQ(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"}).status, 0);
  score_.softcap = 2;
  const std::vector<float> expected = Expected([&](mha_forward_args *args) {
    args->score = &score_;
    args->norm = &norm_;
  });
  const Result result = Mha({"run", "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy", "--output", folder_ / "y.npy",
                             "--causal", "--softcap", "2", "--norm", "rms"});
  ASSERT_EQ(result.status, 0) << result.err;
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.output_dim}, &y);
  EXPECT_EQ(BytesOf(y), BytesOf(expected));
}

TEST_F(Attention, OptionsThatMakeNoSenseAreRefused) {
  WritePlain();
  const auto refused = [&](const Arguments &more, const std::vector<std::string> &words) {
    ExpectRefusal(Mha(RunArguments(folder_, p_, more)), words);
    EXPECT_EQ(folder_.Names().count("y.npy"), 0u);
  };
  refused({"--score-arithmetic", "f16"}, {"--score-arithmetic", "int16", "'f16'"});
  refused({"--context-arithmetic", "int4"}, {"--context-arithmetic", "int16", "'int4'"});
  refused({"--window", "0"}, {"mha: --window: a whole number of at least 1 is expected, not '0'\n"});
  for (const std::string bad : {"0", "-1", "nan", "inf", "x"}) {
    refused({"--softcap", bad}, {"mha: --softcap: a positive number is expected, not '" + bad + "'\n"});
    refused({"--norm", "rms", "--norm-epsilon", bad}, {"mha: --norm-epsilon: a positive number is expected, not '" + bad + "'\n"});
  }
  const auto halves = [&](const std::vector<int64_t> &shape) { return WriteNumbers("h.npy", shape, std::vector<uint16_t>(4)); };
  for (const std::string option : {"--sinks", "--relative-bias", "--t5-bias", "--query-scales", "--head-scales"}) {
    refused({option, halves({4})}, {"h.npy: holds float16; float32"});
    refused({option, WriteFloats("f.npy", {3, 3}, Random(9))}, {"f.npy", "(3, 3)"});
  }
  for (const std::string option : {"--groups", "--lengths", "--starts"}) refused({option, halves({4})}, {"int32 or int64"});
  refused({"--groups", WriteNumbers("g.npy", {6}, std::vector<int32_t>(6))}, {"g.npy", "(6,)", "(7,) or (2, 7) is expected"});
  refused({"--groups", WriteNumbers("g.npy", {7}, std::vector<int64_t>(7, int64_t{1} << 31))}, {"g.npy", "2147483648", "32 bits"});
  refused({"--groups-also"}, {"mha: --groups-also: goes with --groups"});
  const std::string groups = WriteNumbers("g.npy", {7}, std::vector<int32_t>(7));
  refused({"--key-groups", groups}, {"mha: --key-groups: goes with --key and --groups"});
  refused({"--groups", groups, "--key-groups", groups}, {"mha: --key-groups: goes with --key and --groups"});
  refused({"--groups", groups, "--groups-also", "--decode"}, {"--decode: ", "--groups-also"});
  const std::string table = WriteFloats("t.npy", {4, 6}, Random(24));
  refused({"--relative-bias", table}, {"t.npy", "even number of distances, 6", "--relative-left"});
  refused({"--relative-bias", table, "--relative-left", "6"}, {"--relative-left: ", "t.npy", "6 distances"});
  refused({"--relative-bias", table, "--t5-bias", table}, {"--t5-bias: can't be combined with --relative-bias"});
  refused({"--relative-left", "6"}, {"--relative-left: is about --relative-bias"});
  refused({"--t5-bias", WriteFloats("t5.npy", {1, 4}, Random(4))}, {"t5.npy", "num_buckets"});
  refused({"--head-scales", WriteFloats("s.npy", {4}, {1, 2, 3, std::numeric_limits<float>::infinity()})}, {"head_scales[3]"});
  refused({"--norm", "batch"}, {"mha: --norm: rms or layer is expected, not 'batch'\n"});
  refused({"--norm-epsilon", "1e-5"}, {"mha: --norm-epsilon: ", "no weights", "--norm is not given"});
  refused({"--norm-after-rope"}, {"mha: --norm-after-rope: ", "--norm is not given"});
  refused({"--norm-values"}, {"mha: --norm-values: ", "--norm is not given"});
  refused({"--sinks", folder_.Write("sinks.npy", Npy({3}, {1, 2, 3}))}, {"sinks.npy", "(3,)", "(4,)", "a sink for each head"});
  refused({"--sinks", folder_.Write("sinks.npy", Npy({4}, {1, 2, 3, std::numeric_limits<float>::infinity()}))}, {"sinks[3]"});
  refused({"--sinks", folder_ / "no.npy"}, {"no.npy", "No such file"});
  refused({"--bias", WriteBias({2, 7, 7}, Random(98))}, {"bias.npy", "(2, 7, 7)", "(7, 7)", "(4, 7, 7)"});
  refused({"--bias", WriteMask({7, 7}, std::string(49, 1))}, {"mask.npy", "'|b1'", "float32"});
  refused({"--mask", WriteMask({7, 6}, std::string(42, 1))}, {"mask.npy", "(7, 6)", "(7, 7)"});
  refused({"--mask", WriteMask({7, 7}, std::string(48, 1))}, {"mask.npy", "48", "49", "truncated"});
  refused({"--mask", WriteBias({7, 7}, Random(49))}, {"bias.npy", "'<f4'", "bool or uint8"});
  p_.is_causal = false;
  refused({"--window", "3"}, {"mha: --window: ", "give --causal too"});
}

TEST_F(Attention, FilesOfOptionsAreNeverWrittenOver) {
  WritePlain();
  const std::string sinks = folder_.Write("sinks.npy", Npy({4}, Random(4))), before = ReadFile(sinks);
  const std::string weights = folder_ / "layer.safetensors", x = folder_ / "x.npy";
  for (const std::string option :
       {"--sinks", "--bias", "--mask", "--relative-bias", "--t5-bias", "--query-scales", "--head-scales", "--groups", "--cu-seqlens"}) {
    const Arguments inputs = {"--weights", weights, "--heads", "4", "--input", x, option, sinks};
    for (const Arguments &command : {Arguments{"run", "--output", sinks}, {"explain", "--html", sinks}}) {
      Arguments arguments = command;
      arguments.insert(arguments.end(), inputs.begin(), inputs.end());
      ExpectRefusal(Mha(arguments), {"also the " + option});
    }
  }
  EXPECT_EQ(ReadFile(sinks), before);
}

// ---- mha explain ----------------------------------------------------------------------------------------------------------------

class ExplainAttention : public Attention {
 protected:
  std::string Explain(const Arguments &more) {
    Arguments arguments = {"explain", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--input", folder_ / "x.npy", "--causal"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result result = Mha(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return result.out;
  }

  // The text of a step, from its number to the next, with one blank in the place of several; "" = there is none.
  static std::string StepOf(const std::string &text, const std::string &number) {
    const size_t begin = text.find("\nStep " + number + " ");
    if (begin == std::string::npos) return "";
    std::string step = text.substr(begin + 1, text.find("\nStep ", begin + 1) - begin - 1);
    step.erase(std::unique(step.begin(), step.end(), [](char a, char b) { return a == ' ' && b == ' '; }), step.end());
    return step;
  }

  static void ExpectWords(const std::string &step, const std::vector<std::string> &words) {
    for (const std::string &word : words) EXPECT_NE(step.find(word), std::string::npos) << word << " is missing in:\n" << step;
  }

  // The first numbers of a row, as they are printed.
  static std::string Printed(const float *row, int count) {
    std::string text;
    for (int i = 0; i < count; i++) {
      char number[32];
      std::snprintf(number, sizeof number, i == 0 ? "%.4f" : " %.4f", static_cast<double>(row[i]));
      text += number;
    }
    return text;
  }
};

// The keys after norm and rotation are those that a cache holds, and the context from them is the layer's own.
TEST_F(ExplainAttention, ShowsTheQueriesAndKeysThatTheLibraryScores) {
  p_.batch = 1;
  Fill(&p_);
  WriteInput(folder_, p_);
  WriteWithNorm(6, 6);
  const Rotation rotation(10000, 6, p_.n_q);
  const std::string out = Explain({});
  ExpectWords(StepOf(out, "5a"), {"normalised", "RMS norm of each head: x / sqrt(mean of x^2 + 1e-06) * weight.", "weight of Q",
                                  "weight of K", Printed(q_weight_.data(), 2)});
  ExpectWords(StepOf(out, "5b"), {"rotated", "RoPE, rotated (half, base 10000)"});

  const support::Cache cache(CacheConfigOf(p_, {MHA_CACHE_CONTIGUOUS, 0}, 1, p_.n_q));
  std::vector<float> weights(4 * 7 * 7), scores(4 * 7 * 7), context(7 * 24), keys(7 * 12);
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.scores = scores.data();
  taps.context = context.data();
  const std::vector<float> y = Expected([&](mha_forward_args *args) {
    args->norm = &norm_;
    args->rope = &rotation.rope;
    args->cache = cache.get();
    args->taps = &taps;
    args->attention_weights = weights.data();
  });
  ASSERT_EQ(mha_kv_cache_read(cache.get(), 0, 0, 7, keys.data(), nullptr, nullptr), MHA_OK);
  for (int64_t row = 0; row < 7; row++) {
    if (row >= 3 && row < 6) continue;  // such may be left out
    ExpectWords(StepOf(out, "5b"), {Printed(keys.data() + row * 12, 2)});
    ExpectWords(StepOf(out, "7"), {Printed(scores.data() + row * 7, 2)});
    ExpectWords(StepOf(out, "8c"), {Printed(weights.data() + row * 7, 2)});
    ExpectWords(StepOf(out, "11"), {Printed(context.data() + row * 24, 2)});
    ExpectWords(StepOf(out, "12"), {Printed(y.data() + row * 24, 2)});
  }
}

TEST_F(ExplainAttention, ShowsTheStepsInTheOrderOfTheOptions) {
  WritePlain();
  const std::string out = Explain({"--norm", "layer", "--norm-after-rope", "--rope-base", "100"});
  ExpectWords(StepOf(out, "5a"), {"rotated", "base 100"});
  ExpectWords(StepOf(out, "5b"), {"Layer norm of each head: (x - mean) / sqrt(mean of (x - mean)^2 + 1e-06)."});
  EXPECT_EQ(StepOf(Explain({}), "5a"), "");
}

TEST_F(ExplainAttention, ShowsWhatChangesScoresAndMasks) {
  p_.batch = 1;
  Fill(&p_);
  WriteInput(folder_, p_);
  WritePlain();
  const std::vector<float> sinks = Random(4), bias = Random(4 * 49);
  std::string mask(49, 1);
  mask[6 * 7] = 0;
  std::vector<float> slopes(4), softcapped(4 * 49), masked(4 * 49), weights(4 * 49);
  ASSERT_EQ(mha_alibi_slopes(4, slopes.data(), nullptr), MHA_OK);
  score_.softcap = 1.5f;
  score_.alibi_slopes = slopes.data();
  score_.sinks = sinks.data();
  score_.bias = bias.data();
  score_.bias_row_stride = score_.mask_row_stride = 7;
  score_.bias_head_stride = 49;
  score_.mask = reinterpret_cast<const uint8_t *>(mask.data());
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.softcapped_scores = softcapped.data();
  taps.masked_scores = masked.data();
  Expected([&](mha_forward_args *args) {
    args->score = &score_;
    args->taps = &taps;
    args->attention_weights = weights.data();
    args->flags |= MHA_WINDOW_LEFT;
    args->window_left = 4;
  });
  const Arguments options = {"--softcap", "1.5", "--alibi", "--window", "5", "--sinks", folder_.Write("sinks.npy", Npy({4}, sinks)),
                             "--bias", WriteBias({4, 7, 7}, bias), "--mask", WriteMask({7, 7}, mask)};
  const std::string out = Explain(options);
  ExpectWords(out, {"causal, window of 5 rows, softcap 1.5, ALiBi, bias, mask, sinks."});
  ExpectWords(StepOf(out, "8b"), {"softcap", "1.5 * tanh(s / 1.5)"});
  ExpectWords(StepOf(out, "8c"), {"masked", "s - slope * |j - i|", "s + bias", "Causal", "5 tokens", "where the mask is 0", "slopes",
                                  "0.2500", "-inf"});
  ExpectWords(StepOf(out, "8d"), {"exp(s) / (sum of exp(s) + exp(sink))", "less than 1", "sinks", Printed(sinks.data(), 2)});
  for (int64_t head : {0, 1, 3}) {
    ExpectWords(StepOf(out, "8b"), {Printed(softcapped.data() + head * 49, 2)});
    ExpectWords(StepOf(out, "8c"), {Printed(masked.data() + head * 49 + 1 * 7, 2)});
    ExpectWords(StepOf(out, "8d"), {Printed(weights.data() + head * 49 + 1 * 7, 2)});
  }

  Arguments html = options;
  html.insert(html.end(), {"--html", folder_ / "page.html"});
  Explain(html);
  ExpectWords(ReadFile(folder_ / "page.html"), {"sum to less than 1, for its sink has the rest", "1.5 * tanh(s / 1.5)"});
}

TEST_F(ExplainAttention, ShowsScalesGroupsAndPackedSequences) {
  p_.batch = 1;
  p_.is_causal = false;
  Fill(&p_);
  WriteInput(folder_, p_);
  WritePlain();
  const Rotation rotation(10000, 6, p_.n_q);
  const std::vector<float> table = Random(4 * 3), q_scales = Random(7), head_scales = {2, 0, -1, 0.5f};
  const std::vector<int32_t> groups = {1, 1, 2, 2, 2, 2, 1};
  const std::vector<int64_t> starts = {0, 4, 7};
  score_.relative_bias = table.data();
  score_.relative_left = score_.relative_right = 1;
  score_.q_scales = q_scales.data();
  score_.head_scales = head_scales.data();
  score_.q_groups = score_.kv_groups = groups.data();
  std::vector<float> scores(4 * 49), masked(4 * 49), weights(4 * 49), context(7 * 24);
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.scores = scores.data();
  taps.masked_scores = masked.data();
  taps.context = context.data();
  const std::vector<float> y = Expected([&](mha_forward_args *args) {
    args->batch = 2;
    args->cu_seqlens_q = starts.data();
    args->rope = &rotation.rope;
    args->score = &score_;
    args->taps = &taps;
    args->attention_weights = weights.data();
    args->flags = MHA_CAUSAL;
  });
  const Arguments options = {"--rope-base", "10000", "--relative-bias", WriteFloats("t.npy", {4, 3}, table),
                             "--query-scales", WriteFloats("q.npy", {7}, q_scales), "--head-scales", WriteFloats("h.npy", {4}, head_scales),
                             "--groups", WriteNumbers("g.npy", {7}, groups), "--cu-seqlens", WriteNumbers("s.npy", {3}, starts)};
  const std::string out = Explain(options);
  ExpectWords(out, {"relative bias, within groups, query scales, head scales (1 head left", "2 packed sequences."});
  ExpectWords(StepOf(out, "5b"), {"queries scaled", Printed(q_scales.data(), 2)});
  ExpectWords(StepOf(out, "8b"), {"relative bias of j - i, from -1 to 1", "Packed: no token sees those of another sequence.",
                                  "Groups: none sees those of another group.", Printed(table.data() + 3, 3)});
  ExpectWords(StepOf(out, "9"), {"times the scale of the head", Printed(head_scales.data(), 2)});
  for (const int64_t row : {0, 1, 6}) {
    ExpectWords(StepOf(out, "11"), {Printed(context.data() + row * 24, 2)});
    ExpectWords(StepOf(out, "12"), {Printed(y.data() + row * 24, 2)});
  }
  for (const int64_t head : {0, 3}) {  // of the second sequence: behind the keys of the first
    const float *const row = scores.data() + head * 49 + 6 * 7, *const of_weights = weights.data() + head * 49 + 6 * 7;
    ExpectWords(StepOf(out, "7"), {Printed(row + 5, 2)});
    ExpectWords(StepOf(out, "8c"), {Printed(of_weights + 5, 2)});
  }
  std::vector<std::string> also = options;
  also.push_back("--groups-also");
  ExpectWords(StepOf(Explain(also), "8b"), {"Groups: but those of a group see each other."});
}

TEST_F(ExplainAttention, ShowsGatesAndNormalisedValues) {
  for (const bool is_in_q : {false, true}) {
    p_.batch = 1;
    p_.gate = support::GateKind::kSigmoid;
    p_.gate_dim = 6;
    Fill(&p_);
    WriteInput(folder_, p_);
    std::vector<Stored> tensors = Llama();
    if (is_in_q) {
      tensors[0] = StoreTransposed(kPrefix + "q_proj.weight", 24, 48, support::WithGates(p_, p_.w_q, p_.w_g, 24));
      tensors.erase(tensors.begin() + 3);  // of the queries, the only bias that would have to be longer
      p_.b_q.clear();
      p_.b_g.clear();
    } else {
      tensors.push_back(StoreTransposed(kPrefix + "g_proj.weight", 24, 24, p_.w_g));
      tensors.push_back(Store(kPrefix + "g_proj.bias", {24}, p_.b_g));
    }
    WriteLayer(folder_, tensors);
    const Problem whole = p_;
    norm_.flags = MHA_NORM_VALUES;
    const auto change = [&](mha_forward_args *args) { args->norm = &norm_; };
    const std::vector<float> y = Expected(change);
    p_.w_o.clear();
    p_.b_o.clear();
    const std::vector<float> gated = Expected(change);
    p_ = whole;
    const Arguments options = {"--gate", "sigmoid", "--no-rope", "--norm", "rms", "--norm-values"};
    const std::string out = Explain(options);
    ExpectWords(out, {"values too"});
    ExpectWords(StepOf(out, "3"), {is_in_q ? "W_Q and gate" : "W_Q"});
    ExpectWords(StepOf(out, "5a"), {"Of values the RMS norm of each head, without weights."});
    ExpectWords(StepOf(out, "11a"), {"context * 1 / (1 + exp(-g))", "a number for each element", Printed(gated.data(), 2)});
    if (!is_in_q) ExpectWords(StepOf(out, "11a"), {"W_G", "b_G"});
    ExpectWords(StepOf(out, "12"), {Printed(y.data(), 2)});
  }
}

TEST_F(ExplainAttention, TheWorkedExampleTakesTheOptions) {
  const Result result = Mha({"explain", "--softcap", "50"});
  ASSERT_EQ(result.status, 0) << result.err;
  ExpectWords(StepOf(result.out, "8b"), {"50 * tanh(s / 50)"});
  EXPECT_EQ(result.out.find("smaller numbers"), std::string::npos) << "which are without the options";
}

}  // namespace
