// Buffers of the caller's that hold a packed layer or a cache. They may come from a file that is
// damaged, of another version, or made up.
#pragma once

#include <stddef.h>

#include "report.h"

namespace mha {

// What both begin with. The version changes with the format, and others are refused.
struct BufferHead {
  char magic[8];
  uint32_t byte_order = 0x01020304u, version = 2, contract = MHA_CONTRACT;
};

// One of the two formats: its header, whose first bytes are `head`, and the words for messages.
struct BufferFormat {
  BufferHead head;
  size_t header_bytes;
  bool (*has_sound_checksum)(const void *header);
  mha_status status;
  const char *name, *source;  // "KV cache", and the function that fills it
  const char *remedy;         // "pack it again"
};

// Checks the memory for a new buffer, whose size the function `query` returns.
mha_status check_new_buffer(Report report, const void *buffer, size_t buffer_bytes, int64_t needed,
                            const char *query);

// Checks the header of a filled buffer, from what identifies the format to the checksum, so that
// the message names the most likely cause. The report is about the buffer, and the next parameter
// is its size.
mha_status check_head(Report report, const BufferFormat &format, const void *buffer,
                      size_t buffer_bytes);

// Fails if the rest of the header is not sound, or if the buffer is shorter than the header says.
mha_status check_whole(Report report, const BufferFormat &format, bool is_sound,
                       size_t buffer_bytes, uint64_t needed);

}  // namespace mha
