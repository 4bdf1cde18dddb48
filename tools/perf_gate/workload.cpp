#include "workload.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>

#include "failure.h"
#include "tests/support/random.h"

namespace gate {
namespace {

constexpr double largest_difference = 1e-3;

support::Memory allocate(size_t bytes) {
  try {
    return support::Memory(bytes, support::Place::kLargePages);
  } catch (const std::bad_alloc &) {
    throw CannotMeasure("there is no memory for a block of " + std::to_string(bytes) + " bytes; take smaller or fewer shapes");
  }
}

support::Memory random_floats(int64_t count, float scale, uint64_t seed) {
  support::Memory memory = allocate(static_cast<size_t>(count) * sizeof(float));
  support::Random random(seed);
  for (int64_t i = 0; i < count; ++i) memory.floats()[i] = scale * random.Uniform();
  return memory;
}

// In double, in which it cannot overflow. The weights as given, packed by each library, and those in use; the workspace is an estimate.
double bytes_of(const Shape &shape, size_t num_libraries) {
  const double rows = static_cast<double>(shape.batch) * shape.n, keys = static_cast<double>(shape.batch) * shape.n_kv;
  const double q_width = static_cast<double>(shape.heads) * shape.head_dim, kv_width = static_cast<double>(shape.kv_heads) * shape.head_dim;
  const double activations = rows * (2 * q_width + 2 * static_cast<double>(shape.width)) + keys * 2 * kv_width;
  const double weights = static_cast<double>(shape.width) * (2 * q_width + 2 * kv_width);
  const double cached = shape.past ? static_cast<double>(shape.batch) * static_cast<double>(shape.past + shape.n) * 2 * kv_width : 0;
  return sizeof(float) *
         (2 * activations + weights * static_cast<double>(num_libraries + 2) + cached * static_cast<double>(num_libraries + 1));
}

}  // namespace

Workload::Workload(const Shape &shape, const std::vector<Library> &libraries) : shape_(shape), libraries_(libraries) {
  if (shape.threads > 1) workers_ = std::make_unique<bench::Workers>(static_cast<uint32_t>(shape.threads));
  output_ = allocate(output_floats() * sizeof(float));
  if (shape.past) fill_caches();
  const size_t workspace_bytes = shape.is_layer ? prepare_forward() : prepare_attention();
  workspace_ = allocate(workspace_bytes);
}

size_t Workload::output_floats() const {
  return static_cast<size_t>(shape_.batch * shape_.n * (shape_.is_layer ? shape_.width : shape_.heads * shape_.head_dim));
}

void Workload::refused(size_t index, const mha_error &error) const {
  throw CannotMeasure("the shape '" + shape_.text + "' is refused by " + libraries_[index].name + ": " + error.message);
}

void Workload::pack_layers() {
  const int64_t q_width = shape_.heads * shape_.head_dim, kv_width = shape_.kv_heads * shape_.head_dim;
  const float scale = 1.7f / std::sqrt(static_cast<float>(shape_.width));
  const support::Memory w_qkv = random_floats(shape_.width * (q_width + 2 * kv_width), scale, 1),
                        w_o = random_floats(q_width * shape_.width, scale, 2);
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    const Library &library = libraries_[index];
    mha_error error;
    size_t bytes;
    Struct config_memory, weights_memory, options_memory;
    library.structs->fill_layer(shape_, w_qkv.floats(), w_o.floats(), &config_memory, &weights_memory, &options_memory);
    const auto *const config = config_memory.as<mha_layer_config>();
    const auto *const weights = weights_memory.as<mha_layer_weights>();
    const auto *const options = options_memory.as<mha_layer_options>();
    if (library.layer_pack_size(config, weights, options, &bytes, &error)) refused(index, error);
    packed_.push_back({allocate(bytes), allocate(library.layer_view_size()), options_memory});
    if (library.layer_pack(config, weights, options, packed_.back().bytes.data(), bytes, &error)) refused(index, error);
    largest = std::max(largest, bytes);
  }
  packed_in_use_ = allocate(largest);
}

// Every sequence has the same positions: the same few rows again and again.
void Workload::fill_caches() {
  const int64_t rows = std::min<int64_t>(shape_.past, 256);
  const int64_t count = rows * shape_.kv_heads * shape_.head_dim;
  const support::Memory k = random_floats(count, 1, 4), v = random_floats(count, 1, 5);
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    const Library &library = libraries_[index];
    if (!library.has_caches())
      throw CannotMeasure("the shape '" + shape_.text + "' needs KV caches, which " + library.name + " does not have");
    mha_error error;
    mha_kv_cache *cache;
    size_t bytes;
    Struct config_memory;
    library.structs->fill_cache(shape_, &config_memory);
    const auto *const config = config_memory.as<mha_kv_cache_config>();
    if (library.kv_cache_size(config, &bytes, &error)) refused(index, error);
    caches_.push_back(allocate(bytes));
    caches_.back().Fill(0xff);  // what a cache's memory held before must not make it slow
    if (library.kv_cache_init(config, caches_.back().data(), bytes, &cache, &error)) refused(index, error);
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence) {
      for (int64_t first = 0; first < shape_.past; first += rows) {
        if (library.kv_cache_append(cache, sequence, std::min(rows, shape_.past - first), k.floats(), v.floats(), &error))
          refused(index, error);
      }
    }
    largest = std::max(largest, bytes);
  }
  cache_bytes_in_use_ = allocate(largest);
}

void Workload::use(size_t index) {
  in_use_ = index;
  const Library &library = libraries_[index];
  mha_error error;
  if (shape_.is_layer) {
    const Packed &packed = packed_[index];
    memcpy(packed_in_use_.data(), packed.bytes.data(), packed.bytes.size());
    if (library.layer_view(packed_in_use_.data(), packed.bytes.size(), packed.options.as<mha_layer_options>(), packed.storage.data(),
                           library.layer_view_size(), &layer_in_use_, &error))
      refused(index, error);
  }
  if (shape_.past) {
    const support::Memory &cache = caches_[index];
    memcpy(cache_bytes_in_use_.data(), cache.data(), cache.size());
    if (library.kv_cache_view(cache_bytes_in_use_.data(), cache.size(), &cache_in_use_, &error)) refused(index, error);
    library.structs->set_cache(shape_, cache_in_use_, &args_[index]);
  }
}

size_t Workload::prepare_forward() {
  pack_layers();
  inputs_[0] = random_floats(shape_.batch * shape_.n * shape_.width, 1, 3);
  for (const Library &library : libraries_) {
    args_.emplace_back();
    library.structs->fill_forward(shape_, inputs_[0].floats(), output_.floats(), scheduler(), &args_.back());
  }
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    mha_error error;
    size_t bytes;
    use(index);
    if (libraries_[index].forward_workspace(layer_in_use_, args_[index].as<mha_forward_args>(), &bytes, &error)) refused(index, error);
    largest = std::max(largest, bytes);
  }
  return largest;
}

size_t Workload::prepare_attention() {
  inputs_[0] = random_floats(shape_.batch * shape_.n * shape_.heads * shape_.head_dim, 1, 1);
  for (uint32_t i = 1; i < 3; ++i) {
    inputs_[i] = random_floats(shape_.batch * shape_.n_kv * shape_.kv_heads * shape_.head_dim, 1, i + 1);
  }
  for (const Library &library : libraries_) {
    args_.emplace_back();
    library.structs->fill_attention(shape_, inputs_[0].floats(), inputs_[1].floats(), inputs_[2].floats(), output_.floats(), scheduler(),
                                    &args_.back());
  }
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    mha_error error;
    size_t bytes;
    use(index);
    if (libraries_[index].attention_workspace(args_[index].as<mha_attention_args>(), &bytes, &error)) refused(index, error);
    largest = std::max(largest, bytes);
  }
  return largest;
}

void Workload::call() const {
  const Library &library = libraries_[in_use_];
  mha_error error;
  const Struct &args = args_[in_use_];
  const mha_status status =
      shape_.is_layer ? library.forward(layer_in_use_, args.as<mha_forward_args>(), workspace_.data(), workspace_.size(), &error)
                      : library.attention(args.as<mha_attention_args>(), workspace_.data(), workspace_.size(), &error);
  if (status) refused(in_use_, error);
  if (!shape_.is_layer || !shape_.past) return;
  for (int64_t sequence = 0; sequence < shape_.batch; ++sequence) {  // the next call appends the same positions
    if (library.kv_cache_truncate(cache_in_use_, sequence, shape_.past, &error)) refused(in_use_, error);
  }
}

Difference Workload::compare() {
  const size_t count = output_floats();
  const float *const output = output_.floats();
  memset(output_.data(), 0xff, count * sizeof(float));  // NaN, which no call leaves behind
  use(0);
  call();
  const std::vector<float> base(output, output + count);
  memset(output_.data(), 0xff, count * sizeof(float));
  use(1);
  call();
  Difference difference = {memcmp(base.data(), output, count * sizeof(float)) == 0, 0};
  double largest = 0;
  bool is_finite = true;
  for (size_t i = 0; i < count; ++i) {
    is_finite = is_finite && std::isfinite(base[i]) && std::isfinite(output[i]);
    largest = std::fmax(largest, std::fabs(base[i]));
    difference.relative = std::fmax(difference.relative, std::fabs(static_cast<double>(base[i]) - output[i]));
  }
  if (difference.relative > 0) difference.relative /= largest;
  if (!is_finite || difference.relative > largest_difference) {
    char what[64];
    snprintf(what, sizeof what, "differ by %.2g of the largest element", difference.relative);
    throw CannotMeasure("the outputs of " + libraries_[0].name + " and " + libraries_[1].name + " for the shape '" + shape_.text + "' " +
                        (is_finite ? what : "are not all finite") +
                        ", so they do not compute the same function; their speeds cannot be compared");
  }
  return difference;
}

void check_memory(const std::vector<Shape> &shapes, size_t num_libraries) {
  const double available = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  double bytes = 0;
  for (const Shape &shape : shapes) {
    bytes += bytes_of(shape, num_libraries);
    if (bytes <= available / 2) continue;
    char what[96];
    snprintf(what, sizeof what, "%.3g GB, more than half of this machine's %.3g GB", bytes * 1e-9, available * 1e-9);
    throw CannotMeasure("the shapes up to '" + shape.text + "' need about " + what + "; take smaller or fewer shapes");
  }
}

}  // namespace gate
