// Sizes that the contract (kernels/CONTRACT.md) fixes, or that the layout of packed weights and
// caches does, and the ways in which numbers are stored.
#pragma once

#include <stdint.h>

#include "compiler.h"

namespace mha {

// Columns of a weight panel: a multiple of every vector width, and 3 registers of AVX-512.
constexpr int64_t panel_columns = 48;
// Keys of a key tile, which lie side by side in memory, one per lane.
constexpr int64_t tile_keys = 16;

// The contract fixes these, with its section: terms of one chain of a projection (3, 4) and of a
// score (7), pairs of terms of a score whose products are added as integers (7), keys of a chunk
// (8), the most terms of int4 and of others whose products are added as integers (4), groups of
// weights whose offsets are multiplied in one chain (4), inputs whose scales share a factor (2),
// and the largest block of H (2).
constexpr int64_t dot_block = 256;
constexpr int64_t bf16_step = 32;  // terms of two chains in bf16 arithmetic
constexpr int64_t score_block = 32;
constexpr int64_t score_pairs = 256;
constexpr int64_t chunk_keys = 256;
constexpr int64_t int4_chain = 32;
constexpr int64_t code_group = 64;
constexpr int64_t offset_block = 64;
constexpr int64_t scale_block = 256;
constexpr int64_t most_hadamard_block = 256;

// Weights that share a scale: a power of two of inputs of one output.
constexpr int64_t min_group = 16, max_group = 128;

// How numbers are stored: the MHA_TYPE_* of mha.h.
enum class Storage : uint32_t { f32, f16, bf16, int8, int4, int5, int6 };

// What projections compute in: the MHA_ARITHMETIC_* of mha.h.
enum class Arithmetic : uint32_t { f32, int8, int16, bf16 };

}  // namespace mha
