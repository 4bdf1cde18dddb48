// Checks of what a call says of its sequences.
#pragma once

#include "../base/report.h"
#include "../plan/sequences.h"
#include "request.h"

namespace mha {

// Reads mha_sequences and the fields that describe sequences. With cache_read, n_kv is 0.
mha_status read_sequences(Report report, const mha_call &call, bool is_self, int64_t first_position,
                          SequenceArguments *sequences);

// Checks what needs no array: flags, windows, the shape of the rotation, and that the cache has
// these heads. `rope` gets the rotation, all defaults resolved.
mha_status check_sequences(Report report, const SequenceArguments &sequences, int64_t num_kv_heads,
                           int64_t head_dim, int64_t head_dim_v, mha_rope *rope);

// Checks the arrays that say which rows of queries are valid. rows_name is the field with their
// number.
mha_status check_query_rows(Report report, const SequenceArguments &sequences,
                            const char *rows_name);

// Checks the arrays: lengths, positions, sequences of the cache and the room there.
mha_status check_sequence_arrays(Report report, const SequenceArguments &sequences);

// Checks that the lists of chosen keys name keys that exist. Strides are resolved.
mha_status check_chosen_entries(Report report, const SequenceArguments &sequences,
                                const ChosenKeys &chosen, int64_t num_kv_heads);

}  // namespace mha
