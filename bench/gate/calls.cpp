#include "calls.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>

#include "tests/support/random.h"

namespace gate {
namespace {

// Contracts may round what a cache stores in 8 bits in different ways, each off by some percent.
constexpr double largest_difference = 1e-3, largest_of_codes = 5e-2;

support::Memory allocate(size_t bytes) {
  try {
    return support::Memory(bytes, support::Place::kLargePages);
  } catch (const std::bad_alloc &) {
    throw CannotMeasure("there is no memory for a block of " + std::to_string(bytes) +
                        " bytes; take smaller or fewer shapes");
  }
}

support::Memory random_floats(int64_t count, float scale, uint64_t seed) {
  support::Memory memory = allocate(static_cast<size_t>(count) * sizeof(float));
  support::Random random(seed);
  for (int64_t i = 0; i < count; ++i) memory.floats()[i] = scale * random.Uniform();
  return memory;
}

// The file's bytes in a file of their own in memory. Returns its descriptor, which stays open: a
// number used again would be a path used again, and dlopen knows libraries by path, device and
// inode.
int private_copy(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  if (!file || bytes.empty()) throw CannotMeasure("the library '" + path + "' cannot be read");
  const int copy = memfd_create("libmha", MFD_CLOEXEC);
  for (size_t done = 0; copy >= 0 && done < bytes.size();) {
    const ssize_t written = write(copy, bytes.data() + done, bytes.size() - done);
    if (written <= 0)
      throw CannotMeasure("there is no memory for a copy of '" + path + "': " + strerror(errno));
    done += static_cast<size_t>(written);
  }
  return copy;
}

}  // namespace

Library load_library(const std::string &path, const std::string &name, const Structs &structs) {
  const std::string copy = "/proc/self/fd/" + std::to_string(private_copy(path));
  void *const handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    std::string reason = dlerror();
    if (reason.rfind(copy, 0) == 0) reason = path + reason.substr(copy.size());
    throw CannotMeasure("the library cannot be loaded: " + reason);
  }
  Library library = {};
  library.name = name;
  library.structs = structs;
  const auto find = [&](const char *symbol, auto *function) {
    *function =
        reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(handle, symbol));
    if (!*function) throw CannotMeasure(name + " has no function " + symbol);
  };
  find("mha_version", &library.version);
  find("mha_instruction_sets", &library.instruction_sets);
  find("mha_layer_pack_size", &library.layer_pack_size);
  find("mha_layer_pack", &library.layer_pack);
  find("mha_layer_view_size", &library.layer_view_size);
  find("mha_layer_view", &library.layer_view);
  find("mha_forward_workspace", &library.forward_workspace);
  find("mha_forward", &library.forward);
  find("mha_attention_workspace", &library.attention_workspace);
  find("mha_attention", &library.attention);
  find("mha_kv_cache_size", &library.kv_cache_size);
  find("mha_kv_cache_init", &library.kv_cache_init);
  find("mha_kv_cache_view", &library.kv_cache_view);
  find("mha_kv_cache_append", &library.kv_cache_append);
  find("mha_kv_cache_truncate", &library.kv_cache_truncate);
  library.recurrent_workspace = reinterpret_cast<decltype(library.recurrent_workspace)>(
      dlsym(handle, "mha_recurrent_attention_workspace"));
  library.recurrent =
      reinterpret_cast<decltype(library.recurrent)>(dlsym(handle, "mha_recurrent_attention"));
  const uint32_t major = library.version() / 10000;
  if (major != MHA_VERSION_MAJOR) {
    throw CannotMeasure(name + " is version " + std::to_string(major) + "." +
                        std::to_string(library.version() / 100 % 100) +
                        ".x, and this gate knows the interface of version " +
                        std::to_string(MHA_VERSION_MAJOR) + ".x");
  }
  return library;
}

Calls::Calls(const Shape &shape, const std::vector<Library> &libraries)
    : shape_(shape), libraries_(libraries) {
  if (shape.threads > 1)
    workers_ = std::make_unique<bench::Workers>(static_cast<uint32_t>(shape.threads));
  const mha_scheduler *const scheduler = workers_ ? &workers_->scheduler() : nullptr;
  output_ = allocate(output_floats() * sizeof(float));
  if (shape.past) fill_caches();
  if (shape.is_layer) {
    pack_layers();
    inputs_[0] = random_floats(shape.batch * shape.n * shape.width, 1, 3);
  } else {
    inputs_[0] = random_floats(shape.batch * shape.n * shape.heads * shape.head_dim, 1, 1);
    for (uint32_t i = 1; i < 3; ++i)
      inputs_[i] =
          random_floats(shape.batch * shape.n_kv * shape.kv_heads * shape.head_dim, 1, i + 1);
  }
  const float *const q = inputs_[0].floats();
  args_.resize(libraries.size());
  for (size_t index = 0; index < libraries.size(); ++index) {
    const Structs &structs = libraries[index].structs;
    if (shape.is_layer) {
      structs.fill_forward(shape, q, output_.floats(), scheduler, &args_[index]);
    } else if (shape.is_recurrent) {
      if (!libraries[index].recurrent ||
          !structs.fill_recurrent(shape, q, inputs_[1].floats(), inputs_[2].floats(),
                                  output_.floats(), scheduler, &args_[index]))
        refused(index, {0, 0, "it has no recurrent attention"});
    } else {
      structs.fill_attention(shape, q, inputs_[1].floats(), inputs_[2].floats(), output_.floats(),
                             scheduler, &args_[index]);
    }
  }
  size_workspace();
}

// The largest that a library needs.
void Calls::size_workspace() {
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    const Library &library = libraries_[index];
    mha_error error;
    size_t bytes;
    use(index);
    if (shape_.is_layer ? library.forward_workspace(
                              layer_in_use_, args_[index].as<mha_forward_args>(), &bytes, &error)
        : shape_.is_recurrent
            ? library.recurrent_workspace(args_[index].as<mha_recurrent_args>(), &bytes, &error)
            : library.attention_workspace(args_[index].as<mha_attention_args>(), &bytes, &error))
      refused(index, error);
    largest = std::max(largest, bytes);
  }
  workspace_ = allocate(largest);
}

size_t Calls::output_floats() const {
  return static_cast<size_t>(shape_.batch * shape_.n *
                             (shape_.is_layer ? shape_.width : shape_.heads * shape_.head_dim));
}

void Calls::refused(size_t index, const mha_error &error) const {
  const std::string sentence = "the shape '" + shape_.text + "' is refused by " +
                               libraries_[index].name + ": " + error.message;
  if (index + 1 < libraries_.size()) throw NotInBase(sentence);
  throw CannotMeasure(sentence);
}

void Calls::pack_layers() {
  const int64_t q_width = shape_.heads * shape_.head_dim,
                kv_width = shape_.kv_heads * shape_.head_dim;
  const float scale = 1.7f / std::sqrt(static_cast<float>(shape_.width));
  const support::Memory w_qkv = random_floats(shape_.width * (q_width + 2 * kv_width), scale, 1),
                        w_o = random_floats(q_width * shape_.width, scale, 2);
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    const Library &library = libraries_[index];
    mha_error error;
    size_t bytes;
    Struct config_memory, weights_memory, options_memory;
    if (!library.structs.fill_layer(shape_, w_qkv.floats(), w_o.floats(), &config_memory,
                                    &weights_memory, &options_memory))
      refused(index, {0, 0, "it has no such weights"});
    const auto *const config = config_memory.as<mha_layer_config>();
    const auto *const weights = weights_memory.as<mha_layer_weights>();
    const auto *const options = options_memory.as<mha_layer_options>();
    if (library.layer_pack_size(config, weights, options, &bytes, &error)) refused(index, error);
    packed_.push_back({allocate(bytes), allocate(library.layer_view_size()), options_memory});
    if (library.layer_pack(config, weights, options, packed_.back().bytes.data(), bytes, &error))
      refused(index, error);
    largest = std::max(largest, bytes);
  }
  packed_in_use_ = allocate(largest);
}

// Every sequence has the same positions: the same few rows again and again.
void Calls::fill_caches() {
  const int64_t rows = std::min<int64_t>(shape_.past, 256);
  const int64_t count = rows * shape_.kv_heads * shape_.head_dim;
  const support::Memory k = random_floats(count, 1, 4), v = random_floats(count, 1, 5);
  size_t largest = 0;
  for (size_t index = 0; index < libraries_.size(); ++index) {
    const Library &library = libraries_[index];
    mha_error error;
    mha_kv_cache *cache;
    size_t bytes;
    Struct config_memory;
    library.structs.fill_cache(shape_, &config_memory);
    const auto *const config = config_memory.as<mha_kv_cache_config>();
    if (library.kv_cache_size(config, &bytes, &error)) refused(index, error);
    caches_.push_back(allocate(bytes));
    caches_.back().Fill(0xff);  // what a cache's memory held before must not make it slow
    if (library.kv_cache_init(config, caches_.back().data(), bytes, &cache, &error))
      refused(index, error);
    for (int64_t sequence = 0; sequence < shape_.batch; ++sequence) {
      for (int64_t first = 0; first < shape_.past; first += rows) {
        if (library.kv_cache_append(cache, sequence, std::min(rows, shape_.past - first),
                                    k.floats(), v.floats(), &error))
          refused(index, error);
      }
    }
    largest = std::max(largest, bytes);
  }
  cache_bytes_in_use_ = allocate(largest);
}

void Calls::use(size_t index) {
  in_use_ = index;
  const Library &library = libraries_[index];
  mha_error error;
  if (shape_.is_layer) {
    const Packed &packed = packed_[index];
    memcpy(packed_in_use_.data(), packed.bytes.data(), packed.bytes.size());
    if (library.layer_view(packed_in_use_.data(), packed.bytes.size(),
                           packed.options.as<mha_layer_options>(), packed.storage.data(),
                           library.layer_view_size(), &layer_in_use_, &error))
      refused(index, error);
  }
  if (shape_.past) {
    const support::Memory &cache = caches_[index];
    memcpy(cache_bytes_in_use_.data(), cache.data(), cache.size());
    if (library.kv_cache_view(cache_bytes_in_use_.data(), cache.size(), &cache_in_use_, &error))
      refused(index, error);
    library.structs.set_cache(shape_, cache_in_use_, &args_[index]);
  }
}

void Calls::call() const {
  const Library &library = libraries_[in_use_];
  mha_error error;
  const Struct &args = args_[in_use_];
  const mha_status status =
      shape_.is_layer       ? library.forward(layer_in_use_, args.as<mha_forward_args>(),
                                              workspace_.data(), workspace_.size(), &error)
      : shape_.is_recurrent ? library.recurrent(args.as<mha_recurrent_args>(), workspace_.data(),
                                                workspace_.size(), &error)
                            : library.attention(args.as<mha_attention_args>(), workspace_.data(),
                                                workspace_.size(), &error);
  if (status) refused(in_use_, error);
  if (!shape_.is_layer || !shape_.past) return;
  for (int64_t sequence = 0; sequence < shape_.batch;
       ++sequence) {  // the next call appends the same positions
    if (library.kv_cache_truncate(cache_in_use_, sequence, shape_.past, &error))
      refused(in_use_, error);
  }
}

double Calls::difference() {
  const size_t count = output_floats();
  const float *const output = output_.floats();
  std::vector<float> newest;
  double found = -1;
  for (size_t index = libraries_.size(); index-- > 0;) {
    memset(output_.data(), 0xff, count * sizeof(float));  // NaN, which every call overwrites
    use(index);
    call();
    if (newest.empty()) {
      newest.assign(output, output + count);
      continue;
    }
    if (memcmp(newest.data(), output, count * sizeof(float)) == 0 && std::isfinite(output[0]))
      continue;
    double largest = 0, difference = 0;
    bool is_finite = true;
    for (size_t i = 0; i < count; ++i) {
      is_finite = is_finite && std::isfinite(newest[i]) && std::isfinite(output[i]);
      largest = std::fmax(largest, std::fabs(output[i]));
      difference = std::fmax(difference, std::fabs(static_cast<double>(output[i]) - newest[i]));
    }
    if (difference > 0) difference /= largest;
    const bool has_codes = shape_.kv_type == MHA_TYPE_INT8 - MHA_TYPE_F32;
    if (!is_finite || difference > (has_codes ? largest_of_codes : largest_difference)) {
      char what[64];
      snprintf(what, sizeof what, "differ by %.2g of the largest element", difference);
      throw CannotMeasure("the outputs of " + libraries_[index].name + " and " +
                          libraries_.back().name + " for the shape '" + shape_.text + "' " +
                          (is_finite ? what : "are not all finite") +
                          ", so they do not compute the same function");
    }
    found = std::fmax(found, difference);
  }
  return found;
}

}  // namespace gate
