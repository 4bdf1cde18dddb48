// Memory aligned to 64 bytes, which Windows' C library has no aligned_alloc for.
#ifndef MHA_TESTS_SUPPORT_ALIGNED_H
#define MHA_TESTS_SUPPORT_ALIGNED_H

#include <cstddef>
#include <memory>
#include <new>

namespace support {

struct DeleteAligned {
  void operator()(unsigned char *memory) const { ::operator delete(memory, std::align_val_t{64}); }
};
using Aligned = std::unique_ptr<unsigned char, DeleteAligned>;

inline Aligned NewAligned(size_t bytes) { return Aligned(static_cast<unsigned char *>(::operator new(bytes, std::align_val_t{64}))); }

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ALIGNED_H
