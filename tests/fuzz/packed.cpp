// Target `packed`: packed layers and caches as a file may hold them (damaged, cut off or made up,
// with checksums that hold or not), and lists of sequences, rows, blocks and keys with any entries.
// What the library accepts is then used, and must not read or write outside.
#include <algorithm>

#include "fuzz/buffers.h"
#include "objects/layer.h"
#include "objects/tiles.h"

namespace {

using fuzz::Bytes;
using fuzz::Expect;
using fuzz::Wide;

Bytes in(nullptr, 0);
fuzz::Buffers buffers;

constexpr size_t kHeader = 256, kBytes = 24, kShape = 40, kKind = 20,
                 kChecksum = 248;  // offsets in either header; of a layer alone

template <typename T>
T At(const std::string &stored, size_t offset) {
  T value;
  std::memcpy(&value, stored.data() + offset, sizeof value);
  return value;
}
template <typename T>
void Set(std::string *stored, size_t offset, T value) {
  if (offset + sizeof value <= stored->size())
    std::memcpy(&(*stored)[offset], &value, sizeof value);
}

// Changes some numbers of stored[from, to).
void Damage(std::string *stored, size_t from, size_t to) {
  for (int count = in.Byte() % 4; count > 0 && from < to && to <= stored->size(); count--) {
    const size_t at =
        from + static_cast<size_t>(in.Integer(0, static_cast<int64_t>(to - from) - 1));
    switch (in.Byte() % 6) {
      case 0:
        (*stored)[at] ^= static_cast<char>(1 << in.Byte() % 8);
        break;
      case 1:
        (*stored)[at] = static_cast<char>(in.Byte());
        break;
      case 2:
        Set(stored, at / 8 * 8, in.AnyInteger());
        break;
      case 3:
        Set(stored, at / 8 * 8, in.Integer(-2, 300));
        break;
      case 4:
        Set(stored, at / 4 * 4, static_cast<int32_t>(in.Integer(-2, 40)));
        break;
      default:
        Set(stored, at / 4 * 4, static_cast<uint32_t>(in.Raw(4)));
    }
  }
}

void Cut(std::string *stored) {  // by few bytes or by many
  const int64_t size = static_cast<int64_t>(stored->size());
  stored->resize(static_cast<size_t>(in.Boolean() ? in.Integer(0, size)
                                                  : std::max<int64_t>(0, size - in.Byte())));
}

int64_t Wild(int64_t low, int64_t high) {
  const int64_t usual = in.Integer(low, std::max(low, high));
  const uint8_t kind = in.Byte();
  return kind < 224 ? usual : kind < 236 ? high + 1 : kind < 242 ? low - 1 : in.AnyInteger();
}
template <typename T>
T *List(Wide count, int64_t low, int64_t high) {
  T *const list = buffers.Take<T>(count);
  for (int64_t i = 0; i < static_cast<int64_t>(count); i++)
    list[i] = static_cast<T>(in.AtEnd() ? low : Wild(low, high));
  return list;
}
float *Floats(Wide count) {
  float *const floats = buffers.Take<float>(count);
  for (int64_t i = 0; buffers.Fits(count * 4) && i < static_cast<int64_t>(count); i++)
    floats[i] = 0.125f * static_cast<float>(i % 17 - 8);
  return floats;
}

// Makes no call where sizes are so large that the arrays do not fit.
template <typename Function, typename... Args>
mha_status Call(const Function &function, Args... args) {
  if (buffers.is_too_large()) return MHA_OK;
  return buffers.Call([&](mha_error *error) { return function(args..., error); });
}

// ---- Caches

struct CacheShape : mha_kv_cache_config {
  explicit CacheShape(const mha_kv_cache *cache) : mha_kv_cache_config() {
    struct_size = sizeof(mha_kv_cache_config);
    mha_kv_cache_shape(cache, this, nullptr);
  }
};

// Attends to a cache with lists of any contents, and may append to it.
void Attend(mha_kv_cache *cache) {
  const CacheShape shape(cache);
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.call.batch = in.Integer(1, 3), args.call.n_q = in.Integer(1, 6),
  args.call.n_kv = in.Integer(1, 20);
  args.num_kv_heads = shape.num_kv_heads, args.num_heads = shape.num_kv_heads * in.Integer(1, 2);
  args.head_dim = shape.head_dim, args.head_dim_v = shape.head_dim_v;
  const uint8_t way = in.Byte() % 4;
  const bool reads = way == 0 || way == 3;
  args.call.flags = way >= 2 ? MHA_CAUSAL : 0;
  if (reads) args.call.cache_read = cache;
  if (!reads) args.call.cache = cache;
  if (shape.kind == MHA_CACHE_KIND_RING || in.OneIn(3)) {
    args.call.flags |= MHA_CAUSAL | MHA_WINDOW_LEFT;
    args.call.window_left = Wild(0, shape.capacity - 1);
  }
  if (in.OneIn(3)) args.call.n_kv = args.call.n_q;
  const int64_t count = args.call.batch;
  mha_sequences sequences = {};
  sequences.struct_size = sizeof sequences;
  args.call.sequences = &sequences;
  if (in.OneIn(2)) sequences.cache_sequences = List<int64_t>(count, 0, shape.num_sequences - 1);
  if (in.OneIn(3) && shape.kind != MHA_CACHE_KIND_RING)
    sequences.q_first_positions = List<int64_t>(count, -1, 40);
  if (in.OneIn(4)) {
    int64_t *const starts = List<int64_t>(Wide{count} + 1, 0, args.call.n_q);
    sequences.cu_seqlens_q = starts;
    if (!reads && args.call.n_kv != args.call.n_q)
      sequences.cu_seqlens_kv = List<int64_t>(Wide{count} + 1, 0, args.call.n_kv);
    if (in.Boolean())
      std::sort(starts, starts + count + 1), starts[0] = 0, starts[count] = args.call.n_q;
    args.call.batch = 1, sequences.count = count;
  } else if (in.OneIn(3)) {
    sequences.q_lengths = List<int64_t>(count, 0, args.call.n_q);
    if (!reads) sequences.kv_lengths = List<int64_t>(count, 0, args.call.n_kv);
    if (!reads && in.Boolean()) sequences.kv_first_rows = List<int64_t>(count, 0, 3);
  }
  mha_score_arrays arrays = {};
  arrays.struct_size = sizeof arrays;
  if (in.OneIn(2)) {
    arrays.num_chosen = in.Integer(1, 6),
    arrays.chosen_block = in.Choice<int64_t>({1, 16, 5, 64, 1 << 20});
    const Wide lists =
        Wide{args.call.batch} * args.num_kv_heads * args.call.n_q * arrays.num_chosen;
    arrays.chosen_keys = List<int32_t>(buffers.Fits(lists * 4) ? lists : 0, -1,
                                       shape.capacity / arrays.chosen_block);
    args.call.score_arrays = &arrays;
  }
  mha_rope rope = {};
  rope.struct_size = sizeof rope;
  if (in.OneIn(3)) {
    rope.num_positions = in.Integer(1, 100), rope.dims = args.head_dim / 2 * 2;
    rope.cos = Floats(Wide{rope.num_positions} * (rope.dims / 2)),
    rope.sin = Floats(Wide{rope.num_positions} * (rope.dims / 2));
    if (in.Boolean())
      sequences.rope_q_positions =
          List<int64_t>(Wide{args.call.batch} * args.call.n_q, 0, rope.num_positions - 1);
    if (in.Boolean())
      sequences.rope_k_positions =
          List<int64_t>(Wide{args.call.batch} * args.call.n_kv, 0, rope.num_positions - 1);
    args.call.rope = &rope;
  }
  const Wide q_rows = Wide{args.call.batch} * args.call.n_q * args.num_heads,
             kv_rows = Wide{args.call.batch} * args.call.n_kv * args.num_kv_heads;
  args.q.data = Floats(q_rows * args.head_dim);
  if (!reads) args.k.data = Floats(kv_rows * args.head_dim);
  if (!reads && shape.value_place == MHA_CACHE_VALUES_OWN)
    args.v.data = Floats(kv_rows * args.head_dim_v);
  args.output.data = buffers.TakeOutput(q_rows * args.head_dim_v * 4);
  size_t bytes = 0;
  if (Call(mha_attention_workspace, &args, &bytes) != MHA_OK) return;
  unsigned char *const workspace = buffers.Take(static_cast<Wide>(bytes));
  Call(mha_attention, &args, workspace, bytes);
}

void Use(mha_kv_cache *cache) {
  const CacheShape shape(cache);
  for (int i = in.Byte() % 8; i > 0; i--) {
    const int64_t sequence = Wild(0, shape.num_sequences - 1), count = Wild(0, 40);
    int64_t length = 0;
    mha_kv_cache_length(cache, sequence, &length, nullptr);
    const int64_t rows = std::min<int64_t>(std::max<int64_t>(count, 0), 1 << 20);
    const Wide k_floats = Wide{rows} * shape.num_kv_heads * shape.head_dim,
               v_floats = Wide{rows} * shape.num_kv_heads * shape.head_dim_v;
    const uint8_t kind = in.Byte();
    if (kind % 32 == 31) {
      const int32_t block = static_cast<int32_t>(Wild(0, shape.num_blocks - 1));
      uint32_t used = 7;
      const mha_status status = Call(mha_kv_cache_unshare, cache, sequence, block, &used);
      Expect(buffers.is_too_large() || (status == MHA_OK ? used <= 1 : used == 7),
             "used is neither 0 nor 1, or a failed call wrote it");
    } else if (kind % 8 > 4) {
      Attend(cache);
    } else {
      Call([&](mha_error *error) -> mha_status {
        switch (kind % 8) {
          case 0: {
            const float *const k = Floats(k_floats), *const v = shape.value_place
                                                                    ? nullptr
                                                                    : Floats(v_floats);
            return mha_kv_cache_append(cache, sequence, buffers.is_too_large() ? 0 : rows, k, v,
                                       error);
          }
          case 1:
            return mha_kv_cache_truncate(cache, sequence, Wild(0, length), error);
          case 2: {
            const int64_t blocks = in.Integer(0, 12);
            return mha_kv_cache_set_blocks(
                cache, sequence, List<int32_t>(blocks, 0, shape.num_blocks - 1), blocks, error);
          }
          case 3:
            return mha_kv_cache_copy_prefix(cache, sequence, Wild(0, shape.num_sequences - 1),
                                            Wild(0, length), error);
          default: {
            float *const k = buffers.Take<float>(k_floats), *const v =
                                                                buffers.Take<float>(v_floats);
            return mha_kv_cache_read(cache, sequence,
                                     Wild(std::max<int64_t>(0, length - 40), length),
                                     buffers.is_too_large() ? 0 : rows, k, v, error);
          }
        }
      });
    }
    buffers.ForgetSizes();
  }
}

// An empty cache of some shape in its own buffer, or NULL if the shape is invalid.
mha_kv_cache *Empty(size_t *bytes) {
  mha_kv_cache_config config = {};
  config.struct_size = sizeof config;
  config.num_sequences = in.Integer(1, 4);
  config.kind = in.Choice({MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_RING, MHA_CACHE_KIND_PAGED});
  config.capacity =
      16 * in.Integer(1, 5) - (config.kind == MHA_CACHE_KIND_CONTIGUOUS ? in.Byte() % 16 : 0);
  config.num_kv_heads = in.Integer(1, 2), config.head_dim = in.Integer(1, 20),
  config.head_dim_v = in.Integer(0, 20);
  config.k_type = MHA_TYPE_F32 + in.Byte() % 4;
  config.value_place = in.OneIn(4) ? MHA_CACHE_VALUES_IN_KEYS : MHA_CACHE_VALUES_OWN;
  config.v_type = config.value_place ? 0 : MHA_TYPE_F32 + in.Byte() % 5;
  if (config.kind == MHA_CACHE_KIND_PAGED)
    config.block_positions = 16, config.num_blocks = in.Integer(1, 9);
  if (mha_kv_cache_size(&config, bytes, nullptr) != MHA_OK) return nullptr;
  unsigned char *const buffer = buffers.Take(static_cast<Wide>(*bytes), 64);
  mha_kv_cache *cache = nullptr;
  Expect(mha_kv_cache_init(&config, buffer, *bytes, &cache, nullptr) == MHA_OK,
         "an empty cache can't be made");
  return cache;
}

uint64_t CacheChecksum(std::string header) {
  Set<uint64_t>(&header, kChecksum, 0);
  uint64_t sum = 0x9e3779b97f4a7c15u;
  for (size_t at = 0; at < kHeader; at += 8) {
    sum = (sum ^ At<uint64_t>(header, at)) * 0xff51afd7ed558ccdu;
    sum ^= sum >> 32;
  }
  return sum;
}

void TestCache() {
  size_t bytes = 0, other_bytes = 0;
  mha_kv_cache *const cache = Empty(&bytes);
  if (!cache) return;
  const CacheShape shape(cache);
  for (int64_t s = 0; s < shape.num_sequences && shape.kind == MHA_CACHE_KIND_PAGED; s++) {
    int32_t blocks[5];
    const int64_t count = in.Integer(0, std::min(shape.capacity / 16, shape.num_blocks)),
                  first = in.Byte();
    for (int64_t i = 0; i < count; i++)
      blocks[i] = static_cast<int32_t>((first + i) % shape.num_blocks);
    mha_kv_cache_set_blocks(cache, s, blocks, count, nullptr);
  }
  Use(cache);
  std::string stored(reinterpret_cast<const char *>(cache), bytes);
  const std::string sound = stored;
  const auto pages = [](int64_t count) { return static_cast<size_t>((count + 63) / 64 * 64); };
  const size_t tables = kHeader + pages(shape.num_sequences * 16),
               entries = static_cast<size_t>(shape.num_sequences * (shape.capacity / 16));
  const size_t users = shape.kind == MHA_CACHE_KIND_PAGED
                           ? tables + pages(static_cast<int64_t>(entries) * 4)
                           : tables;
  Damage(&stored, kHeader,
         std::min(bytes,
                  users + pages(shape.kind == MHA_CACHE_KIND_PAGED ? shape.num_blocks * 4 : 0)));
  if (in.OneIn(4)) Damage(&stored, 0, bytes);
  for (size_t i = 0; users > tables && in.Boolean() && i < static_cast<size_t>(shape.num_blocks);
       i++) {  // counts that agree with the tables
    int32_t count = 0;
    for (size_t entry = 0; entry < entries; entry++)
      count += At<int32_t>(stored, tables + entry * 4) == static_cast<int32_t>(i);
    Set(&stored, users + i * 4, count);
  }
  if (in.OneIn(4)) Damage(&stored, 0, kHeader);
  if (in.OneIn(8)) {  // the header of another cache
    if (const mha_kv_cache *const other = Empty(&other_bytes)) {
      stored.resize(other_bytes);
      std::memcpy(&stored[0], other, kHeader);
    }
  }
  const bool is_mended = !in.OneIn(8);
  if (is_mended) Set(&stored, kChecksum, CacheChecksum(stored));
  if (in.OneIn(16)) Cut(&stored);

  unsigned char *const buffer = buffers.Take(static_cast<Wide>(stored.size()), 64);
  std::memcpy(buffer, stored.data(), stored.size());
  buffers.Watch(buffer, stored.size());
  mha_kv_cache *viewed = nullptr;
  const mha_status status = Call(mha_kv_cache_view, buffer, stored.size(), &viewed);
  if (stored == sound) Expect(status == MHA_OK, "a sound cache is refused");
  if (stored.size() < kHeader ||
      (!is_mended && stored.compare(0, kHeader, sound, 0, kHeader) != 0 && other_bytes == 0)) {
    Expect(status == MHA_ERROR_CACHE_FORMAT, "a damaged header is taken");
  }
  if (status != MHA_OK) return;
  size_t needed = 0;
  const CacheShape taken(viewed);
  Expect(mha_kv_cache_size(&taken, &needed, nullptr) == MHA_OK && stored.size() >= needed,
         "a cache that is cut off is taken");
  Use(viewed);
  Expect(mha_kv_cache_view(buffer, stored.size(), &viewed, nullptr) == MHA_OK,
         "calls have left a cache that is not sound");
}

// ---- Layers

void Run(const mha_layer *layer) {
  mha_layer_config shape = {};
  shape.struct_size = sizeof shape;
  Expect(mha_layer_shape(layer, &shape, nullptr) == MHA_OK, "a layer has no shape");
  size_t bytes = 0;
  if (shape.num_heads == 0 || in.OneIn(4)) {
    mha_linear_args args = {};
    args.struct_size = sizeof args;
    args.rows = in.Integer(1, 6);
    args.x.data =
        Floats(Wide{args.rows} *
               (shape.num_heads > 0 ? Wide{shape.num_heads} * shape.head_dim_v : shape.query_dim));
    args.output.data = buffers.TakeOutput(Wide{args.rows} * shape.output_dim * 4);
    if (Call(mha_linear_workspace, layer, &args, &bytes) != MHA_OK) return;
    unsigned char *const workspace = buffers.Take(static_cast<Wide>(bytes));
    Call(mha_linear, layer, &args, workspace, bytes);
    return;
  }
  mha_forward_args args = {};
  args.struct_size = sizeof args;
  args.call.batch = in.Integer(1, 2), args.call.n_q = in.Integer(1, 6),
  args.call.n_kv = in.Integer(1, 6);
  args.query.data = Floats(Wide{args.call.batch} * args.call.n_q * shape.query_dim);
  if (in.OneIn(2) || shape.key_dim != shape.query_dim)
    args.key.data = Floats(Wide{args.call.batch} * args.call.n_kv * shape.key_dim);
  const int64_t values = args.key.data ? args.call.n_kv : args.call.n_q;
  if (shape.value_dim != shape.key_dim)
    args.value.data = Floats(Wide{args.call.batch} * values * shape.value_dim);
  args.output.data =
      buffers.TakeOutput(Wide{args.call.batch} * args.call.n_q * shape.output_dim * 4);
  if (Call(mha_forward_workspace, layer, &args, &bytes) != MHA_OK) return;
  unsigned char *const workspace = buffers.Take(static_cast<Wide>(bytes));
  Call(mha_forward, layer, &args, workspace, bytes);
}

void TestLayer() {
  mha_layer_config config = {};
  mha_layer_weights weights = {};
  mha_linear_weights linear = {};
  config.struct_size = sizeof config, weights.struct_size = sizeof weights,
  linear.struct_size = sizeof linear;
  linear.format.type = config.format.type = MHA_TYPE_F32 + in.Byte() % 7;
  linear.format.arithmetic = config.format.arithmetic = 0;
  bool is_given = false;
  if (config.format.type >= MHA_TYPE_INT8) {
    linear.format.arithmetic = config.format.arithmetic =
        in.Choice({MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8, MHA_ARITHMETIC_INT16});
    linear.format.group_size = config.format.group_size = in.Choice({0, 16, 32, 64, 128});
    if (config.format.type >= MHA_TYPE_INT5) {  // which a quantiser gives
      is_given = true;
      if (config.format.group_size == 0) config.format.group_size = 16;
      if (config.format.arithmetic == 0) config.format.arithmetic = MHA_ARITHMETIC_INT8;
      if (in.Boolean()) config.format.scale_type = MHA_TYPE_INT8;
      linear.format = config.format;
    }
  } else if (config.format.type == MHA_TYPE_BF16) {
    linear.format.arithmetic = config.format.arithmetic =
        in.Choice({MHA_ARITHMETIC_F32, MHA_ARITHMETIC_BF16});
  }
  config.num_kv_heads = in.Integer(1, 2), config.num_heads = config.num_kv_heads * in.Integer(1, 2);
  linear.output_dim = config.head_dim = in.Integer(1, 20),
  linear.input_dim = config.query_dim = in.Integer(1, 50);
  config.head_dim_v = in.Integer(0, 20), config.key_dim = in.OneIn(3) ? in.Integer(1, 20) : 0;
  config.gate = in.OneIn(4) ? MHA_FUNCTION_SIGMOID : MHA_FUNCTION_NONE;
  if (config.gate) weights.gate_place = MHA_GATE_IN_W_Q;
  const float *const numbers = Floats(10000);
  mha_matrix matrix = {};
  matrix.data = numbers;
  if (is_given) {
    static const float zeros[10000] = {};
    matrix.data = matrix.scales = zeros, linear.type = weights.type = MHA_TYPE_INT8;
    if (in.Boolean()) matrix.offsets = zeros;
    if (config.format.scale_type == MHA_TYPE_INT8) {
      matrix.block_scales = zeros;
      if (matrix.offsets) matrix.block_offsets = zeros;
    }
  }
  linear.w = weights.w_q = weights.w_k = weights.w_v = matrix;
  linear.w.bias = numbers;
  if (in.Boolean()) weights.w_o = matrix;
  const bool is_linear = in.OneIn(4);
  size_t bytes = 0;
  const mha_status sized = is_linear
                               ? mha_linear_pack_size(&linear, nullptr, &bytes, nullptr)
                               : mha_layer_pack_size(&config, &weights, nullptr, &bytes, nullptr);
  unsigned char *const packed = buffers.Take(static_cast<Wide>(bytes), 64);
  const mha_status status =
      is_linear ? mha_linear_pack(&linear, nullptr, packed, bytes, nullptr)
                : mha_layer_pack(&config, &weights, nullptr, packed, bytes, nullptr);
  Expect(sized == MHA_OK && status == MHA_OK, "a layer can't be packed");
  std::string stored(reinterpret_cast<const char *>(packed), bytes);
  const std::string sound = stored;
  if (in.Boolean()) Damage(&stored, kKind, kShape + sizeof(mha::LayerShape));
  if (in.OneIn(4)) Damage(&stored, 0, bytes);
  mha::LayerShape shape = At<mha::LayerShape>(stored, kShape);
  int64_t *const dims[] = {&shape.query_dim,  &shape.key_dim,    &shape.value_dim,
                           &shape.output_dim, &shape.num_heads,  &shape.num_kv_heads,
                           &shape.head_dim,   &shape.head_dim_v, &shape.gate_dim};
  const bool is_small = std::all_of(std::begin(dims), std::end(dims),
                                    [](const int64_t *dim) { return *dim >= 0 && *dim < 500; });
  const uint32_t kind = At<uint32_t>(stored, kKind);
  if (in.Boolean() && is_small && (shape.group == 0 || mha::is_group_size(shape.group)) &&
      kind >= 1 && kind <= mha::num_packed_kinds) {  // a buffer of the size of a made-up shape
    const int64_t made_up = mha::packed_layout(shape, mha::packed_kinds[kind - 1]).bytes;
    if (made_up < 1 << 18)
      stored.resize(static_cast<size_t>(made_up)),
          Set(&stored, kBytes, static_cast<uint64_t>(made_up));
  }
  const bool is_mended = !in.OneIn(8);
  if (is_mended) {
    Set<uint64_t>(&stored, kChecksum, 0);
    alignas(64) float words[kHeader / 4];
    std::memcpy(words, stored.data(), kHeader);
    Set(&stored, kChecksum, mha::tile_checksum(words, mha::tile_columns, 4, 0));
  }
  const bool is_cut = in.OneIn(16);
  if (is_cut) Cut(&stored);

  unsigned char *const buffer = buffers.Take(static_cast<Wide>(stored.size()), 64);
  std::memcpy(buffer, stored.data(), stored.size());
  buffers.Watch(buffer, stored.size());
  const mha_layer *layer = nullptr;
  const size_t storage_bytes = mha_layer_view_size();
  unsigned char *const storage = buffers.Take(static_cast<Wide>(storage_bytes));
  mha_layer_options options = {};
  options.struct_size = sizeof options;
  options.instruction_set = in.Byte() % 9;
  const mha_status viewed =
      Call(mha_layer_view, buffer, stored.size(), &options, storage, storage_bytes, &layer);
  const mha_status verified = Call(mha_layer_verify, buffer, stored.size());
  if (stored == sound) Expect(verified == MHA_OK, "a sound layer is refused");
  const bool is_same_header =
      stored.size() >= kHeader && stored.compare(0, kHeader, sound, 0, kHeader) == 0;
  if (is_same_header && stored != sound)
    Expect(verified != MHA_OK, "damaged weights pass for sound ones");
  if (!is_same_header && !is_mended)
    Expect(viewed != MHA_OK && verified != MHA_OK, "a damaged header is taken");
  if (viewed != MHA_OK) return;
  Expect(stored.size() >= At<uint64_t>(stored, kBytes), "a layer that is cut off is taken");
  Run(layer);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  in = Bytes(data, size);
  const uint8_t kind = in.Byte();
  buffers.Reset((kind & 128) != 0);
  kind & 1 ? TestLayer() : TestCache();
  return 0;
}
