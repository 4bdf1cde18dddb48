#include "mask.h"

#include <algorithm>

namespace mha_ggml {
namespace {

constexpr uint16_t kMasked = 0xFC00;  // -infinity

// Runs body(begin, end) for parts of `count` rows, which have `numbers` numbers together.
template <class Body>
void in_parts(const mha_scheduler *scheduler, int64_t count, int64_t numbers, const Body &body) {
  const int64_t threads = scheduler ? scheduler->num_threads : 1,
                parts = std::min({count, numbers >> 16, threads});
  if (parts <= 1) {
    return body(0, count);
  }
  const auto run_part = [&](int64_t part) {
    body(count * part / parts, count * (part + 1) / parts);
  };
  scheduler->parallel_for(
      scheduler->context, static_cast<uint32_t>(parts),
      [](void *run, uint32_t part) { (*static_cast<decltype(run_part) *>(run))(part); },
      const_cast<void *>(static_cast<const void *>(&run_part)));
}

}  // namespace

MaskedCalls::Row MaskedCalls::read_row(const uint16_t *keys, int64_t n_kv) {
  int64_t begin = n_kv, end = 0, open = 0;
  uint16_t bits = 0;
  for (int64_t from = 0, to; from < n_kv; from = to) {
    to = std::min(from + 256, n_kv);
    uint16_t open_here = 0;  // as wide as the numbers, so that compilers use vectors
    for (int64_t i = from; i < to; i++) {
      const bool is_open = keys[i] != kMasked;
      open_here = static_cast<uint16_t>(open_here + is_open);
      bits = static_cast<uint16_t>(bits | (is_open ? keys[i] : 0));
    }
    if (open_here > 0) {
      begin = std::min(begin, from), end = to, open += open_here;
    }
  }
  if (open == 0) {
    return {};
  }
  for (; keys[begin] == kMasked; begin++) {
  }
  for (; keys[end - 1] == kMasked; end--) {
  }
  // Only 0 and -0 leave a score as it is.
  return {begin, end, open, (bits & 0x7FFF) != 0};
}

void MaskedCalls::read(const AdditiveMask &mask, int64_t streams, int64_t heads, int64_t n_q,
                       int64_t n_kv, const mha_scheduler *scheduler) {
  mask_ = mask, n_q_ = n_q, end_of_keys_ = 0;
  calls_.clear(), lists_.clear();
  kv_first_rows_.clear(), kv_lengths_.clear(), q_first_positions_.clear();
  rows_.assign(static_cast<size_t>(streams * n_q), {0, n_kv, n_kv, false});
  const int64_t masks = !mask.data ? 0 : mask.head_stride ? heads : 1;
  in_parts(scheduler, streams * n_q, streams * n_q * masks * n_kv, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      Row &row = rows_[static_cast<size_t>(i)];
      for (int64_t head = 0; head < masks; head++) {
        const Row next = read_row(row_of_mask(i) + head * mask.head_stride, n_kv);
        const bool is_same = head == 0 || (row.is_range() && next.is_range() &&
                                           row.begin == next.begin && row.end == next.end);
        row = is_same ? next
                      : Row{std::min(row.begin, next.begin), std::max(row.end, next.end), 0, true};
      }
    }
  });
  for (int64_t stream = 0; stream < streams; stream++) {
    plan_stream(stream);
  }
  // Streams of which each would have a call of the same kind share one.
  bool is_of_streams = true;
  int64_t num_chosen = 0;
  for (const Call &call : calls_) {
    is_of_streams = is_of_streams && call.batch == 1 && call.is_like(calls_[0]);
    num_chosen = std::max(num_chosen, call.num_chosen);
  }
  if (is_of_streams) {
    calls_.resize(1);
    calls_[0].is_of_streams = true, calls_[0].batch = streams, calls_[0].num_chosen = num_chosen;
  }
  for (Call &call : calls_) {
    int64_t *const begins = &kv_first_rows_[call.entry], *const lengths = &kv_lengths_[call.entry];
    call.begin = *std::min_element(begins, begins + call.batch);
    for (int64_t b = 0; b < call.batch; b++) {
      begins[b] -= call.begin;
      call.n_kv = std::max(call.n_kv, begins[b] + lengths[b]);
    }
    end_of_keys_ = std::max(end_of_keys_, call.begin + call.n_kv);
    if (call.form == Form::kLists) {
      write_lists(call, scheduler);
    }
  }
}

// Cuts the rows of a stream into ranges and what is between them. In a range, the query at position
// p has the keys from max(first, p - window_left) to min(last, p): both ends of a row are those of
// the row before or one key further; a beginning that has moved moves on, and an end that has
// stayed stays.
void MaskedCalls::plan_stream(int64_t stream) {
  const Row *const rows = rows_.data() + stream * n_q_;
  for (int64_t from = 0, to; from < n_q_; from = to) {
    Row keys = rows[from];  // of all rows
    const bool is_range = keys.is_range();
    bool begin_moves = false, end_moves = false, end_stays = false;
    for (to = from + 1; to < n_q_ && rows[to].is_range() == is_range; to++) {
      const int64_t by = rows[to].begin - rows[to - 1].begin, end_by = rows[to].end - keys.end;
      if (is_range) {
        if (by < begin_moves || by > 1 || end_by < 0 || end_by > !end_stays) {
          break;
        }
        begin_moves = by == 1, end_stays = end_by == 0, end_moves = end_moves || end_by == 1;
      }
      keys.begin = std::min(keys.begin, rows[to].begin);
      keys.end = std::max(keys.end, rows[to].end);
      keys.open = std::max(keys.open, rows[to].open);
      keys.is_biased = keys.is_biased || rows[to].is_biased;
    }
    Call call;
    call.stream = stream, call.row = from, call.rows = to - from;
    call.entry = kv_lengths_.size();
    const int64_t position = rows[from].end - 1;
    if (is_range) {
      call.flags = (end_moves ? MHA_CAUSAL : 0u) | (begin_moves ? MHA_WINDOW_LEFT : 0u);
      call.window_left = begin_moves ? position + call.rows - 1 - rows[to - 1].begin : 0;
    } else {
      // A key costs about three times as much in a list as in a range, and six times as much with
      // several queries, which share the keys of a range.
      const bool is_sparse = keys.open * (call.rows == 1 ? 3 : 6) <= keys.end - keys.begin;
      call.form = is_sparse && !keys.is_biased ? Form::kLists : Form::kBias;
      call.num_chosen = keys.open;
    }
    kv_first_rows_.push_back(keys.begin), kv_lengths_.push_back(keys.end - keys.begin);
    q_first_positions_.push_back(position - keys.begin);
    if (from > 0 && call.is_like(calls_.back())) {
      calls_.back().batch++;
    } else {
      calls_.push_back(call);
    }
  }
}

// Writes the keys of each query, and -1 where it has fewer than another one.
void MaskedCalls::write_lists(Call &call, const mha_scheduler *scheduler) {
  const int64_t first = call.stream * n_q_ + call.row, count = call.batch * call.rows;
  call.list = lists_.size();
  lists_.resize(call.list + static_cast<size_t>(count * call.num_chosen), -1);
  in_parts(scheduler, count, count * call.n_kv, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      int32_t *to = lists_.data() + call.list + i * call.num_chosen;
      const uint16_t *const keys = row_of_mask(first + i) + call.begin;
      for (int32_t key = 0; key < call.n_kv; key++) {
        if (keys[key] != kMasked) {
          *to++ = key;
        }
      }
    }
  });
}

void MaskedCalls::apply(size_t index, mha_attention_args &args) {
  const Call &call = calls_[index];
  const auto cut = [&](auto &array, int64_t row) {
    const int64_t by = call.stream * array.strides.batch + row * array.strides.row;
    const bool is_half = array.type == MHA_TYPE_F16 || array.type == MHA_TYPE_BF16;
    array.data = static_cast<char *>(const_cast<void *>(array.data)) + by * (is_half ? 2 : 4);
  };
  cut(args.q, call.row), cut(args.output, call.row);
  cut(args.k, call.begin), cut(args.v, call.begin);
  if (!call.is_of_streams) {
    args.q.strides.batch = call.rows * args.q.strides.row;
    args.output.strides.batch = call.rows * args.output.strides.row;
    args.k.strides.batch = args.v.strides.batch = MHA_BROADCAST;
  }
  args.batch = call.batch, args.n_q = call.rows, args.n_kv = call.n_kv ? call.n_kv : MHA_EMPTY;
  args.flags = call.flags, args.window_left = call.window_left, args.window_right = 0;
  args.sequences = nullptr, args.score_arrays = nullptr;
  if (call.form == Form::kRanges) {
    sequences_.struct_size = sizeof sequences_;
    sequences_.kv_first_rows = &kv_first_rows_[call.entry];
    sequences_.kv_lengths = &kv_lengths_[call.entry];
    sequences_.q_first_positions = &q_first_positions_[call.entry];
    args.sequences = &sequences_;
    return;
  }
  arrays_ = {};
  arrays_.struct_size = sizeof arrays_;
  args.score_arrays = &arrays_;
  if (call.form == Form::kLists) {
    arrays_.chosen_keys = &lists_[call.list], arrays_.num_chosen = call.num_chosen;
    arrays_.chosen_keys_strides = {call.rows * call.num_chosen, call.num_chosen, MHA_BROADCAST};
    return;
  }
  const auto stride = [](int64_t numbers) { return numbers ? numbers : MHA_BROADCAST; };
  arrays_.bias.data = row_of_mask(call.stream * n_q_ + call.row) + call.begin;
  arrays_.bias.type = MHA_TYPE_F16;
  arrays_.bias.strides = {stride(mask_.stream_stride), mask_.row_stride, stride(mask_.head_stride)};
}

}  // namespace mha_ggml
