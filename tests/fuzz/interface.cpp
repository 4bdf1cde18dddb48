// Target `interface`: every public function with arbitrary arguments. Pointers are NULL or good ones: each array has a buffer of its own,
// next to a guard page and exactly as large as the headers say for the other arguments. Where that is more than there is memory for here,
// or the call would take too long, its workspace is too small, which must be noticed before any array is read.
#include <algorithm>
#include <memory>

#include "fuzz/buffers.h"

namespace {

using fuzz::Bytes;
using fuzz::Expect;
using fuzz::Wide;

Bytes in(nullptr, 0);
fuzz::Buffers buffers;
bool has_error;  // calls are given an mha_error

template <typename Function>
mha_status Call(const Function &function) {
  return buffers.Call(function, has_error);
}

// ---- Numbers: mostly sensible ones, so that not every call is refused at once

int64_t Odd(int64_t usual) {
  const uint8_t kind = in.Byte();
  return kind < 248 ? usual : kind < 250 ? 0 : kind < 252 ? MHA_EMPTY : in.AnyInteger();
}
int64_t Number(int64_t low, int64_t high) {  // now and then the next one outside
  const int64_t usual = in.Integer(low, std::max(low, high));
  const uint8_t kind = in.Byte();
  return kind < 236 ? usual : kind < 242 ? high + 1 : kind < 246 ? low - 1 : kind < 250 ? MHA_EMPTY : kind < 252 ? 0 : in.AnyInteger();
}
uint32_t Kind(uint32_t count) {  // below count, or any
  const uint8_t kind = in.Byte();
  return kind < 252 ? kind % count : static_cast<uint32_t>(in.Raw(4));
}
float Fraction() { return in.OneIn(8) ? in.Float() : 0.0f; }

// ---- Arrays

struct Axis {
  int64_t count;
  int64_t *stride = nullptr;  // to be chosen; null: contiguous
};

constexpr Wide kHuge = Wide{1} << 62;  // more than there is memory for; products of two do not overflow

// Chooses the strides of an array whose axes are named from the outermost on, and returns its elements. 0 where it is to be refused, or
// empty.
Wide Elements(Wide width, std::initializer_list<Axis> axes) {
  Wide all = std::min(width, kHuge), contiguous = all;
  bool is_wrong = width <= 0;
  const bool has_strides = in.OneIn(3);
  for (const Axis *axis = axes.end(); axis-- != axes.begin();) {
    int64_t given = 0;
    if (axis->stride && has_strides) {
      const uint8_t kind = in.Byte();
      const int64_t usual = static_cast<int64_t>(contiguous);
      given = kind < 128 ? usual : kind < 192 ? usual + kind % 8 : kind < 240 ? MHA_BROADCAST : kind < 248 ? 0 : in.AnyInteger();
      *axis->stride = given;
    }
    const Wide stride = given == MHA_BROADCAST ? 0 : given == 0 ? contiguous : given;
    is_wrong = is_wrong || axis->count <= 0 || stride < 0;
    if (is_wrong) continue;
    all = std::min(all + (axis->count - 1) * stride, kHuge);
    if (given != MHA_BROADCAST) contiguous = std::min(axis->count * stride, kHuge);
  }
  return is_wrong ? 0 : all;
}

Wide BytesOf(uint32_t type) { return type == MHA_TYPE_F16 || type == MHA_TYPE_BF16 ? 2 : type == MHA_TYPE_F32 ? 4 : 1; }

// Four bytes of the input over and over: enough for numbers of all kinds.
void *Contents(Wide bytes) {
  unsigned char *const data = buffers.Take(bytes, 4);
  const uint32_t seed = static_cast<uint32_t>(in.Raw(4));
  for (size_t i = 0; buffers.Fits(bytes) && i < static_cast<size_t>(bytes); i += 4) {
    std::memcpy(data + i, &seed, std::min<size_t>(4, static_cast<size_t>(bytes) - i));
  }
  return data;
}
void *Input(Wide count, uint32_t type) { return Contents(count * BytesOf(type)); }
void *Output(Wide count, uint32_t type = MHA_TYPE_F32) { return buffers.TakeOutput(count * BytesOf(type), 4); }
float *Result(Wide count) { return static_cast<float *>(Output(count)); }
float *Floats(Wide count) {  // finite ones mostly, as slopes and scales have to be
  float *const floats = buffers.Take<float>(count);
  const float usual = in.Float(), odd = in.OneIn(16) ? in.Float() : usual;
  for (int64_t i = 0; buffers.Fits(count * 4) && i < static_cast<int64_t>(count); i++) floats[i] = i % 5 == 3 ? odd : usual;
  return floats;
}
template <typename T>
T *Integers(Wide count, int64_t low, int64_t high) {
  T *const integers = buffers.Take<T>(count);
  for (int64_t i = 0; buffers.Fits(count * Wide{sizeof(T)}) && i < static_cast<int64_t>(count); i++) {
    integers[i] = static_cast<T>(in.AtEnd() ? low : Number(low, high));
  }
  return integers;
}
int64_t *Starts(int64_t batch, int64_t rows) {  // as cu_seqlens
  int64_t *const starts = Integers<int64_t>(Wide{batch} + (batch > 0), 0, 0);
  for (int64_t b = 1; b <= batch && batch < 1 << 14; b++) starts[b] = Number(starts[b - 1], rows);
  return starts;
}

// A struct in as many bytes as its struct_size says: mostly those of this version, always where fields that others lack change sizes of
// arrays.
template <typename T>
T *Placed(T value, bool has_this_version = false) {
  const uint8_t kind = has_this_version ? 0 : in.Byte();
  value.struct_size = sizeof value;
  if (kind >= 240) value.struct_size = static_cast<size_t>(kind < 248 ? in.Integer(0, sizeof value + 64) : in.AnyInteger());
  const size_t size = value.struct_size > 1 << 16 ? sizeof value.struct_size : std::max(value.struct_size, sizeof value.struct_size);
  unsigned char *const data = buffers.Take(static_cast<Wide>(size), 8);
  std::memset(data, in.OneIn(4) ? in.Byte() : 0, size);
  std::memcpy(data, &value, std::min(size, sizeof value));
  return reinterpret_cast<T *>(data);
}

void RunBackwards(void *, uint32_t count, void (*task)(void *, uint32_t), void *context) {
  while (count-- > 0) task(context, count);
}
const mha_scheduler *Scheduler() {
  if (!in.OneIn(3)) return nullptr;
  mha_scheduler *const scheduler = buffers.Take<mha_scheduler>(1);
  *scheduler = {nullptr, static_cast<uint32_t>(Number(1, 5)), in.OneIn(32), in.OneIn(32) ? nullptr : RunBackwards};
  return scheduler;
}

// The query and the call agree. Behind the workspace, of any alignment, are some bytes that no call may change, and then a guard page.
template <class Query, class Run, class Info>
void QueryAndCall(const Query &query, const Run &run, const Info &info) {
  size_t needed = 0;
  const mha_status asked = Call([&](mha_error *error) { return query(&needed, error); });
  const size_t behind = in.Byte() % 64;
  unsigned char *const workspace = buffers.Take(static_cast<Wide>(needed) + behind);
  const auto call = [&](size_t bytes) {
    const mha_status status = Call([&](mha_error *error) { return run(bytes > 0 ? workspace : nullptr, bytes, error); });
    for (size_t i = 0; i < behind && !buffers.is_too_large(); i++)
      Expect(workspace[needed + i] == 0xA5, "a call wrote behind its workspace");
    return status;
  };
  if (asked == MHA_OK && needed > 0) Expect(call(needed - 1) != MHA_OK, "a byte less of workspace than needed was taken");
  if (asked == MHA_OK && buffers.is_too_large()) return;
  const mha_status status = call(needed);
  if (asked != MHA_OK) return Expect(status == asked, "the query and the call fail with different statuses", mha_status_string(status));
  Expect(status != MHA_ERROR_BUFFER_TOO_SMALL, "a workspace of the size that the query said was too small");
  mha_call_info filled = {};
  filled.struct_size = sizeof filled;
  const mha_status described = Call([&](mha_error *error) { return info(&filled, error); });
  if (described == MHA_OK) Expect(filled.workspace_bytes == needed, "the workspace has other sizes in mha_call_info and in the query");
}

// ---- What mha_forward_args and mha_attention_args have in common

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
};

// A cache of these heads, mostly, partly filled. NULL if it can't be.
mha_kv_cache *Cache(const Heads &heads) {
  mha_kv_cache_config config = {};
  config.num_sequences = Number(1, 4);
  config.kind = Kind(3);
  config.capacity = config.kind == MHA_CACHE_CONTIGUOUS ? Number(1, 70) : Odd(16 * in.Integer(1, 5));
  config.num_kv_heads = Odd(heads.num_kv_heads), config.head_dim = Odd(heads.head_dim), config.head_dim_v = Odd(heads.head_dim_v);
  config.k_type = Kind(4);
  config.values = in.OneIn(4) ? Kind(2) : 0;
  config.v_type = config.values ? 0 : Kind(4);
  if (config.kind == MHA_CACHE_PAGED) config.block_positions = Odd(16), config.num_blocks = Number(1, 8);
  const mha_kv_cache_config *const placed = Placed(config);
  size_t bytes = 0;
  mha_kv_cache *cache = nullptr;
  const mha_status sized = Call([&](mha_error *error) { return mha_kv_cache_size(placed, &bytes, error); });
  unsigned char *const buffer = buffers.Take(static_cast<Wide>(bytes), 64);
  const auto make = [&](size_t size) {
    return Call([&](mha_error *error) { return mha_kv_cache_init(placed, buffer, size, &cache, error); });
  };
  if (sized == MHA_OK) Expect(bytes % 64 == 0 && make(bytes - 1) == MHA_ERROR_BUFFER_TOO_SMALL, "a byte less than a cache needs was taken");
  const bool fits = sized != MHA_OK || buffers.Fits(static_cast<Wide>(bytes));
  if (fits) Expect(make(bytes) == sized, "a cache has a size, but can't be made, or the other way round");
  buffers.ForgetSizes();
  if (!cache) return nullptr;
  buffers.Watch(buffer, bytes);
  mha_kv_cache_config shape = {};
  shape.struct_size = sizeof shape;
  mha_kv_cache_shape(cache, &shape, nullptr);
  for (int64_t s = in.Byte() % 4; s > 0; s--) {
    const int64_t sequence = Number(0, shape.num_sequences - 1), blocks = in.Integer(0, 5), rows = in.Integer(0, 40);
    const int32_t *const numbers = Integers<int32_t>(blocks, 0, shape.num_blocks - 1);
    if (shape.kind == MHA_CACHE_PAGED)
      Call([&](mha_error *error) { return mha_kv_cache_set_blocks(cache, sequence, numbers, blocks, error); });
    const float *const k = Floats(Elements(shape.head_dim, {{rows}, {shape.num_kv_heads}}));
    const float *const v = shape.values ? nullptr : Floats(Elements(shape.head_dim_v, {{rows}, {shape.num_kv_heads}}));
    if (!buffers.is_too_large()) Call([&](mha_error *error) { return mha_kv_cache_append(cache, sequence, rows, k, v, error); });
    buffers.ForgetSizes();
  }
  return cache;
}

template <class Args>
void FillSizes(Args *args) {
  args->batch = Number(1, 3);
  args->n_q = Number(1, in.OneIn(8) ? 300 : 20);
  args->n_kv = in.OneIn(2) ? Number(1, in.OneIn(8) ? 600 : 40) : args->n_q;
  args->flags = in.Choice<uint32_t>({0, MHA_CAUSAL, MHA_CAUSAL | MHA_WINDOW_LEFT, MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT, MHA_PADDING_LEFT,
                                     MHA_CACHE_READ, MHA_CACHE_READ | MHA_CAUSAL, MHA_CAUSAL | MHA_PADDING_LEFT, 63});
  if (args->flags == 63) args->flags = static_cast<uint32_t>(in.Raw(4));
  if (args->flags & MHA_WINDOW_LEFT || in.OneIn(64)) args->window_left = Number(0, 20);
  if (args->flags & MHA_WINDOW_RIGHT || in.OneIn(64)) args->window_right = Number(0, 20);
  args->reserved = in.OneIn(64);
  args->scheduler = Scheduler();
}

mha_score_options Score(const Heads &heads, int64_t rows, int64_t n_q, int64_t n_kv, Wide columns) {
  mha_score_options score = {};
  const uint8_t arrays = in.Byte(), pairs = in.Byte();
  score.softcap = Fraction();
  if (arrays & 1) score.alibi_slopes = Floats(heads.num_heads);
  if (arrays & 2) score.sinks = Floats(heads.num_heads);
  if (arrays & 4) score.head_scales = Floats(heads.num_heads);
  if (arrays & 8) score.q_scales = Floats(Elements(n_q, {{rows, &score.q_scales_stride}}));
  if (pairs & 7) score.columns = in.OneIn(3) ? Kind(2) : 0;
  if (pairs & 7 && in.OneIn(4)) score.num_columns = Number(1, 40);
  const Wide width = score.num_columns > 0                   ? Wide{score.num_columns}
                     : score.columns == MHA_COLUMNS_NEW_KEYS ? std::max<Wide>(n_kv, 0)
                                                             : columns;
  const auto pair_array = [&](int64_t *batch, int64_t *head, int64_t *row, Wide columns_of_row, int64_t num_heads) {
    return Elements(columns_of_row, {{rows, batch}, {num_heads, head}, {n_q, row}});
  };
  if (pairs & 1) {
    score.bias_type = Kind(2);
    const Wide count = pair_array(&score.bias_batch_stride, &score.bias_head_stride, &score.bias_row_stride, width, heads.num_heads);
    score.bias = Input(count, score.bias_type);
  }
  if (pairs & 2) {
    const Wide count = pair_array(&score.mask_batch_stride, &score.mask_head_stride, &score.mask_row_stride, width, heads.num_heads);
    score.mask = static_cast<uint8_t *>(Input(count, MHA_TYPE_INT8));
  }
  if (pairs & 4) {
    score.groups = Kind(2);
    score.q_groups = Integers<int32_t>(Elements(n_q, {{rows, &score.q_groups_stride}}), -1, 2);
    if (in.Boolean()) score.kv_groups = Integers<int32_t>(Elements(width, {{rows, &score.kv_groups_stride}}), -1, 2);
  }
  if (arrays & 16) {
    score.relative_left = Number(0, 9), score.relative_right = Number(0, 9);
    const Wide distances = Wide{score.relative_left} + 1 + score.relative_right;
    if (arrays & 32) {
      score.relative_bias = Floats(Elements(distances, {{heads.num_heads}}));
    } else {
      score.relative_rows = Floats(pair_array(&score.relative_rows_batch_stride, &score.relative_rows_head_stride,
                                              &score.relative_rows_row_stride, distances, heads.num_heads));
    }
  }
  if (arrays & 64) {
    score.num_chosen = Number(1, 8);
    score.chosen_block = in.Choice<int64_t>({0, 1, 16, 3, 64});
    const Wide count = pair_array(&score.chosen_keys_batch_stride, &score.chosen_keys_head_stride, &score.chosen_keys_row_stride,
                                  score.num_chosen, heads.num_kv_heads);
    score.chosen_keys = Integers<int32_t>(count, -1, (static_cast<int64_t>(columns) - 1) / std::max<int64_t>(1, score.chosen_block));
  }
  return score;
}

mha_norm NormOf(const Heads &heads) {
  mha_norm norm = {};
  norm.flags = Kind(16), norm.epsilon = in.OneIn(8) ? in.Float() : 1e-5f;
  norm.head_stride = in.OneIn(3) ? Odd(heads.head_dim) : 0;
  const auto weights = [&](int64_t num_heads, int64_t width, uint32_t flags, int64_t stride) {
    if (flags & MHA_NORM_ALL_HEADS) return Floats(std::min(Wide{num_heads} * width, kHuge));
    return Floats(std::min((num_heads - 1) * Wide{std::max<int64_t>(stride, 0)} + width, kHuge));
  };
  if (in.Boolean()) norm.q_weight = weights(heads.num_heads, heads.head_dim, norm.flags, norm.head_stride);
  if (in.Boolean()) norm.k_weight = weights(heads.num_kv_heads, heads.head_dim, norm.flags, norm.head_stride);
  if (in.OneIn(3)) norm.q_bias = weights(heads.num_heads, heads.head_dim, norm.flags, norm.head_stride);
  if (in.OneIn(3)) {
    norm.context_flags = in.Choice({0u, 1u, 2u, 16u, 19u}), norm.context_epsilon = in.OneIn(8) ? in.Float() : 1e-5f;
    norm.context_weight = weights(heads.num_heads, heads.head_dim_v, norm.context_flags, 0);
  }
  return norm;
}

// All but the arrays of rows. is_self: keys are the rows of query. Returns the sequences that arrays of rows have.
template <class Args>
int64_t FillOptions(Args *args, const Heads &heads, bool is_self) {
  const int64_t batch = args->batch, n_q = args->n_q, n_kv = args->flags & MHA_CACHE_READ ? MHA_EMPTY : is_self ? n_q : args->n_kv;
  if (in.OneIn(4)) args->cu_seqlens_q = Starts(batch, n_q);
  if (args->cu_seqlens_q && !is_self && n_kv != n_q) args->cu_seqlens_kv = Starts(batch, n_kv);
  if (in.OneIn(4)) args->q_start = Integers<int64_t>(batch, -3, 30);
  if (!args->cu_seqlens_q && in.OneIn(3)) args->q_lengths = Integers<int64_t>(batch, 0, n_q);
  if (!args->cu_seqlens_q && in.OneIn(4)) args->kv_start = Integers<int64_t>(batch, 0, std::min<int64_t>(n_kv, 8));
  if (!args->cu_seqlens_q && in.OneIn(4) && !is_self) args->kv_lengths = Integers<int64_t>(batch, 0, args->kv_start ? n_kv - 8 : n_kv);
  const int64_t rows = args->cu_seqlens_q && batch > 1 ? 1 : batch;
  if (args->flags & MHA_CACHE_READ || in.OneIn(3)) args->cache = Cache(heads);
  if (args->cache && in.OneIn(3)) args->cache_sequences = Integers<int64_t>(batch, 0, 3);
  // Columns of what has a number for each pair: of a cache, those of its longest sequence after the call.
  Wide columns = args->cache ? 0 : std::max<Wide>(n_kv, 0);
  for (int64_t b = 0; args->cache && b < batch && batch < 1 << 14; b++) {
    const int64_t *const starts = args->cu_seqlens_kv ? args->cu_seqlens_kv : args->cu_seqlens_q;
    const int64_t *const lengths = is_self ? args->q_lengths : args->kv_lengths;
    int64_t length = 0;
    mha_kv_cache_length(args->cache, args->cache_sequences ? args->cache_sequences[b] : b, &length, nullptr);
    const Wide valid = starts    ? Wide{starts[b + 1]} - starts[b]
                       : lengths ? Wide{lengths[b]}
                                 : Wide{n_kv} - (args->kv_start ? args->kv_start[b] : 0);
    columns = std::max(columns, length + std::max<Wide>(0, std::min<Wide>(valid, n_kv)));
  }
  if (in.OneIn(3)) args->score = Placed(Score(heads, rows, n_q, n_kv, columns));
  if (in.OneIn(4)) args->norm = Placed(NormOf(heads));
  if (in.OneIn(3)) {
    mha_rope rope = {};
    rope.style = Kind(2);
    rope.offset = in.OneIn(4) ? Number(0, 4) : 0;
    rope.dims = in.OneIn(2) ? Odd(2 * in.Integer(1, 4)) : 0;
    rope.num_positions = Number(1, 400);
    const Wide floats =
        Elements((rope.dims != 0 ? Wide{rope.dims} : Wide{heads.head_dim} - rope.offset) / 2, {{rope.num_positions, &rope.table_stride}});
    rope.cos = Floats(floats), rope.sin = Floats(floats);
    if (in.OneIn(4)) rope.q_positions = Integers<int64_t>(Elements(n_q, {{rows}}), 0, rope.num_positions - 1);
    if (in.OneIn(4)) rope.k_positions = Integers<int64_t>(Elements(n_kv, {{rows}}), 0, rope.num_positions - 1);
    args->rope = Placed(rope, rope.offset != 0);
  }
  const Wide q_rows = Elements(1, {{rows}, {heads.num_heads}, {n_q}}), kv_rows = Elements(1, {{rows}, {n_kv}, {heads.num_kv_heads}});
  const Wide pairs = Elements(columns, {{rows}, {heads.num_heads}, {n_q}});
  const uint8_t outputs = in.Byte();
  if (outputs & 1) args->lse = Result(q_rows);
  if (outputs % 16 == 8) args->attention_weights = Result(pairs);
  if (outputs >= 224) {
    mha_taps taps = {};
    if (outputs & 2)
      taps.q = Result(q_rows * heads.head_dim), taps.k = Result(kv_rows * heads.head_dim), taps.v = Result(kv_rows * heads.head_dim_v);
    if (outputs & 4) taps.scores = Result(pairs), taps.masked_scores = Result(pairs);
    if (outputs & 8) taps.scaled_scores = Result(pairs), taps.softcapped_scores = Result(pairs);
    if (outputs & 16) taps.context = Result(q_rows * heads.head_dim_v);
    args->taps = Placed(taps);
  }
  // What takes too long counts as too large.
  const Wide work = Elements(1, {{batch}, {n_q}, {std::max<int64_t>(n_kv, 1)}, {heads.num_heads}, {heads.head_dim}});
  if (work > 1 << 22) buffers.Take(kHuge);
  return rows;
}

// ---- The functions

// Returns the sequences that arrays of rows have.
int64_t FillAttention(mha_attention_args *given, Heads *heads, bool has_one_key_head) {
  mha_attention_args &args = *given;
  FillSizes(&args);
  args.num_kv_heads = has_one_key_head ? 1 : Number(1, 2);
  const int64_t group = in.Choice<int64_t>({1, 2, 4, 3});
  args.num_heads = args.num_kv_heads > 0 && args.num_kv_heads < 9 ? Odd(args.num_kv_heads * group) : Number(1, 4);
  args.head_dim = Number(1, in.OneIn(4) ? 130 : 20);
  args.head_dim_v = in.OneIn(3) ? Number(1, 40) : args.head_dim;
  *heads = {args.num_heads, args.num_kv_heads != 0 ? args.num_kv_heads : args.num_heads, args.head_dim,
            args.head_dim_v != 0 ? args.head_dim_v : args.head_dim};
  args.scale = Fraction();
  args.instruction_set = in.OneIn(2) ? Kind(9) : 0;
  args.q_type = Kind(3), args.k_type = Kind(3), args.v_type = Kind(3), args.output_type = Kind(3);
  if (in.OneIn(4)) args.kv_position = Number(0, 20);
  const int64_t rows = FillOptions(&args, *heads, false);
  const auto array = [&](int64_t n, int64_t count, int64_t width, int64_t *batch, int64_t *row, int64_t *head) {
    if (in.OneIn(4)) return Elements(width, {{rows, batch}, {count, head}, {n, row}});
    return Elements(width, {{rows, batch}, {n, row}, {count, head}});
  };
  const bool reads = (args.flags & MHA_CACHE_READ) && !in.OneIn(16);
  const Wide q = array(args.n_q, heads->num_heads, heads->head_dim, &args.q_batch_stride, &args.q_row_stride, &args.q_head_stride);
  const Wide k = array(args.n_kv, heads->num_kv_heads, heads->head_dim, &args.k_batch_stride, &args.k_row_stride, &args.k_head_stride);
  const Wide v = array(args.n_kv, heads->num_kv_heads, heads->head_dim_v, &args.v_batch_stride, &args.v_row_stride, &args.v_head_stride);
  if (!in.OneIn(64)) args.q = Input(q, args.q_type);
  if (!reads) args.k = Input(k, args.k_type);
  if (!reads && !in.OneIn(8)) args.v = Input(v, args.v_type);
  const Wide output =
      array(args.n_q, heads->num_heads, heads->head_dim_v, &args.output_batch_stride, &args.output_row_stride, &args.output_head_stride);
  if (in.OneIn(6)) {
    args.states = Result(Elements(Wide{heads->head_dim_v} + 2, {{rows}, {heads->num_heads}, {args.n_q}}));
    if (!in.OneIn(16)) args.output_batch_stride = args.output_row_stride = args.output_head_stride = args.output_type = 0;
  } else if (!in.OneIn(64)) {
    args.output = Output(output, args.output_type);
  }
  return rows;
}

void TestAttention() {
  Heads heads;
  mha_attention_args args = {};
  FillAttention(&args, &heads, false);
  const mha_attention_args *const placed = Placed(args);
  QueryAndCall([&](size_t *bytes, mha_error *error) { return mha_attention_workspace(placed, bytes, error); },
               [&](void *workspace, size_t bytes, mha_error *error) { return mha_attention(placed, workspace, bytes, error); },
               [&](mha_call_info *info, mha_error *error) { return mha_attention_info(placed, info, error); });
}

void TestChooseKeys() {
  Heads heads;
  mha_attention_args attention = {};
  const bool is_complete = !in.OneIn(16);
  const int64_t rows = FillAttention(&attention, &heads, is_complete);
  if (is_complete) {
    attention.kv_position = 0;
    attention.v = attention.output = nullptr, attention.score = nullptr, attention.taps = nullptr;
    attention.lse = attention.attention_weights = attention.states = nullptr;
  }
  mha_choose_keys_args args = {};
  args.attention = Placed(attention);
  args.num_chosen = Number(1, 50);
  args.weights = Floats(Elements(heads.num_heads, {{rows, &args.weights_batch_stride}, {attention.n_q, &args.weights_row_stride}}));
  args.chosen_keys = static_cast<int32_t *>(Output(Elements(args.num_chosen, {{rows}, {attention.n_q}})));
  if (in.OneIn(3) && !attention.cache) args.index_scores = Result(Elements(attention.n_kv, {{rows}, {attention.n_q}}));
  const mha_choose_keys_args *const placed = Placed(args);
  QueryAndCall([&](size_t *bytes, mha_error *error) { return mha_choose_keys_workspace(placed, bytes, error); },
               [&](void *workspace, size_t bytes, mha_error *error) { return mha_choose_keys(placed, workspace, bytes, error); },
               [&](mha_call_info *, mha_error *error) { return mha_choose_keys_workspace(nullptr, nullptr, error); });
}

struct Destroy {
  void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
};
std::unique_ptr<mha_layer, Destroy> made;  // what is called, unless it is over a packed buffer
uint32_t given_type, given_layout;         // of the matrices that it is made of

const void *Matrix(Wide depth, Wide columns, int64_t *stride, const float **scales) {
  const bool is_int4 = given_type == MHA_TYPE_INT4;
  const Wide rows = given_layout == MHA_LAYOUT_OUT_IN ? columns : depth, width = given_layout == MHA_LAYOUT_OUT_IN ? depth : columns;
  const Wide stored = is_int4 ? width + width % 2 : width;
  if (in.OneIn(4)) *stride = in.Boolean() ? Odd(static_cast<int64_t>(stored) + 2 * (in.Byte() % 4)) : static_cast<int64_t>(width);
  if (given_type >= MHA_TYPE_INT8 && !in.OneIn(32))
    *scales = Floats(columns > 0 && depth > 0 ? columns * (is_int4 ? (depth + 31) / 32 : 1) : 0);
  const Wide step = *stride != 0 ? Wide{*stride} : stored;
  if (rows <= 0 || width <= 0 || in.OneIn(64)) return nullptr;
  const Wide count = step < 0 ? 0 : std::min((std::min(rows, kHuge) - 1) * std::min(step, kHuge) + stored, kHuge);
  return is_int4 ? Contents(count / 2) : Input(count, given_type);
}

const mha_layer *Layer(bool is_linear, mha_layer_config *shape) {
  static const mha_allocator allocator = {nullptr, [](void *, size_t bytes) { return bytes < 1 << 20 ? std::malloc(bytes) : nullptr; },
                                          [](void *, void *memory) { std::free(memory); }};
  mha_layer_options options = {};
  options.instruction_set = in.OneIn(2) ? Kind(9) : 0, options.reserved = in.OneIn(64), options.allocator = &allocator;
  mha_layer_config config = {};
  mha_layer_weights weights = {};
  mha_linear_weights linear = {};
  linear.weight_type = config.weight_type = Kind(5);
  linear.arithmetic = config.arithmetic = in.OneIn(3) ? Kind(3) : 0;
  linear.type = weights.type = given_type = in.OneIn(2) ? config.weight_type : Kind(3);
  linear.layout = weights.layout = given_layout = given_type == MHA_TYPE_INT4 ? MHA_LAYOUT_OUT_IN : Kind(2);
  if (is_linear) {
    linear.input_dim = Number(1, 100), linear.output_dim = Number(1, 70);
    linear.w = Matrix(linear.input_dim, linear.output_dim, &linear.w_stride, &linear.w_scales);
    if (in.Boolean()) linear.bias = Floats(linear.output_dim);
  } else {
    config.num_kv_heads = Number(1, 2);
    const int64_t group = in.Choice<int64_t>({1, 2, 4});
    config.num_heads = config.num_kv_heads > 0 && config.num_kv_heads < 9 ? Odd(config.num_kv_heads * group) : Number(1, 3);
    config.head_dim = in.OneIn(8) ? 0 : Number(1, 20), config.head_dim_v = in.OneIn(3) ? Number(1, 20) : 0;
    config.query_dim = in.OneIn(3) ? Number(1, 100) : Odd(config.num_heads < 99 ? config.num_heads * 16 : 16);
    config.key_dim = in.OneIn(4) ? Number(1, 30) : 0, config.value_dim = in.OneIn(4) ? Number(1, 30) : 0;
    config.scale = Fraction();
    config.gate = in.OneIn(3) ? Kind(3) : 0;
    if (config.gate) config.gate_dim = in.Boolean() ? 1 : 0;
    const Wide heads = config.num_heads, key_heads = config.num_kv_heads != 0 ? Wide{config.num_kv_heads} : heads;
    const Wide d = config.head_dim != 0 ? Wide{config.head_dim} : heads != 0 ? config.query_dim / heads : 0;
    const Wide d_v = config.head_dim_v != 0 ? Wide{config.head_dim_v} : d, gate = config.gate == 0 ? 0 : config.gate_dim == 0 ? d_v : 1;
    const Wide key = config.key_dim != 0 ? config.key_dim : config.query_dim, value = config.value_dim != 0 ? Wide{config.value_dim} : key;
    const bool only_asks = in.OneIn(8), has_output = in.OneIn(2);
    if (config.gate != 0 && in.Boolean()) weights.w_g = Matrix(config.query_dim, heads * gate, &weights.w_g_stride, &weights.w_g_scales);
    const Wide q = heads * (d + (weights.w_g ? 0 : gate)), k = only_asks ? 0 : key_heads * d, v = only_asks ? 0 : key_heads * d_v;
    if (has_output && in.Boolean()) config.output_dim = Number(1, 70);
    if (in.OneIn(4) && !only_asks) {
      weights.w_qkv = Matrix(config.query_dim, q + k + v, &weights.w_qkv_stride, &weights.w_qkv_scales);
    } else {
      weights.w_q = Matrix(config.query_dim, q, &weights.w_q_stride, &weights.w_q_scales);
      if (!only_asks) weights.w_k = Matrix(key, k, &weights.w_k_stride, &weights.w_k_scales);
      if (!only_asks) weights.w_v = Matrix(value, v, &weights.w_v_stride, &weights.w_v_scales);
    }
    const Wide output = config.output_dim != 0 ? config.output_dim : config.query_dim;
    if (has_output) weights.w_o = Matrix(heads * d_v, output, &weights.w_o_stride, &weights.w_o_scales);
    const uint8_t biases = in.Byte();
    if (biases & 1) weights.b_q = Floats(q);
    if (biases & 2 && !only_asks) weights.b_k = Floats(k), weights.b_v = Floats(v);
    if (biases == 8) weights.b_qkv = Floats(q + k + v);
    if (biases & 16 && has_output) weights.b_o = Floats(output);
    if (biases & 32 && weights.w_g) weights.b_g = Floats(heads * gate);
  }
  const mha_layer_options *const o = Placed(options);
  const mha_layer_config *const c = Placed(config, config.gate_dim != 0);
  const mha_layer_weights *const w = Placed(weights);
  const mha_linear_weights *const l = Placed(linear);
  const mha_layer *layer = nullptr;
  size_t bytes = 0;
  const mha_status asked = Call([&](mha_error *error) {
    return is_linear ? mha_linear_pack_size(l, o, &bytes, error) : mha_layer_pack_size(c, w, o, &bytes, error);
  });
  const bool is_packed = in.OneIn(3);
  unsigned char *const buffer = is_packed ? buffers.Take(static_cast<Wide>(bytes), 64) : nullptr;
  if (asked == MHA_OK && buffers.is_too_large()) return nullptr;
  if (is_packed) {
    const auto pack = [&](size_t size) {
      return Call([&](mha_error *error) {
        return is_linear ? mha_linear_pack(l, o, buffer, size, error) : mha_layer_pack(c, w, o, buffer, size, error);
      });
    };
    if (asked == MHA_OK) Expect(pack(bytes - 1) == MHA_ERROR_BUFFER_TOO_SMALL, "a byte less than a packed layer needs was taken");
    const mha_status packed = pack(bytes);
    if (asked != MHA_OK) Expect(packed != MHA_OK, "a layer was packed that has no size");
    if (packed != MHA_OK) return nullptr;
    Expect(mha_layer_verify(buffer, bytes, nullptr) == MHA_OK, "a packed layer is not sound");
    const size_t storage_bytes = mha_layer_view_size();
    void *const storage = buffers.Take(static_cast<Wide>(storage_bytes));
    Call([&](mha_error *error) { return mha_layer_view(buffer, bytes, o, storage, storage_bytes, &layer, error); });
  } else {
    mha_layer *created = nullptr;
    Call([&](mha_error *error) {
      return is_linear ? mha_linear_create(l, o, &created, error) : mha_layer_create(c, w, o, &created, error);
    });
    made.reset(created);
    layer = created;
  }
  shape->struct_size = sizeof *shape;
  Call([&](mha_error *error) { return mha_layer_shape(layer, shape, error); });
  buffers.ForgetSizes();
  return layer;
}

void TestForward() {
  mha_layer_config shape = {};
  const mha_layer *const layer = Layer(in.OneIn(32), &shape);
  mha_forward_args args = {};
  FillSizes(&args);
  args.input_type = Kind(3), args.output_type = Kind(3);
  const bool reads = (args.flags & MHA_CACHE_READ) && !in.OneIn(16), has_key = !reads && in.OneIn(2), has_value = !reads && in.OneIn(3);
  if (has_value && !has_key) args.n_kv = Odd(args.n_q);
  const int64_t rows = FillOptions(&args, {shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim_v}, !has_key);
  const Wide query = Elements(shape.query_dim, {{rows, &args.query_batch_stride}, {args.n_q, &args.query_row_stride}});
  const Wide output = Elements(shape.output_dim, {{rows, &args.output_batch_stride}, {args.n_q, &args.output_row_stride}});
  if (!in.OneIn(64)) args.query = Input(query, args.input_type);
  if (has_key)
    args.key = Input(Elements(shape.key_dim, {{rows, &args.key_batch_stride}, {args.n_kv, &args.key_row_stride}}), args.input_type);
  if (has_value)
    args.value = Input(Elements(shape.value_dim, {{rows, &args.value_batch_stride}, {args.n_kv, &args.value_row_stride}}), args.input_type);
  if (!in.OneIn(64)) args.output = Output(output, args.output_type);
  const mha_forward_args *const placed = Placed(args);
  QueryAndCall([&](size_t *bytes, mha_error *error) { return mha_forward_workspace(layer, placed, bytes, error); },
               [&](void *workspace, size_t bytes, mha_error *error) { return mha_forward(layer, placed, workspace, bytes, error); },
               [&](mha_call_info *info, mha_error *error) { return mha_info(layer, placed, info, error); });
}

void TestLinear() {
  mha_layer_config shape = {};
  const mha_layer *const layer = Layer(!in.OneIn(4), &shape);
  mha_linear_args args = {};
  args.rows = Number(1, 40);
  args.input_type = Kind(3), args.output_type = Kind(3);
  args.scheduler = Scheduler();
  const Wide width = shape.num_heads > 0 ? Wide{shape.num_heads} * shape.head_dim_v : shape.query_dim;
  const Wide x = Elements(width, {{args.rows, &args.x_row_stride}}),
             output = Elements(shape.output_dim, {{args.rows, &args.output_row_stride}});
  if (!in.OneIn(64)) args.x = Input(x, args.input_type);
  if (in.OneIn(3)) args.residual = Input(Elements(shape.output_dim, {{args.rows, &args.residual_row_stride}}), args.output_type);
  if (!in.OneIn(64)) args.output = Output(output, args.output_type);
  const mha_linear_args *const placed = Placed(args);
  QueryAndCall([&](size_t *bytes, mha_error *error) { return mha_linear_workspace(layer, placed, bytes, error); },
               [&](void *workspace, size_t bytes, mha_error *error) { return mha_linear(layer, placed, workspace, bytes, error); },
               [&](mha_call_info *info, mha_error *error) { return mha_linear_info(layer, placed, info, error); });
}

void TestStates() {
  const int64_t rows = Number(1, 20), width = Number(1, 40);
  const Wide count = Elements(Wide{width} + 2, {{rows}});
  const float *const left = Floats(count), *const right = in.OneIn(64) ? nullptr : Floats(count);
  float *const result = Result(count);
  const uint32_t set = Kind(9);
  if (!buffers.is_too_large()) Call([&](mha_error *error) { return mha_states_merge(rows, width, left, right, result, set, error); });
  buffers.ForgetSizes();
  mha_states_args args = {};
  args.batch = Number(1, 3), args.num_heads = Number(1, 4), args.n_q = Number(1, 10), args.head_dim_v = Number(1, 40);
  args.instruction_set = Kind(9), args.output_type = Kind(3);
  args.states = Floats(Elements(Wide{args.head_dim_v} + 2, {{args.batch}, {args.num_heads}, {args.n_q}}));
  if (in.Boolean()) args.sinks = Floats(args.num_heads);
  if (in.Boolean()) args.head_scales = Floats(args.num_heads);
  if (!in.OneIn(4)) args.output = Output(Elements(args.head_dim_v, {{args.batch}, {args.num_heads}, {args.n_q}}), args.output_type);
  if (in.Boolean()) args.lse = Result(Elements(1, {{args.batch}, {args.num_heads}, {args.n_q}}));
  if (!buffers.is_too_large()) Call([&](mha_error *error) { return mha_states_finish(Placed(args), error); });
}

void TestTables() {
  mha_rope_config config = {};
  const auto number = [](double usual) { return in.OneIn(3) ? in.OneIn(8) ? static_cast<double>(in.Float()) : usual : 0.0; };
  config.dims = Odd(2 * in.Integer(1, 8)), config.num_positions = Number(1, 30), config.first_position = in.OneIn(3) ? Number(0, 1000) : 0;
  config.base = number(500000), config.linear_factor = number(4), config.attention_factor = number(1.5);
  const uint8_t kind = in.Byte() % 8;
  if (kind == 1) config.yarn_factor = number(8), config.yarn_beta_fast = number(32), config.yarn_beta_slow = number(1);
  if (kind == 1) config.yarn_unrounded = Kind(2);
  if (kind == 2) config.llama3_factor = number(8), config.llama3_low_freq_factor = number(1), config.llama3_high_freq_factor = number(4);
  if (kind == 3) config.ntk_factor = number(2), config.ntk_positions = Number(0, 9000);
  if (kind > 0 && kind < 4 && !in.OneIn(8)) config.original_positions = Number(1, 8192);
  if (kind == 4) {
    double *const factors = buffers.Take<double>(Wide{config.dims} / 2);
    for (int64_t i = 0; i < config.dims / 2 && !buffers.is_too_large(); i++) factors[i] = number(1) + 1;
    config.pair_factors = factors;
  }
  if (kind == 5) {
    config.mrope_section = Integers<int64_t>(3, 0, config.dims / 2), config.mrope_interleaved = Kind(2);
    config.mrope_positions = Integers<int64_t>(config.num_positions > 0 ? Wide{3} * config.num_positions : 0, 0, 1000);
  }
  const Wide floats = Elements(Wide{config.dims} / 2, {{config.num_positions}});
  float *const cos = Result(floats), *const sin = Result(floats);
  if (!buffers.is_too_large()) Call([&](mha_error *error) { return mha_rope_tables(Placed(config), cos, sin, error); });

  buffers.ForgetSizes();
  const int64_t heads = Number(1, 20), num_buckets = Number(0, 40), max_distance = Number(0, 300), left = Number(0, 40),
                right = Number(0, 40);
  const uint32_t is_bidirectional = Kind(2);
  const float *const embedding = Floats(Elements(heads, {{num_buckets != 0 ? num_buckets : 32}}));
  float *const slopes = Result(heads), *const bias = Result(left < 0 || right < 0 ? 0 : Elements(Wide{left} + 1 + right, {{heads}}));
  if (buffers.is_too_large()) return;
  Call([&](mha_error *error) { return mha_alibi_slopes(heads, slopes, error); });
  Call([&](mha_error *error) {
    return mha_t5_relative_bias(embedding, num_buckets, max_distance, is_bidirectional, heads, left, right, bias, error);
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  in = Bytes(data, size);
  const uint8_t kind = in.Byte();
  buffers.Reset((kind & 128) != 0);
  has_error = (kind & 112) != 112;
  static void (*const tests[])() = {TestAttention, TestForward,    TestAttention, TestForward,
                                    TestLinear,    TestChooseKeys, TestStates,    TestTables};
  tests[kind % 8]();
  made.reset();
  return 0;
}
