// Runs a model of llama.cpp and writes its logits to a file, for llama_models.py:
//
//     llama_models MODEL FLASH SCENARIO LOGITS
//
// FLASH is auto, on or off. Tokens are numbers that depend on nothing, so that logits of several
// runs can be compared. Threads: LLAMA_MODELS_THREADS; types of keys and values:
// LLAMA_MODELS_TYPES, such as 8 (q8_0).

#include <llama.h>

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
  llama_model *const model = llama_model_load_from_file(words[1], llama_model_default_params());
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
    params.n_seq_max = scenario == "one" || scenario == "shift" ? 1 : 4;
    params.kv_unified = scenario == "unified" || scenario == "prefix";
    Run run(model, params, file);
    (scenario == "one"      ? one
     : scenario == "shift"  ? shift
     : scenario == "prefix" ? prefix
                            : four)(run);
  }
  return std::fclose(file) == 0 ? 0 : 1;
}
