#include "mask.h"

namespace mha_ggml {
namespace {

constexpr uint16_t kMasked = 0xFC00;  // -infinity

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
    if (open_here > 0) begin = std::min(begin, from), end = to, open += open_here;
  }
  if (open == 0) return {0, 0, 0, false};
  while (keys[begin] == kMasked) begin++;
  while (keys[end - 1] == kMasked) end--;
  // Only 0 and -0 leave a score as it is.
  return {begin, end, open, (bits & 0x7FFF) != 0};
}

void MaskedCalls::read(const AdditiveMask &mask, int64_t streams, int64_t n_q, int64_t n_kv,
                       const mha_scheduler *scheduler) {
  mask_ = mask, n_q_ = n_q, end_of_keys_ = 0;
  calls_.clear(), lists_.clear();
  kv_first_rows_.clear(), kv_lengths_.clear(), q_first_positions_.clear();
  const int64_t count = streams * n_q;
  // Masks that differ between heads are a bias.
  rows_.assign(static_cast<size_t>(count), {0, n_kv, n_kv, mask.head_stride != 0});
  if (mask.data && mask.head_stride == 0) {
    in_parts(scheduler, count, count * n_kv, [&](int64_t i, int64_t end) {
      for (; i < end; i++) rows_[static_cast<size_t>(i)] = read_row(row_of_mask(i), n_kv);
    });
  }
  for (int64_t first = 0; first < count;) first = add_call(first);
  for (Call &call : calls_) {
    end_of_keys_ = std::max(end_of_keys_, call.end);
    if (call.form == Form::kLists) write_lists(call, scheduler);
  }
}

// Adds the next rows of a stream, ranges or what is between them, to the last call or as another,
// and returns the row after them. In ranges, the query at position p has the keys from
// max(first, p - window_left) to min(last, p): both ends of a row are those of the row before or
// one key further; a beginning that has moved moves on, and an end that has stayed stays.
int64_t MaskedCalls::add_call(int64_t first) {
  const int64_t end_of_stream = first / n_q_ * n_q_ + n_q_;
  const Row *const rows = rows_.data();
  Row keys = rows[first];  // of all rows
  const bool is_range = keys.is_range();
  bool begin_moves = false, end_moves = false, end_stays = false;
  int64_t next = first + 1;
  for (; next < end_of_stream && rows[next].is_range() == is_range; next++) {
    const Row &row = rows[next];
    const int64_t by = row.begin - rows[next - 1].begin, end_by = row.end - keys.end;
    if (is_range) {
      if (by < begin_moves || by > 1 || end_by < 0 || end_by > !end_stays) break;
      begin_moves = by == 1, end_stays = end_by == 0, end_moves = end_moves || end_by == 1;
    }
    keys = {std::min(keys.begin, row.begin), std::max(keys.end, row.end),
            std::max(keys.open, row.open), keys.is_biased || row.is_biased};
  }
  Call call;
  call.first = first, call.rows = next - first, call.end = keys.end;
  call.entry = kv_lengths_.size();
  const int64_t position = rows[first].end - 1;
  kv_first_rows_.push_back(keys.begin), kv_lengths_.push_back(keys.end - keys.begin);
  q_first_positions_.push_back(position - keys.begin);
  if (is_range) {
    call.flags = (end_moves ? MHA_CAUSAL : 0u) | (begin_moves ? MHA_WINDOW_LEFT : 0u);
    call.window_left = begin_moves ? position + call.rows - 1 - rows[next - 1].begin : 0;
  } else {
    // A key costs about three times as much in a list as in a range, and six times as much with
    // several queries, which share the keys of a range.
    const bool is_sparse = keys.open * (call.rows == 1 ? 3 : 6) <= keys.end - keys.begin;
    call.form = is_sparse && !keys.is_biased ? Form::kLists : Form::kBias;
    call.num_chosen = keys.open;
  }
  const bool is_stream = call.rows == n_q_, follows = first % n_q_ != 0;
  Call *const last = calls_.empty() ? nullptr : &calls_.back();
  if (last && (is_stream || follows) && call.form == last->form && call.rows == last->rows &&
      call.flags == last->flags && call.window_left == last->window_left) {
    last->batch++;
    last->end = std::max(last->end, call.end);
    last->num_chosen = std::max(last->num_chosen, call.num_chosen);
  } else {
    calls_.push_back(call);
  }
  return next;
}

// Writes the keys of each query, and -1 where it has fewer than another one.
void MaskedCalls::write_lists(Call &call, const mha_scheduler *scheduler) {
  const int64_t count = call.batch * call.rows;
  call.list = lists_.size();
  lists_.resize(call.list + static_cast<size_t>(count * call.num_chosen), -1);
  in_parts(scheduler, count, count * call.end, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      int32_t *to = lists_.data() + call.list + i * call.num_chosen;
      const uint16_t *const keys = row_of_mask(call.first + i);
      for (int32_t key = 0; key < call.end; key++) {
        if (keys[key] != kMasked) *to++ = key;
      }
    }
  });
}

void MaskedCalls::apply(size_t index, mha_attention_args &args) {
  const Call &call = calls_[index];
  const auto cut = [](auto &array, int64_t stream, int64_t row) {
    const int64_t by = stream * array.strides.batch + row * array.strides.row;
    const bool is_half = array.type == MHA_TYPE_F16 || array.type == MHA_TYPE_BF16;
    array.data = static_cast<char *>(const_cast<void *>(array.data)) + by * (is_half ? 2 : 4);
  };
  const int64_t stream = call.first / n_q_, row = call.first % n_q_;
  cut(args.q, stream, row), cut(args.output, stream, row);
  cut(args.k, stream, 0), cut(args.v, stream, 0);
  if (call.rows != n_q_) {  // neighbours
    args.q.strides.batch = call.rows * args.q.strides.row;
    args.output.strides.batch = call.rows * args.output.strides.row;
    args.k.strides.batch = args.v.strides.batch = MHA_BROADCAST;
  }
  args.call.batch = call.batch, args.call.n_q = call.rows,
  args.call.n_kv = call.end ? call.end : MHA_EMPTY;
  args.call.flags |= call.flags, args.call.window_left = call.window_left;
  arrays_ = {};
  arrays_.struct_size = sizeof arrays_;
  if (call.form == Form::kLists) {
    arrays_.chosen_keys = &lists_[call.list], arrays_.num_chosen = call.num_chosen;
    arrays_.chosen_keys_strides = {call.rows * call.num_chosen, call.num_chosen, MHA_BROADCAST};
    args.call.score_arrays = &arrays_;
    return;
  }
  sequences_.struct_size = sizeof sequences_;
  sequences_.kv_first_rows = &kv_first_rows_[call.entry];
  sequences_.kv_lengths = &kv_lengths_[call.entry];
  sequences_.q_first_positions = &q_first_positions_[call.entry];
  args.call.sequences = &sequences_;
  if (call.form == Form::kBias) {
    const auto stride = [](int64_t numbers) { return numbers ? numbers : MHA_BROADCAST; };
    arrays_.bias.data = row_of_mask(call.first), arrays_.bias.type = MHA_TYPE_F16;
    arrays_.bias.strides = {stride(mask_.stream_stride), mask_.row_stride,
                            stride(mask_.head_stride)};
    args.call.score_arrays = &arrays_;
  }
}

}  // namespace mha_ggml
