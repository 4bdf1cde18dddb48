// Reads structs from the caller and writes structs to them.
//
// Structs of the interface grow at their end, and the program and the library may each be of a
// later version than the other. So each struct begins with its size, which the program sets as its
// header defines it. A library that knows more fields than the program takes the others as zero,
// which means their default. One that knows fewer accepts only programs that leave the others zero.
#pragma once

#include <stddef.h>
#include <string.h>

#include "mha.h"
#include "report.h"

namespace mha {

// The size of each struct in its first version, which no caller's struct is smaller than. It ends
// with the last field of that version, and stays the same when fields are added after it.
template <class Struct>
inline constexpr size_t first_version_bytes = 0;

#define MHA_FIRST_VERSION_ENDS_WITH(Struct, field)      \
  template <>                                           \
  inline constexpr size_t first_version_bytes<Struct> = \
      offsetof(Struct, field) + sizeof(Struct::field)
MHA_FIRST_VERSION_ENDS_WITH(mha_layer_config, gate_dim);
MHA_FIRST_VERSION_ENDS_WITH(mha_layer_weights, w_g);
MHA_FIRST_VERSION_ENDS_WITH(mha_layer_options, allocator);
MHA_FIRST_VERSION_ENDS_WITH(mha_kv_cache_config, num_blocks);
MHA_FIRST_VERSION_ENDS_WITH(mha_rope, table_stride);
MHA_FIRST_VERSION_ENDS_WITH(mha_rope_config, mrope_positions);
MHA_FIRST_VERSION_ENDS_WITH(mha_norm, context_head_stride);
MHA_FIRST_VERSION_ENDS_WITH(mha_score_options, relative_right);
MHA_FIRST_VERSION_ENDS_WITH(mha_score_arrays, chosen_block);
MHA_FIRST_VERSION_ENDS_WITH(mha_partials_args, lse);
MHA_FIRST_VERSION_ENDS_WITH(mha_outputs, attention_weights);
MHA_FIRST_VERSION_ENDS_WITH(mha_sequences, rope_k_positions);
MHA_FIRST_VERSION_ENDS_WITH(mha_forward_args, output);
MHA_FIRST_VERSION_ENDS_WITH(mha_attention_args, kv_first_position);
MHA_FIRST_VERSION_ENDS_WITH(mha_choose_keys_args, index_scores);
MHA_FIRST_VERSION_ENDS_WITH(mha_call_info, bytes);
MHA_FIRST_VERSION_ENDS_WITH(mha_linear_weights, format);
MHA_FIRST_VERSION_ENDS_WITH(mha_linear_args, scheduler);
MHA_FIRST_VERSION_ENDS_WITH(mha_recurrent_args, num_snapshots);
MHA_FIRST_VERSION_ENDS_WITH(mha_causal_conv_args, state_out);
#undef MHA_FIRST_VERSION_ENDS_WITH

mha_status read_struct(Report report, const char *name, const void *given, void *copy,
                       size_t known_bytes, size_t first_bytes);
mha_status write_struct(Report report, const char *name, const void *filled, void *to,
                        size_t known_bytes, size_t first_bytes);

// Copies the fields that the caller's struct has and leaves the others zero. Fields of theirs that
// this version does not know must be zero. Most programs have the version of the library, for which
// a copy is enough.
template <class Struct>
inline mha_status read_struct(Report report, const char *name, const Struct *given, Struct *copy) {
  if (given && given->struct_size == sizeof(Struct)) {
    memcpy(copy, given, sizeof(Struct));
    return MHA_OK;
  }
  return read_struct(report, name, given, copy, sizeof(Struct), first_version_bytes<Struct>);
}

// Fills the caller's struct as far as it goes. Fields that this version does not know become zero,
// and struct_size stays as the caller set it.
template <class Struct>
inline mha_status write_struct(Report report, const char *name, const Struct &filled, Struct *to) {
  return write_struct(report, name, &filled, to, sizeof(Struct), first_version_bytes<Struct>);
}

// Answers a size query.
mha_status write_size(Report report, size_t size, size_t *bytes);

}  // namespace mha
