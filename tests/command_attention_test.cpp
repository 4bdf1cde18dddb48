// What `mha run` and `mha explain` add to a call: norms, windows, softcap, ALiBi, sinks, biases and masks, from options and from the
// tensors of Qwen3, Gemma 3, OLMo 2 and gpt-oss. Outputs are those of the library's own call, bit for bit.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "command_layers.h"

namespace {

using namespace command_test;

const std::string kAbove = "model.layers.0.";
const std::string kPrefix = kAbove + "self_attn.";

// Tables for a whole head, and the rotation that has them.
struct Rotation {
  explicit Rotation(double base, int64_t dims, int64_t n, bool is_gpt_oss = false) : cos(n * dims / 2), sin(n * dims / 2) {
    mha_rope_config config = {};
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
    mha_error error;
    size_t bytes = 0;
    EXPECT_EQ(mha_forward_workspace(layer.get(), &args, &bytes, &error), MHA_OK) << error.message;
    std::vector<unsigned char> workspace(bytes);
    EXPECT_EQ(mha_forward(layer.get(), &args, workspace.data(), bytes, &error), MHA_OK) << error.message;
    return y;
  }

  // Runs the layer that was written, at once and row by row, and expects these bits and a line with these words.
  void ExpectBits(const std::vector<float> &expected, const std::string &words, const Arguments &more = {}) {
    for (const bool is_decoding : {false, true}) {
      if (is_decoding && !p_.is_causal) continue;
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
    ExpectBits(Expected([&](mha_forward_args *args) {
                 args->norm = &norm_;
                 args->rope = &rotation.rope;
               }),
               "normalised (RMS, epsilon 1e-06, values too), rotated (half, base 10000)");
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
  refused({"--window", "0"}, {"mha: --window: a whole number of at least 1 is expected, not '0'\n"});
  for (const std::string bad : {"0", "-1", "nan", "inf", "x"}) {
    refused({"--softcap", bad}, {"mha: --softcap: a positive number is expected, not '" + bad + "'\n"});
    refused({"--norm", "rms", "--norm-epsilon", bad}, {"mha: --norm-epsilon: a positive number is expected, not '" + bad + "'\n"});
  }
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
  for (const std::string option : {"--sinks", "--bias", "--mask"}) {
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
