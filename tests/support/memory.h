// Memory for what is given to the library: exactly so many bytes, where a test or a benchmark needs
// them.
#ifndef MHA_TESTS_SUPPORT_MEMORY_H
#define MHA_TESTS_SUPPORT_MEMORY_H

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#if !defined(NOMINMAX)
#define NOMINMAX
#endif
#include <windows.h>
#elif defined(__wasm__)
#include <cstdlib>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace support {

// Whole pages, as the system has them. Addresses alone at first: bytes that nobody may touch until
// they are allowed.
enum class Access { kNone, kRead, kReadAndWrite };

#if defined(_WIN32)
inline size_t PageBytes() {
  SYSTEM_INFO info;
  GetSystemInfo(&info);
  return info.dwPageSize;
}
inline void *MapPages(size_t bytes) {
  return VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS);
}
inline void UnmapPages(void *pages, size_t) { VirtualFree(pages, 0, MEM_RELEASE); }
inline void AllowPages(void *pages, size_t bytes, Access access) {
  DWORD before;
  if (access == Access::kReadAndWrite)
    VirtualAlloc(pages, bytes, MEM_COMMIT, PAGE_READWRITE);  // again is no change
  VirtualProtect(pages, bytes,
                 access == Access::kNone   ? PAGE_NOACCESS
                 : access == Access::kRead ? PAGE_READONLY
                                           : PAGE_READWRITE,
                 &before);
}
#elif defined(__wasm__)  // whose pages anybody may touch
inline size_t PageBytes() { return 65536; }
inline void *MapPages(size_t bytes) {
  void *const pages = std::aligned_alloc(PageBytes(), bytes);
  return pages ? std::memset(pages, 0, bytes) : nullptr;
}
inline void UnmapPages(void *pages, size_t) { std::free(pages); }
inline void AllowPages(void *, size_t, Access) {}
#else
#ifndef MAP_NORESERVE  // FreeBSD reserves nothing anyway
#define MAP_NORESERVE 0
#endif
inline size_t PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
inline void *MapPages(size_t bytes) {
  void *pages = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}
inline void UnmapPages(void *pages, size_t bytes) { munmap(pages, bytes); }
inline void AllowPages(void *pages, size_t bytes, Access access) {
  mprotect(pages, bytes,
           access == Access::kNone   ? PROT_NONE
           : access == Access::kRead ? PROT_READ
                                     : PROT_READ | PROT_WRITE);
}
#endif

enum class Place {
  kAnywhere,    // aligned to 64 bytes
  kLargePages,  // likewise, and in large pages if it fills one: what is measured is the caches, not
                // the translation of addresses
  kBeforeGuard,  // a read or write past the end faults at once
  kAfterGuard,   // ... before the start
};

// Zero at first. With an alignment, up to alignment - 1 accessible bytes may lie between the end
// and the guard. No bytes next to a guard give a pointer that must not be touched at all.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes, Place place = Place::kBeforeGuard, size_t alignment = 1)
      : bytes_(bytes) {
    if (place == Place::kBeforeGuard || place == Place::kAfterGuard) {
      const size_t page = PageBytes();
      inner_bytes_ = (bytes + page - 1) / page * page;
      void *mapped = MapPages(inner_bytes_ + 2 * page);
      if (mapped == nullptr) throw std::bad_alloc();
      base_ = static_cast<unsigned char *>(mapped);
      inner_ = base_ + page;
      Allow(Access::kReadAndWrite);
      data_ = inner_;
      if (place == Place::kBeforeGuard)
        data_ = inner_ + ((inner_bytes_ - bytes) & ~(alignment - 1));
      return;
    }
    constexpr size_t large_page = size_t{2} << 20;
    const bool is_large = place == Place::kLargePages && bytes >= large_page;
    alignment_ = is_large ? large_page : 64;
    // The end of a large page that is not whole would lie in small ones.
    const size_t taken =
        is_large ? (bytes + large_page - 1) / large_page * large_page : std::max<size_t>(bytes, 1);
    base_ = data_ =
        static_cast<unsigned char *>(::operator new (taken, std::align_val_t{alignment_}));
#if defined(MADV_HUGEPAGE)
    if (is_large) madvise(data_, taken, MADV_HUGEPAGE);  // a wish: the system may have none
#endif
    Fill(0);
  }
  Memory(Memory &&other) noexcept { Swap(other); }
  Memory &operator=(Memory &&other) noexcept {
    Swap(other);
    return *this;
  }
  ~Memory() {
    if (inner_ != nullptr) {
      UnmapPages(base_, inner_bytes_ + 2 * PageBytes());
    } else if (base_ != nullptr) {
      ::operator delete (base_, std::align_val_t{alignment_});
    }
  }

  unsigned char *data() const { return data_; }
  float *floats() const { return reinterpret_cast<float *>(data_); }
  size_t size() const { return bytes_; }

  void Fill(int byte) {
    if (bytes_ > 0) std::memset(data_, byte, bytes_);
  }
  bool Holds(int byte) const {
    return std::all_of(data_, data_ + bytes_,
                       [byte](unsigned char b) { return b == static_cast<unsigned char>(byte); });
  }
  std::string Bytes() const { return std::string(reinterpret_cast<const char *>(data_), bytes_); }

  // Of memory next to a guard.
  void Forbid() { Allow(Access::kNone); }
  void Freeze() { Allow(Access::kRead); }
  void Thaw() { Allow(Access::kReadAndWrite); }
  // From the given byte (rounded up to a page) to the end.
  void ForbidFrom(size_t offset) {
    const size_t page = PageBytes();
    const size_t first = (static_cast<size_t>(data_ - inner_) + offset + page - 1) / page * page;
    if (first < inner_bytes_) AllowPages(inner_ + first, inner_bytes_ - first, Access::kNone);
  }

 private:
  void Allow(Access access) {
    if (inner_bytes_ != 0) AllowPages(inner_, inner_bytes_, access);
  }
  void Swap(Memory &other) {
    std::swap(base_, other.base_);
    std::swap(inner_, other.inner_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(inner_bytes_, other.inner_bytes_);
    std::swap(alignment_, other.alignment_);
  }

  unsigned char *base_ = nullptr;
  unsigned char *inner_ = nullptr;  // between the guards; null: there are none
  unsigned char *data_ = nullptr;
  size_t bytes_ = 0;
  size_t inner_bytes_ = 0;
  size_t alignment_ = 0;  // of base_, without guards
};

// The elements of an array, in memory of their own.
template <typename T>
Memory CopyOf(const std::vector<T> &values, Place place) {
  Memory memory(values.size() * sizeof(T), place);
  if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
  return memory;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_MEMORY_H
