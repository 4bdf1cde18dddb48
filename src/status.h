// Statuses with their sentence.
#pragma once

#include <stdint.h>

#include "mha.h"

#if defined(__MINGW32__)  // where `printf` means Microsoft's, which once lacked %zu
#define MHA_PRINTF gnu_printf
#else
#define MHA_PRINTF printf
#endif

namespace mha {

// Where a function reports: its mha_error (may be null), and the parameter that is being checked.
class Report {
 public:
  // Writes success, which stands until fail: what tells it, not the whole message.
  explicit Report(mha_error *error) : error_(error) {
    if (!error_) return;
    error_->status = MHA_OK;
    error_->argument = 0;
    error_->message[0] = 0;
  }

  // Writes the error and returns status: `return report.fail(...)`.
  mha_status fail(mha_status status, uint32_t argument, const char *format, ...) __attribute__((cold, format(MHA_PRINTF, 4, 5)));

 private:
  mha_error *error_;
};

}  // namespace mha
