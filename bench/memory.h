// Memory for arrays, in huge pages where it is large enough: what is measured is the caches, not
// the translation of addresses.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <memory>
#include <new>

namespace bench {

struct Free {
  void operator()(void *memory) const { free(memory); }
};
template <class T>
using Array = std::unique_ptr<T[], Free>;

// All zero, and with it in memory.
template <class T>
Array<T> make_array(int64_t count) {
  constexpr size_t huge_page = size_t{2} << 20;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T),
               alignment = bytes < huge_page ? 64 : huge_page;
  void *memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes + !bytes)) throw std::bad_alloc();
  if (alignment == huge_page) madvise(memory, bytes, MADV_HUGEPAGE);
  memset(memory, 0, bytes);
  return Array<T>(static_cast<T *>(memory));
}

}  // namespace bench
