// An allocator that keeps a record.
#ifndef MHA_TESTS_SUPPORT_RECORDING_ALLOCATOR_H
#define MHA_TESTS_SUPPORT_RECORDING_ALLOCATOR_H

#include <mha.h>

#include <cstddef>

#include "support/memory.h"

namespace support {

// Its memory ends on a guard page, aligned as much as malloc promises and no more, and stays there
// when it is released.
struct RecordingAllocator {
  static constexpr size_t kMallocAlignment = 16;
  RecordingAllocator() {
    allocator.context = this;
    allocator.allocate = [](void *context, size_t bytes) -> void * {
      auto *self = static_cast<RecordingAllocator *>(context);
      ++self->allocations;
      self->bytes = bytes;
      if (self->fails) return nullptr;
      // Behind an odd multiple of 16 bytes, so that it is aligned to 16 and to nothing more.
      self->block = Memory(bytes + 2 * kMallocAlignment, Place::kBeforeGuard, 2 * kMallocAlignment);
      self->block.Fill(0xFF);
      self->memory = self->block.data() + kMallocAlignment;
      return self->memory;
    };
    allocator.release = [](void *context, void *memory) {
      auto *self = static_cast<RecordingAllocator *>(context);
      ++self->releases;
      self->released = memory;
    };
  }
  RecordingAllocator(const RecordingAllocator &) = delete;

  mha_allocator allocator;
  bool fails = false;
  int allocations = 0;
  int releases = 0;
  size_t bytes = 0;
  void *memory = nullptr;
  void *released = nullptr;
  Memory block;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_RECORDING_ALLOCATOR_H
