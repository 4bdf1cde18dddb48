/* A small layer, computed through the installed library and compared with numbers worked out in
 * double precision; in C99 and in C++. */
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef WITH_OPENBLAS
#include <mha_openblas.h>
#endif

enum { n = 3, width = 4, heads = 2 };

static const float expected[n * width] = {
    0.640625000f,  -1.156250000f, 0.484375000f, -1.484375000f,  /* row 0 sees itself only */
    0.667038285f,  -1.031985315f, 0.241142669f, -1.019055349f,  /* row 1 sees two */
    -0.664366284f, -1.813540621f, 1.409164118f, -2.132034774f}; /* row 2 sees all three */

static void fill(float *values, int count, int step) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * step % 11 - 5) / 4;
}

int main(void) {
  static float x[n * width], w_qkv[width * 3 * width], b_qkv[3 * width], w_o[width * width],
      y[n * width];
  fill(x, n * width, 3);
  fill(w_qkv, width * 3 * width, 7);
  fill(b_qkv, 3 * width, 5);
  fill(w_o, width * width, 4);

  if (mha_version() != 10000 * MHA_VERSION_MAJOR + 100 * MHA_VERSION_MINOR + MHA_VERSION_PATCH) {
    printf("The library is version %u, the header another\n", (unsigned)mha_version());
    return 1;
  }

  static mha_layer_config config;
  static mha_layer_weights weights;
  static mha_layer_options options;
  static mha_forward_args args;
  config.struct_size = sizeof config, config.query_dim = width, config.num_heads = heads;
  weights.struct_size = sizeof weights, weights.w_qkv.data = w_qkv, weights.w_qkv.bias = b_qkv;
  weights.w_o.data = w_o;
  options.struct_size = sizeof options;
#ifdef WITH_OPENBLAS
  options.sgemm = mha_openblas_sgemm;
  printf("OpenBLAS runs its kernels for %s\n", mha_openblas_core_name());
#endif
  mha_layer *layer;
  mha_error error;
  if (mha_layer_create(&config, &weights, &options, &layer, &error)) {
    printf("mha_layer_create: %s\n", error.message);
    return 1;
  }

  args.struct_size = sizeof args, args.call.n_q = n, args.call.flags = MHA_CAUSAL;
  args.query.data = x, args.output.data = y;
  size_t bytes;
  if (mha_forward_workspace(layer, &args, &bytes, &error)) {
    printf("mha_forward_workspace: %s\n", error.message);
    return 1;
  }
  void *workspace = malloc(bytes);
  if (mha_forward(layer, &args, workspace, bytes, &error)) {
    printf("mha_forward: %s\n", error.message);
    return 1;
  }
  free(workspace);
  mha_layer_destroy(layer);

  for (int i = 0; i < n * width; i++) {
    float difference = y[i] - expected[i];
    if (!(difference < 2e-6f && difference > -2e-6f)) {
      printf("y[%d][%d] is %.9g, expected %.9g\n", i / width, i % width, y[i], expected[i]);
      return 1;
    }
  }
  printf("%d numbers as expected\n", n * width);
  return 0;
}
