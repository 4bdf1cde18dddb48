// Products by the packed weights of the module's device MHA_WEIGHTS, for llama_test.py:
//
//     llama_products TYPE OUTPUTS ROWS INPUTS BATCH BATCH    a shape of test-backend-ops -o MUL_MAT
//
// Prints the squared error, of that of the product in double precision. TYPE is a name of ggml.

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

int main(int count, char **words) {
  if (count != 7) return 2;
  int type = 0;
  while (type < GGML_TYPE_COUNT &&
         std::strcmp(ggml_type_name(static_cast<ggml_type>(type)), words[1]) != 0) {
    type++;
  }
  const auto number = [&](int i) { return static_cast<size_t>(std::atoll(words[i])); };
  const size_t outputs = number(2), inputs = number(4), rows = number(3) * number(5) * number(6);
  ggml_backend_load_all();
  const ggml_backend_dev_t device = ggml_backend_dev_by_name("MHA_WEIGHTS");
  if (!device) return 3;
  const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
  const auto make_context = [] {
    return ggml_context_ptr(
        ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true}));
  };
  const ggml_context_ptr context = make_context(), of_weights = make_context();
  ggml_tensor *const w = ggml_new_tensor_2d(of_weights.get(), static_cast<ggml_type>(type),
                                            static_cast<int64_t>(inputs),
                                            static_cast<int64_t>(outputs)),
                     *const x = ggml_new_tensor_4d(
                         context.get(), GGML_TYPE_F32, static_cast<int64_t>(inputs),
                         std::atoll(words[3]), std::atoll(words[5]), std::atoll(words[6])),
                     *const y = ggml_mul_mat(context.get(), w, x);
  const ggml_backend_buffer_ptr weights(ggml_backend_alloc_ctx_tensors_from_buft(
      of_weights.get(), ggml_backend_dev_buffer_type(device))),
      others(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));
  if (!ggml_backend_supports_op(backend.get(), y)) return 4;

  std::mt19937 random;
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> w_floats(outputs * inputs), x_floats(rows * inputs), y_floats(rows * outputs);
  for (float &value : w_floats) value = uniform(random);
  for (float &value : x_floats) value = uniform(random);
  std::vector<char> blocks(ggml_nbytes(w));
  ggml_quantize_chunk(w->type, w_floats.data(), blocks.data(), 0, w->ne[1], w->ne[0], nullptr);
  ggml_get_type_traits(w->type)->to_float(blocks.data(), w_floats.data(), ggml_nelements(w));
  ggml_backend_tensor_set(w, blocks.data(), 0, blocks.size());
  ggml_backend_tensor_set(x, x_floats.data(), 0, ggml_nbytes(x));
  ggml_cgraph *const graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, y);
  if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return 5;
  ggml_backend_tensor_get(y, y_floats.data(), 0, ggml_nbytes(y));

  double error = 0, norm = 0;
  for (size_t i = 0; i < rows * outputs; i++) {
    double expected = 0;
    for (size_t j = 0; j < inputs; j++) {
      expected += static_cast<double>(w_floats[i % outputs * inputs + j]) *
                  x_floats[i / outputs * inputs + j];
    }
    error += (y_floats[i] - expected) * (y_floats[i] - expected), norm += expected * expected;
  }
  std::printf("%g\n", error / norm);
  return 0;
}
