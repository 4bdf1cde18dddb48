// Target `interface`: calls every public function with arbitrary arguments. Pointers are NULL or
// valid: each array has its own buffer, next to a guard page and exactly as large as the headers
// say for the other arguments. Where that does not fit in memory here, or the call would take too
// long, the workspace is too small, which must be noticed before any array is read.
#include <algorithm>
#include <memory>

#include "fuzz/buffers.h"
#include "support/pool.h"
#include "support/shapes.h"

namespace {

using fuzz::Bytes;
using fuzz::Expect;
using fuzz::Wide;

Bytes in(nullptr, 0);
fuzz::Buffers buffers;
bool has_error;  // calls are given an mha_error

template <typename Function, typename... Args>
mha_status Call(const Function &function, Args... args) {
  return buffers.Call([&](mha_error *error) { return function(args..., error); }, has_error);
}

// ---- Numbers: mostly sensible ones, so that not every call is refused at once

int64_t Odd(int64_t usual) {
  const uint8_t kind = in.Byte();
  return kind < 248 ? usual : kind < 250 ? 0 : kind < 252 ? MHA_EMPTY : in.AnyInteger();
}
int64_t Batch(int64_t given) { return given == 0 ? 1 : given; }

int64_t Number(int64_t low, int64_t high) {  // now and then the next one outside
  const int64_t usual = in.Integer(low, std::max(low, high));
  const uint8_t kind = in.Byte();
  return kind < 236   ? usual
         : kind < 242 ? high + 1
         : kind < 246 ? low - 1
         : kind < 250 ? MHA_EMPTY
         : kind < 252 ? 0
                      : in.AnyInteger();
}
uint32_t Kind(uint32_t count) {  // below count, or any
  const uint8_t kind = in.Byte();
  return kind < 252 ? kind % count : static_cast<uint32_t>(in.Raw(4));
}
uint32_t Kind(std::initializer_list<uint32_t> kinds) {  // one of these, or any
  const uint8_t kind = in.Byte();
  return kind < 252 ? kinds.begin()[kind % kinds.size()] : static_cast<uint32_t>(in.Raw(4));
}
uint32_t Type(uint32_t count) {  // one of the first types, 0 for the default, or any
  const uint8_t kind = in.Byte();
  return kind >= 252                        ? static_cast<uint32_t>(in.Raw(4))
         : kind % count == 0 && kind >= 128 ? 0
                                            : MHA_TYPE_F32 + kind % count;
}
float Fraction() { return in.OneIn(8) ? in.Float() : 0.0f; }

// ---- Arrays

struct Axis {
  int64_t count;
  int64_t *stride = nullptr;  // to be chosen; null: contiguous
};

constexpr Wide kHuge =
    Wide{1} << 62;  // more than there is memory for; products of two do not overflow

// Chooses the strides of an array whose axes are named from the outermost on, and returns its
// elements. 0 where it is to be refused, or empty.
Wide Elements(Wide width, std::initializer_list<Axis> axes) {
  Wide all = std::min(width, kHuge), contiguous = all;
  bool is_wrong = width <= 0;
  const bool has_strides = in.OneIn(3);
  for (const Axis *axis = axes.end(); axis-- != axes.begin();) {
    int64_t given = 0;
    if (axis->stride && has_strides) {
      const uint8_t kind = in.Byte();
      const int64_t usual = static_cast<int64_t>(contiguous);
      given = kind < 128   ? usual
              : kind < 192 ? usual + kind % 8
              : kind < 240 ? MHA_BROADCAST
              : kind < 248 ? 0
                           : in.AnyInteger();
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

// The elements of an array with these strides, as the header says. The innermost dimensions are
// heads, or rows where there are numbers for pairs of row and key.
Wide Span(Wide width, const mha_strides &strides, int64_t batch, int64_t rows, int64_t heads,
          bool has_rows_inside_heads = false) {
  Axis axes[] = {{heads, nullptr}, {rows, nullptr}, {batch, nullptr}};
  int64_t given[] = {strides.head, strides.row, strides.batch};
  if (has_rows_inside_heads) std::swap(axes[0], axes[1]), std::swap(given[0], given[1]);
  Wide all = std::min(width, kHuge), contiguous = all;
  for (int i = 0; i < 3; i++) {
    const Wide stride = given[i] == 0 ? contiguous : given[i];
    if (width <= 0 || axes[i].count <= 0 || (stride < 0 && given[i] != MHA_BROADCAST)) return 0;
    if (given[i] == MHA_BROADCAST) continue;
    all = std::min(all + (axes[i].count - 1) * stride, kHuge);
    contiguous = std::min(axes[i].count * stride, kHuge);
  }
  return all;
}
// Chooses the strides of an array of rows without heads.
Wide Rows(Wide width, mha_strides *strides, int64_t batch, int64_t rows) {
  Elements(width, {{batch, &strides->batch}, {rows, &strides->row}});
  return Span(width, *strides, batch, rows, 1);
}

Wide BytesOf(uint32_t type) {
  return type == MHA_TYPE_F16 || type == MHA_TYPE_BF16 ? 2 : type <= MHA_TYPE_F32 ? 4 : 1;
}

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
void *Output(Wide count, uint32_t type = MHA_TYPE_F32) {
  return buffers.TakeOutput(count * BytesOf(type), 4);
}
float *Result(Wide count) { return static_cast<float *>(Output(count)); }
float *Floats(Wide count) {  // finite ones mostly, as slopes and scales have to be
  float *const floats = buffers.Take<float>(count);
  const float usual = in.Float(), odd = in.OneIn(16) ? in.Float() : usual;
  for (int64_t i = 0; buffers.Fits(count * 4) && i < static_cast<int64_t>(count); i++)
    floats[i] = i % 5 == 3 ? odd : usual;
  return floats;
}
template <typename T>
T *Integers(Wide count, int64_t low, int64_t high) {
  T *const integers = buffers.Take<T>(count);
  for (int64_t i = 0; buffers.Fits(count * Wide{sizeof(T)}) && i < static_cast<int64_t>(count);
       i++) {
    integers[i] = static_cast<T>(in.AtEnd() ? low : Number(low, high));
  }
  return integers;
}
int64_t *Starts(int64_t count, int64_t rows) {  // as cu_seqlens, which mostly ends with all rows
  int64_t *const starts = Integers<int64_t>(Wide{count} + (count > 0), 0, 0);
  for (int64_t s = 1; s <= count && count < 1 << 14; s++) {
    starts[s] = Number(starts[s - 1], rows);
    if (s == count && starts[s] >= starts[s - 1] && starts[s] < rows - 1) starts[s] = rows;
  }
  return starts;
}

// A struct in as many bytes as its struct_size says: mostly those of this version.
template <typename T>
T *Placed(T value) {
  const uint8_t kind = in.Byte();
  value.struct_size = sizeof value;
  if (kind >= 240)
    value.struct_size =
        static_cast<size_t>(kind < 248 ? in.Integer(0, sizeof value + 64) : in.AnyInteger());
  const size_t size = value.struct_size > 1 << 16
                          ? sizeof value.struct_size
                          : std::max(value.struct_size, sizeof value.struct_size);
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
  *scheduler = {nullptr, static_cast<uint32_t>(Number(1, 5)), in.OneIn(32),
                in.OneIn(32) ? nullptr : RunBackwards};
  return scheduler;
}

// The size query, the call and its description begin with the same arguments and must agree. After
// the workspace, of any alignment, come some bytes that no call may change, and then a guard page.
template <class Query, class Run, class Info, class... Args>
void QueryAndCall(const Query &query, const Run &run, const Info &info, Args... args) {
  size_t needed = 0;
  const mha_status asked = Call(query, args..., &needed);
  const size_t spare = in.Byte() % 64;
  unsigned char *const workspace = buffers.Take(static_cast<Wide>(needed) + spare);
  const auto call = [&](size_t bytes) {
    const mha_status status = Call(run, args..., bytes > 0 ? workspace : nullptr, bytes);
    for (size_t i = 0; i < spare && !buffers.is_too_large(); i++)
      Expect(workspace[needed + i] == 0xA5, "a call wrote past its workspace");
    return status;
  };
  if (asked == MHA_OK && needed > 0)
    Expect(call(needed - 1) != MHA_OK, "a byte less of workspace than needed was taken");
  if (asked == MHA_OK && buffers.is_too_large()) return;
  const mha_status status = call(needed);
  if (asked != MHA_OK)
    return Expect(status == asked, "the query and the call fail with different statuses",
                  mha_status_string(status));
  Expect(status != MHA_ERROR_BUFFER_TOO_SMALL,
         "a workspace of the size that the query said was too small");
  mha_call_info filled = {};
  filled.struct_size = sizeof filled;
  if (Call(info, args..., &filled) == MHA_OK)
    Expect(filled.workspace_bytes == needed,
           "the workspace has other sizes in mha_call_info and in the query");
}

// ---- What mha_forward_args and mha_attention_args have in common

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim, head_dim_v;
};

// What a call is given besides its args, which Finish puts together: structs that are not placed
// yet.
struct Given {
  bool reads_cache, pads_left, pads_q_left, pads_kv_left, has_wrong_memory;
  mha_kv_cache *cache;
  uint32_t kind;
  int64_t cache_sequences, cache_blocks;
  mha_sequences sequences;
  bool has_score;
  mha_score_options score;
  mha_outputs outputs;
};
Given given;

// Memory for a pool of a configuration that is right if it has a size. Each part is as large as it
// has to be.
mha_kv_pool PoolOf(const mha_kv_cache_config &config, mha_status sized) {
  mha_kv_pool pool = {};
  void *parts[4] = {};
  int64_t *const strides[] = {&pool.k_block_stride, &pool.k_scales_block_stride,
                              &pool.v_block_stride, &pool.v_scales_block_stride};
  for (int n = 0; sized == MHA_OK && n < 4; n++) {
    const int64_t bytes = support::BlockBytes(config)[n];
    if (bytes == 0) continue;
    if (in.OneIn(4)) *strides[n] = bytes + 16 * in.Integer(0, 4);
    const Wide stride = std::max(*strides[n], bytes);
    parts[n] = buffers.TakeOutput((config.num_blocks - 1) * stride + bytes, 64);
  }
  pool.k = parts[0], pool.k_scales = static_cast<float *>(parts[1]);
  pool.v = parts[2], pool.v_scales = static_cast<float *>(parts[3]);
  given.has_wrong_memory = in.OneIn(16);
  if (given.has_wrong_memory) in.OneIn(2) ? pool.v = pool.k : pool.k = nullptr;
  return pool;
}

// A cache of these heads, mostly, partly filled. NULL if it can't be.
mha_kv_cache *Cache(const Heads &heads) {
  mha_kv_cache_config config = {};
  config.num_sequences = Number(1, 4);
  config.kind = Kind(
      {MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_RING, MHA_CACHE_KIND_PAGED, MHA_CACHE_KIND_POOL});
  config.capacity =
      config.kind == MHA_CACHE_KIND_CONTIGUOUS ? Number(1, 70) : Odd(16 * in.Integer(1, 5));
  config.num_kv_heads = Odd(heads.num_kv_heads), config.head_dim = Odd(heads.head_dim),
  config.head_dim_v = Odd(heads.head_dim_v);
  config.k_type = Type(4);
  config.value_place = in.OneIn(4) ? Kind({MHA_CACHE_VALUES_OWN, MHA_CACHE_VALUES_IN_KEYS}) : 0;
  config.v_type = config.value_place ? 0 : Type(5);
  const bool is_pool = config.kind == MHA_CACHE_KIND_POOL;
  if (is_pool || config.kind == MHA_CACHE_KIND_PAGED)
    config.block_positions = Odd(16), config.num_blocks = Number(1, 8);
  const mha_kv_cache_config *const placed = Placed(config);
  size_t bytes = 0;
  mha_kv_cache *cache = nullptr;
  const mha_status sized = Call(mha_kv_cache_size, placed, &bytes);
  unsigned char *const buffer = buffers.Take(static_cast<Wide>(bytes), 64);
  const mha_kv_pool *const pool = is_pool ? Placed(PoolOf(config, sized)) : nullptr;
  const bool is_too_large = is_pool && buffers.is_too_large();
  const auto make = [&](size_t size) {
    if (is_pool) return Call(mha_kv_pool_init, placed, pool, buffer, size, &cache);
    return Call(mha_kv_cache_init, placed, buffer, size, &cache);
  };
  if (sized == MHA_OK)
    Expect(bytes % 64 == 0 && (is_pool ? make(bytes - 1) != MHA_OK
                                       : make(bytes - 1) == MHA_ERROR_BUFFER_TOO_SMALL),
           "a byte less than a cache needs was taken");
  const bool fits = sized != MHA_OK || buffers.Fits(static_cast<Wide>(bytes));
  const mha_status made = fits ? make(bytes) : sized;
  Expect(is_pool ? made != MHA_OK || !given.has_wrong_memory : made == sized,
         "a cache has a size, but can't be made, or the other way round");
  buffers.ForgetSizes();
  if (!cache || is_too_large) return nullptr;
  buffers.Watch(buffer, bytes);
  mha_kv_cache_config shape = {};
  shape.struct_size = sizeof shape;
  mha_kv_cache_shape(cache, &shape, nullptr);
  given.cache_sequences = shape.num_sequences, given.cache_blocks = shape.num_blocks;
  given.kind = shape.kind;
  for (int64_t s = in.Byte() % 4; s > 0; s--) {
    const int64_t sequence = Number(0, shape.num_sequences - 1), blocks = in.Integer(0, 5),
                  rows = in.Integer(0, 40);
    const int32_t *const numbers = Integers<int32_t>(blocks, 0, shape.num_blocks - 1);
    if (shape.kind == MHA_CACHE_KIND_PAGED)
      Call(mha_kv_cache_set_blocks, cache, sequence, numbers, blocks);
    const float *const k = Floats(Elements(shape.head_dim, {{rows}, {shape.num_kv_heads}}));
    const float *const v = shape.value_place
                               ? nullptr
                               : Floats(Elements(shape.head_dim_v, {{rows}, {shape.num_kv_heads}}));
    if (!buffers.is_too_large()) Call(mha_kv_cache_append, cache, sequence, rows, k, v);
    buffers.ForgetSizes();
  }
  return cache;
}

// A block of a sequence is copied to one that is free, or nothing changes.
void Unshare() {
  if (!given.cache || !in.OneIn(2)) return;
  const int64_t sequence = Number(0, given.cache_sequences - 1),
                block = Number(0, given.cache_blocks - 1);
  int64_t before = 0, after = 0;
  mha_kv_cache_length(given.cache, sequence, &before, nullptr);
  uint32_t used = 7;
  uint32_t *const to = in.OneIn(32) ? nullptr : &used;
  const mha_status status =
      Call(mha_kv_cache_unshare, given.cache, sequence, static_cast<int32_t>(block), to);
  Expect(status == MHA_OK ? used <= 1 : used == 7,
         "used is neither 0 nor 1, or it was written by a call that failed");
  mha_kv_cache_length(given.cache, sequence, &after, nullptr);
  Expect(before == after, "mha_kv_cache_unshare has changed a length");
}

constexpr uint32_t kPaddingLeft = 1u << 30,
                   kReads = 1u << 31;  // chosen with the flags, but no flags of a call

template <class Args>
void FillSizes(Args *args) {
  given = {};
  args->call.batch = Number(1, 3);
  args->call.n_q = Number(1, in.OneIn(8) ? 300 : 20);
  args->call.n_kv = in.OneIn(2) ? Number(1, in.OneIn(8) ? 600 : 40) : args->call.n_q;
  args->call.flags = in.Choice<uint32_t>({0, MHA_CAUSAL, MHA_CAUSAL | MHA_WINDOW_LEFT,
                                          MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT, kPaddingLeft, kReads,
                                          kReads | MHA_CAUSAL, MHA_CAUSAL | kPaddingLeft, 63});
  if (args->call.flags == 63) args->call.flags = static_cast<uint32_t>(in.Raw(4));
  given.pads_left = (args->call.flags & kPaddingLeft) != 0,
  given.reads_cache = (args->call.flags & kReads) != 0;
  args->call.flags &= ~(kPaddingLeft | kReads);
  if (args->call.flags & MHA_WINDOW_LEFT || in.OneIn(64)) args->call.window_left = Number(0, 20);
  if (args->call.flags & MHA_WINDOW_RIGHT || in.OneIn(64)) args->call.window_right = Number(0, 20);
  args->call.attention_arithmetic =
      in.Choice<uint32_t>({0, 0, 0, 0, 0, MHA_ARITHMETIC_INT16, MHA_ARITHMETIC_INT16, 1});
  args->call.scheduler = Scheduler();
}

// Fills given.score, too.
mha_score_arrays ScoreArrays(const Heads &heads, int64_t rows, int64_t n_q, int64_t n_kv,
                             Wide columns) {
  mha_score_options &score = given.score;
  mha_score_arrays all = {};
  const auto skip_stride = [] {  // of arrays that had one
    if (in.OneIn(3)) in.Byte();
  };
  const auto contiguous = [&](Wide count) {
    return count <= 0 || rows <= 0 ? 0 : std::min(std::min(count, kHuge) * rows, kHuge);
  };
  const uint8_t arrays = in.Byte(), pairs = in.Byte();
  score.softcap = Fraction();
  uint32_t of_heads = (arrays & 7u) | (pairs & ~7u);
#define MHA_FLOATS(name, ...)                             \
  if (of_heads & 1) score.name = Floats(heads.num_heads); \
  of_heads >>= 1;
  MHA_EACH_HEAD_ARRAY(MHA_FLOATS)
  if (arrays & 8) {
    skip_stride();
    all.q_scales = Floats(contiguous(n_q));
  }
  if (pairs & 7)
    all.column_keys = in.OneIn(3) ? Kind({MHA_COLUMNS_ALL_KEYS, MHA_COLUMNS_NEW_KEYS}) : 0;
  if (pairs & 7 && in.OneIn(4)) all.num_columns = Number(1, 40);
  const Wide width = all.num_columns > 0                       ? Wide{all.num_columns}
                     : all.column_keys == MHA_COLUMNS_NEW_KEYS ? std::max<Wide>(n_kv, 0)
                                                               : columns;
  const auto pair_array = [&](mha_strides *strides, Wide columns_of_row, int64_t num_heads) {
    Elements(columns_of_row,
             {{rows, &strides->batch}, {num_heads, &strides->head}, {n_q, &strides->row}});
    return Span(columns_of_row, *strides, rows, n_q, num_heads, true);
  };
  if (pairs & 1) {
    all.bias.type = Type(2);
    all.bias.data = Input(pair_array(&all.bias.strides, width, heads.num_heads), all.bias.type);
  }
  if (pairs & 2)
    all.mask = static_cast<uint8_t *>(
        Input(pair_array(&all.mask_strides, width, heads.num_heads), MHA_TYPE_INT8));
  if (pairs & 4) {
    all.segments = Kind({MHA_SEGMENTS_WITHIN, MHA_SEGMENTS_ALSO});
    skip_stride();
    all.q_segments = Integers<int32_t>(contiguous(n_q), -1, 2);
    if (in.Boolean()) {
      skip_stride();
      all.kv_segments = Integers<int32_t>(contiguous(width), -1, 2);
    }
  }
  if (arrays & 16) {
    score.relative_left = Number(0, 9), score.relative_right = Number(0, 9);
    const Wide distances = Wide{score.relative_left} + 1 + score.relative_right;
    if (arrays & 32) {
      score.relative_bias = Floats(Elements(distances, {{heads.num_heads}}));
    } else {
      all.relative_rows =
          Floats(pair_array(&all.relative_rows_strides, distances, heads.num_heads));
    }
  }
  if (arrays & 64) {
    all.num_chosen = Number(1, 8);
    all.chosen_block = in.Choice<int64_t>({0, 1, 16, 3, 64});
    const Wide count = pair_array(&all.chosen_keys_strides, all.num_chosen, heads.num_kv_heads);
    all.chosen_keys = Integers<int32_t>(
        count, -1, (static_cast<int64_t>(columns) - 1) / std::max<int64_t>(1, all.chosen_block));
  }
  return all;
}

mha_norm NormOf(const Heads &heads) {
  mha_norm norm = {};
  norm.flags = Kind(16);
  if (norm.flags < 16) norm.flags *= MHA_NORM_LAYER;  // the least one
  norm.epsilon = in.OneIn(8) ? in.Float() : 1e-5f;
  norm.head_stride = in.OneIn(3) ? Odd(heads.head_dim) : 0;
  const auto weights = [&](int64_t num_heads, int64_t width, uint32_t flags, int64_t stride) {
    if (flags & MHA_NORM_ALL_HEADS) return Floats(std::min(Wide{num_heads} * width, kHuge));
    return Floats(std::min((num_heads - 1) * Wide{std::max<int64_t>(stride, 0)} + width, kHuge));
  };
  if (in.Boolean())
    norm.q_weight = weights(heads.num_heads, heads.head_dim, norm.flags, norm.head_stride);
  if (in.Boolean())
    norm.k_weight = weights(heads.num_kv_heads, heads.head_dim, norm.flags, norm.head_stride);
  if (in.OneIn(3))
    norm.q_bias = weights(heads.num_heads, heads.head_dim, norm.flags, norm.head_stride);
  if (in.OneIn(3)) {
    norm.context_flags = in.Choice({0u, MHA_NORM_LAYER, MHA_NORM_ALL_HEADS, MHA_NORM_AFTER_GATE,
                                    MHA_NORM_LAYER | MHA_NORM_ALL_HEADS | MHA_NORM_AFTER_GATE});
    norm.context_epsilon = in.OneIn(8) ? in.Float() : 1e-5f;
    norm.context_weight = weights(heads.num_heads, heads.head_dim_v, norm.context_flags, 0);
  }
  return norm;
}

// First rows of sequences whose last rows are valid, as many as lengths say.
const int64_t *PaddedLeft(const int64_t *lengths, int64_t count, int64_t rows) {
  if (!lengths || count <= 0 || count >= 1 << 14) return nullptr;
  int64_t *const first = buffers.Take<int64_t>(count);
  for (int64_t s = 0; s < count; s++)
    first[s] =
        static_cast<int64_t>(static_cast<uint64_t>(rows) - static_cast<uint64_t>(lengths[s]));
  return first;
}

// All but the arrays of rows. is_self: keys are the rows of query. Returns the batch of arrays of
// rows.
template <class Args>
int64_t FillOptions(Args *args, const Heads &heads, bool is_self) {
  const int64_t count = Batch(args->call.batch), n_q = args->call.n_q,
                n_kv = given.reads_cache ? MHA_EMPTY
                       : is_self         ? n_q
                                         : args->call.n_kv;
  mha_sequences &s = given.sequences;
  if (in.OneIn(4)) s.cu_seqlens_q = Starts(count, n_q);
  const bool is_packed = s.cu_seqlens_q != nullptr;
  if (is_packed && !is_self && n_kv != n_q) {
    const int64_t *const starts = Starts(count, n_kv);
    if (!given.reads_cache) s.cu_seqlens_kv = starts;
  }
  if (in.OneIn(4)) s.q_first_positions = Integers<int64_t>(count, -3, 30);
  int64_t *const q_lengths = !is_packed && in.OneIn(3) ? Integers<int64_t>(count, 0, n_q) : nullptr;
  s.q_lengths = q_lengths;
  const int64_t *const first_rows =
      !is_packed && in.OneIn(4) ? Integers<int64_t>(count, 0, std::min<int64_t>(n_kv, 8)) : nullptr;
  (is_self ? s.q_first_rows : s.kv_first_rows) = first_rows;
  for (int64_t b = 0; is_self && q_lengths && first_rows && b < count && count < 1 << 14; b++) {
    const bool are_usual =
        first_rows[b] >= 0 && first_rows[b] <= n_q && q_lengths[b] >= 0 && q_lengths[b] <= n_q;
    if (are_usual) q_lengths[b] = std::min(q_lengths[b], n_q - first_rows[b]);
  }
  if (!is_packed && in.OneIn(4) && !is_self)
    s.kv_lengths = Integers<int64_t>(count, 0, first_rows ? n_kv - 8 : n_kv);
  given.pads_q_left = given.pads_left && !s.q_first_rows,
  given.pads_kv_left = given.pads_left && !s.kv_first_rows;
  if (given.pads_q_left) s.q_first_rows = PaddedLeft(s.q_lengths, count, n_q);
  if (given.pads_kv_left) s.kv_first_rows = PaddedLeft(s.kv_lengths, count, n_kv);
  if (is_packed) args->call.batch = 1, s.count = count;
  const int64_t rows = Batch(args->call.batch);
  if (given.reads_cache || in.OneIn(3)) given.cache = Cache(heads);
  if (given.reads_cache && !given.cache)
    given.cache = reinterpret_cast<mha_kv_cache *>(buffers.Take(4096, 64));  // which is none
  if (given.reads_cache) args->call.cache_read = given.cache;
  if (!given.reads_cache) args->call.cache = given.cache;
  if (given.cache && in.OneIn(3)) s.cache_sequences = Integers<int64_t>(count, 0, 3);
  if (given.kind == MHA_CACHE_KIND_POOL) {
    s.cache_lengths = Integers<int64_t>(count, 0, 40);
    s.block_table_entries = Number(1, 5);
    s.block_table_stride = in.OneIn(4) ? Odd(s.block_table_entries + 1) : 0;
    const Wide stride = std::max(s.block_table_stride, s.block_table_entries),
               entries = count > 0 && stride > 0 ? (count - 1) * stride + s.block_table_entries : 0;
    s.block_tables = Integers<int32_t>(std::min(entries, kHuge), 0, given.cache_blocks - 1);
    if (in.OneIn(4)) {
      s.block_table_entries = static_cast<int64_t>(std::min<Wide>(entries, 1 << 20));
      s.block_table_stride = 0;
      s.block_table_starts = Starts(count, s.block_table_entries);
    }
  }
  // Columns of what has a number for each pair: of a cache, those of its longest sequence after the
  // call.
  Wide columns = given.cache ? 0 : std::max<Wide>(n_kv, 0);
  for (int64_t b = 0; given.cache && b < count && count < 1 << 14; b++) {
    const int64_t *const starts = s.cu_seqlens_kv ? s.cu_seqlens_kv : s.cu_seqlens_q,
                         *const lengths = is_self ? s.q_lengths : s.kv_lengths,
                         *const first = is_self ? s.q_first_rows : s.kv_first_rows;
    int64_t length = 0;
    mha_kv_cache_length(given.cache, s.cache_sequences ? s.cache_sequences[b] : b, &length,
                        nullptr);
    if (s.cache_lengths) length = s.cache_lengths[b];
    const Wide valid = starts    ? Wide{starts[b + 1]} - starts[b]
                       : lengths ? Wide{lengths[b]}
                                 : Wide{n_kv} - (first ? first[b] : 0);
    columns = std::max(columns, length + std::max<Wide>(0, std::min<Wide>(valid, n_kv)));
  }
  if (in.OneIn(3)) {
    given.has_score = true;
    args->call.score_arrays = Placed(ScoreArrays(heads, rows, n_q, n_kv, columns));
  }
  if (in.OneIn(4)) args->call.norm = Placed(NormOf(heads));
  if (in.OneIn(3)) {
    mha_rope rope = {};
    rope.style = Kind(2);
    rope.offset = in.OneIn(4) ? Number(0, 4) : 0;
    rope.dims = in.OneIn(2) ? Odd(2 * in.Integer(1, 4)) : 0;
    rope.num_positions = Number(1, 400);
    const Wide floats =
        Elements((rope.dims != 0 ? Wide{rope.dims} : Wide{heads.head_dim} - rope.offset) / 2,
                 {{rope.num_positions, &rope.table_stride}});
    rope.cos = Floats(floats), rope.sin = Floats(floats);
    if (in.OneIn(4))
      s.rope_q_positions = Integers<int64_t>(Elements(n_q, {{rows}}), 0, rope.num_positions - 1);
    if (in.OneIn(4))
      s.rope_k_positions = Integers<int64_t>(Elements(n_kv, {{rows}}), 0, rope.num_positions - 1);
    args->call.rope = Placed(rope);
  }
  const Wide q_rows = Elements(1, {{rows}, {heads.num_heads}, {n_q}}),
             kv_rows = Elements(1, {{rows}, {n_kv}, {heads.num_kv_heads}});
  const Wide pairs = Elements(columns, {{rows}, {heads.num_heads}, {n_q}});
  const uint8_t outputs = in.Byte();
  mha_outputs &o = given.outputs;
  if (outputs & 1) o.lse = Result(q_rows);
  if (outputs % 16 == 8) o.attention_weights = Result(pairs);
  if (outputs >= 224) {
    if (outputs & 2) o.q = Result(q_rows * heads.head_dim), o.k = Result(kv_rows * heads.head_dim);
    if (outputs & 2) o.v = Result(kv_rows * heads.head_dim_v);
    if (outputs & 4) o.scores = Result(pairs), o.masked_scores = Result(pairs);
    if (outputs & 8) o.scaled_scores = Result(pairs), o.softcapped_scores = Result(pairs);
    if (outputs & 16) o.context = Result(q_rows * heads.head_dim_v);
  }
  // What takes too long counts as too large.
  const Wide work = Elements(
      1, {{count}, {n_q}, {std::max<int64_t>(n_kv, 1)}, {heads.num_heads}, {heads.head_dim}});
  if (work > 1 << 22) buffers.Take(kHuge);
  return rows;
}

// Sets a field that must be 0, now and then.
void SetReserved(std::initializer_list<mha_input *> inputs, mha_output *output, bool has_heads,
                 bool has_batch = true) {
  const uint8_t kind = in.Byte();
  mha_input *const input = inputs.begin()[kind % inputs.size()];
  if (kind < 240) return;
  switch (in.Byte() % 5) {
    case 0:
      input->reserved = 1;
      break;
    case 1:
      input->reserved_pointer = input;
      break;
    case 2:
      output->reserved = 1;
      break;
    case 3:
      if (!has_heads) input->strides.head = in.AnyInteger();
      if (!has_batch) input->strides.batch = in.AnyInteger();
      break;
    default:
      if (!has_heads) output->strides.head = in.AnyInteger();
      if (!has_batch) output->strides.batch = in.AnyInteger();
  }
}

template <typename T>
bool IsEmpty(const T &value) {
  static const T empty = {};
  return std::memcmp(&value, &empty, sizeof value) == 0;
}

// What is chosen last, so that stored inputs mean what they meant before there was any of it. Then
// the args in their place.
template <class Args>
const Args *Finish(Args *args) {
  mha_sequences &s = given.sequences;
  if (in.OneIn(8)) args->call.flags |= MHA_EQUAL_SCORES;         // an error if there is a scale
  if (given.pads_q_left && in.Boolean()) s.q_lengths = nullptr;  // the first rows say the same
  if (given.pads_kv_left && in.Boolean()) s.kv_lengths = nullptr;
  if (in.OneIn(16)) s.count = s.cu_seqlens_q ? std::min(Number(0, 4), s.count) : Number(0, 4);
  if (in.OneIn(16) && s.cu_seqlens_q) args->call.batch = Number(1, 3);
  if (in.OneIn(32)) args->call.cache_read = given.cache;
  if (in.OneIn(16)) given.score.reserved = 1;
  if (in.OneIn(16) && args->call.rope && args->call.rope->struct_size == sizeof(mha_rope))
    const_cast<mha_rope *>(args->call.rope)->reserved = 1;
  if (!IsEmpty(s) || in.OneIn(4)) args->call.sequences = Placed(s);
  if (given.has_score) args->call.score = Placed(given.score);
  if (!IsEmpty(given.outputs)) args->call.outputs = Placed(given.outputs);
  return Placed(*args);
}

// ---- The functions

// Returns the batch of arrays of rows.
int64_t FillAttention(mha_attention_args *filled, Heads *heads, bool has_one_key_head) {
  mha_attention_args &args = *filled;
  FillSizes(&args);
  args.num_kv_heads = has_one_key_head ? 1 : Number(1, 2);
  const int64_t group = in.Choice<int64_t>({1, 2, 4, 3});
  args.num_heads = args.num_kv_heads > 0 && args.num_kv_heads < 9 ? Odd(args.num_kv_heads * group)
                                                                  : Number(1, 4);
  args.head_dim = Number(1, in.OneIn(4) ? 130 : 20);
  args.head_dim_v = in.OneIn(3) ? Number(1, 40) : args.head_dim;
  *heads = {args.num_heads, args.num_kv_heads != 0 ? args.num_kv_heads : args.num_heads,
            args.head_dim, args.head_dim_v != 0 ? args.head_dim_v : args.head_dim};
  args.scale = Fraction();
  args.instruction_set = in.OneIn(2) ? Kind(9) : 0;
  args.q.type = Type(3), args.k.type = Type(3), args.v.type = Type(3), args.output.type = Type(3);
  if (in.OneIn(4)) args.kv_first_position = Number(0, 20);
  const int64_t rows = FillOptions(&args, *heads, false);
  const auto array = [&](int64_t n, int64_t count, int64_t width, mha_strides *strides) {
    if (in.OneIn(4)) {
      Elements(width, {{rows, &strides->batch}, {count, &strides->head}, {n, &strides->row}});
    } else {
      Elements(width, {{rows, &strides->batch}, {n, &strides->row}, {count, &strides->head}});
    }
    return Span(width, *strides, rows, n, count);
  };
  const bool reads = given.reads_cache && !in.OneIn(16);
  const Wide q = array(args.call.n_q, heads->num_heads, heads->head_dim, &args.q.strides);
  const Wide k = array(args.call.n_kv, heads->num_kv_heads, heads->head_dim, &args.k.strides);
  const Wide v = array(args.call.n_kv, heads->num_kv_heads, heads->head_dim_v, &args.v.strides);
  if (!in.OneIn(64)) args.q.data = Input(q, args.q.type);
  const uint32_t k_type = args.k.type != 0 ? args.k.type : args.q.type,
                 v_type = args.v.type != 0 ? args.v.type : k_type;
  if (!reads) args.k.data = Input(k, k_type);
  if (!reads && !in.OneIn(8)) args.v.data = Input(v, v_type);
  const Wide output =
      array(args.call.n_q, heads->num_heads, heads->head_dim_v, &args.output.strides);
  if (in.OneIn(6)) {
    given.outputs.partials = Result(
        Elements(Wide{heads->head_dim_v} + 2, {{rows}, {heads->num_heads}, {args.call.n_q}}));
    if (!in.OneIn(16)) args.output = {};
  } else if (!in.OneIn(64)) {
    args.output.data = Output(output, args.output.type);
  }
  return rows;
}

void TestAttention() {
  Heads heads;
  mha_attention_args args = {};
  FillAttention(&args, &heads, false);
  SetReserved({&args.q, &args.k, &args.v}, &args.output, true);
  const mha_attention_args *const placed = Finish(&args);
  QueryAndCall(mha_attention_workspace, mha_attention, mha_attention_info, placed);
  Unshare();
}

void TestChooseKeys() {
  Heads heads;
  mha_attention_args attention = {};
  const bool is_complete = !in.OneIn(16);
  const int64_t rows = FillAttention(&attention, &heads, is_complete);
  if (is_complete) {
    attention.kv_first_position = 0;
    attention.v = {}, attention.output = {}, attention.call.score_arrays = nullptr;
    given.has_score = false, given.outputs = {};
  }
  mha_choose_keys_args args = {};
  args.attention = Finish(&attention);
  args.num_chosen = Number(1, 50);
  args.weights.data =
      Floats(Rows(heads.num_heads, &args.weights.strides, rows, attention.call.n_q));
  args.chosen_keys =
      static_cast<int32_t *>(Output(Elements(args.num_chosen, {{rows}, {attention.call.n_q}})));
  if (in.OneIn(3) && !given.cache)
    args.index_scores = Result(Elements(attention.call.n_kv, {{rows}, {attention.call.n_q}}));
  SetReserved({&args.weights}, &attention.output, false);
  const mha_choose_keys_args *const placed = Placed(args);
  QueryAndCall(
      mha_choose_keys_workspace, mha_choose_keys,
      [](const mha_choose_keys_args *, mha_call_info *, mha_error *error) {
        return mha_choose_keys_workspace(nullptr, nullptr, error);  // there is none
      },
      placed);
  Unshare();
}

// Sequences of a call that has rows alone, and how many there are.
int64_t FillRows(int64_t *batch, int64_t rows, const mha_sequences **placed) {
  mha_sequences s = {};
  const int64_t count = Batch(*batch);
  if (in.OneIn(4)) {
    s.cu_seqlens_q = Starts(count, rows);
    s.count = in.OneIn(16) ? std::min(Number(0, 4), count) : count;
    *batch = Odd(1);
    *placed = Placed(s);
    return s.count;
  }
  if (in.OneIn(4)) s.q_lengths = Integers<int64_t>(count, 0, rows);
  if (in.OneIn(4)) s.q_first_rows = PaddedLeft(s.q_lengths, count, rows);
  if (in.OneIn(32)) s.kv_lengths = s.q_lengths;
  if (!IsEmpty(s) || in.OneIn(4)) *placed = Placed(s);
  return count;
}

template <class Args>
void FillStates(Args *args, Wide width, std::initializer_list<Axis> axes) {
  const Wide all = Elements(width, axes);
  if (in.OneIn(2)) args->state = Floats(all);
  if (in.OneIn(2)) args->state_out = Result(all);
  if (in.OneIn(4) && args->state_out) args->state = args->state_out;
}

void TestRecurrent() {
  mha_recurrent_args args = {};
  args.batch = Number(1, 3), args.rows = Number(1, 9);
  args.num_v_heads = Number(1, 4);
  args.num_k_heads = in.OneIn(2) ? Odd(1) : 0;
  const int64_t v_heads = args.num_v_heads, k_heads = args.num_k_heads ? args.num_k_heads : v_heads;
  args.num_q_heads = in.OneIn(2) ? in.Choice<int64_t>({v_heads, 1, 2, 3, 8}) : 0;
  const int64_t q_heads = args.num_q_heads ? args.num_q_heads : k_heads;
  args.head_dim = Number(1, in.OneIn(4) ? 130 : 20);
  args.head_dim_v = in.OneIn(3) ? Number(1, 40) : 0;
  const int64_t width = args.head_dim_v ? args.head_dim_v : args.head_dim;
  args.decay_dim = in.OneIn(3) ? Odd(args.head_dim) : 0;
  args.scale = Fraction(), args.norm_epsilon = Fraction();
  args.beta_function = in.OneIn(2) ? Kind(2) : 0;
  args.instruction_set = in.OneIn(2) ? Kind(9) : 0;
  args.scheduler = Scheduler();
  const int64_t count = FillRows(&args.batch, args.rows, &args.sequences);
  const int64_t decay_dim = args.decay_dim ? args.decay_dim : 1;
  if (in.OneIn(3)) args.a_log = Floats(v_heads);
  if (in.OneIn(3)) args.dt_bias = Floats(Elements(decay_dim, {{v_heads}}));
  args.q.type = Type(3), args.k.type = Type(3), args.v.type = Type(3), args.output.type = Type(3);
  args.decay.type = Type(3), args.beta.type = Type(3);
  const auto array = [&](int64_t heads, Wide of_head, mha_strides *strides) {
    if (in.OneIn(4)) {
      Elements(of_head, {{Batch(args.batch), &strides->batch},
                         {heads, &strides->head},
                         {args.rows, &strides->row}});
    } else {
      Elements(of_head, {{Batch(args.batch), &strides->batch},
                         {args.rows, &strides->row},
                         {heads, &strides->head}});
    }
    return Span(of_head, *strides, Batch(args.batch), args.rows, heads);
  };
  const uint32_t k_type = args.k.type != 0 ? args.k.type : args.q.type,
                 v_type = args.v.type != 0 ? args.v.type : k_type;
  args.q.data = Input(array(q_heads, args.head_dim, &args.q.strides), args.q.type);
  args.k.data = Input(array(k_heads, args.head_dim, &args.k.strides), k_type);
  args.v.data = Input(array(v_heads, width, &args.v.strides), v_type);
  if (in.OneIn(2))
    args.decay.data = Input(array(v_heads, decay_dim, &args.decay.strides), args.decay.type);
  if (in.OneIn(2)) args.beta.data = Input(array(v_heads, 1, &args.beta.strides), args.beta.type);
  args.output.data =
      Output(array(std::max(q_heads, v_heads), width, &args.output.strides), args.output.type);
  FillStates(&args, width, {{count}, {v_heads}, {args.head_dim}});
  if (in.OneIn(3)) {
    args.num_snapshots = Number(1, 16);
    args.snapshots =
        Result(Elements(width, {{count}, {args.num_snapshots}, {v_heads}, {args.head_dim}}));
  }
  SetReserved({&args.q, &args.k, &args.v, &args.decay, &args.beta}, &args.output, true);
  const mha_recurrent_args *const placed = Placed(args);
  QueryAndCall(mha_recurrent_attention_workspace, mha_recurrent_attention,
               mha_recurrent_attention_info, placed);
}

void TestCausalConv() {
  mha_causal_conv_args args = {};
  args.batch = Number(1, 3), args.rows = Number(1, 9);
  args.channels = Number(1, in.OneIn(4) ? 300 : 40), args.kernel_size = Number(2, 8);
  args.activation = Kind({MHA_FUNCTION_NONE, MHA_FUNCTION_SILU});
  args.instruction_set = in.OneIn(2) ? Kind(9) : 0;
  args.scheduler = Scheduler();
  const int64_t count = FillRows(&args.batch, args.rows, &args.sequences);
  const int64_t channels = args.channels;
  if (!in.OneIn(16)) args.weights = Floats(Elements(args.kernel_size, {{channels}}));
  if (in.OneIn(2)) args.bias = Floats(channels);
  args.x.type = Type(3), args.output.type = Type(3);
  args.x.data = Input(Rows(channels, &args.x.strides, Batch(args.batch), args.rows), args.x.type);
  args.output.data =
      Output(Rows(channels, &args.output.strides, Batch(args.batch), args.rows), args.output.type);
  FillStates(&args, channels, {{count}, {std::max<int64_t>(args.kernel_size, 1) - 1}});
  SetReserved({&args.x}, &args.output, false);
  const mha_causal_conv_args *const placed = Placed(args);
  QueryAndCall(
      mha_causal_conv_workspace, mha_causal_conv,
      [](const mha_causal_conv_args *, mha_call_info *, mha_error *error) {
        return mha_causal_conv_workspace(nullptr, nullptr, error);  // there is none
      },
      placed);
}

struct Destroy {
  void operator()(mha_layer *layer) const { mha_layer_destroy(layer); }
};
std::unique_ptr<mha_layer, Destroy> made;  // what is called, unless it is over a packed buffer
uint32_t given_type, given_layout;         // of the matrices that it is made of
uint32_t group_size;                       // that it is made with
bool has_blocks;                           // of scales

void FillMatrix(mha_matrix *matrix, Wide depth, Wide columns) {
  const bool is_int4 = given_type == MHA_TYPE_INT4;
  const Wide rows = given_layout == MHA_LAYOUT_OUT_IN ? columns : depth,
             width = given_layout == MHA_LAYOUT_OUT_IN ? depth : columns;
  const Wide stored = is_int4 ? width + width % 2 : width;
  const bool has_stride = in.OneIn(4);
  if (has_stride)
    matrix->row_stride = in.Boolean() ? Odd(static_cast<int64_t>(stored) + 2 * (in.Byte() % 4))
                                      : static_cast<int64_t>(width);
  if (given_type >= MHA_TYPE_INT8 && !in.OneIn(32)) {
    const Wide group = group_size != 0 ? group_size : is_int4 ? 32 : depth;
    const Wide numbers = columns > 0 && depth > 0 ? columns * ((depth + group - 1) / group) : 0;
    matrix->scales = Floats(numbers);
    if (in.OneIn(4)) matrix->offsets = Floats(numbers);
    const Wide blocks = numbers > 0 ? columns * ((depth + 255) / 256) : 0;
    if (has_blocks && !in.OneIn(16)) matrix->block_scales = Floats(blocks);
    if (has_blocks && matrix->offsets) matrix->block_offsets = Floats(blocks);
  }
  const Wide step = matrix->row_stride != 0 ? Wide{matrix->row_stride} : stored;
  if (rows <= 0 || width <= 0 || in.OneIn(64)) return;
  const Wide count =
      step < 0 ? 0 : std::min((std::min(rows, kHuge) - 1) * std::min(step, kHuge) + stored, kHuge);
  matrix->data = is_int4 ? Contents(count / 2) : Input(count, given_type);
}

const mha_layer *Layer(bool is_linear, mha_layer_config *shape) {
  static const mha_allocator allocator = {
      nullptr, [](void *, size_t bytes) { return bytes < 1 << 20 ? std::malloc(bytes) : nullptr; },
      [](void *, void *memory) { std::free(memory); }};
  mha_layer_options options = {};
  options.instruction_set = in.OneIn(2) ? Kind(10) : 0, options.reserved = in.OneIn(64),
  options.allocator = &allocator;
  mha_layer_config config = {};
  mha_layer_weights weights = {};
  mha_linear_weights linear = {};
  linear.format.type = config.format.type = Type(7);
  linear.format.arithmetic = config.format.arithmetic =
      in.OneIn(3) ? Kind({MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8, MHA_ARITHMETIC_INT16,
                          MHA_ARITHMETIC_BF16})
                  : 0;
  linear.format.group_size = config.format.group_size = group_size = in.OneIn(3)
                                                                         ? Kind({16, 32, 64, 128})
                                                                     : in.OneIn(64) ? Kind(300)
                                                                                    : 0;
  linear.format.scale_type = config.format.scale_type = in.OneIn(4) ? Type(4) : 0;
  has_blocks = config.format.scale_type == MHA_TYPE_INT8;
  linear.type = weights.type = given_type = in.OneIn(2) ? config.format.type : Type(3);
  if (given_type >= MHA_TYPE_INT5) linear.type = weights.type = given_type = MHA_TYPE_INT8;
  linear.layout = weights.layout = given_layout =
      given_type == MHA_TYPE_INT4 ? MHA_LAYOUT_OUT_IN : Kind(2);
  if (is_linear) {
    linear.input_dim = Number(1, 100), linear.output_dim = Number(1, 70);
    FillMatrix(&linear.w, linear.input_dim, linear.output_dim);
    if (in.Boolean()) linear.w.bias = Floats(linear.output_dim);
  } else {
    config.num_kv_heads = Number(1, 2);
    const int64_t group = in.Choice<int64_t>({1, 2, 4});
    config.num_heads = config.num_kv_heads > 0 && config.num_kv_heads < 9
                           ? Odd(config.num_kv_heads * group)
                           : Number(1, 3);
    config.head_dim = in.OneIn(8) ? 0 : Number(1, 20),
    config.head_dim_v = in.OneIn(3) ? Number(1, 20) : 0;
    config.query_dim =
        in.OneIn(3) ? Number(1, 100) : Odd(config.num_heads < 99 ? config.num_heads * 16 : 16);
    config.key_dim = in.OneIn(4) ? Number(1, 30) : 0,
    config.value_dim = in.OneIn(4) ? Number(1, 30) : 0;
    config.scale = Fraction();
    config.gate = in.OneIn(3) ? Kind(3) : 0;
    if (config.gate) config.gate_dim = in.Boolean() ? 1 : 0;
    const Wide heads = config.num_heads,
               key_heads = config.num_kv_heads != 0 ? Wide{config.num_kv_heads} : heads;
    const Wide d = config.head_dim != 0 ? Wide{config.head_dim}
                   : heads != 0         ? config.query_dim / heads
                                        : 0;
    const Wide d_v = config.head_dim_v != 0 ? Wide{config.head_dim_v} : d,
               gate = config.gate == 0       ? 0
                      : config.gate_dim == 0 ? d_v
                                             : 1;
    const Wide key = config.key_dim != 0 ? config.key_dim : config.query_dim,
               value = config.value_dim != 0 ? Wide{config.value_dim} : key;
    const bool only_asks = in.OneIn(8), has_output = in.OneIn(2);
    if (config.gate != 0 && in.Boolean()) FillMatrix(&weights.w_g, config.query_dim, heads * gate);
    if (config.gate != 0 && !weights.w_g.data) weights.gate_place = MHA_GATE_IN_W_Q;
    const Wide q = heads * (d + (weights.gate_place != 0 ? gate : 0)),
               k = only_asks ? 0 : key_heads * d, v = only_asks ? 0 : key_heads * d_v;
    if (has_output && in.Boolean()) config.output_dim = Number(1, 70);
    if (in.OneIn(4) && !only_asks) {
      FillMatrix(&weights.w_qkv, config.query_dim, q + k + v);
    } else {
      FillMatrix(&weights.w_q, config.query_dim, q);
      if (!only_asks) FillMatrix(&weights.w_k, key, k);
      if (!only_asks) FillMatrix(&weights.w_v, value, v);
    }
    const Wide output = config.output_dim != 0 ? config.output_dim : config.query_dim;
    if (has_output) FillMatrix(&weights.w_o, heads * d_v, output);
    const uint8_t biases = in.Byte();
    if (biases & 1) weights.w_q.bias = Floats(q);
    if (biases & 2 && !only_asks) weights.w_k.bias = Floats(k), weights.w_v.bias = Floats(v);
    if (biases == 8) weights.w_qkv.bias = Floats(q + k + v);
    if (biases & 16 && has_output) weights.w_o.bias = Floats(output);
    if (biases & 32 && weights.w_g.data) weights.w_g.bias = Floats(heads * gate);
    if (biases >= 252 && given_type < MHA_TYPE_INT8)  // which has none
      (biases & 1 ? weights.w_q : weights.w_o).offsets = Floats(q);
  }
  const mha_layer_options *const o = Placed(options);
  const mha_layer_config *const c = Placed(config);
  const mha_layer_weights *const w = Placed(weights);
  const mha_linear_weights *const l = Placed(linear);
  const mha_layer *layer = nullptr;
  size_t bytes = 0;
  const mha_status asked = Call([&](mha_error *error) {
    return is_linear ? mha_linear_pack_size(l, o, &bytes, error)
                     : mha_layer_pack_size(c, w, o, &bytes, error);
  });
  const bool is_packed = in.OneIn(3);
  unsigned char *const buffer = is_packed ? buffers.Take(static_cast<Wide>(bytes), 64) : nullptr;
  if (asked == MHA_OK && buffers.is_too_large()) return nullptr;
  if (is_packed) {
    const auto pack = [&](size_t size) {
      return Call([&](mha_error *error) {
        return is_linear ? mha_linear_pack(l, o, buffer, size, error)
                         : mha_layer_pack(c, w, o, buffer, size, error);
      });
    };
    if (asked == MHA_OK)
      Expect(pack(bytes - 1) == MHA_ERROR_BUFFER_TOO_SMALL,
             "a byte less than a packed layer needs was taken");
    const mha_status packed = pack(bytes);
    if (asked != MHA_OK) Expect(packed != MHA_OK, "a layer was packed that has no size");
    if (packed != MHA_OK) return nullptr;
    Expect(mha_layer_verify(buffer, bytes, nullptr) == MHA_OK, "a packed layer is not sound");
    const size_t storage_bytes = mha_layer_view_size();
    void *const storage = buffers.Take(static_cast<Wide>(storage_bytes));
    Call(mha_layer_view, buffer, bytes, o, storage, storage_bytes, &layer);
  } else {
    mha_layer *created = nullptr;
    Call([&](mha_error *error) {
      return is_linear ? mha_linear_create(l, o, &created, error)
                       : mha_layer_create(c, w, o, &created, error);
    });
    made.reset(created);
    layer = created;
  }
  shape->struct_size = sizeof *shape;
  Call(mha_layer_shape, layer, shape);
  buffers.ForgetSizes();
  return layer;
}

void TestForward() {
  mha_layer_config shape = {};
  const mha_layer *const layer = Layer(in.OneIn(32), &shape);
  mha_forward_args args = {};
  FillSizes(&args);
  args.query.type = Type(3), args.output.type = Type(3);
  const bool reads = given.reads_cache && !in.OneIn(16), has_key = !reads && in.OneIn(2),
             has_value = !reads && in.OneIn(3);
  if (has_value && !has_key) args.call.n_kv = Odd(args.call.n_q);
  const int64_t rows = FillOptions(
      &args, {shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim_v}, !has_key);
  const Wide query = Rows(shape.query_dim, &args.query.strides, rows, args.call.n_q);
  const Wide output = Rows(shape.output_dim, &args.output.strides, rows, args.call.n_q);
  if (!in.OneIn(64)) args.query.data = Input(query, args.query.type);
  if (has_key)
    args.key.data =
        Input(Rows(shape.key_dim, &args.key.strides, rows, args.call.n_kv), args.query.type);
  const int64_t values = has_key ? args.call.n_kv : args.call.n_q;
  if (has_value)
    args.value.data =
        Input(Rows(shape.value_dim, &args.value.strides, rows, values), args.query.type);
  if (!in.OneIn(64)) args.output.data = Output(output, args.output.type);
  SetReserved({&args.query, &args.key, &args.value}, &args.output, false);
  for (mha_input *const input : {&args.key, &args.value})
    input->type = in.OneIn(4) ? Type(3) : 0;  // another one is refused
  const mha_forward_args *const placed = Finish(&args);
  QueryAndCall(mha_forward_workspace, mha_forward, mha_forward_info, layer, placed);
  Unshare();
}

void TestLinear() {
  mha_layer_config shape = {};
  const mha_layer *const layer = Layer(!in.OneIn(4), &shape);
  mha_linear_args args = {};
  args.rows = Number(1, 40);
  args.x.type = Type(3), args.output.type = Type(3);
  args.scheduler = Scheduler();
  const Wide width =
      shape.num_heads > 0 ? Wide{shape.num_heads} * shape.head_dim_v : shape.query_dim;
  const auto array = [&](Wide width_of_row, mha_strides *strides) {
    Elements(width_of_row, {{args.rows, &strides->row}});
    return Span(width_of_row, *strides, 1, args.rows, 1);
  };
  const Wide x = array(width, &args.x.strides),
             output = array(shape.output_dim, &args.output.strides);
  if (!in.OneIn(64)) args.x.data = Input(x, args.x.type);
  if (in.OneIn(3))
    args.residual.data = Input(array(shape.output_dim, &args.residual.strides), args.output.type);
  if (!in.OneIn(64)) args.output.data = Output(output, args.output.type);
  SetReserved({&args.x, &args.residual}, &args.output, false, false);
  args.residual.type = in.OneIn(4) ? Type(3) : 0;  // another one than that of output is refused
  const mha_linear_args *const placed = Placed(args);
  QueryAndCall(mha_linear_workspace, mha_linear, mha_linear_info, layer, placed);
}

void TestPartials() {
  const int64_t rows = Number(1, 20), width = Number(1, 40);
  const Wide count = Elements(Wide{width} + 2, {{rows}});
  const float *const left = Floats(count), *const right = in.OneIn(64) ? nullptr : Floats(count);
  float *const result = Result(count);
  const uint32_t set = Kind(9);
  if (!buffers.is_too_large()) Call(mha_partials_merge, rows, width, left, right, result, set);
  buffers.ForgetSizes();
  mha_partials_args args = {};
  args.batch = Number(1, 3), args.num_heads = Number(1, 4), args.n_q = Number(1, 10),
  args.head_dim_v = Number(1, 40);
  args.instruction_set = Kind(9), args.output.type = Type(3);
  args.partials = Floats(
      Elements(Wide{args.head_dim_v} + 2, {{Batch(args.batch)}, {args.num_heads}, {args.n_q}}));
  if (in.Boolean()) args.sinks = Floats(args.num_heads);
  if (in.Boolean()) args.head_scales = Floats(args.num_heads);
  if (!in.OneIn(4))
    args.output.data =
        Output(Elements(args.head_dim_v, {{Batch(args.batch)}, {args.num_heads}, {args.n_q}}),
               args.output.type);
  if (in.Boolean())
    args.lse = Result(Elements(1, {{Batch(args.batch)}, {args.num_heads}, {args.n_q}}));
  const mha_partials_args *placed = Placed(args);
  if (in.OneIn(3)) {
    mha_strides &strides = args.output.strides;
    Elements(args.head_dim_v, {{Batch(args.batch), &strides.batch},
                               {args.n_q, &strides.row},
                               {args.num_heads, &strides.head}});
    args.output.data =
        Output(Span(args.head_dim_v, strides, Batch(args.batch), args.n_q, args.num_heads),
               args.output.type);
    args.reserved = in.OneIn(16), args.output.reserved = in.OneIn(16);
    placed = Placed(args);
  }
  if (!buffers.is_too_large()) Call(mha_partials_finish, placed);
}

void TestTables() {
  mha_rope_config config = {};
  const auto number = [](double usual) {
    return in.OneIn(3) ? in.OneIn(8) ? static_cast<double>(in.Float()) : usual : 0.0;
  };
  config.dims = Odd(2 * in.Integer(1, 8)), config.num_positions = Number(1, 30),
  config.first_position = in.OneIn(3) ? Number(0, 1000) : 0;
  config.base = number(500000), config.linear_factor = number(4),
  config.attention_factor = number(1.5);
  const uint8_t kind = in.Byte() % 8;
  if (kind == 1)
    config.yarn_factor = number(8), config.yarn_beta_fast = number(32),
    config.yarn_beta_slow = number(1);
  if (kind == 1) config.yarn_unrounded = Kind(2);
  if (kind == 2)
    config.llama3_factor = number(8), config.llama3_low_freq_factor = number(1),
    config.llama3_high_freq_factor = number(4);
  if (kind == 3) config.ntk_factor = number(2), config.ntk_positions = Number(0, 9000);
  if (kind > 0 && kind < 4 && !in.OneIn(8)) config.original_positions = Number(1, 8192);
  if (kind == 4) {
    double *const factors = buffers.Take<double>(Wide{config.dims} / 2);
    for (int64_t i = 0; i < config.dims / 2 && !buffers.is_too_large(); i++)
      factors[i] = number(1) + 1;
    config.pair_factors = factors;
  }
  if (kind == 5) {
    config.mrope_section = Integers<int64_t>(3, 0, config.dims / 2),
    config.mrope_interleaved = Kind(2);
    config.mrope_positions =
        Integers<int64_t>(config.num_positions > 0 ? Wide{3} * config.num_positions : 0, 0, 1000);
  }
  const Wide floats = Elements(Wide{config.dims} / 2, {{config.num_positions}});
  float *const cos = Result(floats), *const sin = Result(floats);
  if (!buffers.is_too_large())
    Call([&](mha_error *error) { return mha_rope_tables(Placed(config), cos, sin, error); });

  buffers.ForgetSizes();
  const int64_t heads = Number(1, 20), num_buckets = Number(0, 40), max_distance = Number(0, 300),
                left = Number(0, 40), right = Number(0, 40);
  const uint32_t is_bidirectional = Kind(2);
  const float *const embedding = Floats(Elements(heads, {{num_buckets != 0 ? num_buckets : 32}}));
  float *const slopes = Result(heads), *const bias = Result(
                                           left < 0 || right < 0
                                               ? 0
                                               : Elements(Wide{left} + 1 + right, {{heads}}));
  if (buffers.is_too_large()) return;
  Call(mha_alibi_slopes, heads, slopes);
  Call(mha_t5_relative_bias, embedding, num_buckets, max_distance, is_bidirectional, heads, left,
       right, bias);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  in = Bytes(data, size);
  const uint8_t kind = in.Byte();
  buffers.Reset((kind & 128) != 0);
  has_error = (kind & 112) != 112;
  static void (*const tests[])() = {TestAttention, TestForward,    TestAttention,  TestForward,
                                    TestLinear,    TestChooseKeys, TestPartials,   TestTables,
                                    TestAttention, TestForward,    TestRecurrent,  TestForward,
                                    TestLinear,    TestChooseKeys, TestCausalConv, TestTables};
  tests[kind % 16]();
  made.reset();
  return 0;
}
