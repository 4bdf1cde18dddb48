// mha_soak does what a server does, for as long as one likes. Sequences come, share prefixes, grow,
// lose drafted tokens and go, in paged caches of several types, on all cores. tools/soak.sh --help
// says what is checked.

#include <mha.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "bench/workers.h"
#include "support/fixtures.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr int64_t kVocabulary = 256, kMostPositions = 512, kSlots = 48, kMostBatch = 8,
                  kMostDrafted = 4, kWidth = 64;

// A layer and what its cache keeps.
struct Kind {
  const char *name;
  Storage k_type, v_type;
  Stored weight_type;
  int64_t heads, kv_heads, head_dim, head_dim_v, block, window = -1, num_chosen = 0;
};
constexpr Kind kKinds[] = {
    {"f32", Storage::kF32, Storage::kF32, Stored::kF32, 8, 2, 16, 16, 16},
    {"f16 with a window", Storage::kF16, Storage::kF16, Stored::kF16, 4, 4, 32, 32, 32, 40},
    {"int8", Storage::kInt8, Storage::kInt8, Stored::kInt8, 6, 3, 16, 24, 64},
    {"chosen keys", Storage::kF32, Storage::kBf16, Stored::kInt8, 4, 1, 32, 32, 16, -1, 24},
};

std::string plant;  // a fault that is to be found
std::atomic<bool> is_over{false};
std::atomic<int> failures{0};
std::atomic<int64_t> num_sequences{0}, num_forks{0}, num_tokens{0}, num_results{0}, num_checked{0};

void Fail(const std::string &what) {
  if (failures++ == 0) std::fprintf(stderr, "mha_soak: %s\n", what.c_str());
  is_over = true;
}

// Runs the work on a thread. An exception, which has the library's message, is a failure.
template <typename Work>
std::thread Start(const Work &work) {
  return std::thread([=] {
    try {
      work();
    } catch (const std::exception &error) {
      Fail(error.what());
    }
  });
}

int64_t ResidentKilobytes() {
  long pages = 0;
  FILE *const file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%*s %ld", &pages) != 1)
    Fail("memory cannot be watched: /proc/self/statm is not there");
  if (file != nullptr) std::fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

// The layer of a kind, and the rows that tokens stand for.
struct Model {
  explicit Model(const Kind &the_kind) : kind(the_kind) {
    sizes.num_heads = kind.heads, sizes.num_kv_heads = kind.kv_heads,
    sizes.head_dim = kind.head_dim, sizes.head_dim_v = kind.head_dim_v;
    sizes.k_type = kind.k_type, sizes.v_type = kind.v_type;
    LayerProblem problem;
    static_cast<AttentionSizes &>(problem) = sizes;
    problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim = kWidth;
    LayerForm form;
    form.weight_type = kind.weight_type;
    layer = MakeLayer(NormalLayer(problem), form);
    mha_rope_config angles = Zeroed<mha_rope_config>();
    angles.dims = kind.head_dim, angles.num_positions = rope.num_positions = kMostPositions;
    mha_error error;
    Check(mha_rope_tables(&angles, cosines.data(), sines.data(), &error), error);
    rope.cos = cosines.data(), rope.sin = sines.data();
  }

  const Kind kind;
  AttentionSizes sizes;
  const std::vector<float> rows = Random(5).Uniforms(kVocabulary * kWidth, 2);
  std::vector<float> cosines = std::vector<float>(kMostPositions * 64), sines = cosines;
  Layer layer;
  mha_rope rope = Zeroed<mha_rope>();
};

struct Sequence {
  std::vector<unsigned char> tokens;  // none: the slot is free
  std::vector<int32_t> blocks;
  size_t target = 0;
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

// Makes a thread's calls. Nothing in it grows.
class Caller {
 public:
  explicit Caller(const mha_scheduler *scheduler = nullptr) : scheduler_(scheduler) {}

  // The last n tokens of these sequences, with a cache (or none) that has those before. Returns
  // their outputs, [batch, n, width].
  const float *Run(const Model &model, mha_kv_cache *cache, const std::vector<int64_t> &slots,
                   const std::vector<const Sequence *> &of, int64_t n) {
    const Kind &kind = model.kind;
    const int64_t width = kWidth, batch = static_cast<int64_t>(of.size());
    for (int64_t row = 0; row < batch * n; row++) {
      const Sequence &sequence = *of[static_cast<size_t>(row / n)];
      const int64_t position = sequence.length() - n + row % n,
                    token = sequence.tokens[static_cast<size_t>(position)];
      std::copy_n(model.rows.data() + token * width, width, query_.data() + row * width);
      // Each row has its own choice.
      Random random(static_cast<uint64_t>(position * kVocabulary + token));
      for (int64_t i = 0; i < kind.num_chosen; i++)
        chosen_[row * kind.num_chosen + i] = static_cast<int32_t>(random.Below(position + 1));
    }
    mha_score_arrays arrays = Zeroed<mha_score_arrays>();
    arrays.chosen_keys = chosen_.data(), arrays.chosen_keys_strides.head = MHA_BROADCAST,
    arrays.num_chosen = kind.num_chosen;
    mha_sequences sequences = Zeroed<mha_sequences>();
    sequences.cache_sequences = slots.data();
    mha_forward_args args = Zeroed<mha_forward_args>();
    args.call.batch = batch, args.call.n_q = n, args.query.data = query_.data(),
    args.output.data = output_.data(), args.call.rope = &model.rope;
    args.call.flags = MHA_CAUSAL | (kind.window >= 0 ? MHA_WINDOW_LEFT : 0u),
    args.call.window_left = std::max<int64_t>(kind.window, 0);
    args.call.cache = cache, args.call.sequences = &sequences, args.call.scheduler = scheduler_;
    if (kind.num_chosen > 0) args.call.score_arrays = &arrays;
    mha_error error;
    Check(mha_forward(model.layer.get(), &args, workspace_.data(), workspace_.size(), &error),
          error);
    return output_.data();
  }

 private:
  const mha_scheduler *const scheduler_;
  std::vector<float> query_ = std::vector<float>(kMostPositions * kWidth), output_ = query_;
  std::vector<int32_t> chosen_ = std::vector<int32_t>(kMostPositions * 24);
  Memory workspace_{size_t{16} << 20, Place::kAnywhere};
};

// The sequences of a paged cache, whose pool has fewer blocks than they would like.
class Engine {
 public:
  Engine(const Model &model, Caller *caller, Caller *checker, uint64_t seed)
      : model_(model),
        caller_(*caller),
        checker_(*checker),
        random_(seed),
        cache_(ConfigOf(model)),
        alone_(CacheConfigOf(model.sizes, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, kMostPositions)) {
    for (int64_t b = 0; b < cache_.config().num_blocks; b++)
      free_.push_back(static_cast<int32_t>(b));
    for (Sequence &sequence : sequences_)
      sequence.tokens.reserve(kMostPositions), sequence.blocks.reserve(kMostPositions / 16);
  }

  void Step() {
    steps_++;
    if (plant == "memory" && steps_ % 10 == 0) std::memset(std::malloc(1 << 14), 1, 1 << 14);
    live_ < kSlots / 2 || (live_ < kSlots && random_.Chance(0.1)) ? Admit() : Decode();
    if (steps_ % 64 == 0) CountBlocks();
  }

 private:
  static mha_kv_cache_config ConfigOf(const Model &model) {
    mha_kv_cache_config config = CacheConfigOf(
        model.sizes, {MHA_CACHE_KIND_PAGED, model.kind.block}, kSlots, kMostPositions);
    config.num_blocks = kSlots * 120 / model.kind.block;
    return config;
  }

  int64_t PickSlot(bool is_free) {
    int64_t slot = random_.Below(kSlots);
    while (sequences_[slot].tokens.empty() != is_free) slot = (slot + 1) % kSlots;
    return slot;
  }

  void Admit() {
    Need(kMostPositions / model_.kind.block);
    const int64_t count = random_.Chance(0.1) ? random_.Between(100, 300) : random_.Between(1, 40);
    const int64_t slot = PickSlot(true),
                  parent = live_ == 0 || random_.Coin() ? -1 : PickSlot(false);
    Sequence &sequence = sequences_[slot];
    const bool shares_all = random_.Coin();
    // Whole blocks are shared; what is in the next one is copied with the prefix or, if it is
    // shared too, after it.
    if (parent >= 0) {
      const Sequence &from = sequences_[parent];
      const int64_t length = random_.Between(1, std::min(from.length(), kMostPositions - count));
      sequence.tokens.assign(from.tokens.begin(), from.tokens.begin() + length);
      const int64_t shared =
          (length + (shares_all ? model_.kind.block - 1 : 0)) / model_.kind.block;
      sequence.blocks.assign(from.blocks.begin(), from.blocks.begin() + shared);
      for (const int32_t block : sequence.blocks) uses_[block]++;
    }
    const int64_t length = sequence.length();
    for (int64_t i = 0; i < count; i++)
      sequence.tokens.push_back(static_cast<unsigned char>(random_.Next()));
    sequence.target = static_cast<size_t>(
        std::min(sequence.length() + random_.Between(1, 120), kMostPositions - kMostDrafted));
    GiveBlocks(slot);
    if (parent >= 0) cache_.CopyPrefix(parent, slot, length);
    if (parent >= 0 && shares_all) Unshare(slot, length);
    live_++, num_sequences++, num_forks += parent >= 0;
    Call({slot}, count);
    if (sequence.tokens.size() >= sequence.target) Finish(slot);
  }

  void Unshare(int64_t slot, int64_t length) {
    uint32_t used = 0;
    mha_error error;
    Check(mha_kv_cache_unshare(cache_.get(), slot, free_.back(), &used, &error), error);
    if ((used != 0) != (length % model_.kind.block != 0))
      Fail("a block that is partly filled and shared is copied, and no other one");
    if (used == 0) return;
    int32_t &block = sequences_[slot].blocks[static_cast<size_t>(length / model_.kind.block)];
    uses_[block]--, block = free_.back(), uses_[block]++;
    free_.pop_back();
  }

  void Decode() {
    Need(kMostBatch);
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < std::min(kMostBatch, live_); i++) {
      const int64_t slot = PickSlot(false);
      if (std::find(slots.begin(), slots.end(), slot) == slots.end()) slots.push_back(slot);
    }
    const int64_t n = random_.Chance(0.8) ? 1 : random_.Between(2, kMostDrafted);
    for (const int64_t slot : slots) {
      for (int64_t i = 0; i < n; i++)
        sequences_[slot].tokens.push_back(static_cast<unsigned char>(random_.Next()));
      GiveBlocks(slot);
    }
    Call(slots, n);
    for (const int64_t slot : slots) {
      std::vector<unsigned char> &tokens = sequences_[slot].tokens;
      // Drafted tokens that are rejected.
      tokens.resize(tokens.size() - static_cast<size_t>(random_.Below(n)));
      cache_.Truncate(slot, sequences_[slot].length());
      if (tokens.size() >= sequences_[slot].target) Finish(slot);
    }
  }

  void Call(const std::vector<int64_t> &slots, int64_t n) {
    if (plant == "table" && steps_ > 200) SwapTwoBlocks(slots[0]);
    std::vector<const Sequence *> of;
    for (const int64_t slot : slots) of.push_back(&sequences_[slot]);
    const float *output = caller_.Run(model_, cache_.get(), slots, of, n);
    num_tokens += static_cast<int64_t>(of.size()) * n;
    for (const Sequence *sequence : of) {
      num_results++;
      if (random_.Chance(0.1)) ExpectSame(*sequence, n, output);
      output += n * kWidth;
    }
  }

  // As the whole sequence at once without a cache, or with an empty one where a cache keeps keys or
  // values in fewer bits.
  void ExpectSame(const Sequence &sequence, int64_t n, const float *output) {
    const bool is_cached =
        model_.kind.k_type != Storage::kF32 || model_.kind.v_type != Storage::kF32;
    alone_.Truncate(0, 0);
    const float *const all = checker_.Run(model_, is_cached ? alone_.get() : nullptr, {0},
                                          {&sequence}, sequence.length());
    num_checked++;
    const int64_t width = kWidth;
    if (std::memcmp(all + (sequence.length() - n) * width, output,
                    static_cast<size_t>(n * width) * sizeof(float)) != 0) {
      Fail(std::string(model_.kind.name) + ": the last " + std::to_string(n) +
           " rows of a sequence of " + std::to_string(sequence.length()) +
           " tokens have other bits than when computed anew");
    }
  }

  // Sequences end before their time where there are fewer free blocks.
  void Need(int64_t count) {
    while (static_cast<int64_t>(free_.size()) < count && live_ > 0) Finish(PickSlot(false));
  }

  void GiveBlocks(int64_t slot) {
    std::vector<int32_t> &blocks = sequences_[slot].blocks;
    const size_t needed = static_cast<size_t>((sequences_[slot].length() + model_.kind.block - 1) /
                                              model_.kind.block);
    if (blocks.size() == needed && cache_.Length(slot) > 0) return;
    for (; blocks.size() < needed; free_.pop_back())
      blocks.push_back(free_.back()), uses_[free_.back()]++;
    cache_.SetBlocks(slot, blocks);
  }

  void Finish(int64_t slot) {
    cache_.Truncate(slot, 0);
    cache_.SetBlocks(slot, {});
    for (const int32_t block : sequences_[slot].blocks) {
      if (--uses_[block] == 0 && !(plant == "block" && random_.Chance(0.001)))
        free_.push_back(block);
    }
    sequences_[slot].tokens.clear(), sequences_[slot].blocks.clear(), live_--;
  }

  // That free blocks and those of sequences are all there are, and that the cache says the same.
  void CountBlocks() {
    std::vector<bool> is_there(static_cast<size_t>(cache_.config().num_blocks));
    for (const int32_t block : free_) is_there[static_cast<size_t>(block)] = true;
    for (int64_t slot = 0; slot < kSlots; slot++) {
      for (const int32_t block : sequences_[slot].blocks)
        is_there[static_cast<size_t>(block)] = true;
      if (cache_.Length(slot) != sequences_[slot].length())
        Fail("a sequence in the cache has another length than it was given");
    }
    if (std::count(is_there.begin(), is_there.end(), false) != 0)
      Fail("a block is neither free nor a sequence's: it has leaked");
    mha_kv_cache *view = nullptr;
    mha_error error;
    Check(mha_kv_cache_view(cache_.buffer().data(), cache_.buffer().size(), &view, &error), error);
  }

  // The tables come after the header and the lengths, see src/objects/cache.h.
  void SwapTwoBlocks(int64_t slot) {
    int32_t *const tables = reinterpret_cast<int32_t *>(cache_.buffer().data() + 256 + kSlots * 16);
    int32_t *const table = tables + slot * (kMostPositions / model_.kind.block);
    if (sequences_[slot].blocks.size() >= 3) std::swap(table[0], table[1]);
  }

  const Model &model_;
  Caller &caller_, &checker_;
  Random random_;
  Cache cache_, alone_;
  Sequence sequences_[kSlots];
  std::vector<int32_t> free_;
  int uses_[kSlots * 120 / 16] = {};  // of each block
  int64_t live_ = 0, steps_ = 0;
};

void Soak(int seconds) {
  const int warm = std::min(60, (seconds + 2) / 3);
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::unique_ptr<Model>> models;
  for (const Kind &kind : kKinds) models.push_back(std::make_unique<Model>(kind));
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < cores; thread++) {
    threads.push_back(
        Start([&, thread] {  // calls of the first one run on all cores, those of others on theirs
          bench::Workers workers(thread == 0 ? cores : 1);
          Caller caller(thread == 0 ? &workers.scheduler() : nullptr), checker;
          Random random(thread);
          std::vector<std::unique_ptr<Engine>> engines;
          for (const auto &model : models)
            engines.push_back(std::make_unique<Engine>(*model, &caller, &checker, random.Next()));
          while (!is_over)
            engines[static_cast<size_t>(random.Below(static_cast<int64_t>(engines.size())))]
                ->Step();
        }));
  }
  long long after_warming = 0, resident = 0;
  for (int second = 1; second <= seconds && !is_over; second++) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    resident = ResidentKilobytes();
    if (second == warm) after_warming = resident;
    if (second % 10 != 0 && second != seconds) continue;
    std::printf(
        "%d s: %lld KiB, %lld sequences, %lld of them with a shared prefix, %lld tokens, %lld "
        "results, %lld checked\n",
        second, resident, static_cast<long long>(num_sequences), static_cast<long long>(num_forks),
        static_cast<long long>(num_tokens), static_cast<long long>(num_results),
        static_cast<long long>(num_checked));
    std::fflush(stdout);
  }
  is_over = true;
  for (std::thread &thread : threads) thread.join();
  std::printf("memory: %lld KiB after %d s, %lld KiB at the end\n", after_warming, warm, resident);
  if (failures == 0 && resident > after_warming + 1024)
    Fail("the process has grown by " + std::to_string(resident - after_warming) + " KiB");
}

}  // namespace

int main(int argc, char **argv) {
  const int seconds = argc > 1 ? std::atoi(argv[1]) : 0;
  if (argc > 2) plant = argv[2];
  if (seconds < 1 || argc > 3 ||
      (argc == 3 && plant != "block" && plant != "table" && plant != "memory")) {
    std::fprintf(stderr,
                 "mha_soak takes SECONDS, and block, table or memory for a fault to be found; see "
                 "tools/soak.sh --help\n");
    return 2;
  }
  Start([=] { Soak(seconds); }).join();
  return failures > 0;
}
