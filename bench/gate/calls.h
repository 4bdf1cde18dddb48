// Libraries of any version, loaded beside each other, and one shape made ready to be called through
// them, in turns, in the same memory.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/workers.h"
#include "mha.h"
#include "structs.h"
#include "tests/support/memory.h"

namespace gate {

struct CannotMeasure : std::runtime_error {  // what() is one sentence
  using std::runtime_error::runtime_error;
};

struct NotInBase : CannotMeasure {  // it is a base that lacks something or refuses
  using CannotMeasure::CannotMeasure;
};

struct Library {
  std::string name;  // for people: a revision, or the path
  Structs structs;
  decltype(&::mha_version) version;
  decltype(&::mha_instruction_sets) instruction_sets;
  decltype(&::mha_layer_pack_size) layer_pack_size;
  decltype(&::mha_layer_pack) layer_pack;
  decltype(&::mha_layer_view_size) layer_view_size;
  decltype(&::mha_layer_view) layer_view;
  decltype(&::mha_forward_workspace) forward_workspace;
  decltype(&::mha_forward) forward;
  decltype(&::mha_attention_workspace) attention_workspace;
  decltype(&::mha_attention) attention;
  decltype(&::mha_recurrent_attention_workspace) recurrent_workspace;  // null in older versions
  decltype(&::mha_recurrent_attention) recurrent;
  decltype(&::mha_kv_cache_size) kv_cache_size;
  decltype(&::mha_kv_cache_init) kv_cache_init;
  decltype(&::mha_kv_cache_view) kv_cache_view;
  decltype(&::mha_kv_cache_append) kv_cache_append;
  decltype(&::mha_kv_cache_truncate) kv_cache_truncate;
};

// Under a name of its own, so that several libraries, or one several times, share nothing. Stays
// loaded.
Library load_library(const std::string &path, const std::string &name, const Structs &structs);

class Calls {
 public:
  // Throws CannotMeasure if the last library refuses the shape, NotInBase if another one does. The
  // libraries must outlive it.
  Calls(const Shape &shape, const std::vector<Library> &libraries);
  Calls(const Calls &) = delete;

  const Shape &shape() const { return shape_; }
  // Calls go through library `index` from now on. Where weights and caches lie decides how fast
  // they are read, so those of the library in use are always copied to one and the same place.
  void use(size_t index);
  void call() const;
  // The largest difference of an element of what the last library and another one compute, as a
  // share of the largest element; -1: not a bit differs. Throws CannotMeasure if it is not the same
  // function.
  double difference();

 private:
  void pack_layers();
  void fill_caches();
  void size_workspace();
  [[noreturn]] void refused(size_t index, const mha_error &error) const;
  size_t output_floats() const;

  struct Packed {
    support::Memory bytes, storage;  // of the layer object
    Struct options;
  };

  const Shape shape_;
  const std::vector<Library> &libraries_;
  std::unique_ptr<bench::Workers> workers_;  // of several threads
  std::vector<Packed> packed_;               // by library
  std::vector<support::Memory> caches_;      // by library; none without past
  std::vector<Struct> args_;                 // by library
  size_t in_use_ = 0;
  support::Memory packed_in_use_, cache_bytes_in_use_, inputs_[3], output_, workspace_;
  const mha_layer *layer_in_use_ = nullptr;
  mha_kv_cache *cache_in_use_ = nullptr;
};

}  // namespace gate
