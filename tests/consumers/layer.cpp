// What layer.c computes, from C++: its numbers, and a second call for two sequences that must give the first one's bits twice.
#include <mha.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int n = 3, width = 4, heads = 2;

// Worked out in double precision.
constexpr float expected[n * width] = {0.640625000f,  -1.156250000f, 0.484375000f,  -1.484375000f, 0.667038285f, -1.031985315f,
                                       0.241142669f,  -1.019055349f, -0.664366284f, -1.813540621f, 1.409164118f, -2.132034774f};

std::vector<float> filled(int count, int step) {
  std::vector<float> values;
  for (int i = 0; i < count; i++) values.push_back(static_cast<float>(i * step % 11 - 5) / 4);
  return values;
}

int fail(const char *where, const mha_error &error) {
  std::printf("%s: %s\n", where, error.message);
  return 1;
}

}  // namespace

int main() {
  std::vector<float> x = filled(n * width, 3);
  const std::vector<float> w_qkv = filled(width * 3 * width, 7), b_qkv = filled(3 * width, 5), w_o = filled(width * width, 4);

  mha_layer_config config = {};
  config.struct_size = sizeof config;
  config.query_dim = width;
  config.num_heads = heads;
  mha_layer_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.w_qkv = w_qkv.data();
  weights.b_qkv = b_qkv.data();
  weights.w_o = w_o.data();
  mha_layer *created = nullptr;
  mha_error error;
  if (mha_layer_create(&config, &weights, nullptr, &created, &error)) return fail("mha_layer_create", error);
  const std::unique_ptr<mha_layer, decltype(&mha_layer_destroy)> layer(created, mha_layer_destroy);

  x.resize(2 * n * width);
  std::memcpy(x.data() + n * width, x.data(), n * width * sizeof(float));
  std::vector<float> y(x.size());
  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.batch = 2;
  args.n_q = n;
  args.query = x.data();
  args.output = y.data();
  args.flags = MHA_CAUSAL;
  size_t bytes = 0;
  if (mha_forward_workspace(layer.get(), &args, &bytes, &error)) return fail("mha_forward_workspace", error);
  std::vector<unsigned char> workspace(bytes);
  if (mha_forward(layer.get(), &args, workspace.data(), bytes, &error)) return fail("mha_forward", error);

  for (int i = 0; i < n * width; i++) {
    const float difference = y[i] - expected[i];
    if (!(difference < 2e-6f && difference > -2e-6f)) {
      std::printf("y[%d][%d] is %.9g, expected %.9g\n", i / width, i % width, y[i], expected[i]);
      return 1;
    }
  }
  if (std::memcmp(y.data(), y.data() + n * width, n * width * sizeof(float)) != 0) {
    std::printf("the same sequence twice has different bits\n");
    return 1;
  }
  std::printf("%d numbers as expected, from C++\n", n * width);
}
