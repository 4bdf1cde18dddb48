// Times FLASH_ATTN_EXT, GATED_DELTA_NET or MUL_MAT with weights of a type on a backend of ggml, for
// llama.py. Weights lie in a buffer type that the device makes for their products: repacked where
// there is one.
//
//     llama_operation DEVICE THREADS ROUNDS HEADS KV_HEADS WIDTH QUERIES KEYS TYPE
//     llama_operation DEVICE THREADS ROUNDS HEADS KEY_HEADS WIDTH TOKENS DECAY_WIDTH
//     llama_operation DEVICE THREADS ROUNDS ROWS INPUTS OUTPUTS TYPE
//
// Prints the seconds of each round. TYPE is a number of ggml_type.

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void fill(ggml_tensor *tensor, float from = -1, float to = 1) {
  const int64_t count = ggml_nelements(tensor);
  std::vector<float> values(static_cast<size_t>(count));
  uint32_t state = 1;
  for (float &value : values) {
    state = state * 1664525 + 1013904223;
    value = from + static_cast<float>(state >> 8) / (1 << 24) * (to - from);
  }
  if (tensor->type == GGML_TYPE_F32) {
    ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    return;
  }
  std::vector<char> stored(ggml_nbytes(tensor));
  ggml_quantize_chunk(tensor->type, values.data(), stored.data(), 0, count / tensor->ne[0],
                      tensor->ne[0], nullptr);
  ggml_backend_tensor_set(tensor, stored.data(), 0, stored.size());
}

ggml_backend_buffer_type_t type_of_weights(ggml_backend_dev_t device, ggml_tensor *product) {
  const auto extra =
      reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  for (ggml_backend_buffer_type_t *type = extra ? extra(device) : nullptr; type && *type; type++) {
    const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(*type, 0));
    product->src[0]->buffer = empty.get();  // of which the device is asked
    const bool is_supported = ggml_backend_dev_supports_op(device, product);
    product->src[0]->buffer = nullptr;
    if (is_supported) return *type;
  }
  return ggml_backend_dev_buffer_type(device);
}

}  // namespace

int main(int count, char **words) {
  if (count < 8 || count > 10) return 2;
  const auto number = [&](int i) { return std::atoll(words[i]); };
  ggml_backend_load_all();
  ggml_backend_dev_t device = ggml_backend_dev_by_name(words[1]);
  if (!device) return 3;
  ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
  const auto set_threads =
      reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
  set_threads(backend.get(), static_cast<int>(number(2)));
  ggml_context_ptr context(
      ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true}));
  ggml_context *const c = context.get();
  ggml_context_ptr weights_context;
  ggml_backend_buffer_ptr weights_buffer;
  ggml_tensor *result, *weights, *mask = nullptr;
  if (count == 10) {
    const int64_t heads = number(4), kv_heads = number(5), width = number(6), queries = number(7),
                  keys = number(8);
    const ggml_type type = static_cast<ggml_type>(number(9));
    const auto rows = [&](ggml_type t, int64_t n, int64_t h) {  // as llama.cpp's caches lie
      return ggml_permute(c, ggml_new_tensor_3d(c, t, width, h, n), 0, 2, 1, 3);
    };
    mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, keys, queries);
    result = ggml_flash_attn_ext(c, rows(GGML_TYPE_F32, queries, heads), rows(type, keys, kv_heads),
                                 rows(type, keys, kv_heads), mask,
                                 1 / std::sqrt(static_cast<float>(width)), 0, 0);
  } else if (count == 9) {
    const int64_t heads = number(4), key_heads = number(5), width = number(6), tokens = number(7);
    const auto rows = [&](int64_t w, int64_t h) {
      return ggml_new_tensor_4d(c, GGML_TYPE_F32, w, h, tokens, 1);
    };
    result = ggml_gated_delta_net(c, rows(width, key_heads), rows(width, key_heads),
                                  rows(width, heads), rows(number(8), heads), rows(1, heads),
                                  ggml_new_tensor_4d(c, GGML_TYPE_F32, width, width, heads, 1), 1);
  } else {
    const int64_t inputs = number(5);
    weights_context.reset(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    weights = ggml_new_tensor_2d(weights_context.get(), static_cast<ggml_type>(number(7)), inputs,
                                 number(6));
    result = ggml_mul_mat(c, weights, ggml_new_tensor_2d(c, GGML_TYPE_F32, inputs, number(4)));
    weights_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_context.get(),
                                                                  type_of_weights(device, result)));
    ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    fill(weights);
    if (!ggml_backend_supports_op(backend.get(), result)) return 4;
  }
  ggml_cgraph *const graph = ggml_new_graph(c);
  ggml_build_forward_expand(graph, result);
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(c, backend.get()));
  for (ggml_tensor *t = ggml_get_first_tensor(c); t; t = ggml_get_next_tensor(c, t)) {
    if (t->op == GGML_OP_NONE && t != mask) fill(t);
  }
  if (result->op == GGML_OP_GATED_DELTA_NET) {  // keys of length 1, decays and betas up to 1
    const float each = std::sqrt(3 / static_cast<float>(number(6)));
    fill(result->src[1], -each, each), fill(result->src[3], -1, 0), fill(result->src[4], 0, 1);
  }
  if (mask) {  // causal; the queries are the last rows
    const int64_t keys = mask->ne[0], queries = mask->ne[1];
    std::vector<ggml_fp16_t> values(static_cast<size_t>(keys * queries));
    for (int64_t i = 0; i < keys * queries; i++) {
      values[static_cast<size_t>(i)] =
          ggml_fp32_to_fp16(i % keys <= keys - queries + i / keys ? 0.0f : -INFINITY);
    }
    ggml_backend_tensor_set(mask, values.data(), 0, ggml_nbytes(mask));
  }
  for (int64_t round = -1; round < number(3); round++) {
    const auto begin = std::chrono::steady_clock::now();
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return 1;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (round >= 0) std::printf("%.9f\n", seconds.count());
  }
}
