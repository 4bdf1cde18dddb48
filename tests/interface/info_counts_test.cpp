// mha_forward_info and mha_attention_info count the operations and bytes that plain loops over the
// definition count, pair by pair and row by row.

#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "support/fixtures.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr int64_t kSequences = 4;  // of each cache
constexpr int64_t kHeads = 6, kKvHeads = 2, kHeadDim = 10, kHeadDimV = 7;
constexpr int64_t kQueryDim = 11, kKeyDim = 12, kValueDim = 13, kOutputDim = 14;

// A call, in the terms of its definition.
struct Call {
  int64_t batch = 1, n_q = 1, n_kv = 1;
  bool is_causal = false, is_self = false;  // is_self: the keys are the queries' rows
  uint32_t flags = 0;
  int64_t window_left = 0, window_right = 0;
  std::vector<int64_t> q_start, q_lengths, kv_lengths, q_first_rows, kv_first_rows;  // empty = NULL
  const mha_kv_cache *cache = nullptr;
  bool is_read = false;  // as cache_read
  std::vector<int64_t> cache_sequences;
  std::vector<int64_t> past = std::vector<int64_t>(kSequences, 0);  // of the sequences of the cache
  uint32_t k_type = MHA_TYPE_F32, v_type = MHA_TYPE_F32;            // as they are stored
  std::vector<float> head_scales;                                   // [kHeads]; empty = NULL
  bool has_norm_of_all_heads = false, is_in_integers = false;

  int64_t Queries(int64_t b) const {
    return q_lengths.empty() ? n_q - FirstOf(q_first_rows, b) : q_lengths[b];
  }
  int64_t NewKeys(int64_t b) const {
    return is_self              ? Queries(b)
           : kv_lengths.empty() ? n_kv - FirstOf(kv_first_rows, b)
                                : kv_lengths[b];
  }
  static int64_t FirstOf(const std::vector<int64_t> &first_rows, int64_t b) {
    return first_rows.empty() ? 0 : first_rows[b];
  }
  int64_t Past(int64_t b) const {
    return cache == nullptr ? 0 : past[cache_sequences.empty() ? b : cache_sequences[b]];
  }
  int64_t Keys(int64_t b) const { return Past(b) + NewKeys(b); }

  bool Computes(int64_t head) const {
    return head_scales.empty() || head_scales[static_cast<size_t>(head)] != 0;
  }
  int64_t ComputedHeads() const {
    int64_t heads = 0;
    for (int64_t head = 0; head < kHeads; head++) heads += Computes(head);
    return heads;
  }
  int64_t AttendedHeads() const {  // of keys and values
    int64_t heads = 0;
    for (int64_t head = 0; head < kHeads; head += kHeads / kKvHeads)
      heads += Computes(head) || Computes(head + 1) || Computes(head + 2);
    return heads;
  }

  bool Attends(int64_t b, int64_t i, int64_t j) const {
    const int64_t p = (q_start.empty() ? Keys(b) - Queries(b) : q_start[b]) + i;
    if (is_causal && j > p) return false;
    if ((flags & MHA_WINDOW_LEFT) != 0 && p - j > window_left) return false;
    return (flags & MHA_WINDOW_RIGHT) == 0 || j - p <= window_right;
  }
};

std::ostream &operator<<(std::ostream &out, const Call &call) {
  const auto list = [&](const char *name, const std::vector<int64_t> &values) {
    out << ", " << name;
    for (const int64_t value : values) out << " " << value;
  };
  out << "batch " << call.batch << ", n_q " << call.n_q << ", n_kv " << call.n_kv
      << (call.is_causal ? ", causal" : "") << (call.is_self ? ", self" : "") << ", flags "
      << call.flags << ", window " << call.window_left << " " << call.window_right;
  list("q_start", call.q_start), list("q_lengths", call.q_lengths),
      list("kv_lengths", call.kv_lengths);
  list("q_first_rows", call.q_first_rows), list("kv_first_rows", call.kv_first_rows);
  if (call.cache != nullptr) list("past", call.past), list("cache_sequences", call.cache_sequences);
  for (int64_t head = 0; head < kHeads; head++)
    out << (head == 0 ? ", heads " : "") << call.Computes(head);
  return out << ", types " << call.k_type << " " << call.v_type
             << (call.has_norm_of_all_heads ? ", norm of all heads" : "");
}

// Counts one by one. A position that a cache already had counts if a row attends to it.
struct Counts {
  int64_t pairs = 0, queries = 0, new_keys = 0, used_past = 0;

  explicit Counts(const Call &call) {
    for (int64_t b = 0; b < call.batch; b++) {
      queries += call.Queries(b);
      new_keys += call.NewKeys(b);
      for (int64_t j = 0; j < call.Keys(b); j++) {
        bool is_used = false;
        for (int64_t i = 0; i < call.Queries(b); i++) {
          pairs += call.Attends(b, i, j);
          is_used = is_used || call.Attends(b, i, j);
        }
        used_past += is_used && j < call.Past(b);
      }
    }
  }
};

int64_t RowBytes(uint32_t type, int64_t width) {
  return (width * kTypeBits[type] + 7) / 8 + 4 * HasCodes(static_cast<Storage>(type));
}

const int64_t *DataOf(const std::vector<int64_t> &values) {
  return values.empty() ? nullptr : values.data();
}

template <typename Args>
Args ArgsOf(const Call &call, mha_sequences *sequences) {
  Args args = Zeroed<Args>();
  args.call.batch = ExtentOf(call.batch);
  args.call.n_q = ExtentOf(call.n_q);
  args.call.n_kv = ExtentOf(call.n_kv);
  args.call.flags = (call.is_causal ? MHA_CAUSAL : 0u) | call.flags;
  args.call.attention_arithmetic = call.is_in_integers ? MHA_ARITHMETIC_INT16 : 0u;
  args.call.window_left = call.window_left;
  args.call.window_right = call.window_right;
  *sequences = Zeroed<mha_sequences>();
  sequences->q_first_positions = DataOf(call.q_start);
  sequences->q_lengths = DataOf(call.q_lengths);
  sequences->kv_lengths = DataOf(call.kv_lengths);
  sequences->q_first_rows = DataOf(call.q_first_rows);
  sequences->kv_first_rows = DataOf(call.kv_first_rows);
  sequences->cache_sequences = DataOf(call.cache_sequences);
  args.call.sequences = sequences;
  if (call.is_read) {
    args.call.cache_read = call.cache;
  } else {
    args.call.cache = const_cast<mha_kv_cache *>(call.cache);
  }
  return args;
}

// The options of a call, besides its sizes.
template <typename Args>
struct Options {
  explicit Options(const Call &call, Args *args) {
    score.head_scales = call.head_scales.data();
    if (!call.head_scales.empty()) args->call.score = &score;
    norm.flags = MHA_NORM_ALL_HEADS;
    norm.epsilon = 1;
    if (call.has_norm_of_all_heads) args->call.norm = &norm;
  }
  mha_score_options score = Zeroed<mha_score_options>();
  mha_norm norm = Zeroed<mha_norm>();
};

// The bytes of a cache that a call touches: rows it appends, of all heads, and rows it attends to.
int64_t CacheBytes(const Call &call, const Counts &counts) {
  const int64_t rows = kKvHeads * counts.new_keys + call.AttendedHeads() * counts.used_past;
  return rows * (RowBytes(call.k_type, kHeadDim) + RowBytes(call.v_type, kHeadDimV));
}

void ExpectAttentionInfo(const Call &call) {
  mha_sequences sequences;
  mha_attention_args args = ArgsOf<mha_attention_args>(call, &sequences);
  const Options<mha_attention_args> options(call, &args);
  args.num_heads = kHeads;
  args.num_kv_heads = kKvHeads;
  args.head_dim = kHeadDim;
  args.head_dim_v = kHeadDimV;
  if (call.cache == nullptr) args.k.type = call.k_type, args.v.type = call.v_type;
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  ASSERT_EQ(mha_attention_info(&args, &info, &error), MHA_OK) << error.message << ": " << call;
  const Counts counts(call);
  EXPECT_EQ(info.operations,
            static_cast<uint64_t>(2 * call.ComputedHeads() * counts.pairs * (kHeadDim + kHeadDimV)))
      << call;
  // A norm over all heads reads the queries and keys of all heads. Outputs are written for all
  // heads.
  const int64_t heads = call.has_norm_of_all_heads ? kHeads : call.ComputedHeads(),
                kv_heads = call.AttendedHeads();
  const int64_t k_heads = call.has_norm_of_all_heads ? kKvHeads : kv_heads;
  const int64_t array_bytes = counts.new_keys * (k_heads * RowBytes(call.k_type, kHeadDim) +
                                                 kv_heads * RowBytes(call.v_type, kHeadDimV));
  const int64_t key_bytes = call.cache != nullptr ? CacheBytes(call, counts) : array_bytes;
  EXPECT_EQ(info.bytes,
            static_cast<uint64_t>(4 * counts.queries * (heads * kHeadDim + kHeads * kHeadDimV) +
                                  key_bytes))
      << call;
}

Layer CreateLayer(bool is_self, bool has_output) {
  LayerProblem sizes;
  sizes.query_dim = sizes.key_dim = sizes.value_dim = kQueryDim;
  if (!is_self) sizes.key_dim = kKeyDim, sizes.value_dim = kValueDim;
  sizes.output_dim = kOutputDim;
  sizes.num_heads = kHeads;
  sizes.num_kv_heads = kKvHeads;
  sizes.head_dim = kHeadDim;
  sizes.head_dim_v = kHeadDimV;
  return MakeLayer(NormalLayer(sizes, 1, kNoBiases, has_output));
}

void ExpectForwardInfo(const Call &call, bool has_output) {
  const Layer layer = CreateLayer(call.is_self, has_output);
  mha_sequences sequences;
  mha_forward_args args = ArgsOf<mha_forward_args>(call, &sequences);
  const Options<mha_forward_args> options(call, &args);
  const float somewhere = 0;  // is not read
  if (!call.is_self) args.key.data = args.value.data = &somewhere;
  mha_call_info info = Zeroed<mha_call_info>();
  mha_error error;
  ASSERT_EQ(mha_forward_info(layer.get(), &args, &info, &error), MHA_OK)
      << error.message << ": " << call;
  const Counts counts(call);
  const int64_t key_dim = call.is_self ? kQueryDim : kKeyDim,
                value_dim = call.is_self ? kQueryDim : kValueDim;
  const int64_t y_dim = has_output ? kOutputDim : kHeads * kHeadDimV;
  const int64_t projected =
      counts.queries * kQueryDim * kHeads * kHeadDim +
      counts.new_keys * kKvHeads * (key_dim * kHeadDim + value_dim * kHeadDimV) +
      (has_output ? counts.queries * kHeads * kHeadDimV * kOutputDim : 0);
  EXPECT_EQ(info.operations,
            static_cast<uint64_t>(
                2 * (projected + call.ComputedHeads() * counts.pairs * (kHeadDim + kHeadDimV))))
      << call;
  const int64_t rows = 4 * (counts.queries * (kQueryDim + y_dim) +
                            (call.is_self ? 0 : counts.new_keys * (kKeyDim + kValueDim)));
  const int64_t stored = call.cache != nullptr ? CacheBytes(call, counts) : 0;
  EXPECT_EQ(info.bytes, info.packed_bytes + static_cast<uint64_t>(rows + stored)) << call;
}

// Random lengths, masks and positions, within what the cache's past allows.
Call RandomCall(Random *random) {
  Call call;
  call.batch = random->Between(1, kSequences);
  call.n_q = random->Between(1, 40);
  call.is_causal = random->Chance(0.5);
  call.is_self = random->Chance(0.4);
  call.n_kv = call.is_self ? call.n_q : random->Between(1, 60);
  const auto lengths = [&](int64_t most) {
    std::vector<int64_t> values;
    for (int64_t b = 0; b < call.batch; b++)
      values.push_back(random->Chance(0.2) ? 0 : random->Between(0, most));
    return values;
  };
  if (random->Chance(0.4)) call.q_lengths = lengths(call.n_q);
  if (!call.is_self && random->Chance(0.4)) call.kv_lengths = lengths(call.n_kv);
  // The first valid rows: after padding on the left, or any.
  const auto first_rows = [&](bool are_left, int64_t n, const std::vector<int64_t> &of_lengths) {
    std::vector<int64_t> values;
    for (int64_t b = 0; b < call.batch; b++) {
      const int64_t most = n - (of_lengths.empty() ? 0 : of_lengths[b]);
      values.push_back(are_left ? most : random->Between(0, most));
    }
    return values;
  };
  const bool are_left = random->Chance(0.3);
  if (are_left || random->Chance(0.3))
    call.q_first_rows = first_rows(are_left && !call.q_lengths.empty(), call.n_q, call.q_lengths);
  if (!call.is_self && (are_left || random->Chance(0.3))) {
    call.kv_first_rows =
        first_rows(are_left && !call.kv_lengths.empty(), call.n_kv, call.kv_lengths);
  }
  const auto window = [&](uint32_t flag, int64_t *size) {
    if (!random->Chance(0.4)) return;
    call.flags |= flag;
    *size = random->Pick<int64_t>({0, 1, 3, 20, 100, INT64_MAX});
  };
  call.has_norm_of_all_heads = random->Chance(0.2);
  for (int64_t head = 0; head < kHeads && random->Chance(0.95); head++) {
    call.head_scales.push_back(random->Chance(0.6) ? 0.0f : 2.0f);
  }
  if (call.head_scales.size() < kHeads) call.head_scales.clear();
  window(MHA_WINDOW_LEFT, &call.window_left);
  window(MHA_WINDOW_RIGHT, &call.window_right);
  return call;
}

// Adds positions of the first queries where the call needs them, and often where it does not.
void AddStarts(Call *call, Random *random) {
  bool is_needed = false;
  for (int64_t b = 0; b < call->batch; b++)
    is_needed = is_needed || call->Queries(b) > call->Keys(b);
  if (!is_needed && random->Chance(0.6)) return;
  // Appended rows have only one possible position.
  const bool is_appended = call->is_self && call->cache != nullptr;
  for (int64_t b = 0; b < call->batch; b++) {
    call->q_start.push_back(is_appended ? call->Past(b) : random->Between(-20, call->Keys(b) + 10));
  }
}

Cache MakeCache(Call *call, uint32_t kind, Random *random) {
  call->k_type = static_cast<uint32_t>(random->Pick(kKeyTypes));
  call->v_type = static_cast<uint32_t>(random->Pick(kValueTypes));
  call->is_in_integers = call->k_type == MHA_TYPE_INT8 && call->v_type >= MHA_TYPE_INT8;
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = kSequences;
  config.capacity = kind == MHA_CACHE_KIND_RING ? 48 : 192;
  config.num_kv_heads = kKvHeads;
  config.head_dim = kHeadDim;
  config.head_dim_v = kHeadDimV;
  config.k_type = call->k_type;
  config.v_type = call->v_type;
  config.kind = kind;
  if (kind == MHA_CACHE_KIND_PAGED)
    config.block_positions = 32, config.num_blocks = kSequences * 6 + 1;
  Cache cache(config);
  SpreadBlocks(random, &cache);
  for (int64_t sequence = 0; sequence < kSequences; sequence++) {
    int64_t &past = call->past[sequence];
    past = random->Between(0, kind == MHA_CACHE_KIND_RING ? 120 : 100);
    const auto zeros = [past](int64_t width) {
      return std::vector<float>(past * kKvHeads * width);
    };
    cache.Append(sequence, {zeros(kHeadDim), zeros(kHeadDimV)});
  }
  call->cache = cache.get();
  if (random->Chance(0.5)) {
    const int64_t first = random->Between(0, kSequences - 1);
    for (int64_t b = 0; b < call->batch; b++)
      call->cache_sequences.push_back((first + b) % kSequences);
  }
  return cache;
}

TEST(InfoCounts, EqualTheDefinitionWithoutACache) {
  Random random(1);
  for (int round = 0; round < 2000 && !testing::Test::HasFailure(); round++) {
    Call call = RandomCall(&random);
    AddStarts(&call, &random);
    call.is_in_integers = random.Chance(0.5);
    ExpectForwardInfo(call, random.Chance(0.5));
    if (call.is_self) continue;  // to mha_attention all keys are arguments
    if (random.Chance(0.5)) call.k_type = MHA_TYPE_F16, call.v_type = MHA_TYPE_BF16;
    ExpectAttentionInfo(call);
  }
}

class InfoCountsOfCaches : public testing::TestWithParam<uint32_t> {};

TEST_P(InfoCountsOfCaches, EqualTheDefinition) {
  Random random(2);
  const bool is_ring = GetParam() == MHA_CACHE_KIND_RING;
  for (int round = 0; round < 1000 && !testing::Test::HasFailure(); round++) {
    Call call = RandomCall(&random);
    const Cache cache = MakeCache(&call, GetParam(), &random);
    if (is_ring) {  // what it can be used for
      call.is_causal = true;
      call.flags |= MHA_WINDOW_LEFT;
      call.window_left = random.Between(0, 47);
      call.is_self = true;
      call.n_kv = call.n_q;
      call.kv_lengths.clear();
      call.kv_first_rows.clear();
    } else {
      AddStarts(&call, &random);
    }
    ExpectForwardInfo(call, random.Chance(0.5));
    if (call.is_self) {  // to mha_attention all keys are arguments
      call.is_self = false;
      call.kv_lengths = call.q_lengths;
      call.kv_first_rows = call.q_first_rows;
    }
    ExpectAttentionInfo(call);
  }
}

TEST_P(InfoCountsOfCaches, EqualTheDefinitionInCallsThatOnlyRead) {
  Random random(3);
  const bool is_ring = GetParam() == MHA_CACHE_KIND_RING;
  for (int round = 0; round < 1000 && !testing::Test::HasFailure(); round++) {
    Call call = RandomCall(&random);
    call.is_self = false;
    call.n_kv = 0;
    call.kv_lengths.clear();
    call.kv_first_rows.clear();
    call.is_read = random.Chance(0.5);  // or a call that appends nothing
    const Cache cache = MakeCache(&call, GetParam(), &random);
    if (is_ring) {
      call.is_causal = true;
      call.flags |= MHA_WINDOW_LEFT;
      call.window_left = random.Between(0, 30);
      call.q_lengths.clear();
      call.q_first_rows.clear();
      call.n_q = random.Between(1, 17);  // as far back as the ring reaches
      for (int64_t b = 0; b < call.batch; b++) call.n_q = std::min(call.n_q, call.Past(b));
      if (call.n_q == 0) continue;
    } else {
      AddStarts(&call, &random);
    }
    ExpectAttentionInfo(call);
  }
}

INSTANTIATE_TEST_SUITE_P(, InfoCountsOfCaches,
                         testing::Values(MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_RING,
                                         MHA_CACHE_KIND_PAGED),
                         [](const testing::TestParamInfo<uint32_t> &info) {
                           return info.param == MHA_CACHE_KIND_RING    ? "Ring"
                                  : info.param == MHA_CACHE_KIND_PAGED ? "Paged"
                                                                       : "Contiguous";
                         });

}  // namespace
