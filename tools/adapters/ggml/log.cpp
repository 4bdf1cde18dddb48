#include "log.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace mha_ggml {

void log(ggml_log_level level, const char *format, ...) {
  const char *const quiet = std::getenv("MHA_GGML_QUIET");
  if (level == GGML_LOG_LEVEL_WARN && quiet && *quiet && std::strcmp(quiet, "0") != 0) return;
  char text[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  ggml_log_callback callback;
  void *user_data;
  ggml_log_get(&callback, &user_data);
  callback(level, text, user_data);
}

void ModelReport::ask(const ggml_tensor *matrix, bool is_taken) noexcept try {
  const std::lock_guard<std::mutex> guard(lock_);
  if (!is_due_) types_.clear(), computed_.clear();
  is_due_ = true;
  types_[matrix->name] = is_taken ? "" : ggml_type_name(matrix->type);
} catch (const std::bad_alloc &) {  // which its buffer will meet, too
}

void ModelReport::count(const ggml_tensor *op) noexcept try {
  if (!is_due_) return;
  const std::lock_guard<std::mutex> guard(lock_);
  computed_[op->op].insert(op->name);
} catch (const std::bad_alloc &) {
}

void ModelReport::finish() noexcept try {
  const std::lock_guard<std::mutex> guard(lock_);
  if (!is_due_ || computed_.empty()) return;
  is_due_ = false;
  std::map<std::string, std::vector<std::string>> left;  // by types
  for (const auto &[name, type] : types_) left[type].push_back(name);
  const size_t taken = left[""].size(), recurrent = computed_[GGML_OP_GATED_DELTA_NET].size();
  left.erase("");
  std::string sentence =
      "attention of " + std::to_string(computed_[GGML_OP_FLASH_ATTN_EXT].size()) + " layers, ";
  if (recurrent > 0) sentence += "recurrent attention of " + std::to_string(recurrent) + ", ";
  sentence += std::to_string(taken) + " of " + std::to_string(types_.size()) + " matrices";
  const char *between = "; left to the CPU: ";
  for (const auto &[type, names] : left) {
    sentence +=
        between + (names.size() == 1 ? names[0] : std::to_string(names.size())) + " (" + type + ")";
    between = ", ";
  }
  log(GGML_LOG_LEVEL_WARN, "mha: %s\n", sentence.c_str());
} catch (const std::bad_alloc &) {
}

}  // namespace mha_ggml
