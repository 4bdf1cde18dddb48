// Layers of W_Q alone, which attend to a cache that others fill: the bits of a layer with any W_K
// and W_V, without the memory for these.
#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/attention_test.h"
#include "support/cache.h"
#include "support/interface_support.h"
#include "support/rope.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr int64_t kHeld = 290;

LayerData WithoutKeys(LayerData data) {
  data.weights.w_k = data.weights.w_v = {};
  data.config.key_dim = data.config.value_dim = 0;
  return data;
}

LayerProblem Sizes(int64_t n, int64_t dim, int64_t heads, int64_t kv_heads, int64_t head_dim,
                   int64_t head_dim_v) {
  LayerProblem problem;
  problem.batch = 2;
  problem.n_q = problem.n_kv = n;
  problem.query_dim = problem.key_dim = problem.value_dim = dim;
  problem.output_dim = dim + 3;
  problem.num_heads = heads;
  problem.num_kv_heads = kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  problem.is_causal = true;
  return problem;
}

// Wide and narrow, with gates, without W_O, of a shape that is small with W_K and W_V.
std::vector<LayerProblem> Problems() {
  std::vector<LayerProblem> problems;
  for (const int64_t n : {1, 5, 40}) {
    problems.push_back(NormalLayer(Sizes(n, 70, 6, 3, 20, 17), 1));
    problems.back().rope = MakeRope(true, 12, kHeld);
    problems.back().rope->offset = 5;
    problems.push_back(NormalLayer(Sizes(n, 33, 2, 1, 48, 16), 2, kNoBiases, false));
    problems.push_back(NormalLayer(Sizes(n, 16, 2, 2, 8, 8), 3));
    LayerProblem gated = Sizes(n, 61, 4, 2, 9, 24);
    gated.gate = GateKind::kSigmoid;
    gated.gate_dim = 24;
    problems.push_back(NormalLayer(gated, 4));
  }
  return problems;
}

Cache FilledFor(const LayerProblem &problem, const CacheForm &form) {
  Cache cache(CacheConfigOf(problem, form, problem.batch, kHeld));
  Random random(7);
  if (form.kind == MHA_CACHE_KIND_PAGED) SpreadBlocks(&random, &cache);
  for (int64_t b = 0; b < problem.batch; b++) {
    cache.Append(
        b, {random.Normals(kHeld * problem.k_width()), random.Normals(kHeld * problem.v_width())});
  }
  return cache;
}

class AskingTest : public AttentionTest {
 protected:
  Outputs Ask(const LayerData &data, const LayerProblem &problem, const Cache &cache,
              uint32_t asked = kAskNothing, const mha_scheduler *scheduler = nullptr,
              mha_sgemm sgemm = nullptr) const {
    const mha_layer_options options = Options(instruction_set(), sgemm);
    const Layer layer = Create(data, &options);
    LayerCall call;
    call.asked = asked;
    call.scheduler = scheduler;
    call.cache = {cache.get(), {1, 0}, kHeld, true};
    return Forward(layer.get(), problem, call);
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(AskingTest);

TEST_P(AskingTest, GivesTheBitsOfALayerWithKeysAndValues) {
  const Scheduler threads(3, RunOnThreads);
  for (const LayerProblem &problem : Problems()) {
    SCOPED_TRACE(Describe(problem));
    const LayerData whole(problem), asking = WithoutKeys(LayerData(problem));
    for (const CacheForm &form :
         {CacheForm{MHA_CACHE_KIND_CONTIGUOUS, 0}, CacheForm{MHA_CACHE_KIND_PAGED, 16}}) {
      const Cache cache = FilledFor(problem, form);
      const Outputs expected = Ask(whole, problem, cache);
      EXPECT_TRUE(SameBits(Ask(asking, problem, cache), expected));
      EXPECT_TRUE(SameBits(Ask(asking, problem, cache, kAskNothing, threads.get()), expected));
      EXPECT_TRUE(SameBits(Ask(asking, problem, cache, kAskNothing, nullptr, PlainSgemm),
                           Ask(whole, problem, cache, kAskNothing, nullptr, PlainSgemm)));
    }
  }
}

TEST_P(AskingTest, IsTheSameInEveryFormAndTypeOfWeights) {
  for (const LayerProblem &problem : Problems()) {
    if (problem.n_q != 5) continue;
    const Cache cache = FilledFor(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0});
    for (const Stored stored :
         {Stored::kF32, Stored::kF16, Stored::kBf16, Stored::kInt8, Stored::kInt4}) {
      LayerForm form;
      form.weight_type = stored;
      for (int which = 0; which < 8; which++) {
        form.layout = which & 1 ? MHA_LAYOUT_OUT_IN : MHA_LAYOUT_IN_OUT;
        form.row_gap = which & 2 ? 3 : 0;
        form.gate_in_q = (which & 4) != 0;
        LayerData whole(problem, Place::kBeforeGuard, form),
            asking = WithoutKeys(LayerData(problem, Place::kBeforeGuard, form));
        const bool is_coded = stored == Stored::kInt8 || stored == Stored::kInt4;
        whole.config.arithmetic = asking.config.arithmetic =
            is_coded && which & 2 ? MHA_ARITHMETIC_INT16 : MHA_ARITHMETIC_F32;
        EXPECT_TRUE(SameBits(Ask(asking, problem, cache), Ask(whole, problem, cache)))
            << Describe(problem) << " " << Describe(form);
      }
    }
  }
}

// ---- Packed

TEST(AskingLayer, IsPackedWithoutRoomForWhatItLacks) {
  for (const LayerProblem &problem : Problems()) {
    for (const mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
      const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
      const LayerData whole(problem), asking = WithoutKeys(LayerData(problem));
      const Memory packed = asking.Pack(&options, 0x00);
      EXPECT_EQ(asking.Pack(&options, 0xff).Bytes(), packed.Bytes());
      const auto panels = [](int64_t columns) { return (columns + 47) / 48 * 48; };
      const int64_t columns = sgemm ? problem.k_width() + problem.v_width()
                                    : panels(problem.k_width()) + panels(problem.v_width());
      const int64_t biases = panels(problem.k_width()) + panels(problem.v_width());
      const size_t least = static_cast<size_t>(4 * (columns * problem.key_dim + biases) -
                                               (sgemm ? 64 : 0));  // but for rounding
      EXPECT_LE(packed.size() + least, whole.PackSize(&options)) << Describe(problem);
      if (!sgemm) {
        EXPECT_LE(whole.PackSize(&options), packed.size() + least + 2 * 64);
      }
    }
  }
}

TEST(AskingLayer, IsViewedAndVerifiedAndHasItsShape) {
  const LayerProblem problem = Problems()[0];
  const LayerData data = WithoutKeys(LayerData(problem));
  Memory buffer = data.Pack();
  buffer.Freeze();
  const View view(buffer);
  ASSERT_EQ(view.status, MHA_OK) << view.error.message;
  EXPECT_EQ(mha_layer_verify(buffer.data(), buffer.size(), nullptr), MHA_OK);
  const Layer created = Create(data);
  const Cache cache = FilledFor(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0});
  LayerCall call;
  call.asked = kAskNothing;
  call.cache = {cache.get(), {}, kHeld, true};
  EXPECT_TRUE(SameBits(Forward(view.layer, problem, call), Forward(created.get(), problem, call)));
  mha_layer_config shape = Zeroed<mha_layer_config>();
  ASSERT_EQ(mha_layer_shape(view.layer, &shape, nullptr), MHA_OK);
  EXPECT_EQ(shape.key_dim, 0);
  EXPECT_EQ(shape.value_dim, 0);
  EXPECT_EQ(shape.num_kv_heads, problem.num_kv_heads);
  EXPECT_EQ(shape.head_dim, problem.head_dim);
  EXPECT_EQ(shape.head_dim_v, problem.head_dim_v);
  mha_layer *again = nullptr;  // the shape makes the layer once more
  ASSERT_EQ(mha_layer_create(&shape, &data.weights, nullptr, &again, nullptr), MHA_OK);
  mha_layer_destroy(again);
}

// ---- Calls

TEST(AskingLayer, NeedsNoWorkspaceAndNoWorkForKeysAndValues) {
  for (const mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    const LayerProblem problem = Problems()[8];
    const LayerData whole(problem), asking = WithoutKeys(LayerData(problem));
    const Cache cache = FilledFor(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0});
    const auto info_of = [&](const LayerData &data) {
      const Layer layer = Create(data, &options);
      LayerCall call;
      call.asked = kAskNothing;
      call.cache = {cache.get(), {}, kHeld, true};
      mha_call_info info = Zeroed<mha_call_info>();
      mha_error error;
      Check(ForwardData(layer.get(), problem, call).Info(&info, &error), error);
      return info;
    };
    const mha_call_info of_whole = info_of(whole), of_asking = info_of(asking);
    EXPECT_EQ(of_asking.operations, of_whole.operations);
    EXPECT_EQ(of_whole.bytes - of_asking.bytes, of_whole.packed_bytes - of_asking.packed_bytes);
    EXPECT_EQ(of_asking.packed_bytes, asking.PackSize(&options));
    const size_t of_sgemm = static_cast<size_t>(4 * problem.batch * problem.n_q *
                                                (problem.k_width() + problem.v_width()));
    EXPECT_EQ(of_whole.workspace_bytes - of_asking.workspace_bytes, sgemm ? of_sgemm : 0);
  }
}

TEST(AskingLayer, RunsOnlyToReadACache) {
  const LayerProblem problem = Problems()[0];
  const Layer layer = Create(WithoutKeys(LayerData(problem)));
  const Cache cache = FilledFor(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0});
  LayerCall call;
  call.asked = kAskNothing;
  for (const bool has_cache : {false, true}) {
    ForwardData data(layer.get(), problem, call);
    data.args.cache = has_cache ? cache.get() : nullptr;
    data.PoisonOutputs();
    mha_error error;
    std::vector<unsigned char> workspace(1 << 20);
    EXPECT_EQ(data.Run(workspace.data(), workspace.size(), &error), MHA_ERROR_INVALID_VALUE);
    EXPECT_EQ(error.argument, 2u);
    EXPECT_EQ(std::string(error.message),
              "cache_read is NULL, but the layer has no W_K and W_V, so it can only attend to a "
              "cache; give cache_read");
    EXPECT_TRUE(data.OutputsAreUntouched());
    size_t bytes = 0;
    EXPECT_EQ(data.Workspace(&bytes, &error), MHA_ERROR_INVALID_VALUE);
  }
}

}  // namespace
