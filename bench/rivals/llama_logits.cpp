// The logits of llama.cpp after a prompt, which its bench tool does not give:
//
//     llama_logits MODEL PROMPT LOGITS        PROMPT: a file of numbers of tokens; LOGITS: a file
//     of float32

#include <llama.h>

#include <cstdio>
#include <vector>

int main(int count, char **words) {
  if (count != 4) return 2;
  std::vector<llama_token> tokens;
  FILE *const prompt = std::fopen(words[2], "r");
  for (int token; prompt && std::fscanf(prompt, "%d", &token) == 1;) tokens.push_back(token);
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  ggml_backend_load_all();
  llama_model *const model = llama_model_load_from_file(words[1], llama_model_default_params());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = static_cast<uint32_t>(tokens.size());
  llama_context *const context = model ? llama_init_from_model(model, params) : nullptr;
  if (!context || llama_decode(context, llama_batch_get_one(tokens.data(),
                                                            static_cast<int32_t>(tokens.size()))))
    return 1;
  const size_t size = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  FILE *const file = std::fopen(words[3], "wb");
  return file &&
                 std::fwrite(llama_get_logits_ith(context, -1), sizeof(float), size, file) ==
                     size &&
                 !std::fclose(file)
             ? 0
             : 1;
}
