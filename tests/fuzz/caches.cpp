// Runs operations on a cache of any kind and type against a model, which has the rows and the table
// of blocks of each sequence. After each operation the status, the lengths and what is read back
// equal the model's, and attention has the bits of the specification over the model's rows. A
// refused operation changes no byte of the cache and no output.
#include <mha.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/bytes.h"
#include "support/cache.h"
#include "support/generated_case.h"
#include "support/instruction_sets.h"
#include "support/stored.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

struct Sequence {
  std::vector<float> k, v;  // as they were given, of the positions below length
  int64_t length = 0;
  int64_t written = 0;  // of a ring: the most positions that it had since it was empty
  std::vector<int32_t> blocks;
};

class Caches {
 public:
  explicit Caches(fuzz::Bytes *bytes)
      : bytes_(*bytes),
        sizes_(SizesOf(bytes)),
        cache_(ConfigOf(sizes_, bytes)),
        random_(bytes->Raw(3)) {
    sequences_.resize(static_cast<size_t>(config().num_sequences));
  }

  void Run() {
    for (int n = 0; n < 30 && !bytes_.AtEnd(); n++) {
      Operate();
      for (int64_t s = 0; s < config().num_sequences; s++)
        fuzz::Expect(cache_.Length(s) == At(s).length, "a length is wrong", operation_);
      ExpectStored(AnySequence(), 20);
    }
    for (int64_t s = 0; s < config().num_sequences; s++) ExpectStored(s, INT64_MAX);
  }

 private:
  static AttentionSizes SizesOf(fuzz::Bytes *bytes) {
    AttentionSizes sizes;
    sizes.num_kv_heads = bytes->Choice({1, 2});
    sizes.num_heads = sizes.num_kv_heads * bytes->Choice({1, 2, 3, 7});
    sizes.head_dim = bytes->Integer(1, bytes->Choice({8, 20, 70}));
    sizes.k_type = bytes->Choice(kKeyTypes);
    sizes.v_type = bytes->Choice(kValueTypes);
    sizes.values_in_keys = bytes->OneIn(3);
    sizes.head_dim_v = bytes->Integer(1, sizes.values_in_keys ? sizes.head_dim : 40);
    if (sizes.values_in_keys) sizes.v_type = sizes.k_type;
    return sizes;
  }
  static mha_kv_cache_config ConfigOf(const AttentionSizes &sizes, fuzz::Bytes *bytes) {
    CacheForm form = {
        bytes->Choice({MHA_CACHE_KIND_CONTIGUOUS, MHA_CACHE_KIND_PAGED, MHA_CACHE_KIND_RING}), 0};
    form.positions = form.kind == MHA_CACHE_KIND_RING
                         ? 16 * bytes->Integer(1, bytes->Choice({2, 2, 5, 40}))
                         : bytes->Choice<int64_t>({16, 32, 64, 128, 256, 512});
    mha_kv_cache_config config =
        CacheConfigOf(sizes, form, bytes->Integer(1, 4), bytes->Integer(1, 700));
    if (form.kind == MHA_CACHE_KIND_PAGED) config.num_blocks = bytes->Integer(1, 40);
    return config;
  }

  const mha_kv_cache_config &config() const { return cache_.config(); }
  bool IsRing() const { return config().kind == MHA_CACHE_KIND_RING; }
  bool IsPaged() const { return config().kind == MHA_CACHE_KIND_PAGED; }
  Sequence &At(int64_t s) { return sequences_[static_cast<size_t>(s)]; }
  int64_t AnySequence() { return bytes_.Integer(0, config().num_sequences - 1); }
  int64_t k_width() const { return sizes_.num_kv_heads * sizes_.head_dim; }
  int64_t v_width() const { return sizes_.num_kv_heads * sizes_.head_dim_v; }

  // A number of rows, mostly one that ends near a border: of a group of 16, a block, a chunk or the
  // cache.
  int64_t Count(int64_t length) {
    const int64_t small = bytes_.Integer(0, 20);
    const int64_t border = bytes_.Choice<int64_t>(
        {0, 0, 16, 256, config().capacity, std::max<int64_t>(config().block_positions, 16)});
    return border == 0 ? small : std::max<int64_t>(border - length % border + small - 10, 0);
  }

  std::vector<float> Numbers(int64_t count) {
    std::vector<float> x = QuickNormals(&random_, count);
    if (random_.Chance(0.3))
      MakeSpecial(&random_, random_.Coin() ? Values::kAny : RandomKind(&random_), 1, &x);
    return x;
  }

  int64_t TablesWith(int32_t block) const {
    return std::count_if(sequences_.begin(), sequences_.end(), [block](const Sequence &sequence) {
      return std::find(sequence.blocks.begin(), sequence.blocks.end(), block) !=
             sequence.blocks.end();
    });
  }
  int64_t BlocksOf(int64_t length) const {
    return (length + config().block_positions - 1) / config().block_positions;
  }

  // ---- What the model says

  mha_status ToAppend(const Sequence &sequence, int64_t count) const {
    if (!IsRing() && sequence.length + count > config().capacity) return MHA_ERROR_CACHE_FULL;
    for (int64_t n = IsPaged() && count > 0 ? sequence.length / config().block_positions
                                            : INT64_MAX;
         n < (IsPaged() ? BlocksOf(sequence.length + count) : 0); n++) {
      if (n >= static_cast<int64_t>(sequence.blocks.size())) return MHA_ERROR_CACHE_FULL;
      if (TablesWith(sequence.blocks[static_cast<size_t>(n)]) > 1) return MHA_ERROR_CACHE_SHARED;
    }
    return MHA_OK;
  }

  void Grow(int64_t s, const std::vector<float> &k, const std::vector<float> &v) {
    Sequence &sequence = At(s);
    sequence.k.insert(sequence.k.end(), k.begin(), k.end());
    sequence.v.insert(sequence.v.end(), v.begin(), v.end());
    SetLength(&sequence, static_cast<int64_t>(sequence.k.size()) / k_width());
    sequence.written = std::max(sequence.written, sequence.length);
  }
  void SetLength(Sequence *sequence, int64_t length) const {
    sequence->length = length;
    sequence->k.resize(static_cast<size_t>(length * k_width()));
    sequence->v.resize(static_cast<size_t>(length * v_width()));
    if (length == 0) sequence->written = 0;
  }
  int64_t OldestOf(const Sequence &sequence, int64_t length) const {
    return IsRing() ? std::max<int64_t>(std::max(sequence.written, length) - config().capacity, 0)
                    : 0;
  }

  // The oldest position that can be read back. A ring that was truncated to positions it has
  // overwritten has none.
  int64_t OldestHeld(const Sequence &sequence) const {
    return std::min(OldestOf(sequence, sequence.length), sequence.length);
  }

  // ---- What the library says

  // call(&error) has this status. If it fails, it changes nothing.
  template <typename Call>
  void Expect(mha_status expected, const Call &call) {
    const std::string before = expected != MHA_OK ? cache_.buffer().Bytes() : "";
    mha_error error;
    const mha_status status = call(&error);
    const std::string text = std::string(operation_) + ": " + mha_status_string(status) +
                             " instead of " + mha_status_string(expected) + " in a cache " +
                             Describe(CacheForm{config().kind, config().block_positions});
    fuzz::Expect(status == expected, text.c_str(), error.message);
    fuzz::Expect(expected == MHA_OK || cache_.buffer().Bytes() == before,
                 "a refused operation changed the cache", operation_);
  }
  template <typename Function, typename Arg, typename... Args>
  void Expect(mha_status expected, const Function &function, Arg arg, Args... args) {
    Expect(expected, [&](mha_error *error) { return function(arg, args..., error); });
  }

  void ExpectStored(int64_t s, int64_t most) {
    const Sequence &sequence = At(s);
    const int64_t count = std::min(sequence.length - OldestHeld(sequence), most),
                  first = sequence.length - count;
    AttentionProblem history;
    static_cast<AttentionSizes &>(history) = sizes_;
    history.n_kv = count;
    history.k.assign(sequence.k.begin() + first * k_width(), sequence.k.end());
    history.v.assign(sequence.v.begin() + first * v_width(), sequence.v.end());
    fuzz::Expect(SameBits(cache_.Read(s, first, count), SpecifyStored(history, 0, 0, count)),
                 "other rows are read", operation_);
  }

  // ---- Operations

  void Operate() {
    const uint8_t kind = bytes_.Byte(), operations[] = {0, 0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 6, 7};
    if (kind / std::size(operations) == 255 / std::size(operations)) return Unshare();
    switch (operations[kind % std::size(operations)]) {
      case 0:
        return Append();
      case 1:
        return Attend();
      case 2:
        return Truncate();
      case 3:
        return SetBlocks();
      case 4:
        return CopyPrefix();
      case 5:
        return Move();
      case 6:
        return Read();
      default:
        return Damage();
    }
  }

  void Append() {
    operation_ = "append";
    const int64_t s = AnySequence(), count = Count(At(s).length);
    const std::vector<float> k = Numbers(count * k_width()), v = Numbers(count * v_width());
    const mha_status expected = ToAppend(At(s), count);
    Expect(expected, mha_kv_cache_append, cache_.get(), s, count, k.data(),
           sizes_.values_in_keys ? nullptr : v.data());
    if (expected == MHA_OK) Grow(s, k, v);
  }

  void Truncate() {
    operation_ = "truncate";
    const int64_t s = AnySequence(),
                  length = bytes_.Choice({0, 1}) * (At(s).length - bytes_.Integer(-1, 40));
    const mha_status expected =
        length < 0 || length > At(s).length ? MHA_ERROR_INVALID_VALUE : MHA_OK;
    Expect(expected, mha_kv_cache_truncate, cache_.get(), s, length);
    if (expected == MHA_OK) SetLength(&At(s), length);
  }

  // Blocks of the sequence's own, then some of another's, then any.
  void SetBlocks() {
    operation_ = "set_blocks";
    const int64_t s = AnySequence(), other = AnySequence(),
                  entries = IsPaged() ? config().capacity / config().block_positions : 3;
    Sequence &sequence = At(s);
    std::vector<int32_t> blocks = sequence.blocks;
    blocks.resize(
        std::min(blocks.size(), static_cast<size_t>(IsPaged() ? BlocksOf(sequence.length) : 0) +
                                    bytes_.Choice({0u, 1u, 40u})));
    if (bytes_.OneIn(10) && !blocks.empty()) blocks.pop_back();
    const auto &of_other = At(other).blocks;
    for (int64_t n = bytes_.Integer(0, 3); n > 0 && blocks.size() < of_other.size(); n--)
      blocks.push_back(of_other[blocks.size()]);
    for (int64_t n = bytes_.Integer(0, 12); n > 0 && static_cast<int64_t>(blocks.size()) < entries;
         n--) {
      blocks.push_back(
          static_cast<int32_t>(bytes_.Byte() % std::max<int64_t>(config().num_blocks, 1)));
      while (std::count(blocks.begin(), blocks.end(), blocks.back()) > 1 && n > 1)
        blocks.pop_back();  // seldom twice the same
    }
    if (bytes_.OneIn(20)) blocks.push_back(bytes_.Choice({-1, 40, 1 << 30}));
    const int64_t in_use = IsPaged() ? BlocksOf(sequence.length) : 0,
                  count = static_cast<int64_t>(blocks.size());
    std::vector<int32_t> sorted = blocks;
    std::sort(sorted.begin(), sorted.end());
    const bool is_fine =
        IsPaged() && count <= entries && count >= in_use &&
        (count == 0 || (sorted.front() >= 0 && sorted.back() < config().num_blocks)) &&
        std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end() &&
        std::equal(blocks.begin(), blocks.begin() + std::min(in_use, count),
                   sequence.blocks.begin());
    const mha_status expected = is_fine ? MHA_OK : MHA_ERROR_INVALID_VALUE;
    Expect(expected, mha_kv_cache_set_blocks, cache_.get(), s, blocks.data(), count);
    if (is_fine) sequence.blocks = blocks;
  }

  void CopyPrefix() {
    operation_ = "copy_prefix";
    const int64_t from = AnySequence(), to = AnySequence();
    const Sequence &source = At(from);
    Sequence &target = At(to);
    const int64_t length = source.length - bytes_.Choice({0, 1}) * bytes_.Integer(-1, 60);
    mha_status expected =
        length < 0 || length > source.length || from == to ? MHA_ERROR_INVALID_VALUE : MHA_OK;
    for (int64_t n = 0; IsPaged() && expected == MHA_OK && n < BlocksOf(length); n++) {
      if (n >= static_cast<int64_t>(target.blocks.size())) {
        expected = MHA_ERROR_CACHE_FULL;
      } else if (const int32_t block = target.blocks[static_cast<size_t>(n)];
                 block != source.blocks[static_cast<size_t>(n)]) {
        if (TablesWith(block) > 1) expected = MHA_ERROR_CACHE_SHARED;
      }
    }
    Expect(expected, mha_kv_cache_copy_prefix, cache_.get(), from, to, length);
    if (expected != MHA_OK) return;
    target.k = source.k;
    target.v = source.v;
    target.written = source.written;
    SetLength(&target, length);
  }

  void Unshare() {
    operation_ = "unshare";
    const int64_t s = AnySequence(), per_block = std::max<int64_t>(config().block_positions, 1);
    Sequence &sequence = At(s);
    int32_t block = static_cast<int32_t>(bytes_.Integer(-1, 40));
    while (block >= 0 && block < config().num_blocks && TablesWith(block) > 0 && !bytes_.OneIn(4) &&
           !bytes_.AtEnd())
      block++;
    const size_t last = static_cast<size_t>(sequence.length / per_block);
    const bool is_block = IsPaged() && block >= -1 && block < config().num_blocks;  // or none
    const bool is_shared =
        IsPaged() && sequence.length % per_block != 0 && TablesWith(sequence.blocks[last]) > 1;
    const bool is_wrong = !is_block || (is_shared && TablesWith(block) > 0);
    const mha_status expected = is_wrong                   ? MHA_ERROR_INVALID_VALUE
                                : is_shared && block == -1 ? MHA_ERROR_CACHE_FULL
                                                           : MHA_OK;
    uint32_t used = 7;
    Expect(expected, mha_kv_cache_unshare, cache_.get(), s, block, &used);
    fuzz::Expect(used == (expected != MHA_OK ? 7u
                          : is_shared        ? 1u
                                             : 0u),
                 "unshare says wrongly whether it used the block");
    if (used == 1) sequence.blocks[last] = block;
  }

  // Moves the cache to another buffer, and overwrites the old one.
  void Move() {
    operation_ = "view of a copy";
    Cache copy = cache_.Copy(bytes_.OneIn(4) ? Place::kBeforeGuard : Place::kAnywhere);
    cache_.buffer().Fill(0xff);
    cache_ = std::move(copy);
  }

  void Read() {
    operation_ = "read";
    const int64_t s = AnySequence(), length = At(s).length,
                  first = length - bytes_.Choice({1, 20}) * bytes_.Integer(-1, 40),
                  count = bytes_.Integer(-1, 60);
    const bool is_fine = first >= OldestHeld(At(s)) && count >= 0 && first + count <= length;
    std::vector<float> k(static_cast<size_t>(std::max<int64_t>(count, 0) * k_width()));
    Expect(is_fine ? MHA_OK : MHA_ERROR_INVALID_VALUE, mha_kv_cache_read, cache_.get(), s, first,
           count, k.data(), nullptr);
  }

  // A copy with a changed byte is refused, or, where the byte is after the header, works as any
  // cache does, whatever it holds.
  void Damage() {
    operation_ = "view of a damaged copy";
    Memory copy(cache_.buffer().size(), Place::kBeforeGuard, 64);
    std::memcpy(copy.data(), cache_.buffer().data(), copy.size());
    const size_t at = static_cast<size_t>(bytes_.Raw(2)) %
                      std::min<size_t>(copy.size(), bytes_.Choice({1024u, 65536u}));
    copy.data()[at] = static_cast<unsigned char>(copy.data()[at] ^ (bytes_.Byte() | 1));
    mha_kv_cache *viewed = nullptr;
    mha_error error;
    const mha_status status = mha_kv_cache_view(copy.data(), copy.size(), &viewed, &error);
    fuzz::Expect(status == MHA_ERROR_CACHE_FORMAT || (status == MHA_OK && at >= 256),
                 "a damaged cache is taken", error.message);
    for (int64_t s = 0; status == MHA_OK && s < config().num_sequences; s++) {
      int64_t length = 0;
      fuzz::Expect(mha_kv_cache_length(viewed, s, &length, &error) == MHA_OK, "length",
                   error.message);
      std::vector<float> rows(static_cast<size_t>(20 * std::max(k_width(), v_width())));
      mha_kv_cache_read(viewed, s, std::max<int64_t>(length - 20, 0), std::min<int64_t>(length, 20),
                        rows.data(), rows.data(), &error);
      AttentionProblem problem;
      static_cast<AttentionSizes &>(problem) = sizes_;
      problem.n_kv = 0;
      problem.is_causal = true;
      problem.window_left = 5;
      problem.q.resize(static_cast<size_t>(sizes_.num_heads * sizes_.head_dim));
      CallTo(problem, {s}, viewed, true, 0);
    }
  }

  // ---- Attention

  struct Called {
    mha_status status;
    mha_error error;
    Outputs outputs;
    bool are_untouched;
  };

  Called CallTo(const AttentionProblem &problem, const std::vector<int64_t> &sequences,
                mha_kv_cache *cache, bool reads, int64_t columns) {
    static const std::vector<uint32_t> sets = SetsOfTheArchitecture(Sets::kWithKernels);
    const Scheduler scheduler(bytes_.Choice({1u, 2u, 3u, 9u}), RunBackwards);
    AttentionCall call;
    call.instruction_set = sets[bytes_.Byte() % sets.size()];
    if (!(mha_instruction_sets() >> call.instruction_set & 1))
      call.instruction_set = MHA_INSTRUCTION_SET_AUTO;
    call.scheduler = scheduler.get();
    call.place = bytes_.OneIn(4) ? Place::kBeforeGuard : Place::kAnywhere;
    call.asked = kAskLse | (columns > 0 && !IsRing() && bytes_.Boolean() ? kAskWeights : 0);
    call.cache = {cache, sequences, columns, reads};
    AttentionData data(problem, call);
    Called called = {};
    data.PoisonOutputs();
    size_t size = 0;
    called.status = data.Workspace(&size, &called.error);
    Memory workspace(size, call.place);
    workspace.Fill(0xff);
    if (called.status == MHA_OK) called.status = data.Run(workspace.data(), size, &called.error);
    called.are_untouched = data.OutputsAreUntouched();
    if (called.status == MHA_OK) called.outputs = data.Results();
    return called;
  }

  void Attend() {
    operation_ = "attention";
    AttentionProblem call;  // and what it means for the specification: `whole`
    static_cast<AttentionSizes &>(call) = sizes_;
    const bool reads = bytes_.OneIn(3);
    const uint8_t step = bytes_.Byte();
    const bool in_step = (step & 1) != 0, pads_left = step >= 208, keeps_lengths = step < 232;
    call.is_causal = IsRing() ? !bytes_.OneIn(20) : bytes_.Boolean();
    if (IsRing() || bytes_.OneIn(3))
      call.window_left = bytes_.Choice<int64_t>({0, 5, 200, 1 << 20}) + bytes_.Integer(0, 30);
    if (IsRing() && *call.window_left > config().capacity)
      *call.window_left %= config().capacity + 1;
    std::vector<int64_t> sequences;
    for (int64_t n = AnySequence() + 1; n > 0; n--) {
      const int64_t s = AnySequence();
      if (std::find(sequences.begin(), sequences.end(), s) == sequences.end())
        sequences.push_back(s);
    }
    call.batch = static_cast<int64_t>(sequences.size());
    for (const int64_t s : sequences) {
      const int64_t cost = call.batch * sizes_.num_heads *
                           (sizes_.head_dim + sizes_.head_dim_v + 20) * (At(s).length + 20);
      const int64_t count = std::min(Count(At(s).length), 12 + 400'000 / cost);
      call.kv_lengths.push_back(reads ? 0 : count);
      call.q_lengths.push_back(in_step && !reads ? count : bytes_.Integer(0, 12));
    }
    call.n_kv = *std::max_element(call.kv_lengths.begin(), call.kv_lengths.end());
    call.n_q = std::max<int64_t>(in_step && !reads ? call.n_kv : 1,
                                 *std::max_element(call.q_lengths.begin(), call.q_lengths.end()));
    call.n_q = std::max<int64_t>(call.n_q, 1);
    call.q = Numbers(call.batch * call.n_q * sizes_.num_heads * sizes_.head_dim);
    call.k = Numbers(call.batch * call.n_kv * k_width());
    call.v = Numbers(call.batch * call.n_kv * v_width());
    if (pads_left) PadLeft(true, &call);

    const bool has_positions = call.is_causal || call.window_left;
    const int64_t at_once = IsRing() ? config().capacity - *call.window_left : INT64_MAX;
    mha_status expected = MHA_OK;
    if (IsRing() && !call.is_causal) expected = MHA_ERROR_INVALID_VALUE;
    if (expected == MHA_OK && (at_once < 1 || (call.n_kv > at_once && call.n_q != call.n_kv)))
      expected = MHA_ERROR_SHAPE;
    AttentionProblem whole = call;
    whole.n_kv = 0;
    whole.kv_start.clear();
    for (size_t b = 0; b < sequences.size(); b++) {
      const Sequence &sequence = At(sequences[b]);
      const int64_t rows = call.kv_lengths[b], queries = call.q_lengths[b],
                    length = sequence.length + rows, start = length - queries;
      whole.kv_lengths[b] = length;
      whole.n_kv = std::max(whole.n_kv, length);
      if (expected == MHA_OK) expected = ToAppend(sequence, rows);
      // Queries of a sequence whose first key is given.
      const bool may_precede_keys = pads_left && !reads;
      if (expected == MHA_OK && has_positions && start < 0 && !may_precede_keys)
        expected = MHA_ERROR_SHAPE;
      if (expected != MHA_OK || !IsRing() || queries == 0) continue;
      const int64_t needed = std::max<int64_t>(start - *call.window_left, 0);
      if ((rows > at_once && rows != queries) ||
          (needed < length &&
           needed < OldestOf(sequence, sequence.length + std::min(rows, at_once)))) {
        expected = MHA_ERROR_SHAPE;
      }
    }
    if (reads) {
      call.k.clear();
      call.v.clear();
      call.kv_lengths.clear();
      call.kv_start.clear();
    }
    const AttentionSizes sizes = call;
    if (pads_left && !keeps_lengths) call.q_lengths.clear(), call.kv_lengths.clear();
    Called called;
    Expect(expected, [&](mha_error *error) {
      called = CallTo(call, sequences, cache_.get(), reads, whole.n_kv);
      *error = called.error;
      return called.status;
    });
    if (expected != MHA_OK)
      return fuzz::Expect(called.are_untouched, "a refused call wrote", called.error.message);
    whole.k.assign(static_cast<size_t>(whole.batch * whole.n_kv * k_width()), Unwritten());
    whole.v.assign(static_cast<size_t>(whole.batch * whole.n_kv * v_width()), Unwritten());
    for (int64_t b = 0; b < whole.batch; b++) {
      const int64_t s = sequences[static_cast<size_t>(b)],
                    rows = reads ? 0 : sizes.kv_lengths[static_cast<size_t>(b)],
                    first = reads || !pads_left ? 0 : sizes.kv_start[static_cast<size_t>(b)];
      Grow(s, SliceRows(call.k, b, call.n_kv, k_width(), first, rows),
           SliceRows(call.v, b, call.n_kv, v_width(), first, rows));
      std::copy(At(s).k.begin(), At(s).k.end(), whole.k.begin() + b * whole.n_kv * k_width());
      std::copy(At(s).v.begin(), At(s).v.end(), whole.v.begin() + b * whole.n_kv * v_width());
    }
    const testing::AssertionResult same = SameBits(called.outputs, Specify(whole));
    fuzz::Expect(
        same,
        ("attention over a cache " + Describe(CacheForm{config().kind, config().block_positions}))
            .c_str(),
        (Describe(whole) + same.message()).c_str());
  }

  fuzz::Bytes &bytes_;
  const AttentionSizes sizes_;
  Cache cache_;
  Random random_;
  std::vector<Sequence> sequences_;
  const char *operation_ = "nothing";
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Bytes bytes(data, size);
  Caches(&bytes).Run();
  return 0;
}
