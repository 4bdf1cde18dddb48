// Runs a model of llama.cpp and writes its logits to a file, for llama_test.py:
//
//     llama_models MODEL FLASH SCENARIO LOGITS
//
// FLASH is auto, on or off. Tokens are numbers that depend on nothing, so that logits of several
// runs can be compared. Threads: LLAMA_MODELS_THREADS; types of keys and values:
// LLAMA_MODELS_TYPES, such as 8 (q8_0); the device of all weights: LLAMA_MODELS_WEIGHTS. The
// scenario save writes the model to LOGITS.

#include <gguf.h>
#include <llama.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "llama_models: %s\n", what);
  std::exit(1);
}

class Run {
 public:
  Run(llama_model *model, llama_context_params params, FILE *file)
      : file_(file),
        n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))),
        context_(llama_init_from_model(model, params)),
        batch_(llama_batch_init(2048, 0, 1)) {
    if (!context_) fail("no context");
  }
  ~Run() {
    llama_batch_free(batch_);
    llama_free(context_);
  }

  llama_context *context() { return context_; }
  llama_memory_t memory() { return llama_get_memory(context_); }

  // A token of a sequence; those of other sequences may come between.
  void add(int sequence, int position, bool has_logits = false) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = (position * 37 + sequence * 101 + 11) % n_vocab_;
    batch_.pos[i] = position;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = has_logits;
  }

  void decode() {
    if (llama_decode(context_, batch_)) fail("llama_decode failed");
    for (int i = 0; i < batch_.n_tokens; i++) {
      if (batch_.logits[i]) {
        std::fwrite(llama_get_logits_ith(context_, i), sizeof(float), static_cast<size_t>(n_vocab_),
                    file_);
      }
    }
    batch_.n_tokens = 0;
  }

  // Rows of one sequence, the logits of the last; then tokens one by one.
  void prompt(int sequence, int from, int to) {
    for (int i = from; i < to; i++) add(sequence, i, i == to - 1);
    decode();
  }
  void step(int sequence, int from, int count) {
    for (int i = from; i < from + count; i++) prompt(sequence, i, i + 1);
  }

 private:
  FILE *file_;
  int n_vocab_;
  llama_context *context_;
  llama_batch batch_;
};

void one(Run &run) {
  run.prompt(0, 0, 300);  // in three parts, of which two have no logits
  run.step(0, 300, 8);
  run.prompt(0, 308, 330);
}

void four(Run &run) {
  for (int i = 0; i < 90; i++) {
    for (int s = 0; s < 4; s++) {
      if (i < 30 + 20 * s) run.add(s, i, i == 29 + 20 * s);
    }
  }
  run.decode();
  for (int i = 0; i < 6; i++) {
    for (int s = 0; s < 4; s++) run.add(s, 30 + 20 * s + i, true);
    run.decode();
  }
}

void prefix(Run &run) {
  run.prompt(0, 0, 100);
  for (int s = 1; s < 4; s++) llama_memory_seq_cp(run.memory(), 0, s, -1, -1);
  for (int i = 100; i < 105; i++) {
    for (int s = 0; s < 4; s++) run.add(s, i, true);
    run.decode();
  }
}

void shift(Run &run) {
  run.prompt(0, 0, 200);
  if (!llama_memory_can_shift(run.memory())) return;
  llama_memory_seq_rm(run.memory(), 0, 10, 60);
  llama_memory_seq_add(run.memory(), 0, 60, -1, -50);
  run.step(0, 150, 6);
  run.prompt(0, 156, 220);
}

std::vector<float> numbers_of(int64_t count) {
  std::vector<float> numbers(static_cast<size_t>(count));
  for (size_t i = 0; i < numbers.size(); i++) numbers[i] = std::sin(static_cast<float>(i * i));
  return numbers;
}

// A LoRA for every matrix of the model's layers.
llama_adapter_lora *load_lora(llama_model *model, char **words, ggml_type type, int64_t rank) {
  ggml_context *of_model = nullptr, *const context = ggml_init({64 << 20, nullptr, false});
  gguf_context *const lora = gguf_init_empty();
  gguf_set_kv(lora, gguf_init_from_file(words[1], {true, &of_model}));
  gguf_set_val_str(lora, "general.type", "adapter");
  gguf_set_val_str(lora, "adapter.type", "lora");
  gguf_set_val_f32(lora, "adapter.lora.alpha", 0.2f);
  for (ggml_tensor *w = ggml_get_first_tensor(of_model); w; w = ggml_get_next_tensor(of_model, w)) {
    if (std::strncmp(w->name, "blk.", 4) != 0 || ggml_n_dims(w) != 2) continue;
    for (const bool is_a : {true, false}) {
      ggml_tensor *const matrix =
          ggml_new_tensor_2d(context, type, is_a ? w->ne[0] : rank, is_a ? rank : w->ne[1]);
      ggml_quantize_chunk(type, numbers_of(ggml_nelements(matrix)).data(), matrix->data, 0,
                          matrix->ne[1], matrix->ne[0], nullptr);
      gguf_add_tensor(lora, ggml_format_name(matrix, "%s.lora_%c", w->name, is_a ? 'a' : 'b'));
    }
  }
  const std::string path = std::string(words[4]) + ".lora";
  gguf_write_to_file(lora, path.c_str(), false);
  return llama_adapter_lora_init(model, path.c_str());
}

// The tokens of one(), with two LoRAs, of a rank that is no multiple of anything and of quantised
// matrices; then with one of them and another factor; then without.
void lora(Run &run, llama_model *model, char **words) {
  llama_adapter_lora *adapters[] = {load_lora(model, words, GGML_TYPE_F16, 5),
                                    load_lora(model, words, GGML_TYPE_Q8_0, 32)};
  if (!adapters[0] || !adapters[1]) fail("no LoRA");
  float factors[] = {1, 0.5f};
  llama_set_adapters_lora(run.context(), adapters, 2, factors);
  run.prompt(0, 0, 300);
  factors[0] = -0.5f;
  llama_set_adapters_lora(run.context(), adapters, 1, factors);
  run.step(0, 300, 8);
  llama_set_adapters_lora(run.context(), nullptr, 0, nullptr);
  run.prompt(0, 308, 330);
}

void control(Run &run, const llama_model *model) {
  const int width = llama_model_n_embd(model), layers = llama_model_n_layer(model);
  const std::vector<float> numbers = numbers_of(width * (layers - 1));
  if (llama_set_adapter_cvec(run.context(), numbers.data(), numbers.size(), width, 1, layers))
    fail("no control vector");
  one(run);
}

// Several contexts at once, each on a thread of its own.
void together(llama_model *model, const llama_context_params &params, FILE *file) {
  FILE *files[] = {file, std::tmpfile(), std::tmpfile()};
  std::vector<std::thread> threads;
  for (FILE *each : files) {
    threads.emplace_back([&, each] {
      Run run(model, params, each);
      one(run);
    });
  }
  for (std::thread &thread : threads) thread.join();
}

}  // namespace

int main(int count, char **words) {
  if (count != 5) return 2;
  const std::string flash = words[2], scenario = words[3];
  llama_log_set(
      [](ggml_log_level level, const char *text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN || std::strstr(text, "Flash")) std::fputs(text, stderr);
      },
      nullptr);
  ggml_backend_load_all();
  llama_model_params of_model = llama_model_default_params();
  of_model.use_extra_bufts = scenario != "save";  // llama.cpp cannot read its repacked weights
  llama_model_tensor_buft_override overrides[] = {{nullptr, nullptr}, {nullptr, nullptr}};
  if (const char *const device = std::getenv("LLAMA_MODELS_WEIGHTS")) {
    overrides[0] = {".", ggml_backend_dev_buffer_type(ggml_backend_dev_by_name(device))};
    of_model.tensor_buft_overrides = overrides;
  }
  llama_model *const model = llama_model_load_from_file(words[1], of_model);
  if (model && scenario == "save") {
    llama_model_save_to_file(model, words[4]);
    return 0;
  }
  FILE *const file = std::fopen(words[4], "wb");
  if (!model || !file) fail("no model, or no file for logits");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 1024;
  params.n_batch = 1024;
  params.n_ubatch = 128;
  params.flash_attn_type = flash == "on"    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                           : flash == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                            : LLAMA_FLASH_ATTN_TYPE_AUTO;
  const char *const threads = std::getenv("LLAMA_MODELS_THREADS");
  params.n_threads = params.n_threads_batch = threads ? std::atoi(threads) : 2;
  const char *const types = std::getenv("LLAMA_MODELS_TYPES");
  if (types) params.type_k = params.type_v = static_cast<ggml_type>(std::atoi(types));
  if (scenario == "together") {
    together(model, params, file);
  } else {
    params.kv_unified = scenario == "unified" || scenario == "prefix";
    params.n_seq_max = params.kv_unified || scenario == "four" ? 4 : 1;
    Run run(model, params, file);
    if (scenario == "lora") {
      lora(run, model, words);
    } else if (scenario == "control") {
      control(run, model);
    } else {
      (scenario == "one"      ? one
       : scenario == "shift"  ? shift
       : scenario == "prefix" ? prefix
                              : four)(run);
    }
  }
  return std::fclose(file) == 0 ? 0 : 1;
}
