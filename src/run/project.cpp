#include "project.h"

#include <algorithm>

#include "../cpu.h"

namespace mha {
namespace {

// Rows that go through sgemm at once, which bounds the memory for its result.
constexpr int64_t sgemm_rows = 512;

// How a product is cut: blocks of rows, and under each of them groups of panels.
struct Cut {
  int64_t block_rows, row_blocks;
  int64_t group_panels, groups[max_products], groups_of_all_parts;

  int64_t units() const { return row_blocks * groups_of_all_parts; }
};

void cut_rows(int64_t rows, int64_t block_rows, Cut *cut) {
  cut->block_rows = block_rows;
  cut->row_blocks = blocks_of(rows, block_rows);
}

void group_panels(const Product &product, int64_t panels, Cut *cut) {
  cut->group_panels = panels;
  cut->groups_of_all_parts = 0;
  for (int64_t part = 0; part < product.num_parts; ++part) {
    cut->groups[part] = blocks_of(panels_of(product.parts[part].columns), panels);
    cut->groups_of_all_parts += cut->groups[part];
  }
}

// A block of input rows stays in the level-2 cache while the weights stream past it. The more rows
// a block has, the less often the weights are read from memory. (Measured with 2 MiB of level-2
// cache: 4096 columns take up to 6% less time in blocks of 72 rows than in blocks of 48; still
// larger ones take more.) Blocks are as equal as whole tiles allow, because a small block at the
// end would read all weights for little arithmetic.
constexpr int64_t block_floats = 288 * 1024, whole_tiles = 8, min_block = 48;

int64_t block_rows_of(int64_t rows, int64_t depth) {
  // The divisions below take as long as the arithmetic of a small layer.
  if (rows <= min_block) return min_block;
  int64_t block_rows = std::min(std::max(block_floats / depth, min_block), project_block_rows);
  if (rows > block_rows)
    block_rows = blocks_of(blocks_of(rows, blocks_of(rows, block_rows)), whole_tiles) * whole_tiles;
  return block_rows;
}

// Several threads need about three units each.
Cut cut_of(const Product &product, int64_t num_threads) {
  constexpr int64_t min_shared = 24;
  const Projection &first = product.parts[0];
  int64_t block_rows = block_rows_of(first.rows, first.depth);
  // One or two rows need several panels at once to fill the registers, and a panel keeps a thread
  // busy for a short time only if the rows are few.
  Cut cut = {};
  cut_rows(first.rows, block_rows, &cut);
  group_panels(product, first.rows <= 8 ? 4 : 1, &cut);
  // Smaller units leave no thread without work, and fewer threads idle while the last ones run.
  const int64_t wanted = num_threads > 1 ? 3 * num_threads : 1;
  const auto has_idle = [&cut, num_threads] {
    return 10 * cut.units() < 9 * num_threads * blocks_of(cut.units(), num_threads);
  };
  while (cut.group_panels > 1 && (cut.units() < wanted || has_idle()))
    group_panels(product, cut.group_panels / 2, &cut);
  for (block_rows = std::min(block_rows, first.rows) / 2;
       cut.units() < wanted && block_rows >= min_shared; block_rows /= 2) {
    cut_rows(first.rows, block_rows, &cut);
  }
  return cut;
}

// A thread's copy of a block of input rows, in the form that the kernels multiply: rows of 16 bits
// become floats; for integer arithmetic all rows become codes, and for that of bf16 factors; for
// offsets, sums follow each row. Many panels use the same copy.
struct alignas(64) ReadyRows {
  int64_t product, row_begin;  // which block it is; product -1: none yet

  void *rows() { return this + 1; }
};

// The products of an arithmetic that is not that of floats.
const ProductKernels *products_of(const Kernels &kernels, const Projection &projection) {
  return projection.arithmetic == Arithmetic::bf16 ? kernels.pairs : kernels.codes;
}

// Where the copies of all threads lie.
struct Readying {
  unsigned char *memory;
  int64_t bytes_per_thread;

  ReadyRows &of_thread(int64_t thread) const {
    return *reinterpret_cast<ReadyRows *>(memory + thread * bytes_per_thread);
  }

  void clear(int64_t num_threads) const {
    for (int64_t thread = 0; bytes_per_thread != 0 && thread < num_threads; ++thread)
      of_thread(thread).product = -1;
  }

  // These rows of a product, made ready now, or earlier for other panels. Null: the kernels read
  // them where they are.
  const void *rows_of(const Kernels &kernels, const Projection &first, int64_t product,
                      int64_t row_begin, int64_t row_end, int64_t thread) const {
    const bool is_float = first.arithmetic == Arithmetic::f32;
    if (is_float && first.x.storage == Storage::f32 && first.sums == 0) return nullptr;
    ReadyRows &ready = of_thread(thread);
    if (ready.product != product || ready.row_begin != row_begin) {
      if (is_float)
        kernels.widen_rows(first.x, row_begin, row_end, first.depth, first.sums ? first.group : 0,
                           static_cast<float *>(ready.rows()));
      else
        products_of(kernels, first)->encode_rows(first, row_begin, row_end, ready.rows());
      ready.product = product;
      ready.row_begin = row_begin;
    }
    return ready.rows();
  }
};

struct ProjectWork {
  const Kernels *kernels;
  const Product *products;
  Readying readying;
  Cut cuts[max_products];
};

// Which of the functions of the kernels multiplies.
auto project_of(const Kernels &kernels, const Projection &projection) {
  return projection.arithmetic == Arithmetic::f32 ? kernels.project
                                                  : products_of(kernels, projection)->project;
}

// Units are numbered block of rows by block of rows, and within a block panel by panel of all
// parts, so that the threads work on the same rows at about the same time.
void run_unit(const void *context, int64_t unit, int64_t thread) {
  const ProjectWork &work = *static_cast<const ProjectWork *>(context);
  int64_t i = 0;
  for (; unit >= work.cuts[i].units(); ++i) unit -= work.cuts[i].units();
  const Product &product = work.products[i];
  const Cut &cut = work.cuts[i];
  const int64_t row_begin = unit / cut.groups_of_all_parts * cut.block_rows;
  int64_t group = unit % cut.groups_of_all_parts, part = 0;
  while (group >= cut.groups[part]) group -= cut.groups[part++];
  const Projection &projection = product.parts[part];
  const int64_t panel_begin = group * cut.group_panels,
                row_end = std::min(projection.rows, row_begin + cut.block_rows);
  const void *const rows =
      work.readying.rows_of(*work.kernels, projection, i, row_begin, row_end, thread);
  const int64_t panel_end = std::min(panels_of(projection.columns), panel_begin + cut.group_panels);
  project_of(*work.kernels, projection)(projection, rows, row_begin, row_end, panel_begin,
                                        panel_end);
}

// A single thread needs no units.
void run_alone(const Kernels &kernels, const Product &product, int64_t number,
               const Readying &readying) {
  const int64_t rows = product.parts[0].rows,
                block_rows = block_rows_of(rows, product.parts[0].depth);
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t end = std::min(rows, row + block_rows);
    const void *const ready = readying.rows_of(kernels, product.parts[0], number, row, end, 0);
    for (int64_t part = 0; part < product.num_parts; ++part) {
      const Projection &projection = product.parts[part];
      project_of(kernels, projection)(projection, ready, row, end, 0,
                                      panels_of(projection.columns));
    }
  }
}

// sgemm takes float rows at one stride. Rows of one sequence have one, and so have those of all
// sequences if these follow each other; other rows are copied first. The product goes to the
// workspace, and the kernels add the bias and write it where it belongs.
void run_through_sgemm(const mha_layer &layer, const Product &product, float *results,
                       float *widened) {
  const Projection &first = product.parts[0];
  const InputRows &x = first.x;
  int64_t columns = 0;
  for (int64_t part = 0; part < product.num_parts; ++part) columns += product.parts[part].columns;
  // Sequences of one row lie at their batch stride, which serves as well.
  const bool has_single_rows =
      x.rows_per_sequence == 1 && x.batch_stride >= first.depth && x.batch_stride <= INT32_MAX;
  const bool is_widened = x.storage != Storage::f32 || x.extents;
  const int64_t row_stride = is_widened        ? first.depth
                             : has_single_rows ? x.batch_stride
                                               : x.row_stride;
  const bool is_one_run = is_widened || first.rows == x.rows_per_sequence ||
                          x.batch_stride == x.rows_per_sequence * row_stride;
  const int64_t run_rows = is_one_run ? first.rows : x.rows_per_sequence;
  for (int64_t row = 0; row < first.rows;) {
    const int64_t run = row / run_rows, in_run = row % run_rows,
                  rows = std::min(sgemm_rows, run_rows - in_run);
    const float *a = widened;
    if (is_widened)
      layer.kernels->widen_rows(x, row, row + rows, first.depth, 0, widened);
    else
      a = static_cast<const float *>(x.base) + run * x.batch_stride + in_run * row_stride;
    layer.sgemm(101, 111, 111, static_cast<int>(rows), static_cast<int>(columns),
                static_cast<int>(first.depth), 1.0f, a, static_cast<int>(row_stride),
                product.plain_weights, static_cast<int>(product.plain_stride), 0.0f, results,
                static_cast<int>(columns));
    int64_t column = 0;
    for (int64_t part = 0; part < product.num_parts; ++part) {
      layer.kernels->finish_rows(product.parts[part], results + column, columns, row, row + rows);
      column += product.parts[part].columns;
    }
    row += rows;
  }
}

}  // namespace

bool takes_rows_as_given(const mha_layer &layer, Storage input) {
  return input == Storage::f32 && layer.shape.arithmetic == Arithmetic::f32 &&
         layer.shape.offsets == 0;
}

// Takes no memory if the kernels read the input rows where they are.
ProductPlan plan_products(const mha_layer &layer, Storage input, bool has_padding, Count rows,
                          int64_t input_width, int64_t columns, int64_t num_threads,
                          WorkspaceLayout *layout) {
  ProductPlan memory = {};
  const int64_t most = rows.overflows() ? INT32_MAX : rows.value();
  const Count width(input_width);
  if (layer.sgemm) {
    const Count at_once(std::min(most, sgemm_rows));
    memory.results = layout->take_floats(at_once * Count(columns));
    if (input != Storage::f32 || has_padding) memory.widened = layout->take_floats(at_once * width);
  } else if (!takes_rows_as_given(layer, input)) {
    // Memory for the largest block. block_rows_of returns fewer rows for wider ones; the sum here
    // is monotonic all the same, so that more or wider rows never need less.
    const bool are_codes = has_codes(layer.storage) && layer.shape.arithmetic != Arithmetic::f32;
    const int64_t group = layer.shape.group_of(layer.storage),
                  chain = terms_of_chain(layer.storage, group),
                  sums = layer.shape.offsets ? blocks_of(input_width, group) : 0;
    const bool are_pairs = layer.shape.arithmetic == Arithmetic::bf16;
    const int64_t row_floats = sums + (are_codes   ? coded_bytes<int16_t>(chain, input_width) / 4
                                       : are_pairs ? blocks_of(input_width, bf16_step) * bf16_step
                                                   : input_width);
    const int64_t fewest =
        std::max(block_floats + whole_tiles * row_floats, min_block * row_floats);
    const int64_t floats = std::min(
        std::min(blocks_of(most, whole_tiles) * whole_tiles, project_block_rows) * row_floats,
        fewest);
    memory.ready_per_thread = static_cast<int64_t>(sizeof(ReadyRows)) + blocks_of(floats, 16) * 64;
    memory.ready = layout->take(Count(num_threads), memory.ready_per_thread);
  }
  return memory;
}

// Written field by field into a struct that is read soon after.
void describe_projection(const mha_layer &layer, MatrixName name, const InputRows &x, int64_t rows,
                         Projection *projection) {
  const PackedMatrix &matrix = layer.layout.matrices[name];
  projection->x = x;
  projection->rows = rows;
  projection->depth = matrix.depth;
  projection->columns = matrix.columns;
  projection->storage = layer.storage;
  projection->arithmetic = layer.shape.arithmetic;
  projection->panels = layer.weights(name);
  projection->scale_storage = layer.shape.scale_storage;
  projection->group = layer.shape.group_of(layer.storage);
  projection->sums = layer.shape.offsets != 0 ? blocks_of(matrix.depth, projection->group) : 0;
  projection->scales = layer.scales(name);
  projection->offsets = layer.offsets(name);
  projection->bias = layer.bias(name);
  for (Destination *const to : {&projection->destination, &projection->tap}) {
    to->kind = Destination::Kind::none;
    to->storage = Storage::f32;
    to->residual = nullptr;
  }
}

// A BLAS takes one product after the other, and one thread needs no units.
void run_products(const mha_layer &layer, const Product *products, int64_t num_products,
                  const mha_scheduler *scheduler, UnitCounter *counter, const ProductPlan &memory,
                  unsigned char *workspace) {
  if (layer.sgemm) {
    float *const results = reinterpret_cast<float *>(workspace + memory.results);
    float *const widened = reinterpret_cast<float *>(workspace + memory.widened);
    for (int64_t i = 0; i < num_products; ++i)
      run_through_sgemm(layer, products[i], results, widened);
    return;
  }
  const Readying readying = {workspace + memory.ready, memory.ready_per_thread};
  readying.clear(threads_of(scheduler));
  if (threads_of(scheduler) == 1) {
    for (int64_t i = 0; i < num_products; ++i) run_alone(*layer.kernels, products[i], i, readying);
    return;
  }
  ProjectWork work = {layer.kernels, products, readying, {}};
  int64_t units = 0;
  for (int64_t i = 0; i < num_products; ++i) {
    work.cuts[i] = cut_of(products[i], threads_of(scheduler));
    units += work.cuts[i].units();
  }
  run_units(scheduler, counter, units, run_unit, &work);
}

}  // namespace mha
