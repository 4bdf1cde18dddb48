// The functions of layers: pack, view, verify, create, destroy.
//
// pack_size, pack and create begin with a PackJob (check/layer.h), which holds everything about a
// layer but its packed weights. pack writes those to the caller's buffer. create takes memory from
// an allocator for the object and the packed weights after it. view makes an object for a buffer
// that the caller keeps. A linear layer is a layer that has a W_O alone.

#include "../objects/layer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../base/buffer.h"
#include "../base/structs.h"
#include "../base/workspace.h"
#include "../check/layer.h"
#include "../cpu.h"
#include "../run/small.h"

namespace mha {
namespace {

// malloc, but with huge pages of 2 MiB for a large layer. Most of the time of creating one would
// otherwise be spent on page faults, one at the first write to each 4 KiB.
void *allocate_block(size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t huge_page_bytes = size_t{2} << 20;
  if (bytes >= 2 * huge_page_bytes) {
    void *memory;
    if (posix_memalign(&memory, huge_page_bytes, bytes) != 0) return nullptr;
    // Only whole huge pages are ours; the rest of the last one may have other use. The system may
    // ignore the advice.
    madvise(memory, bytes / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);
    return memory;
  }
#endif
  return malloc(bytes);
}

// The allocator of a layer for which the caller sets none. errno stays as it was, because the
// library reports a failure by its own means.
void *allocate_default(void *, size_t bytes) {
  const int before = errno;
  void *const memory = allocate_block(bytes);
  errno = before;
  return memory;
}
void release_default(void *, void *memory) { free(memory); }

// The size of the object, rounded up so that packed weights can follow it.
constexpr size_t layer_bytes = (sizeof(mha_layer) + 63) / 64 * 64;

// Makes the object in memory of layer_bytes + 63 bytes, which may begin at any address. It is made
// on the stack and copied, because small_layer_of reads it.
mha_layer *make_layer(void *storage, const PackedForm &form, const void *packed,
                      const mha_layer_options &options, const Kernels *kernels) {
  mha_layer layer = {};
  layer.shape = form.shape;
  layer.layout = form.layout;
  layer.packed = static_cast<const unsigned char *>(packed);
  layer.storage = form.kind.storage;
  layer.kernels = kernels;
  layer.sgemm = options.sgemm;
  layer.small = small_layer_of(layer);
  mha_layer *const made = reinterpret_cast<mha_layer *>(align64(storage));
  layer.magic = magic_at(made);
  memcpy(static_cast<void *>(made), &layer, sizeof layer);
  return made;
}

// The functions below serve both kinds of layers. `given` is what a layer is made from: its
// configuration, weights and options, or the weights and options of a linear layer.

template <class... Given>
mha_status pack_size(mha_error *error, size_t *bytes, const Given *...given) {
  const Reporter report(error);
  PackJob job;
  MHA_TRY(prepare(report, given..., &job));
  return write_size(report.about(sizeof...(given) + 1), static_cast<size_t>(job.form.layout.bytes),
                    bytes);
}

// Packs into the caller's buffer, which stays as it is after an error. `size_query` is the function
// that tells its size.
template <class... Given>
mha_status pack(mha_error *error, const char *size_query, void *buffer, size_t buffer_bytes,
                const Given *...given) {
  const Reporter report(error);
  PackJob job;
  MHA_TRY(prepare(report, given..., &job));
  MHA_TRY(check_new_buffer(report.about(sizeof...(given) + 1), buffer, buffer_bytes,
                           job.form.layout.bytes, size_query));
  MHA_TRY(check_range(report.about(job.arguments.weights), job.form, job.weights));
  pack_layer(job.form, job.weights, buffer);
  return MHA_OK;
}

// Allocates, checks the weights, packs them, and makes the object. No error leaves a pointer that
// looks like a layer: the caller's is NULL until nothing can fail any more.
template <class... Given>
mha_status create(mha_error *error, mha_layer **layer, const Given *...given) {
  const Reporter report(error);
  if (!layer)
    return report.about(sizeof...(given) + 1)
        .null("layer is NULL; pass the address of a pointer to a layer");
  *layer = nullptr;
  PackJob job;
  MHA_TRY(prepare(report, given..., &job));
  const Kernels *kernels;
  MHA_TRY(
      choose_kernels(report.about(job.arguments.options), job.options.instruction_set, &kernels));

  const mha_allocator allocator = job.options.allocator
                                      ? *job.options.allocator
                                      : mha_allocator{nullptr, allocate_default, release_default};
  // One block holds the object and, at the next multiple of 64 bytes, its packed weights.
  const Count bytes = Count(job.form.layout.bytes) + Count(static_cast<int64_t>(layer_bytes + 63));
  if (bytes.overflows())
    return report.too_large(
        "the packed layer would exceed the address space; set smaller dimensions");
  void *const block = allocator.allocate(allocator.context, static_cast<size_t>(bytes.value()));
  if (!block)
    return report.about(0).fail(
        MHA_ERROR_OUT_OF_MEMORY,
        "the allocator returned NULL for the %lld bytes of the packed layer; free memory",
        lld(bytes.value()));
  // Reading all weights takes time, so their values are checked only once there is memory.
  if (const mha_status status =
          check_range(report.about(job.arguments.weights), job.form, job.weights)) {
    allocator.release(allocator.context, block);
    return status;
  }
  unsigned char *const packed = align64(block) + layer_bytes;
  pack_layer(job.form, job.weights, packed);
  mha_layer *const made = make_layer(block, job.form, packed, job.options, kernels);
  made->allocator = allocator;
  made->block = block;
  *layer = made;
  return MHA_OK;
}

}  // namespace
}  // namespace mha

using namespace mha;

// ---- Packing

mha_status mha_layer_pack_size(const mha_layer_config *config, const mha_layer_weights *weights,
                               const mha_layer_options *options, size_t *bytes, mha_error *error) {
  return pack_size(error, bytes, config, weights, options);
}

mha_status mha_linear_pack_size(const mha_linear_weights *weights, const mha_layer_options *options,
                                size_t *bytes, mha_error *error) {
  return pack_size(error, bytes, weights, options);
}

mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights,
                          const mha_layer_options *options, void *buffer, size_t buffer_bytes,
                          mha_error *error) {
  return pack(error, "mha_layer_pack_size", buffer, buffer_bytes, config, weights, options);
}

mha_status mha_linear_pack(const mha_linear_weights *weights, const mha_layer_options *options,
                           void *buffer, size_t buffer_bytes, mha_error *error) {
  return pack(error, "mha_linear_pack_size", buffer, buffer_bytes, weights, options);
}

// ---- Layers

// The object is aligned to 64 bytes within memory that may begin anywhere.
size_t mha_layer_view_size(void) { return layer_bytes + 63; }

// The buffer is checked first, then the options, and then the memory for the object. Nothing is
// allocated, and the weights stay where they are: a layer of a mapped file takes no time to load.
mha_status mha_layer_view(const void *buffer, size_t buffer_bytes, const mha_layer_options *options,
                          void *storage, size_t storage_bytes, const mha_layer **layer,
                          mha_error *error) {
  Reporter report(error);
  PackedForm form;
  MHA_TRY(read_packed(report, buffer, buffer_bytes, &form));
  mha_layer_options read;
  MHA_TRY(read_options(report.about(3), options, &read));
  // A buffer in panels does not suit a BLAS, nor the other way round.
  if (form.kind.is_plain != (read.sgemm != nullptr))
    return report.about(3).fail(MHA_ERROR_PACKED_FORMAT, "options.sgemm is %s",
                                read.sgemm ? "given, but the layer was packed without one; set it "
                                             "to NULL, or pack the layer again with it"
                                           : "NULL, but the layer was packed with one; set it, or "
                                             "pack the layer again without it");
  if (!storage)
    return report.about(4).null("storage is NULL; pass memory of mha_layer_view_size bytes");
  if (storage_bytes < mha_layer_view_size())
    return report.about(5).fail(MHA_ERROR_BUFFER_TOO_SMALL,
                                "storage_bytes is %zu, but the layer object needs %zu; call "
                                "mha_layer_view_size for the size",
                                storage_bytes, mha_layer_view_size());
  if (!layer)
    return report.about(6).null("layer is NULL; pass the address of a pointer to a layer");
  const Kernels *kernels;
  MHA_TRY(choose_kernels(report.about(3), read.instruction_set, &kernels));
  *layer = make_layer(storage, form, buffer, read, kernels);
  return MHA_OK;
}

// Reads the whole buffer, unlike mha_layer_view, to find damage in the weights themselves.
mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error) {
  Reporter report(error);
  PackedForm form;
  MHA_TRY(read_packed(report, buffer, buffer_bytes, &form));
  if (!packed_checksum_holds(form, buffer))
    return report.fail(
        MHA_ERROR_PACKED_CHECKSUM,
        "the packed weights are damaged (their checksum is wrong); pack the layer again");
  return MHA_OK;
}

mha_status mha_layer_create(const mha_layer_config *config, const mha_layer_weights *weights,
                            const mha_layer_options *options, mha_layer **layer, mha_error *error) {
  return create(error, layer, config, weights, options);
}

mha_status mha_linear_create(const mha_linear_weights *weights, const mha_layer_options *options,
                             mha_layer **layer, mha_error *error) {
  return create(error, layer, weights, options);
}

// The caller owns the memory of a view, so there is nothing to destroy. A layer that was destroyed
// before is recognised as long as its memory has no other use.
void mha_layer_destroy(mha_layer *layer) {
  if (!layer || !is_layer(layer) || !layer->block) return;
  const mha_allocator allocator = layer->allocator;
  layer->magic = 0;
  allocator.release(allocator.context, layer->block);
}

// All dimensions with their defaults resolved, as the caller might have set them.
mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config, mha_error *error) {
  Reporter report(error);
  MHA_TRY(check_layer(report, layer));
  mha_layer_config filled = {};
  const LayerShape &shape = layer->shape;
  filled.query_dim = shape.query_dim;
  filled.key_dim = shape.key_dim;
  filled.value_dim = shape.value_dim;
  filled.output_dim = shape.output_dim;
  filled.num_heads = shape.num_heads;
  filled.num_kv_heads = shape.num_kv_heads;
  filled.head_dim = shape.head_dim;
  filled.head_dim_v = shape.head_dim_v;
  filled.scale = shape.scale;
  filled.format.type = type_of(layer->storage);
  filled.format.group_size = static_cast<uint32_t>(shape.group_of(layer->storage));
  filled.format.scale_type = type_of(shape.scale_storage);
  filled.gate = shape.gate;
  filled.gate_dim = shape.gate_dim;
  filled.format.arithmetic = number_of(shape.arithmetic);
  return write_struct(report.about(2), "mha_layer_config", filled, config);
}
