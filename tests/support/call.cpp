#include "support/call.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace support {

uint16_t BitsIn16(Storage type, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (type == Storage::kBf16) return static_cast<uint16_t>(bits >> 16);
  const uint32_t sign = bits >> 16 & 0x8000u, exponent = bits >> 23 & 0xff;
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(magnitude * 0x1p24f));
  return static_cast<uint16_t>(sign | (exponent == 0xff ? 0x7c00u : (exponent - 112) << 10) | (bits >> 13 & 0x3ffu));
}

float FloatOf(Storage type, uint16_t bits) {
  if (bits == 0xffffu) return Unwritten();
  if (type == Storage::kBf16) return FromBits(static_cast<uint32_t>(bits) << 16);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, rest = bits & 0x3ffu;
  if (exponent == 31) return FromBits(sign | 0x7f800000u | rest << 13);
  const float magnitude = exponent == 0 ? static_cast<float>(rest) * 0x1p-24f : FromBits((exponent + 112) << 23 | rest << 13);
  return sign != 0 ? -magnitude : magnitude;
}

CallData::~CallData() = default;
AttentionData::~AttentionData() = default;
ForwardData::~ForwardData() = default;

size_t CallData::WorkspaceBytes() const {
  size_t bytes = 0;
  mha_error error;
  Check(Workspace(&bytes, &error), error);
  return bytes;
}

Outputs CallData::Compute(int workspace_fill, Place place, size_t misalignment) {
  const size_t bytes = WorkspaceBytes();
  Memory workspace(bytes + misalignment, place);
  workspace.Fill(workspace_fill);
  PoisonOutputs();
  mha_error error;
  Check(Run(workspace.data() + misalignment, bytes, &error), error);
  return Results();
}

Outputs CallData::Results() const {
  for (size_t n = 0; n < narrow_output_.size() / sizeof(uint16_t); n++) {
    output.memory.floats()[n] = FloatOf(output_type_, reinterpret_cast<const uint16_t *>(narrow_output_.data())[n]);
  }
  if (!output.GapsAreUntouched()) throw std::runtime_error("the call wrote between the rows of its output");
  Outputs outputs;
  outputs.y = output.Get();
  for (const auto &[field, memory] : optional_) (outputs.*field).assign(memory.floats(), memory.floats() + memory.size() / sizeof(float));
  return outputs;
}

void CallData::PoisonOutputs() {
  output.memory.Fill(0xff);
  narrow_output_.Fill(0xff);
  for (auto &[field, memory] : optional_) memory.Fill(0xff);
}

bool CallData::OutputsAreUntouched() const {
  return output.memory.Holds(0xff) && narrow_output_.Holds(0xff) &&
         std::all_of(optional_.begin(), optional_.end(), [](const auto &optional) { return optional.second.Holds(0xff); });
}

void CallData::FreezeInputs() {
  for (Memory &input : inputs_) input.Freeze();
}

template <typename T>
void CallData::SetStrides(const AttentionSizes &sizes, const Pairs<T> &pairs, int64_t natural_columns, int64_t *batch, int64_t *head,
                          int64_t *row) {
  if (pairs.values.empty()) return;
  const int64_t columns = pairs.columns != 0 ? pairs.columns : sizes.n_kv, of_head = (pairs.by_row ? sizes.n_q : 1) * columns;
  const bool are_named = columns != natural_columns || sizes.n_q % 2 == 1;  // half of what is contiguous has strides of 0
  *row = !pairs.by_row ? MHA_BROADCAST : are_named ? columns : 0;
  *head = !pairs.by_head ? MHA_BROADCAST : are_named ? of_head : 0;
  *batch = !pairs.by_sequence ? MHA_BROADCAST : are_named ? (pairs.by_head ? pairs.heads_of(sizes.num_heads) : 1) * of_head : 0;
}

template <typename T>
void CallData::SetInput(const Layout &layout, int64_t batch, int64_t rows, int64_t heads, int64_t width, const std::vector<float> &x,
              const T **pointer, int64_t *batch_stride, int64_t *row_stride, int64_t *head_stride) {
  Strided input(layout, batch, rows, heads, width, place_);
  input.Set(x);
  *pointer = input.memory.floats();
  *batch_stride = input.batch_stride();
  *row_stride = input.row_stride();
  if (head_stride != nullptr) *head_stride = input.head_stride();
  inputs_.push_back(std::move(input.memory));
}

const void *CallData::Narrow(Storage type, const void *floats, uint32_t *type_field) {
  if (type == Storage::kF32) return floats;
  const Memory &wide = inputs_.back();
  std::vector<uint16_t> narrow(wide.size() / sizeof(float));
  std::transform(wide.floats(), wide.floats() + narrow.size(), narrow.begin(), [&](float x) { return BitsIn16(type, x); });
  *type_field = static_cast<uint32_t>(type);
  inputs_.push_back(CopyOf(narrow, place_));
  return inputs_.back().data();
}

template <typename Args>
void CallData::SetOutputType(Storage type, Args *args) {
  if (type == Storage::kF32) return;
  output_type_ = type;
  args->output_type = static_cast<uint32_t>(type);
  narrow_output_ = Memory(output.memory.size() / 2, place_);
  args->output = narrow_output_.data();
}

const int32_t *CallData::KeepInt32(const std::vector<int64_t> &values) { return Keep(std::vector<int32_t>(values.begin(), values.end())); }

template <typename Args>
void CallData::SetArgs(const AttentionSizes &sizes, const CallForm &call, Args *args) {
  *args = Zeroed<Args>();
  args->batch = ExtentOf(sizes.batch);
  args->n_q = ExtentOf(sizes.n_q);
  args->n_kv = ExtentOf(sizes.n_kv);
  args->flags = (sizes.is_causal ? MHA_CAUSAL : 0u) | (sizes.window_left ? MHA_WINDOW_LEFT : 0u) |
                (sizes.window_right ? MHA_WINDOW_RIGHT : 0u) | (sizes.padding_left ? MHA_PADDING_LEFT : 0u) |
                (call.cache.read ? MHA_CACHE_READ : 0u);
  args->window_left = sizes.window_left.value_or(0);
  args->window_right = sizes.window_right.value_or(0);
  args->q_start = q_start = Keep(sizes.q_start);
  args->q_lengths = Keep(sizes.q_lengths);
  args->kv_lengths = Keep(sizes.kv_lengths);
  args->kv_start = Keep(sizes.kv_start);
  if (sizes.rope) {
    rope.style = sizes.rope->is_interleaved ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALF;
    rope.dims = sizes.rope->use_defaults ? 0 : sizes.rope->dims;
    rope.offset = sizes.rope->offset;
    rope.num_positions = sizes.rope->num_positions;
    rope.cos = Keep(sizes.rope->cos);
    rope.sin = Keep(sizes.rope->sin);
    rope.table_stride = sizes.rope->use_defaults ? 0 : sizes.rope->table_stride;
    rope.q_positions = Keep(sizes.rope->q_positions);
    rope.k_positions = Keep(sizes.rope->k_positions);
    args->rope = &rope;
  }
  if (sizes.norm) {
    const NormArrays &from = *sizes.norm;
    norm.flags = (from.is_layer ? MHA_NORM_LAYER : 0u) | (from.is_of_all_heads ? MHA_NORM_ALL_HEADS : 0u) |
                 (from.is_after_rotation ? MHA_NORM_AFTER_ROPE : 0u) | (from.is_of_values ? MHA_NORM_VALUES : 0u);
    norm.epsilon = from.epsilon;
    norm.q_weight = Keep(from.q_weight);
    norm.k_weight = Keep(from.k_weight);
    norm.q_bias = Keep(from.q_bias);
    norm.k_bias = Keep(from.k_bias);
    norm.head_stride = from.use_defaults ? 0 : from.head_stride;
    args->norm = &norm;
  }
  if (sizes.context_norm) {
    const ContextNormArrays &from = *sizes.context_norm;
    norm.context_flags = (from.is_layer ? MHA_NORM_LAYER : 0u) | (from.is_of_all_heads ? MHA_NORM_ALL_HEADS : 0u) |
                         (from.is_after_gate ? MHA_NORM_AFTER_GATE : 0u);
    norm.context_epsilon = from.epsilon;
    norm.context_weight = Keep(from.weight);
    norm.context_bias = Keep(from.bias);
    norm.context_head_stride = from.use_defaults ? 0 : from.head_stride;
    args->norm = &norm;
  }
  if (sizes.score) {
    const ScoreArrays &from = *sizes.score;
    score.softcap = from.softcap;
    score.alibi_slopes = Keep(from.alibi_slopes);
    score.sinks = Keep(from.sinks);
    score.relative_bias = Keep(from.relative_bias);
    score.relative_rows = Keep(from.relative_rows.values);
    SetStrides(sizes, from.relative_rows, from.relative_left + 1 + from.relative_right, &score.relative_rows_batch_stride,
               &score.relative_rows_head_stride, &score.relative_rows_row_stride);
    score.relative_left = from.relative_left;
    score.relative_right = from.relative_right;
    score.chosen_keys = Keep(from.chosen.values);
    SetStrides(sizes, from.chosen, from.chosen.columns, &score.chosen_keys_batch_stride, &score.chosen_keys_head_stride,
               &score.chosen_keys_row_stride);
    score.num_chosen = from.chosen.columns;
    score.chosen_block = score.chosen_keys == nullptr || (from.chosen_block == 1 && sizes.n_q % 2 == 0) ? 0 : from.chosen_block;
    score.q_scales = Keep(from.q_scales);
    const bool scales_one = static_cast<int64_t>(from.q_scales.size()) <= sizes.n_q;  // sequence, for all
    score.q_scales_stride = from.q_scales.empty() ? 0 : scales_one ? MHA_BROADCAST : sizes.n_q % 2 == 1 ? sizes.n_q : 0;
    score.head_scales = Keep(from.head_scales);
    if (from.bias_is_f16) {
      std::vector<uint16_t> halves(from.bias.values.size());
      std::transform(from.bias.values.begin(), from.bias.values.end(), halves.begin(), [](float x) { return BitsIn16(Storage::kF16, x); });
      score.bias = Keep(halves);
      score.bias_type = MHA_TYPE_F16;
    } else {
      score.bias = Keep(from.bias.values);
    }
    score.mask = Keep(from.mask.values);
    const int64_t keys = call.cache.cache != nullptr ? call.cache.columns : sizes.n_kv;
    const int64_t natural = from.num_columns != 0 ? from.num_columns : keys;
    SetStrides(sizes, from.bias, natural, &score.bias_batch_stride, &score.bias_head_stride, &score.bias_row_stride);
    SetStrides(sizes, from.mask, natural, &score.mask_batch_stride, &score.mask_head_stride, &score.mask_row_stride);
    score.q_groups = KeepInt32(from.groups.of_queries);
    score.kv_groups = KeepInt32(from.groups.of_keys);
    score.groups = from.groups.add_keys ? MHA_GROUPS_ALSO : MHA_GROUPS_WITHIN;
    const int64_t columns = from.groups.columns != 0 ? from.groups.columns : sizes.n_kv;
    const bool are_named = columns != natural || sizes.n_q % 2 == 1;
    if (score.q_groups != nullptr) score.q_groups_stride = !from.groups.by_sequence ? MHA_BROADCAST : are_named ? sizes.n_q : 0;
    if (score.kv_groups != nullptr) score.kv_groups_stride = !from.groups.by_sequence ? MHA_BROADCAST : are_named ? columns : 0;
    score.num_columns = from.num_columns;
    args->score = &score;
  }
  args->cache = call.cache.cache;
  args->cache_sequences = Keep(call.cache.sequences);
  args->scheduler = call.scheduler;

  const int64_t rows = sizes.batch * sizes.n_q, kv_rows = sizes.batch * sizes.n_kv;
  const int64_t columns = call.cache.cache != nullptr ? call.cache.columns : sizes.n_kv, pairs = rows * sizes.num_heads * columns;
  const auto ask = [&](uint32_t bit, int64_t count, std::vector<float> Outputs::*field) -> float * {
    if ((call.asked & bit) == 0) return nullptr;
    Memory &memory = optional_.emplace_back(field, Memory(static_cast<size_t>(count) * sizeof(float), place_)).second;
    memory.Fill(0xff);
    return memory.floats();
  };
  taps.q = ask(kAskQ, rows * sizes.num_heads * sizes.head_dim, &Outputs::q);
  taps.k = ask(kAskK, kv_rows * sizes.num_kv_heads * sizes.head_dim, &Outputs::k);
  taps.v = ask(kAskV, kv_rows * sizes.num_kv_heads * sizes.head_dim_v, &Outputs::v);
  taps.scores = ask(kAskScores, pairs, &Outputs::scores);
  taps.scaled_scores = ask(kAskScaledScores, pairs, &Outputs::scaled_scores);
  taps.softcapped_scores = ask(kAskSoftcappedScores, pairs, &Outputs::softcapped_scores);
  taps.masked_scores = ask(kAskMaskedScores, pairs, &Outputs::masked_scores);
  taps.context = ask(kAskContext, rows * sizes.num_heads * sizes.head_dim_v, &Outputs::context);
  args->attention_weights = ask(kAskWeights, pairs, &Outputs::attention_weights);
  args->lse = ask(kAskLse, rows * sizes.num_heads, &Outputs::lse);
  if ((call.asked & ~(kAskWeights | kAskLse)) != 0) args->taps = &taps;
}

AttentionData::AttentionData(const AttentionProblem &problem, AttentionCall call) : CallData(call.place) {
  call.asked &= ~(kAskQ | kAskK | kAskV);
  SetArgs(problem, call, &args);
  args.num_heads = problem.num_heads;
  args.num_kv_heads = problem.num_kv_heads;
  args.head_dim = problem.head_dim;
  args.head_dim_v = problem.head_dim_v;
  args.scale = problem.scale;
  args.instruction_set = call.instruction_set;
  SetInput(call.q, problem.batch, problem.n_q, problem.num_heads, problem.head_dim, problem.q, &args.q, &args.q_batch_stride,
           &args.q_row_stride, &args.q_head_stride);
  args.q = Narrow(call.q_array, args.q, &args.q_type);
  if (!call.cache.read) {
    SetInput(call.k, problem.batch, problem.n_kv, problem.num_kv_heads, problem.head_dim, problem.k, &args.k, &args.k_batch_stride,
             &args.k_row_stride, &args.k_head_stride);
    args.k = Narrow(call.k_array, args.k, &args.k_type);
  }
  if (!call.cache.read && !problem.values_in_keys) {
    SetInput(call.v, problem.batch, problem.n_kv, problem.num_kv_heads, problem.head_dim_v, problem.v, &args.v, &args.v_batch_stride,
             &args.v_row_stride, &args.v_head_stride);
    args.v = Narrow(call.v_array, args.v, &args.v_type);
  }
  args.kv_position = problem.kv_position;
  output = Strided(call.output, problem.batch, problem.n_q, problem.num_heads, problem.head_dim_v, place_);
  args.output = output.memory.floats();
  args.output_batch_stride = output.batch_stride();
  args.output_row_stride = output.row_stride();
  args.output_head_stride = output.head_stride();
  SetOutputType(call.output_array, &args);
}

mha_status AttentionData::Workspace(size_t *bytes, mha_error *error) const { return mha_attention_workspace(&args, bytes, error); }

mha_status AttentionData::Run(void *workspace, size_t bytes, mha_error *error) const {
  return mha_attention(&args, workspace, bytes, error);
}

mha_status AttentionData::Info(mha_call_info *info, mha_error *error) const { return mha_attention_info(&args, info, error); }

ForwardData::ForwardData(const mha_layer *the_layer, const LayerProblem &problem, const LayerCall &call)
    : CallData(call.place), layer(the_layer) {
  SetArgs(problem, call, &args);
  SetInput(call.query, problem.batch, problem.n_q, 1, problem.query_dim, problem.query, &args.query, &args.query_batch_stride,
           &args.query_row_stride);
  args.query = Narrow(call.input_array, args.query, &args.input_type);
  if (problem.has_key) {
    SetInput(call.key, problem.batch, problem.n_kv, 1, problem.key_dim, problem.key, &args.key, &args.key_batch_stride,
             &args.key_row_stride);
    args.key = Narrow(call.input_array, args.key, &args.input_type);
  }
  if (problem.has_value) {
    SetInput(call.value, problem.batch, problem.n_kv, 1, problem.value_dim, problem.value, &args.value, &args.value_batch_stride,
             &args.value_row_stride);
    args.value = Narrow(call.input_array, args.value, &args.input_type);
  }
  if (!problem.has_key && !problem.has_value) {  // keys and values are those of the query
    args.n_kv = 0;
    args.kv_lengths = nullptr;
  }
  output = Strided(call.output, problem.batch, problem.n_q, 1, problem.y_width(), place_);
  args.output = output.memory.floats();
  args.output_batch_stride = output.batch_stride();
  args.output_row_stride = output.row_stride();
  SetOutputType(call.output_array, &args);
}

mha_status ForwardData::Workspace(size_t *bytes, mha_error *error) const { return mha_forward_workspace(layer, &args, bytes, error); }

mha_status ForwardData::Run(void *workspace, size_t bytes, mha_error *error) const {
  return mha_forward(layer, &args, workspace, bytes, error);
}

mha_status ForwardData::Info(mha_call_info *info, mha_error *error) const { return mha_info(layer, &args, info, error); }

Outputs Attend(const AttentionProblem &problem, const AttentionCall &call) {
  return AttentionData(problem, call).Compute(call.workspace_fill, call.place, call.workspace_misalignment);
}

Outputs Forward(const mha_layer *layer, const LayerProblem &problem, const LayerCall &call) {
  return ForwardData(layer, problem, call).Compute(call.workspace_fill, call.place, call.workspace_misalignment);
}

}  // namespace support
