// The table through which the library calls the kernels of one instruction set (kernels.h).
// The file that instantiates the kernels of a set includes it last.
#pragma once

#include "attend.h"
#include "causal_conv.h"
#include "choose.h"
#include "inspect.h"
#include "partials.h"
#include "project.h"
#include "project_integers.h"
#include "recurrent.h"
#include "small.h"
#include "store.h"

namespace mha {
namespace {

// Products by the instructions that every processor of the set has. Files such as
// avx2_vnni.cpp compile them once more for newer processors.
constexpr ProductKernels own_codes = {encode_rows, project_codes, nullptr, nullptr};
constexpr ProductKernels own_pairs = {round_rows, project, nullptr, nullptr};

// The table of one instruction set, whose vector V is.
//
// The scalar kernels have no small path: one number at a time, 16 keys are too many for a small
// call.
template <class V>
constexpr Kernels make_kernels(uint32_t instruction_set, const ProductKernels *codes,
                               const ProductKernels *pairs = &own_pairs) {
  return {instruction_set,
          codes,
          pairs,
          project,
          widen_rows,
          attend<V>,
          normalize_context<V>,
          inspect<V>,
          score_keys,
          choose_greatest,
          store,
          measure,
          finish_rows,
          merge_partials<V>,
          finish_partials<V>,
          advance_state,
          convolve,
          V::size > 1 ? run_small : nullptr};
}

}  // namespace
}  // namespace mha
