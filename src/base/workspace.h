// Lays out the caller's workspace. A call makes the same layout as the size query for it, so that
// both agree: each part takes its memory in turn and keeps its offset, and the end is the size.
// Offsets become pointers when the call runs.
#pragma once

#include <stdint.h>

#include "count.h"

namespace mha {

class WorkspaceLayout {
 public:
  // Takes `count` elements of `element_bytes`, on a cache line border. Returns the offset in bytes.
  int64_t take(Count count, int64_t element_bytes) {
    const int64_t offset = end_.value();
    end_ = round_up(end_ + count * Count(element_bytes), 64);
    return offset;
  }
  int64_t take_floats(Count count) { return take(count, sizeof(float)); }

  // What the caller has to give: any alignment will do, so there is room for moving up to the next
  // border. -1 after an overflow.
  int64_t bytes() const { return (end_ + Count(63)).value(); }

 private:
  Count end_ = 0;
};

// The first address from `memory` on that is a multiple of 64.
inline unsigned char *align64(void *memory) {
  return reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

}  // namespace mha
