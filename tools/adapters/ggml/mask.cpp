#include "mask.h"

#include <algorithm>

namespace mha_ggml {
namespace {

constexpr uint16_t kMasked = 0xFC00;  // -infinity

// Runs body(begin, end) for parts of `count` rows, in which there are `numbers` to read.
template <class Body>
void in_parts(const mha_scheduler *scheduler, int64_t count, int64_t numbers, const Body &body) {
  const int64_t parts =
      std::min({count, numbers >> 16, scheduler ? int64_t{scheduler->num_threads} : 1});
  if (parts <= 1) {
    return body(0, count);
  }
  struct Parts {
    const Body &body;
    int64_t count, parts;
  } of = {body, count, parts};
  scheduler->parallel_for(
      scheduler->context, static_cast<uint32_t>(parts),
      [](void *context, uint32_t part) {
        const Parts &all = *static_cast<Parts *>(context);
        all.body(all.count * part / all.parts, all.count * (part + 1) / all.parts);
      },
      &of);
}

// Whether one of 64 keys is not masked, without a branch for each.
bool is_any_open(const uint16_t *keys) {
  uint16_t any = 0;
  for (int i = 0; i < 64; i++) {
    any = static_cast<uint16_t>(any | (keys[i] ^ kMasked));
  }
  return any != 0;
}

}  // namespace

MaskedCalls::Row MaskedCalls::read_row(const uint16_t *row, int64_t n_kv) {
  int64_t begin = 0, end = n_kv;
  while (end - begin >= 64 && !is_any_open(row + begin)) {
    begin += 64;
  }
  while (begin < end && row[begin] == kMasked) {
    begin++;
  }
  while (end - begin >= 64 && !is_any_open(row + end - 64)) {
    end -= 64;
  }
  while (begin < end && row[end - 1] == kMasked) {
    end--;
  }
  if (begin == end) {
    return {};
  }
  int64_t open = 0;
  uint16_t bits = 0;
  for (int64_t from = begin; from < end; from += 32768) {
    uint16_t open_here = 0;  // as wide as the numbers, so that compilers use vectors
    for (int64_t i = from; i < std::min(end, from + 32768); i++) {
      const bool is_open = row[i] != kMasked;
      open_here = static_cast<uint16_t>(open_here + is_open);
      bits = static_cast<uint16_t>(bits | (is_open ? row[i] : 0));
    }
    open += open_here;
  }
  // Only 0 and -0 leave a score as it is.
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end), static_cast<int32_t>(open),
          (bits & 0x7FFF) != 0};
}

const uint16_t *MaskedCalls::row_of_mask(int64_t stream, int64_t head, int64_t row) const {
  return mask_.data + stream * mask_.stream_stride + head * mask_.head_stride +
         row * mask_.row_stride;
}

void MaskedCalls::read(const AdditiveMask &mask, int64_t streams, int64_t heads, int64_t n_q,
                       int64_t n_kv, const mha_scheduler *scheduler) {
  mask_ = mask, n_q_ = n_q, end_of_keys_ = 0;
  calls_.clear(), kv_first_rows_.clear(), kv_lengths_.clear(), q_first_positions_.clear();
  lists_.clear();
  const int32_t all = static_cast<int32_t>(n_kv);
  rows_.assign(static_cast<size_t>(streams * n_q), {0, all, all, false});
  if (mask.data) {
    const int64_t masks = mask.head_stride ? heads : 1;
    in_parts(scheduler, streams * n_q, streams * n_q * masks * n_kv, [&](int64_t i, int64_t end) {
      for (; i < end; i++) {
        Row &row = rows_[static_cast<size_t>(i)];
        row = read_row(row_of_mask(i / n_q, 0, i % n_q), n_kv);
        for (int64_t head = 1; head < masks; head++) {
          const Row other = read_row(row_of_mask(i / n_q, head, i % n_q), n_kv);
          const bool is_same = row.is_range() && other.is_range() && row.begin == other.begin &&
                               row.end == other.end;
          row.begin = std::min(row.begin, other.begin), row.end = std::max(row.end, other.end);
          row.is_biased = row.is_biased || !is_same;
        }
      }
    });
  }
  for (int64_t stream = 0; stream < streams; stream++) {
    plan_stream(stream);
  }
  const bool is_one = std::all_of(calls_.begin(), calls_.end(), [&](const Call &call) {
    return call.batch == 1 && call.is_like(calls_[0]);
  });
  if (static_cast<int64_t>(calls_.size()) == streams && is_one) {
    calls_.resize(1);
    calls_[0].is_of_streams = true, calls_[0].batch = streams;
  }
  for (Call &call : calls_) {
    settle(call);
    end_of_keys_ = std::max(end_of_keys_, call.begin + call.n_kv);
    if (call.form == Form::kLists) {
      write_lists(call, scheduler);
    }
  }
}

bool MaskedCalls::Call::is_like(const Call &other) const {
  return form == other.form && rows == other.rows && flags == other.flags &&
         window_left == other.window_left;
}

// Cuts the rows of a stream. Row i of a range that is row 0's, moved along, is from
// max(first begin, position - window_left) to min(last end, position + 1), where the position is
// one more in each row. So both ends stay or move by one; a beginning that has moved moves on, and
// an end that has stayed stays.
void MaskedCalls::plan_stream(int64_t stream) {
  const Row *const rows = rows_.data() + stream * n_q_;
  for (int64_t first = 0, end; first < n_q_; first = end) {
    Call call;
    call.stream = stream, call.row = first;
    int32_t begin_of_keys = rows[first].begin, end_of_keys = rows[first].end;
    int64_t most_open = rows[first].open;
    bool is_biased = rows[first].is_biased, begin_moved = false, end_moved = false, stayed = false;
    for (end = first + 1; end < n_q_ && rows[end].is_range() == rows[first].is_range(); end++) {
      if (rows[first].is_range()) {
        const int32_t by = rows[end].begin - rows[end - 1].begin,
                      end_by = rows[end].end - rows[end - 1].end;
        if (by != (by == 1 || begin_moved) || end_by != (end_by == 1) || (stayed && end_by == 1)) {
          break;
        }
        begin_moved = by == 1, end_moved = end_moved || end_by == 1, stayed = end_by == 0;
      }
      begin_of_keys = std::min(begin_of_keys, rows[end].begin);
      end_of_keys = std::max(end_of_keys, rows[end].end);
      most_open = std::max<int64_t>(most_open, rows[end].open);
      is_biased = is_biased || rows[end].is_biased;
    }
    call.rows = end - first;
    const int64_t position = rows[first].end - 1;
    if (rows[first].is_range()) {
      call.flags = (end_moved ? MHA_CAUSAL : 0u) | (begin_moved ? MHA_WINDOW_LEFT : 0u);
      call.window_left = begin_moved ? position + call.rows - 1 - rows[end - 1].begin : 0;
    } else {
      // A key costs about three times as much in a list as in a range, and six times as much with
      // several queries, which share the keys of a range.
      const bool is_sparse =
          most_open * (call.rows == 1 ? 3 : 6) <= int64_t{end_of_keys} - begin_of_keys;
      call.form = is_sparse && !is_biased ? Form::kLists : Form::kBias;
    }
    add(call, begin_of_keys, end_of_keys, position - begin_of_keys);
  }
}

// Adds a sequence: to the last call, if that is one for neighbours of this kind.
void MaskedCalls::add(Call call, int64_t begin, int64_t end, int64_t position) {
  call.entry = kv_first_rows_.size();
  kv_first_rows_.push_back(begin), kv_lengths_.push_back(end - begin);
  q_first_positions_.push_back(position);
  if (!calls_.empty() && calls_.back().stream == call.stream && call.form == Form::kRanges &&
      call.is_like(calls_.back())) {
    calls_.back().batch++;
  } else {
    calls_.push_back(call);
  }
}

// Sets the keys of a call: those of all its sequences.
void MaskedCalls::settle(Call &call) {
  int64_t *const begins = kv_first_rows_.data() + call.entry, *const lengths =
                                                                  kv_lengths_.data() + call.entry;
  call.begin = *std::min_element(begins, begins + call.batch);
  for (int64_t b = 0; b < call.batch; b++) {
    begins[b] -= call.begin;
    call.n_kv = std::max(call.n_kv, begins[b] + lengths[b]);
  }
}

// Writes the keys of each query, and -1 where a query has fewer than others.
void MaskedCalls::write_lists(Call &call, const mha_scheduler *scheduler) {
  const int64_t first = call.stream * n_q_ + call.row, count = call.batch * call.rows;
  for (int64_t i = first; i < first + count; i++) {
    call.num_chosen = std::max<int64_t>(call.num_chosen, rows_[static_cast<size_t>(i)].open);
  }
  call.list = lists_.size();
  lists_.resize(call.list + static_cast<size_t>(count * call.num_chosen), -1);
  in_parts(scheduler, count, count * call.n_kv, [&](int64_t i, int64_t end) {
    int32_t *list = lists_.data() + call.list + i * call.num_chosen;
    for (; i < end; i++, list += call.num_chosen) {
      const uint16_t *const keys =
          row_of_mask((first + i) / n_q_, 0, (first + i) % n_q_) + call.begin;
      int32_t *to = list;
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
  const auto move = [&](auto &array, int64_t row) {
    const int64_t numbers = call.stream * array.strides.batch + row * array.strides.row;
    const bool is_wide = array.type != MHA_TYPE_F16 && array.type != MHA_TYPE_BF16;
    array.data = (is_wide ? sizeof(float) : sizeof(uint16_t)) * numbers +
                 static_cast<char *>(const_cast<void *>(array.data));
  };
  move(args.q, call.row), move(args.output, call.row);
  move(args.k, call.begin), move(args.v, call.begin);
  if (!call.is_of_streams) {
    args.q.strides.batch = call.rows * args.q.strides.row;
    args.output.strides.batch = call.rows * args.output.strides.row;
    args.k.strides.batch = args.v.strides.batch = MHA_BROADCAST;
  }
  args.batch = call.batch, args.n_q = call.rows, args.n_kv = call.n_kv ? call.n_kv : MHA_EMPTY;
  args.flags = call.flags, args.window_left = call.window_left, args.window_right = 0;
  args.sequences = nullptr, args.score_arrays = &arrays_;
  arrays_ = {};
  arrays_.struct_size = sizeof arrays_;
  switch (call.form) {
    case Form::kRanges:
      sequences_ = {};
      sequences_.struct_size = sizeof sequences_;
      sequences_.kv_first_rows = kv_first_rows_.data() + call.entry;
      sequences_.kv_lengths = kv_lengths_.data() + call.entry;
      sequences_.q_first_positions = q_first_positions_.data() + call.entry;
      args.sequences = &sequences_, args.score_arrays = nullptr;
      return;
    case Form::kLists:
      arrays_.chosen_keys = lists_.data() + call.list;
      arrays_.num_chosen = call.num_chosen;
      arrays_.chosen_keys_strides = {call.rows * call.num_chosen, call.num_chosen, MHA_BROADCAST};
      return;
    case Form::kBias:
      arrays_.bias.data = row_of_mask(call.stream, 0, call.row) + call.begin;
      arrays_.bias.type = MHA_TYPE_F16;
      arrays_.bias.strides = {mask_.stream_stride ? mask_.stream_stride : MHA_BROADCAST,
                              mask_.row_stride,
                              mask_.head_stride ? mask_.head_stride : MHA_BROADCAST};
      return;
  }
}

}  // namespace mha_ggml
