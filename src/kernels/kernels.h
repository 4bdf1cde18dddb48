// The table of functions that each instruction set provides.
//
// This is the border between the library and the kernels. The library is compiled once, for any
// processor; kernels are compiled once for each instruction set, and reached only through the
// table. tasks/ has a header for each subject with the plain structs that describe what a kernel is
// asked to do. None of them holds a function that a linker could share between instruction sets.
// Both sides also include compiler.h and storage.h, whose functions every file compiles for itself.
#pragma once

#include "../compiler.h"
#include "tasks/attention.h"
#include "tasks/projection.h"
#include "tasks/recurrent.h"
#include "tasks/small.h"
#include "tasks/tile.h"

namespace mha {

// Products in integer arithmetic, or in that of bf16: what differs between instruction sets that
// have instructions for them and those that have not.
struct ProductKernels {
  // Input rows [row_begin, row_end) of a projection as `project` takes them. Codes are followed by
  // their sums: coded_bytes<int16_t> and 4 bytes for each sum at most. A row for bf16 arithmetic
  // has at most 4 bytes for each number of whole steps; the memory has room for 8 rows or more.
  void (*encode_rows)(const Projection &projection, int64_t row_begin, int64_t row_end, void *to);

  // As Kernels::project. rows: what encode_rows has made of these input rows.
  void (*project)(const Projection &projection, const void *rows, int64_t row_begin,
                  int64_t row_end, int64_t panel_begin, int64_t panel_end);

  // The loops over codes of keys, or of values, for a number of rows of codes: over pairs of words
  // in memory (f32 stands for them), or over stored bytes. Null: those of the set that has the
  // other kernels.
  Loops (*loops_over_codes)(int64_t rows, Storage storage, bool are_values);

  // Whether the set's own instruction computes what the contract says; null: there is no doubt.
  bool (*is_as_defined)();
};

// All that the library calls of one instruction set. Units of work call these functions, which take
// long enough that a call through a pointer costs nothing beside them. Each takes plain
// descriptions and writes to memory that is described there.
struct Kernels {
  uint32_t instruction_set;             // MHA_INSTRUCTION_SET_*
  const ProductKernels *codes, *pairs;  // of integer and of bf16 arithmetic

  // Output rows [row_begin, row_end) and panels [panel_begin, panel_end) of a projection. rows:
  // what widen_rows has made of these input rows; null: they are floats, and taken as such.
  void (*project)(const Projection &projection, const void *rows, int64_t row_begin,
                  int64_t row_end, int64_t panel_begin, int64_t panel_end);

  // Input rows [row_begin, row_end), `width` numbers each, as floats, one after the other. Unless
  // group is 0, the sums of the groups of each row follow it.
  void (*widen_rows)(const InputRows &x, int64_t row_begin, int64_t row_end, int64_t width,
                     int64_t group, float *to);

  // One unit of attention: the queries from block * block_queries on of all query heads of
  // unit_kv_heads kv heads, group number `group` of one sequence, with the keys of one part.
  // scratch: attention.plan.scratch.floats floats, aligned to 64 bytes.
  void (*attend)(const Attention &attention, int64_t sequence, int64_t group, int64_t block,
                 int64_t part, float *scratch);

  // Norm, and a gate behind it, of rows [row_begin, row_end) of a sequence's context, which are
  // floats.
  void (*normalize_context)(const Attention &attention, int64_t sequence, int64_t row_begin,
                            int64_t row_end);

  // The outputs per pair of a block of queries of one kv head, when all units of `attend` are done.
  void (*inspect)(const Attention &attention, int64_t sequence, int64_t kv_head, int64_t block,
                  float *scratch);

  // The scores of a unit of `attend` with one part of its keys; then the choice of one query.
  void (*score_keys)(const KeyChoice &choice, int64_t sequence, int64_t block, int64_t part,
                     float *scratch);
  void (*choose_greatest)(const KeyChoice &choice, int64_t sequence, int64_t query);

  // Rows [row_begin, row_end) of those that one sequence stores. scratch: of keys 4 * width, of
  // values width floats, if they are to be prepared.
  void (*store)(const KvStore &storing, int64_t sequence, int64_t row_begin, int64_t row_end,
                float *scratch);

  // The same rows of queries or keys. scratch: width floats.
  void (*measure)(const RowMeasure &measure, int64_t sequence, int64_t row_begin, int64_t row_end,
                  float *scratch);

  // The second half of project, for a product made elsewhere: adds the bias and writes output rows
  // [row_begin, row_end), of which the first is at `product`.
  void (*finish_rows)(const Projection &projection, const float *product, int64_t product_stride,
                      int64_t row_begin, int64_t row_end);

  // Rows of partials, head_dim_v numbers each behind m and l: merge(left, right). The result may be
  // one of them.
  void (*merge_partials)(const float *left, const float *right, int64_t rows, int64_t head_dim_v,
                         float *result);
  void (*finish_partials)(const Partials &partials);

  // All rows of one sequence, for the columns [column_begin, column_end) of one state. scratch:
  // recurrence.scratch.floats floats, aligned to 64 bytes.
  void (*advance_state)(const Recurrence &recurrence, const SequenceRows &rows, int64_t head,
                        int64_t column_begin, int64_t column_end, float *scratch);

  // All rows of one sequence, for conv_channels channels from `channel` on.
  void (*convolve)(const Convolution &convolution, const SequenceRows &rows, int64_t channel);

  // All of a small call; null where there is no such function. scratch: small_workspace_bytes.
  void (*run_small)(const SmallLayer &layer, const SmallCall &call, float *scratch);
};

// The kernels of each set, and the products of one that only adds these.
#define MHA_SET(name, ...)             \
  extern const Kernels kernels_##name; \
  extern const ProductKernels codes_##name, pairs_##name;
#include "sets.def"

}  // namespace mha
