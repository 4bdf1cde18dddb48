#include "example.h"

namespace command {
namespace {

constexpr int64_t kTokens = 3;
constexpr int64_t kWidth = 6;
constexpr int64_t kHeads = 2;
constexpr int64_t kHeadDim = 3;

const float kX[kTokens * kWidth] = {
    1, 2, 3, 4, 5, 6,  //
    6, 5, 4, 3, 2, 1,  //
    1, 1, 1, 1, 1, 1,
};
const float kWq[kWidth * kWidth] = {
    0.4993f, 0.2528f, 0.9087f, 0.4387f, 0.0761f, 0.6710f,  //
    0.4096f, 0.0766f, 0.3847f, 0.5818f, 0.5646f, 0.5658f,  //
    0.2798f, 0.7151f, 0.1058f, 0.6133f, 0.2456f, 0.3947f,  //
    0.5394f, 0.9090f, 0.6069f, 0.5502f, 0.2611f, 0.0625f,  //
    0.9705f, 0.0770f, 0.5557f, 0.5505f, 0.4124f, 0.5342f,  //
    0.1674f, 0.8521f, 0.7174f, 0.2237f, 0.0440f, 0.4619f,
};
const float kWk[kWidth * kWidth] = {
    0.2858f, 0.4111f, 0.6800f, 0.7871f, 0.7942f, 0.9427f,  //
    0.2936f, 0.8079f, 0.2960f, 0.4484f, 0.4080f, 0.0224f,  //
    0.6710f, 0.9872f, 0.1064f, 0.0914f, 0.7141f, 0.2901f,  //
    0.4991f, 0.7919f, 0.2702f, 0.5881f, 0.2960f, 0.7207f,  //
    0.2867f, 0.9855f, 0.7803f, 0.1783f, 0.6278f, 0.9921f,  //
    0.7149f, 0.9552f, 0.8109f, 0.9274f, 0.8857f, 0.5978f,
};
const float kWv[kWidth * kWidth] = {
    0.0403f, 0.9850f, 0.9636f, 0.2161f, 0.2303f, 0.7819f,  //
    0.6405f, 0.3427f, 0.0892f, 0.8515f, 0.8595f, 0.4642f,  //
    0.8738f, 0.0162f, 0.1105f, 0.0801f, 0.5262f, 0.2379f,  //
    0.0604f, 0.5162f, 0.9510f, 0.8857f, 0.4536f, 0.1404f,  //
    0.3554f, 0.6543f, 0.0071f, 0.3822f, 0.7250f, 0.8788f,  //
    0.4789f, 0.0458f, 0.6999f, 0.9771f, 0.9141f, 0.1221f,
};

const float kGroupedQ[kHeads * kTokens * kHeadDim] = {
    0.0299f, 0.7057f, 0.1425f, 0.5029f, 0.6294f, 0.3265f, 0.8386f, 0.7803f, 0.8877f,  // head 1
    0.0808f, 0.7281f, 0.7343f, 0.5948f, 0.8757f, 0.6526f, 0.8280f, 0.1269f, 0.9827f,  // head 2
};
const float kGroupedK[kHeads * kTokens * kHeadDim] = {
    0.2260f, 0.7611f, 0.6772f, 0.7446f, 0.4209f, 0.6467f, 0.4521f, 0.1769f, 0.1615f,  // head 1
    0.6787f, 0.7103f, 0.8188f, 0.5338f, 0.8099f, 0.9866f, 0.0227f, 0.4601f, 0.4753f,  // head 2
};
const float kGroupedV[kHeads * kTokens * kHeadDim] = {
    0.8375f, 0.7430f, 0.8563f, 0.1214f, 0.1560f, 0.0729f, 0.1887f, 0.9912f, 0.1640f,  // head 1
    0.7458f, 0.6515f, 0.1220f, 0.6801f, 0.4366f, 0.6720f, 0.8135f, 0.6831f, 0.7280f,  // head 2
};

}  // namespace

LayerWeights example_weights() {
  LayerWeights layer = {};
  layer.name = "the worked example";
  layer.config.struct_size = sizeof layer.config;
  layer.config.query_dim = kWidth;
  layer.config.num_heads = kHeads;
  layer.weights.struct_size = sizeof layer.weights;
  layer.weights.layout = MHA_LAYOUT_IN_OUT;
  layer.weights.w_q = kWq;
  layer.weights.w_k = kWk;
  layer.weights.w_v = kWv;
  return layer;
}

CallInputs example_inputs() {
  CallInputs inputs;
  inputs.query.name = "the worked example";
  inputs.query.shape = {1, kTokens, kWidth};
  inputs.query.data = kX;
  inputs.is_causal = true;
  return inputs;
}

GroupedExample grouped_example() { return {kGroupedQ, kGroupedK, kGroupedV, kHeads, kTokens, kHeadDim}; }

}  // namespace command
