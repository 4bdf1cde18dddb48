/*
 * A layer with a recurrent state, as three of four layers of Qwen3-Next and Qwen3.5 are: products,
 * the short convolution, the gated delta rule, a gated norm and W_O. Words in comments are those of
 * the model's files, under linear_attn. A prompt goes through at once, then drafted tokens, some of
 * which are rejected; the rows have the bits of all tokens at once, and are compared with a
 * reference in double precision.
 */
#include <math.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In the model of 80 billion weights 2048, 16, 32 and 128. The columns of the first product are q,
 * k, v, z, then beta and decay, one of each for a value head. */
enum { width = 48, key_heads = 2, value_heads = 4, dim = 16, kernel_size = 4 };
enum { keys = key_heads * dim, values = value_heads * dim, channels = 2 * keys + values };
enum { at_z = channels, at_beta = at_z + values, at_decay = at_beta + value_heads };
enum { columns = at_decay + value_heads, tokens = 40, prompt = 30, state_size = values * dim };

struct block {
  float w_in[columns * width], w_out[width * values]; /* in_proj_qkvz, in_proj_ba; out_proj */
  float conv[channels * kernel_size];                 /* conv1d.weight */
  float a_log[value_heads], dt_bias[value_heads], norm[dim];
  mha_layer *in, *out;
  float rows[(kernel_size - 1) * channels], state[state_size]; /* of the sequence; at first 0 */
};

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

static void fill(float *numbers, int count, float size) {
  for (int i = 0; i < count; i++) numbers[i] = size * ((float)rand() / (float)RAND_MAX * 2 - 1);
}

static mha_layer *make_linear(int inputs, int outputs, const float *w) {
  mha_linear_weights weights = {.struct_size = sizeof weights, .layout = MHA_LAYOUT_OUT_IN};
  weights.input_dim = inputs;
  weights.output_dim = outputs;
  weights.w.data = w;
  mha_layer *layer;
  mha_error error;
  check(mha_linear_create(&weights, NULL, &layer, &error), &error);
  return layer;
}

static void linear(const mha_layer *layer, int n, const float *x, float *y) {
  mha_linear_args args = {.struct_size = sizeof args, .rows = n, .x.data = x, .output.data = y};
  mha_error error;
  check(mha_linear(layer, &args, NULL, 0, &error), &error); /* one thread needs no workspace */
}

static void convolve(const mha_causal_conv_args *args) {
  mha_error error;
  size_t bytes;
  check(mha_causal_conv_workspace(args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_causal_conv(args, workspace, bytes, &error), &error);
  free(workspace);
}

static void attend(const mha_recurrent_args *args) {
  mha_error error;
  size_t bytes;
  check(mha_recurrent_attention_workspace(args, &bytes, &error), &error);
  void *workspace = malloc(bytes); /* a model keeps one for all of its layers */
  check(mha_recurrent_attention(args, workspace, bytes, &error), &error);
  free(workspace);
}

/* The next n rows of the sequence, of which the first `kept` count. */
static void run(struct block *b, int n, int kept, const float *x, float *y) {
  static float p[tokens * columns], qkv[tokens * channels], o[tokens * values];
  static float snapshots[16 * state_size];
  linear(b->in, n, x, p);

  mha_causal_conv_args conv = {.struct_size = sizeof conv, .channels = channels, .batch = 1};
  conv.kernel_size = kernel_size;
  conv.weights = b->conv;
  conv.activation = MHA_FUNCTION_SILU;
  conv.rows = n;
  conv.x.data = p;
  conv.x.strides.row = columns;
  conv.output.data = qkv;
  conv.state = b->rows;
  conv.state_out = kept == n ? b->rows : NULL;
  convolve(&conv);

  mha_recurrent_args args = {.struct_size = sizeof args, .batch = 1, .rows = n};
  args.num_q_heads = args.num_k_heads = key_heads;
  args.num_v_heads = value_heads;
  args.head_dim = dim;
  args.norm_epsilon = 1e-6f;
  args.a_log = b->a_log;
  args.dt_bias = b->dt_bias;
  args.beta_function = MHA_FUNCTION_SIGMOID;
  args.q.data = qkv;
  args.k.data = qkv + keys;
  args.v.data = qkv + 2 * keys;
  args.q.strides.row = args.k.strides.row = args.v.strides.row = channels;
  args.beta.data = p + at_beta;
  args.decay.data = p + at_decay;
  args.beta.strides.row = args.decay.strides.row = columns;
  args.output.data = o;
  args.state = b->state;
  if (kept == n)
    args.state_out = b->state;
  else {
    args.snapshots = snapshots;
    args.num_snapshots = n - kept;
  }
  attend(&args);

  if (kept < n) { /* back to the rows and to the state after the last row that is kept */
    memcpy(b->state, snapshots + (n - kept - 1) * state_size, sizeof b->state);
    conv.rows = kept;
    conv.state_out = b->rows;
    convolve(&conv);
  }

  for (int i = 0; i < n * value_heads; i++) { /* norm(o) * silu(z) */
    float *head = o + i * dim, mean = 0;
    const float *z = p + i / value_heads * columns + at_z + i % value_heads * dim;
    for (int j = 0; j < dim; j++) mean += head[j] * head[j] / dim;
    for (int j = 0; j < dim; j++)
      head[j] = head[j] / sqrtf(mean + 1e-6f) * b->norm[j] * z[j] / (1 + expf(-z[j]));
  }
  linear(b->out, n, o, y);
}

static double silu(double x) { return x / (1 + exp(-x)); }

/* All of that by its definition, in double precision: y [tokens, width]. */
static void reference(const struct block *b, const float *x, double *y) {
  static double p[tokens][columns], state[value_heads][dim][dim];
  for (int t = 0; t < tokens; t++) {
    double qkv[channels] = {0}, o[values];
    for (int c = 0; c < columns; c++)
      for (int i = 0; i < width; i++) p[t][c] += (double)x[t * width + i] * b->w_in[c * width + i];
    for (int c = 0; c < channels; c++) {
      for (int j = 0, from = t - (kernel_size - 1); j < kernel_size; j++, from++)
        if (from >= 0) qkv[c] += b->conv[c * kernel_size + j] * p[from][c];
      qkv[c] = silu(qkv[c]);
    }
    for (int h = 0; h < value_heads; h++) {
      const double *q = qkv + h / (value_heads / key_heads) * dim, *k = q + keys;
      const double *v = qkv + 2 * keys + h * dim, *z = p[t] + at_z + h * dim;
      const double softplus = log1p(exp(p[t][at_decay + h] + b->dt_bias[h]));
      const double decay = exp(-exp(b->a_log[h]) * softplus),
                   beta = 1 / (1 + exp(-p[t][at_beta + h]));
      double qq = 1e-6, kk = 1e-6, mean = 0;
      for (int i = 0; i < dim; i++) {
        qq += q[i] * q[i];
        kk += k[i] * k[i];
      }
      for (int j = 0; j < dim; j++) {
        double recalled = 0, sum = 0;
        for (int i = 0; i < dim; i++) recalled += k[i] / sqrt(kk) * (state[h][i][j] *= decay);
        for (int i = 0; i < dim; i++) {
          state[h][i][j] += k[i] / sqrt(kk) * beta * (v[j] - recalled);
          sum += q[i] / sqrt(qq) * state[h][i][j];
        }
        o[h * dim + j] = sum / sqrt(dim);
        mean += sum * sum / dim / dim;
      }
      for (int j = 0; j < dim; j++) o[h * dim + j] *= b->norm[j] * silu(z[j]) / sqrt(mean + 1e-6);
    }
    for (int c = 0; c < width; c++) {
      y[t * width + c] = 0;
      for (int i = 0; i < values; i++) y[t * width + c] += b->w_out[c * values + i] * o[i];
    }
  }
}

int main(void) {
  static struct block block;
  static float x[tokens * width], whole[tokens * width], y[tokens * width];
  static double exact[tokens * width];
  struct block *b = &block;
  fill(b->w_in, columns * width, 0.4f);
  fill(b->w_out, width * values, 0.3f);
  fill(b->conv, channels * kernel_size, 1);
  fill(b->a_log, value_heads, 1);
  fill(b->dt_bias, value_heads, 2);
  fill(b->norm, dim, 2);
  fill(x, tokens * width, 1);
  b->in = make_linear(width, columns, b->w_in);
  b->out = make_linear(values, width, b->w_out);

  reference(b, x, exact);
  run(b, tokens, tokens, x, whole); /* all at once */
  memset(b->rows, 0, sizeof b->rows);
  memset(b->state, 0, sizeof b->state);
  run(b, prompt, prompt, x, y);
  for (int t = prompt; t < tokens; t++) /* of three drafted tokens, one is kept */
    run(b, t + 3 <= tokens ? 3 : 1, 1, x + t * width, y + t * width);
  double error = 0, largest = 0;
  for (int i = 0; i < tokens * width; i++) {
    error = fmax(error, fabs(y[i] - exact[i]));
    largest = fmax(largest, fabs(exact[i]));
  }
  const int differ = memcmp(y, whole, sizeof y) != 0;
  printf(
      "a prompt of %d and drafted tokens: %s at once; %.0e of the largest number from double "
      "precision\n",
      prompt, differ ? "other bits than all" : "the same bits as all", error / largest);
  mha_layer_destroy(b->in);
  mha_layer_destroy(b->out);
  return differ || error > 1e-5 * largest;
}
