// The shapes and weights of one sequence, shared by the specification, the oracle and the tests.
// Plain data and no functions, so that a file compiled for more than the baseline instruction set
// can include it.
#ifndef MHA_TESTS_SUPPORT_SHAPES_H
#define MHA_TESTS_SUPPORT_SHAPES_H

#include <cstdint>

namespace support {

// The types in which weights, keys and values are stored; the numbers are mha.h's, and 0 is F32.
enum class Storage : uint32_t { kF32 = 1, kF16 = 2, kBf16 = 3, kInt8 = 4, kInt4 = 5, kInt5, kInt6 };
using Stored = Storage;  // of weights
inline constexpr const char *kTypeNames[] = {"", "f32", "f16", "bf16", "int8", "int4"};
inline constexpr int64_t kTypeBits[] = {32, 32, 16, 16, 8, 4};  // of a number, without scales

inline constexpr Storage kKeyTypes[] = {Storage::kF32, Storage::kF16, Storage::kBf16,
                                        Storage::kInt8};
// Values and weights may have one type more.
inline constexpr Storage kValueTypes[] = {Storage::kF32, Storage::kF16, Storage::kBf16,
                                          Storage::kInt8, Storage::kInt4};
inline constexpr auto &kWeightTypes = kValueTypes;

// What projections, or scores, compute in; the numbers are mha.h's.
enum class Arithmetic : uint32_t { kF32 = 0, kInt8 = 0x501, kInt16 = 0x502, kBf16 = 0x503 };

// How a layer stores and multiplies its weights: all that there is with the default groups.
struct WeightFormat {
  Stored stored;
  Arithmetic arithmetic;
  const char *name;
  int64_t group = 0;
};
inline constexpr WeightFormat kWeightFormats[] = {
    {Stored::kF32, Arithmetic::kF32, "f32"},
    {Stored::kF16, Arithmetic::kF32, "f16"},
    {Stored::kBf16, Arithmetic::kF32, "bf16"},
    {Stored::kInt8, Arithmetic::kF32, "int8"},
    {Stored::kInt4, Arithmetic::kF32, "int4"},
    {Stored::kInt8, Arithmetic::kInt8, "int8 in int8"},
    {Stored::kInt8, Arithmetic::kInt16, "int8 in int16"},
    {Stored::kInt4, Arithmetic::kInt8, "int4 in int8"},
    {Stored::kInt4, Arithmetic::kInt16, "int4 in int16"},
    {Stored::kBf16, Arithmetic::kBf16, "bf16 in bf16"}};
inline bool IsOfIntegers(const WeightFormat &format) {
  return format.arithmetic == Arithmetic::kInt8 || format.arithmetic == Arithmetic::kInt16;
}

// A rotation of queries and keys, as the struct of mha.h has it, for one sequence.
struct Rotation {
  bool is_interleaved;         // elements 2 i and 2 i + 1 are a pair, else i and i + dims / 2
  int64_t dims;                // rotated elements of a head
  int64_t offset;              // the first of them
  const float *cos;            // [positions, dims / 2]
  const float *sin;            // [positions, dims / 2]
  int64_t table_stride;        // from one position to the next
  const int64_t *q_positions;  // [n_q]; null: q_start + i
  const int64_t *k_positions;  // [n_kv]; null: j
};

// A norm of queries, keys and values, as the struct of mha.h has it.
struct Norm {
  bool is_layer, is_of_all_heads, is_after_rotation, is_of_values;
  float epsilon;
  const float *q_weight, *k_weight, *q_bias, *k_bias;  // null: none
  int64_t head_stride;                                 // from one head's to the next one's
};

// A norm of the context before W_O.
struct ContextNorm {
  bool is_layer, is_of_all_heads, is_after_gate;
  float epsilon;
  const float *weight, *bias;  // null: none
  int64_t head_stride;         // from one head's to the next one's
};

constexpr int64_t kNoSegment = INT64_MIN;

// The arrays of mha_score_options with a number for each head: ONE(name, whether -infinity is
// allowed, how large random numbers are).
#define MHA_EACH_HEAD_ARRAY(ONE) \
  ONE(alibi_slopes, false, 0.1f) ONE(sinks, true, 2.0f) ONE(head_scales, false, 1.0f)

// What changes scores beyond the scale, as the struct of mha.h has it, for one sequence. Null:
// none.
struct ScoreOptions {
  float softcap;
  const float *bias;                    // [num_heads, n_q, n_kv]
  const uint8_t *mask;                  // [num_heads, n_q, n_kv]: 0 = takes no part
  const int64_t *q_segments = nullptr;  // [n_q]
  // [n_kv], or kNoSegment for a key without a column; null with q_segments.
  const int64_t *kv_segments = nullptr;
  bool segments_add_keys = false;        // MHA_SEGMENTS_ALSO
  int64_t num_keys = INT64_MAX;          // the keys from here on are masked, for want of a column
  const float *relative_bias = nullptr;  // [num_heads, relative_left + 1 + relative_right]
  int64_t relative_left = 0;
  int64_t relative_right = 0;
  const int32_t *chosen = nullptr;  // [num_kv_heads, n_q, num_chosen]
  int64_t num_chosen = 0;
  int64_t chosen_block = 1;
  const float *q_scales = nullptr;  // [n_q]
  // [num_heads, n_q, relative_left + 1 + relative_right], in place of relative_bias.
  const float *relative_rows = nullptr;
#define MHA_POINTER(name, ...) const float *name = nullptr;  // [num_heads]
  MHA_EACH_HEAD_ARRAY(MHA_POINTER)
};

// What the context is multiplied by; the numbers of MHA_FUNCTION_*.
enum class GateKind : uint32_t { kNone = 0, kSigmoid = 1, kSoftplus = 2 };

// The gate of one sequence.
struct Gate {
  GateKind kind = GateKind::kNone;
  int64_t dim = 0;                // head_dim_v or 1
  const float *values = nullptr;  // [n_q, num_heads, dim]
};

struct AttentionShape {
  int64_t n_q;
  int64_t n_kv;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;
  float scale;     // 0 = 1 / sqrt(head_dim)
  bool is_causal;  // key j is masked in row i where j > q_start + i
  int64_t q_start;
  bool has_window_left = false;  // masked where j < q_start + i - window_left
  int64_t window_left = 0;
  bool has_window_right = false;  // masked where j > q_start + i + window_right
  int64_t window_right = 0;
  const Rotation *rotation = nullptr;         // null: none
  const Norm *norm = nullptr;                 // null: none
  const ContextNorm *context_norm = nullptr;  // of a layer; null: none
  const ScoreOptions *score = nullptr;        // null: none
  Storage k_type = Storage::kF32;  // keys and values are attended to as if stored in these types
  Storage v_type = Storage::kF32;
  bool values_in_keys = false;  // a value is the first elements of its key, as stored
  bool is_in_integers = false;  // of keys and values of codes
  Gate gate = {};               // of a layer, kind and dim alone
  // Of the first key; q_start and the rotation count from the sequence's first one.
  int64_t kv_position = 0;
  bool has_equal_scores = false;  // the scale is 0, whatever it says
};

struct LayerShape {
  int64_t query_dim;
  int64_t key_dim;
  int64_t value_dim;
  int64_t output_dim;  // not looked at without w_o
  AttentionShape attention;
};

// How a matrix is kept: codes may have a scale for each group of inputs, and offsets besides.
struct Format {
  Format(Stored type, int64_t size = 0, const float *of_groups = nullptr,  // NOLINT: just a type
         bool in_blocks = false)
      : stored(type),
        group(size == 0 && type == Stored::kInt4 ? 32 : size),
        offsets(of_groups),
        are_in_blocks(in_blocks) {}

  Stored stored;
  int64_t group;         // inputs that share a scale; 0: all of them
  const float *offsets;  // [groups, out]; null: none. Codes below 8 bits are then not negative.
  bool are_in_blocks;    // scales and offsets are codes, and [blocks, out] factors come after them
};

// All matrices dense, [in, out]. Null: no bias, no output projection. Of kInt8 and kInt4 they are
// codes, which have scales.
struct LayerWeights {
  const float *w_q;  // [query_dim, num_heads * head_dim]
  const float *w_k;  // [key_dim, num_kv_heads * head_dim]
  const float *w_v;  // [value_dim, num_kv_heads * head_dim_v]
  const float *w_o;  // [num_heads * head_dim_v, output_dim]
  const float *b_q;  // [num_heads * head_dim]
  const float *b_k;  // [num_kv_heads * head_dim]
  const float *b_v;  // [num_kv_heads * head_dim_v]
  const float *b_o;  // [output_dim]
  Stored stored = Stored::kF32;
  // [num_heads * head_dim], in groups [groups, num_heads * head_dim]; likewise below.
  const float *s_q = nullptr;
  const float *s_k = nullptr;
  const float *s_v = nullptr;
  const float *s_o = nullptr;
  const float *w_g = nullptr;  // [query_dim, num_heads * gate.dim]; with a gate
  const float *b_g = nullptr;
  const float *s_g = nullptr;
  Arithmetic arithmetic = Arithmetic::kF32;
  int64_t group = 0;  // of a Format
  const float *o_q = nullptr;
  const float *o_k = nullptr;
  const float *o_v = nullptr;
  const float *o_o = nullptr;
  const float *o_g = nullptr;
  bool are_in_blocks = false;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_SHAPES_H
