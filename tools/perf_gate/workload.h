// One shape made ready to be called through several libraries, in turns, in the same memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/workers.h"
#include "library.h"
#include "shapes.h"
#include "tests/support/memory.h"

namespace gate {

struct Difference {
  bool is_bit_equal;
  double relative;  // the largest difference of two elements, as a share of the largest element
};

class Workload {
 public:
  // Throws CannotMeasure if a library refuses the shape. The libraries must outlive it.
  Workload(const Shape &shape, const std::vector<Library> &libraries);
  Workload(const Workload &) = delete;

  const Shape &shape() const { return shape_; }
  // Calls go through library `index` from now on. Where weights and caches lie decides how fast they are read, so those of the library in
  // use are always put into one and the same place.
  void use(size_t index);
  // One call. Throws CannotMeasure if the library refuses it.
  void call() const;
  // Compares what libraries 0 and 1 compute. Throws CannotMeasure if it is not the same function.
  Difference compare();

 private:
  void pack_layers();
  void fill_caches();
  size_t prepare_forward();  // the largest workspace that a library needs
  size_t prepare_attention();
  [[noreturn]] void refused(size_t index, const mha_error &error) const;
  size_t output_floats() const;
  const mha_scheduler *scheduler() const { return workers_ ? &workers_->scheduler() : nullptr; }

  struct Packed {
    support::Memory bytes;
    support::Memory storage;  // of the layer object
    Struct options;
  };

  const Shape shape_;
  const std::vector<Library> &libraries_;
  std::unique_ptr<bench::Workers> workers_;  // of several threads
  std::vector<Packed> packed_;               // by library
  support::Memory packed_in_use_;
  const mha_layer *layer_in_use_ = nullptr;
  std::vector<support::Memory> caches_;  // by library; none without past
  support::Memory cache_bytes_in_use_;
  mha_kv_cache *cache_in_use_ = nullptr;
  size_t in_use_ = 0;
  support::Memory inputs_[3], output_, workspace_;
  std::vector<Struct> args_;  // by library
};

// Throws CannotMeasure if the machine does not have the memory for all of these shapes at once.
void check_memory(const std::vector<Shape> &shapes, size_t num_libraries);

}  // namespace gate
