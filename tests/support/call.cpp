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
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(magnitude * 0x1p24f));
  return static_cast<uint16_t>(sign | (exponent == 0xff ? 0x7c00u : (exponent - 112) << 10) |
                               (bits >> 13 & 0x3ffu));
}

float FloatOf(Storage type, uint16_t bits) {
  if (bits == 0xffffu) return Unwritten();
  if (type == Storage::kBf16) return FromBits(static_cast<uint32_t>(bits) << 16);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u,
                 rest = bits & 0x3ffu;
  if (exponent == 31) return FromBits(sign | 0x7f800000u | rest << 13);
  const float magnitude = exponent == 0 ? static_cast<float>(rest) * 0x1p-24f
                                        : FromBits((exponent + 112) << 23 | rest << 13);
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
    output.memory.floats()[n] =
        FloatOf(output_type_, reinterpret_cast<const uint16_t *>(narrow_output_.data())[n]);
  }
  if (!output.GapsAreUntouched())
    throw std::runtime_error("the call wrote between the rows of its output");
  Outputs outputs;
  outputs.y = output.Get();
  for (const auto &[field, memory] : optional_)
    (outputs.*field).assign(memory.floats(), memory.floats() + memory.size() / sizeof(float));
  return outputs;
}

void CallData::PoisonOutputs() {
  output.memory.Fill(0xff);
  narrow_output_.Fill(0xff);
  for (auto &[field, memory] : optional_) memory.Fill(0xff);
}

bool CallData::OutputsAreUntouched() const {
  return output.memory.Holds(0xff) && narrow_output_.Holds(0xff) &&
         std::all_of(optional_.begin(), optional_.end(),
                     [](const auto &optional) { return optional.second.Holds(0xff); });
}

void CallData::FreezeInputs() {
  for (Memory &input : inputs_) input.Freeze();
}

template <typename T>
mha_strides CallData::StridesOf(const AttentionSizes &sizes, const Pairs<T> &pairs,
                                int64_t natural_columns) const {
  if (pairs.values.empty()) return {};
  const int64_t columns = pairs.columns != 0 ? pairs.columns : sizes.n_kv,
                of_head = (pairs.by_row ? sizes.n_q : 1) * columns;
  const bool are_named = columns != natural_columns || writes_defaults_;
  mha_strides strides = {};
  strides.row = !pairs.by_row ? MHA_BROADCAST : are_named ? columns : 0;
  strides.head = !pairs.by_head ? MHA_BROADCAST : are_named ? of_head : 0;
  strides.batch = !pairs.by_sequence ? MHA_BROADCAST
                  : are_named ? (pairs.by_head ? pairs.heads_of(sizes.num_heads) : 1) * of_head
                              : 0;
  return strides;
}

uint32_t CallData::TypeField(Storage type, Storage by_default) const {
  return type == by_default && !writes_defaults_ ? 0 : static_cast<uint32_t>(type);
}

void CallData::SetInput(const Layout &layout, Storage type, Storage type_by_default, int64_t batch,
                        int64_t rows, int64_t heads, int64_t width, const std::vector<float> &x,
                        mha_input *input, bool has_heads) {
  Strided strided(layout, batch, rows, heads, width, place_);
  strided.Set(x);
  input->type = TypeField(type, type_by_default);
  input->strides = {strided.batch_stride(), strided.row_stride(),
                    has_heads ? strided.head_stride() : 0};
  inputs_.push_back(std::move(strided.memory));
  if (type != Storage::kF32) {
    const Memory &wide = inputs_.back();
    std::vector<uint16_t> narrow(wide.size() / sizeof(float));
    std::transform(wide.floats(), wide.floats() + narrow.size(), narrow.begin(),
                   [&](float number) { return BitsIn16(type, number); });
    inputs_.push_back(CopyOf(narrow, place_));
  }
  input->data = inputs_.back().data();
}

void CallData::SetOutput(const Layout &layout, Storage type, int64_t batch, int64_t rows,
                         int64_t heads, int64_t width, mha_output *args_output, bool has_heads) {
  output = Strided(layout, batch, rows, heads, width, place_);
  args_output->data = output.memory.data();
  args_output->type = TypeField(type, Storage::kF32);
  args_output->strides = {output.batch_stride(), output.row_stride(),
                          has_heads ? output.head_stride() : 0};
  if (type == Storage::kF32) return;
  output_type_ = type;
  narrow_output_ = Memory(output.memory.size() / 2, place_);
  args_output->data = narrow_output_.data();
}

const int32_t *CallData::KeepInt32(const std::vector<int64_t> &values) {
  return Keep(std::vector<int32_t>(values.begin(), values.end()));
}

template <typename Args>
void CallData::SetArgs(const AttentionSizes &sizes, const CallForm &call, Args *args) {
  *args = Zeroed<Args>();
  writes_defaults_ = sizes.n_q % 2 == 1;  // half of all calls
  args->call.batch = ExtentOf(sizes.batch);
  args->call.n_q = ExtentOf(sizes.n_q);
  args->call.n_kv = ExtentOf(sizes.n_kv);
  args->call.flags = (sizes.is_causal ? MHA_CAUSAL : 0u) |
                     (sizes.window_left ? MHA_WINDOW_LEFT : 0u) |
                     (sizes.window_right ? MHA_WINDOW_RIGHT : 0u) |
                     (sizes.has_equal_scores ? MHA_EQUAL_SCORES : 0u);
  if (sizes.is_in_integers) args->call.attention_arithmetic = MHA_ARITHMETIC_INT16;
  args->call.window_left = sizes.window_left.value_or(0);
  args->call.window_right = sizes.window_right.value_or(0);
  sequences.q_first_positions = q_start = Keep(sizes.q_start);
  sequences.q_lengths = Keep(sizes.q_lengths);
  sequences.kv_lengths = Keep(sizes.kv_lengths);
  sequences.q_first_rows = Keep(sizes.q_first);
  sequences.kv_first_rows = Keep(sizes.kv_start);
  sequences.cache_sequences = Keep(call.cache.sequences);
  args->call.sequences = &sequences;
  if (sizes.rope) {
    rope.style = sizes.rope->is_interleaved ? MHA_ROPE_INTERLEAVED : MHA_ROPE_HALF;
    rope.dims = sizes.rope->use_defaults ? 0 : sizes.rope->dims;
    rope.offset = sizes.rope->offset;
    rope.num_positions = sizes.rope->num_positions;
    rope.cos = Keep(sizes.rope->cos);
    rope.sin = Keep(sizes.rope->sin);
    rope.table_stride = sizes.rope->use_defaults ? 0 : sizes.rope->table_stride;
    sequences.rope_q_positions = Keep(sizes.rope->q_positions);
    sequences.rope_k_positions = Keep(sizes.rope->k_positions);
    args->call.rope = &rope;
  }
  if (sizes.norm) {
    const NormArrays &from = *sizes.norm;
    norm.flags = (from.is_layer ? MHA_NORM_LAYER : 0u) |
                 (from.is_of_all_heads ? MHA_NORM_ALL_HEADS : 0u) |
                 (from.is_after_rotation ? MHA_NORM_AFTER_ROPE : 0u) |
                 (from.is_of_values ? MHA_NORM_VALUES : 0u);
    norm.epsilon = from.epsilon;
    norm.q_weight = Keep(from.q_weight);
    norm.k_weight = Keep(from.k_weight);
    norm.q_bias = Keep(from.q_bias);
    norm.k_bias = Keep(from.k_bias);
    norm.head_stride = from.use_defaults ? 0 : from.head_stride;
    args->call.norm = &norm;
  }
  if (sizes.context_norm) {
    const ContextNormArrays &from = *sizes.context_norm;
    norm.context_flags = (from.is_layer ? MHA_NORM_LAYER : 0u) |
                         (from.is_of_all_heads ? MHA_NORM_ALL_HEADS : 0u) |
                         (from.is_after_gate ? MHA_NORM_AFTER_GATE : 0u);
    norm.context_epsilon = from.epsilon;
    norm.context_weight = Keep(from.weight);
    norm.context_bias = Keep(from.bias);
    norm.context_head_stride = from.use_defaults ? 0 : from.head_stride;
    args->call.norm = &norm;
  }
  if (sizes.score) {
    const ScoreArrays &from = *sizes.score;
    score.softcap = from.softcap;
#define MHA_KEEP(name, ...) score.name = Keep(from.name);
    MHA_EACH_HEAD_ARRAY(MHA_KEEP)
    score.relative_bias = Keep(from.relative_bias);
    score.relative_left = from.relative_left;
    score.relative_right = from.relative_right;
    args->call.score = &score;
    score_arrays.relative_rows = Keep(from.relative_rows.values);
    score_arrays.relative_rows_strides =
        StridesOf(sizes, from.relative_rows, from.relative_left + 1 + from.relative_right);
    score_arrays.chosen_keys = Keep(from.chosen.values);
    score_arrays.chosen_keys_strides = StridesOf(sizes, from.chosen, from.chosen.columns);
    score_arrays.num_chosen = from.chosen.columns;
    const bool is_one_key =
        score_arrays.chosen_keys == nullptr || (from.chosen_block == 1 && !writes_defaults_);
    score_arrays.chosen_block = is_one_key ? 0 : from.chosen_block;
    score_arrays.q_scales = Keep(from.q_scales);
    if (from.bias_is_f16) {
      std::vector<uint16_t> halves(from.bias.values.size());
      std::transform(from.bias.values.begin(), from.bias.values.end(), halves.begin(),
                     [](float x) { return BitsIn16(Storage::kF16, x); });
      score_arrays.bias.data = Keep(halves);
    } else {
      score_arrays.bias.data = Keep(from.bias.values);
    }
    if (score_arrays.bias.data != nullptr) {
      score_arrays.bias.type =
          TypeField(from.bias_is_f16 ? Storage::kF16 : Storage::kF32, Storage::kF32);
    }
    score_arrays.mask = Keep(from.mask.values);
    const int64_t keys = call.cache.cache != nullptr ? call.cache.columns : sizes.n_kv;
    const int64_t natural = from.num_columns != 0 ? from.num_columns : keys;
    score_arrays.bias.strides = StridesOf(sizes, from.bias, natural);
    score_arrays.mask_strides = StridesOf(sizes, from.mask, natural);
    score_arrays.q_segments = KeepInt32(from.segments.of_queries);
    score_arrays.kv_segments = KeepInt32(from.segments.of_keys);
    score_arrays.segments = from.segments.add_keys ? MHA_SEGMENTS_ALSO : MHA_SEGMENTS_WITHIN;
    score_arrays.num_columns = from.num_columns;
    args->call.score_arrays = &score_arrays;
  }
  if (call.cache.read) {
    args->call.cache_read = call.cache.cache;
  } else {
    args->call.cache = call.cache.cache;
  }
  args->call.scheduler = call.scheduler;

  const int64_t rows = sizes.batch * sizes.n_q, kv_rows = sizes.batch * sizes.n_kv;
  const int64_t columns = call.cache.cache != nullptr ? call.cache.columns : sizes.n_kv,
                pairs = rows * sizes.num_heads * columns;
  const auto ask = [&](uint32_t bit, int64_t count, std::vector<float> Outputs::*field) -> float * {
    if ((call.asked & bit) == 0) return nullptr;
    Memory &memory =
        optional_.emplace_back(field, Memory(static_cast<size_t>(count) * sizeof(float), place_))
            .second;
    memory.Fill(0xff);
    return memory.floats();
  };
  outputs.q = ask(kAskQ, rows * sizes.num_heads * sizes.head_dim, &Outputs::q);
  outputs.k = ask(kAskK, kv_rows * sizes.num_kv_heads * sizes.head_dim, &Outputs::k);
  outputs.v = ask(kAskV, kv_rows * sizes.num_kv_heads * sizes.head_dim_v, &Outputs::v);
  outputs.scores = ask(kAskScores, pairs, &Outputs::scores);
  outputs.scaled_scores = ask(kAskScaledScores, pairs, &Outputs::scaled_scores);
  outputs.softcapped_scores = ask(kAskSoftcappedScores, pairs, &Outputs::softcapped_scores);
  outputs.masked_scores = ask(kAskMaskedScores, pairs, &Outputs::masked_scores);
  outputs.context = ask(kAskContext, rows * sizes.num_heads * sizes.head_dim_v, &Outputs::context);
  outputs.attention_weights = ask(kAskWeights, pairs, &Outputs::attention_weights);
  outputs.lse = ask(kAskLse, rows * sizes.num_heads, &Outputs::lse);
  args->call.outputs = &outputs;
}

AttentionData::AttentionData(const AttentionProblem &problem, AttentionCall call)
    : CallData(call.place) {
  call.asked &= ~(kAskQ | kAskK | kAskV);
  SetArgs(problem, call, &args);
  args.num_heads = problem.num_heads;
  args.num_kv_heads = problem.num_kv_heads;
  args.head_dim = problem.head_dim;
  args.head_dim_v = problem.head_dim_v;
  args.scale = problem.scale;
  args.instruction_set = call.instruction_set;
  SetInput(call.q, call.q_array, Storage::kF32, problem.batch, problem.n_q, problem.num_heads,
           problem.head_dim, problem.q, &args.q);
  if (!call.cache.read) {
    SetInput(call.k, call.k_array, call.q_array, problem.batch, problem.n_kv, problem.num_kv_heads,
             problem.head_dim, problem.k, &args.k);
  }
  if (!call.cache.read && !problem.values_in_keys) {
    SetInput(call.v, call.v_array, call.k_array, problem.batch, problem.n_kv, problem.num_kv_heads,
             problem.head_dim_v, problem.v, &args.v);
  }
  args.kv_first_position = problem.kv_position;
  SetOutput(call.output, call.output_array, problem.batch, problem.n_q, problem.num_heads,
            problem.head_dim_v, &args.output);
}

mha_status AttentionData::Workspace(size_t *bytes, mha_error *error) const {
  const mha_attention_args given = Given(args);
  return mha_attention_workspace(&given, bytes, error);
}

mha_status AttentionData::Run(void *workspace, size_t bytes, mha_error *error) const {
  const mha_attention_args given = Given(args);
  return mha_attention(&given, workspace, bytes, error);
}

mha_status AttentionData::Info(mha_call_info *info, mha_error *error) const {
  const mha_attention_args given = Given(args);
  return mha_attention_info(&given, info, error);
}

ForwardData::ForwardData(const mha_layer *the_layer, const LayerProblem &problem,
                         const LayerCall &call)
    : CallData(call.place), layer(the_layer) {
  SetArgs(problem, call, &args);
  SetInput(call.query, call.input_array, Storage::kF32, problem.batch, problem.n_q, 1,
           problem.query_dim, problem.query, &args.query, false);
  if (problem.has_key) {
    SetInput(call.key, call.input_array, call.input_array, problem.batch, problem.n_kv, 1,
             problem.key_dim, problem.key, &args.key, false);
  }
  if (problem.has_value) {
    SetInput(call.value, call.input_array, call.input_array, problem.batch, problem.n_kv, 1,
             problem.value_dim, problem.value, &args.value, false);
  }
  const bool is_self = !problem.has_key && !call.cache.read;  // the keys are the rows of query
  if (is_self) sequences.kv_lengths = sequences.kv_first_rows = nullptr;
  if (is_self && !problem.has_value) args.call.n_kv = 0;
  SetOutput(call.output, call.output_array, problem.batch, problem.n_q, 1, problem.y_width(),
            &args.output, false);
}

mha_status ForwardData::Workspace(size_t *bytes, mha_error *error) const {
  const mha_forward_args given = Given(args);
  return mha_forward_workspace(layer, &given, bytes, error);
}

mha_status ForwardData::Run(void *workspace, size_t bytes, mha_error *error) const {
  const mha_forward_args given = Given(args);
  return mha_forward(layer, &given, workspace, bytes, error);
}

mha_status ForwardData::Info(mha_call_info *info, mha_error *error) const {
  const mha_forward_args given = Given(args);
  return mha_forward_info(layer, &given, info, error);
}

Outputs Attend(const AttentionProblem &problem, const AttentionCall &call) {
  return AttentionData(problem, call)
      .Compute(call.workspace_fill, call.place, call.workspace_misalignment);
}

Outputs Forward(const mha_layer *layer, const LayerProblem &problem, const LayerCall &call) {
  return ForwardData(layer, problem, call)
      .Compute(call.workspace_fill, call.place, call.workspace_misalignment);
}

}  // namespace support
