// One shape made ready to be called through several libraries, in turns, in the same memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/workers.h"
#include "library.h"
#include "shapes.h"

namespace gate {

// Memory that begins on a page; large blocks lie on large pages where the system has them.
class Memory {
 public:
  explicit Memory(size_t bytes);
  void *get() const { return bytes_.get(); }
  float *floats() const { return static_cast<float *>(bytes_.get()); }

 private:
  struct Free {
    void operator()(void *memory) const;
  };
  std::unique_ptr<void, Free> bytes_;
};

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
  void prepare_forward();
  void prepare_attention();
  [[noreturn]] void refused(size_t index, const mha_error &error) const;
  size_t output_floats() const;
  const mha_scheduler *scheduler() const { return workers_ ? &workers_->scheduler() : nullptr; }

  struct Packed {
    size_t num_bytes;
    std::unique_ptr<Memory> bytes;
    std::unique_ptr<Memory> storage;  // of the layer object
    Struct options;
  };

  const Shape shape_;
  const std::vector<Library> &libraries_;
  std::unique_ptr<bench::Workers> workers_;  // of several threads
  std::vector<Packed> packed_;               // by library
  std::unique_ptr<Memory> packed_in_use_;
  const mha_layer *layer_in_use_ = nullptr;
  struct Cache {
    size_t num_bytes;
    std::unique_ptr<Memory> bytes;
  };
  std::vector<Cache> caches_;  // by library; none without past
  std::unique_ptr<Memory> cache_bytes_in_use_;
  mha_kv_cache *cache_in_use_ = nullptr;
  size_t in_use_ = 0;
  std::unique_ptr<Memory> inputs_[3], output_, workspace_;
  size_t workspace_bytes_ = 0;
  std::vector<Struct> args_;  // by library
};

// Throws CannotMeasure if the machine does not have the memory for all of these shapes at once.
void check_memory(const std::vector<Shape> &shapes, size_t num_libraries);

}  // namespace gate
