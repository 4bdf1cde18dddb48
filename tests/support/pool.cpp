#include "support/pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/structs.h"

namespace support {

namespace {

// The parts of a paged cache (objects/cache.h): keys, their scales, values and their scales.
struct Parts {
  int64_t tables;
  std::array<int64_t, 4> bytes, first;  // of a block; where block 0 lies
};

Parts PartsOf(const mha_kv_cache_config &config) {
  const auto rounded = [](int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; };
  Parts parts;
  parts.bytes = BlockBytes(config);
  parts.tables = rounded(256 + 16 * config.num_sequences, 64);
  const int64_t entries = config.num_sequences * (config.capacity / config.block_positions);
  int64_t end = rounded(parts.tables + 4 * entries, 64);
  end = rounded(end + 4 * config.num_blocks, 64);
  for (int n = 0; n < 4; n++) {
    parts.first[n] = end;
    end = rounded(end + config.num_blocks * parts.bytes[n], 64);
  }
  return parts;
}

}  // namespace

Pool::Pool(const Cache &paged, Random *random)
    : config_(paged.config()), pool_(Zeroed<mha_kv_pool>()), has_starts_(random->Chance(0.5)) {
  const Parts parts = PartsOf(config_);
  const auto rounded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const int64_t blocks = config_.num_blocks, gap = 16 * random->Between(0, 5);
  const bool is_one_page = random->Chance(0.5);
  const int64_t page = rounded(parts.bytes[0]) + rounded(parts.bytes[1]) + rounded(parts.bytes[2]) +
                       parts.bytes[3] + gap;
  void *data[4] = {};
  int64_t *const strides[] = {&pool_.k_block_stride, &pool_.k_scales_block_stride,
                              &pool_.v_block_stride, &pool_.v_scales_block_stride};
  int64_t place = 0;
  for (int n = 0; n < 4; n++) {
    const int64_t bytes = parts.bytes[n], stride = is_one_page ? page : bytes + gap;
    if (bytes == 0) continue;
    Memory &memory = memory_[is_one_page ? 0 : n];
    if (memory.size() == 0) {
      memory = Memory(is_one_page ? blocks * page : (blocks - 1) * stride + bytes,
                      Place::kBeforeGuard, 64);
      memory.Fill(0xa5);
    }
    data[n] = memory.data() + place;
    if (is_one_page) place += rounded(bytes);
    if (stride != bytes || random->Chance(0.5)) *strides[n] = stride;
    for (int64_t block = 0; block < blocks; block++)
      std::memcpy(static_cast<unsigned char *>(data[n]) + block * stride,
                  paged.buffer().data() + parts.first[n] + block * bytes, bytes);
  }
  pool_.k = data[0];
  pool_.k_scales = static_cast<float *>(data[1]);
  pool_.v = data[2];
  pool_.v_scales = static_cast<float *>(data[3]);
  tables_.resize(config_.num_sequences * (config_.capacity / config_.block_positions));
  std::memcpy(tables_.data(), paged.buffer().data() + parts.tables,
              tables_.size() * sizeof(int32_t));
  for (int64_t s = 0; s < config_.num_sequences; s++) lengths_.push_back(paged.Length(s));
  config_.kind = MHA_CACHE_KIND_POOL;
  size_t bytes;
  mha_error error;
  Check(mha_kv_cache_size(&config_, &bytes, &error), error);
  buffer_ = Memory(bytes, Place::kBeforeGuard, 64);
  Check(mha_kv_pool_init(&config_, &pool_, buffer_.data(), bytes, &cache_, &error), error);
}

void Pool::SetSequences(const std::vector<int64_t> &sequences, int64_t count, const Cache &after,
                        int64_t unused, mha_sequences *to) {
  const int64_t entries = config_.capacity / config_.block_positions, gap = count % 3;
  given_lengths_.clear();
  given_tables_.assign(has_starts_ ? gap : 0, -1);
  starts_ = {gap};
  for (int64_t b = 0; b < count; b++) {
    const int64_t sequence = sequences.empty() ? b : sequences[b],
                  used = (after.Length(sequence) + config_.block_positions - 1) /
                         config_.block_positions;
    given_lengths_.push_back(lengths_[sequence]);
    for (int64_t i = 0; i < (has_starts_ ? used : entries + gap); i++)
      given_tables_.push_back(i < unused || i >= used ? (i % 2 == 0 ? -1 : INT32_MAX)
                                                      : tables_[sequence * entries + i]);
    starts_.push_back(static_cast<int64_t>(given_tables_.size()));
  }
  to->cache_lengths = given_lengths_.data();
  to->block_tables = given_tables_.data();
  if (has_starts_) {
    // Nothing is in the tables if no sequence has a position.
    if (given_tables_.empty()) given_tables_.assign(1, -1);
    to->block_tables = given_tables_.data();
    to->block_table_starts = starts_.data();
    to->block_table_entries = starts_.back();
  } else {
    to->block_table_entries = entries;
    to->block_table_stride = gap == 0 ? 0 : entries + gap;
  }
}

bool Pool::HoldsTheBytesOf(const Cache &paged) const {
  const Parts parts = PartsOf(paged.config());
  const void *const data[] = {pool_.k, pool_.k_scales, pool_.v, pool_.v_scales};
  const int64_t strides[] = {pool_.k_block_stride, pool_.k_scales_block_stride,
                             pool_.v_block_stride, pool_.v_scales_block_stride};
  for (int n = 0; n < 4; n++) {
    const int64_t bytes = parts.bytes[n], stride = strides[n] != 0 ? strides[n] : bytes;
    for (int64_t block = 0; bytes != 0 && block < config_.num_blocks; block++) {
      if (std::memcmp(static_cast<const unsigned char *>(data[n]) + block * stride,
                      paged.buffer().data() + parts.first[n] + block * bytes, bytes) != 0)
        return false;
    }
  }
  return true;
}

}  // namespace support
