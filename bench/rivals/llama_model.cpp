// Times a model of llama.cpp, for llama.py: a prompt, and tokens at depths, which are read on the
// way through it.
//
//     llama_model MODEL FLASH THREADS PROMPT TOKENS DEPTH ...
//
// FLASH is 0 or 1, and 2 or 3 without reordering weights (--no-repack). Prints one line of JSON:
// seconds of a token of the prompt; of a token at each depth, the median; and the resident memory
// at the end in MB.

#include <ggml-cpu.h>
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kBatch = 512;

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "llama_model: %s\n", what);
  std::exit(1);
}

double seconds_of(llama_context *context, int vocabulary, int first, int count) {
  std::vector<llama_token> tokens;
  for (int i = first; i < first + count; i++) tokens.push_back((i * 37 + 11) % vocabulary);
  const auto start = std::chrono::steady_clock::now();
  if (llama_decode(context, llama_batch_get_one(tokens.data(), count))) fail("llama_decode failed");
  llama_synchronize(context);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double resident_mb() {
  long pages = 0;
  FILE *const file = std::fopen("/proc/self/statm", "r");
  if (!file || std::fscanf(file, "%*d %ld", &pages) != 1) fail("no /proc/self/statm");
  std::fclose(file);
  return static_cast<double>(pages) * 4096 / 1e6;
}

}  // namespace

int main(int count, char **words) {
  if (count < 6) return 2;
  const int threads = std::atoi(words[3]), prompt = std::atoi(words[4]),
            tokens = std::atoi(words[5]);
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  ggml_backend_load_all();
  llama_model_params of_model = llama_model_default_params();
  of_model.use_extra_bufts = words[2][0] < '2';
  llama_model *const model = llama_model_load_from_file(words[1], of_model);
  if (!model) fail("the model cannot be loaded");
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(prompt + tokens);
  params.n_batch = params.n_ubatch = kBatch;
  params.n_threads = params.n_threads_batch = threads;
  params.flash_attn_type =
      words[2][0] % 2 == 1 ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context *const context = llama_init_from_model(model, params);
  if (!context) fail("no context");
  // As llama.cpp's programs do; otherwise each graph makes a pool.
  const auto make_pool =
      reinterpret_cast<decltype(&ggml_threadpool_new)>(ggml_backend_reg_get_proc_address(
          ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)),
          "ggml_threadpool_new"));
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
  llama_attach_threadpool(context, make_pool(&pool_params), nullptr);
  llama_memory_t memory = llama_get_memory(context);
  seconds_of(context, vocabulary, 0, std::min(kBatch, prompt));  // to warm up
  seconds_of(context, vocabulary, 0, 1);
  llama_memory_clear(memory, true);

  double of_prompt = 0;
  std::printf("{");
  int at = 0;
  for (int i = 6; i <= count; i++) {
    const int depth = i < count ? std::atoi(words[i]) : prompt;
    for (int n; at < depth; at += n) {
      n = std::min(kBatch, depth - at);
      of_prompt += seconds_of(context, vocabulary, at, n);
    }
    if (i == count) break;
    std::vector<double> each;
    for (int j = 0; j < tokens; j++) each.push_back(seconds_of(context, vocabulary, depth + j, 1));
    llama_memory_seq_rm(memory, 0, depth, -1);
    std::nth_element(each.begin(), each.begin() + tokens / 2, each.end());
    std::printf("\"token at %d\": %.9f, ", depth, each[static_cast<size_t>(tokens) / 2]);
  }
  std::printf("\"prompt\": %.9f, \"resident MB\": %.1f}\n", of_prompt / prompt, resident_mb());
  llama_free(context);
  llama_model_free(model);
  return 0;
}
