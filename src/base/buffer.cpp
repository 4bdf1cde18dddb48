#include "buffer.h"

#include <string.h>

namespace mha {
namespace {

mha_status check_alignment(Report report, const void *buffer) {
  if (reinterpret_cast<uintptr_t>(buffer) % 64 == 0) return MHA_OK;
  return report.invalid(
      "buffer is not aligned to 64 bytes; allocate it with aligned_alloc(64, ...) or mmap");
}

}  // namespace

mha_status check_new_buffer(Report report, const void *buffer, size_t buffer_bytes, int64_t needed,
                            const char *query) {
  if (!buffer) return report.null("buffer is NULL; pass memory of the size that %s returns", query);
  MHA_TRY(check_alignment(report, buffer));
  if (buffer_bytes >= static_cast<uint64_t>(needed)) return MHA_OK;
  return report.next().fail(MHA_ERROR_BUFFER_TOO_SMALL,
                            "buffer_bytes is %zu, but %lld are needed; call %s for the size",
                            buffer_bytes, lld(needed), query);
}

mha_status check_head(Report report, const BufferFormat &format, const void *buffer,
                      size_t buffer_bytes) {
  const auto &[known, header_bytes, has_sound_checksum, status, name, source, remedy] = format;
  if (!buffer) return report.null("buffer is NULL; pass one that %s filled", source);
  MHA_TRY(check_alignment(report, buffer));
  if (buffer_bytes < header_bytes)
    return report.next().fail(
        status, "buffer_bytes is %zu, less than the %zu of the header; pass the whole %s",
        buffer_bytes, header_bytes, name);
  BufferHead head;
  memcpy(&head, buffer, sizeof head);
  if (memcmp(head.magic, known.magic, sizeof head.magic) != 0)
    return report.fail(status, "buffer does not hold a %s; pass one that %s filled", name, source);
  if (head.byte_order != known.byte_order)
    return report.fail(status, "the %s has the other byte order; %s", name, remedy);
  if (head.version != known.version)
    return report.fail(status,
                       "the %s has version %u of the format, but this library reads version %u; %s",
                       name, head.version, known.version, remedy);
  if (!has_sound_checksum(buffer))
    return report.fail(status, "the header of the %s is damaged (its checksum is wrong); %s", name,
                       remedy);
  if (head.contract == known.contract) return MHA_OK;
  return report.fail(status, "the %s has arithmetic contract %u, but this library has %u; %s", name,
                     head.contract, known.contract, remedy);
}

mha_status check_whole(Report report, const BufferFormat &format, bool is_sound,
                       size_t buffer_bytes, uint64_t needed) {
  if (!is_sound)
    return report.fail(format.status, "the %s's sizes contradict each other; %s", format.name,
                       format.remedy);
  if (buffer_bytes >= needed) return MHA_OK;
  return report.next().fail(format.status,
                            "buffer_bytes is %zu, but the %s has %llu; pass the whole buffer",
                            buffer_bytes, format.name, llu(needed));
}

}  // namespace mha
