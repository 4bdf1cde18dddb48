// Buffers of an exact size next to guard pages, which are mapped once and reused for each input;
// and calls that are watched for what every function promises for any arguments.
#ifndef MHA_TESTS_FUZZ_BUFFERS_H
#define MHA_TESTS_FUZZ_BUFFERS_H

#include <string>
#include <vector>

#include "fuzz/bytes.h"
#include "mha.h"
#include "support/memory.h"

namespace fuzz {

__extension__ typedef __int128 Wide;

struct Span {
  unsigned char *data;
  size_t size;
};

class Buffers {
 public:
  void Reset(bool after_guard) {
    after_guard_ = after_guard;
    is_too_large_ = false;
    used_ = 0;
    watched_.clear();
  }

  static bool Fits(Wide bytes) { return bytes > 0 && bytes <= static_cast<Wide>(kSlotBytes); }

  // A buffer with any contents. For no bytes, or too many, it is memory that must not be touched,
  // for a call that must be refused.
  unsigned char *Take(Wide bytes, size_t alignment = 1) {
    if (used_ == slots_.size()) slots_.emplace_back(kSlotBytes, support::Place::kBeforeGuard);
    unsigned char *const first = slots_[used_++].data(), *const end = first + kSlotBytes;
    if (bytes > static_cast<Wide>(kSlotBytes)) is_too_large_ = true;
    if (!Fits(bytes)) return end;
    const size_t size = static_cast<size_t>(bytes);
    unsigned char *const data =
        after_guard_ ? first : end - (size + alignment - 1) / alignment * alignment;
    std::memset(data, 0xA5, size);
    return data;
  }
  template <typename T>
  T *Take(Wide count) {
    return reinterpret_cast<T *>(Take(count * static_cast<Wide>(sizeof(T))));
  }
  // A buffer that a call may write to only if it succeeds.
  unsigned char *TakeOutput(Wide bytes, size_t alignment = 1) {
    unsigned char *const data = Take(bytes, alignment);
    if (Fits(bytes)) Watch(data, static_cast<size_t>(bytes));
    return data;
  }
  void Watch(void *data, size_t size) {
    watched_.push_back({static_cast<unsigned char *>(data), size});
  }
  bool is_too_large() const { return is_too_large_; }
  void ForgetSizes() { is_too_large_ = false; }

  // Calls function(error) and checks what holds for all: a known status, the same in the error, a
  // sentence if it failed and none if not, and after a failure no changed byte of what is watched.
  template <typename Function>
  mha_status Call(const Function &function, bool has_error = true) {
    std::string before;
    for (const Span &span : watched_)
      before.append(reinterpret_cast<const char *>(span.data), span.size);
    mha_error error;
    std::memset(&error, 0x5A, sizeof error);
    const mha_status status = function(has_error ? &error : nullptr);
    Expect(status <= MHA_ERROR_CACHE_FORMAT, "a status that the header does not have");
    if (has_error) {
      Expect(error.status == status, "the error has another status than was returned");
      Expect(std::memchr(error.message, 0, sizeof error.message) != nullptr,
             "the message has no end");
      Expect((error.message[0] != 0) == (status != MHA_OK),
             "a failure without a message, or a message without a failure", error.message);
      Expect(error.argument <= 9, "the error names a parameter that no function has",
             error.message);
    }
    if (status == MHA_OK) return status;
    size_t at = 0;
    for (const Span &span : watched_) {
      Expect(std::memcmp(before.data() + at, span.data, span.size) == 0,
             "a call that failed has written", has_error ? error.message : "");
      at += span.size;
    }
    return status;
  }

 private:
  static constexpr size_t kSlotBytes = size_t{1} << 18;
  bool after_guard_ = false;
  bool is_too_large_ = false;
  size_t used_ = 0;
  std::vector<support::Memory> slots_;
  std::vector<Span> watched_;
};

}  // namespace fuzz

#endif  // MHA_TESTS_FUZZ_BUFFERS_H
