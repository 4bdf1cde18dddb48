// Programs that were compiled with an older or a newer header: every struct states its size, and
// no byte after it is read.

#include "interface/calls.h"
#include "support/choice.h"
#include "support/recurrent.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Calls with a struct of every size from 0 to 8 bytes more than it has. Only struct_size bytes are
// accessible, up to the alignment, so that a read beyond them faults. This is the first version, so
// the least size is the struct as it is; a larger one comes from a newer program, and must be
// accepted as long as it uses nothing new. call: mha_status(const Struct *, mha_error *).
template <typename Struct, typename Call>
void ExpectStructSizeRule(const Struct &valid, uint32_t argument, const Call &call) {
  const Expected expected = {MHA_ERROR_STRUCT_SIZE, {argument}, {"struct_size"}};
  const auto place = [&](Memory &memory, size_t size) {
    memory.Fill(0);
    std::memcpy(memory.data(), &valid, std::min(sizeof valid, memory.size()));
    auto *placed = reinterpret_cast<Struct *>(memory.data());
    std::memcpy(memory.data(), &size, sizeof size);
    return placed;
  };
  for (size_t size = 0; size <= sizeof(Struct) + 8; ++size) {
    SCOPED_TRACE("struct_size " + std::to_string(size));
    Memory memory(std::max(size, sizeof size), Place::kBeforeGuard, alignof(Struct));
    const Struct *placed = place(memory, size);
    if (size < sizeof(Struct)) {
      ExpectFails([&](auto *error) { return call(placed, error); }, expected);
      continue;
    }
    ExpectSucceeds([&](auto *error) { return call(placed, error); });
    for (size_t byte = sizeof(Struct); byte < size; ++byte) {
      for (int bit : {0x01, 0x80}) {
        memory.data()[byte] = static_cast<unsigned char>(bit);
        ExpectFails([&](auto *error) { return call(placed, error); }, expected);
        memory.data()[byte] = 0;
      }
    }
  }
  // A size that was never set leads far outside the struct, so it is not followed.
  for (const size_t size : {size_t{65537}, SIZE_MAX}) {
    Memory memory(sizeof(Struct), Place::kBeforeGuard, alignof(Struct));
    const Struct *placed = place(memory, size);
    ExpectFails([&](auto *error) { return call(placed, error); }, expected);
  }
  // A tail longer than a few bytes is looked at to its end as well.
  Memory memory(sizeof(Struct) + 4096);
  const Struct *placed = place(memory, memory.size());
  ExpectSucceeds([&](auto *error) { return call(placed, error); });
  memory.data()[memory.size() - 1] = 1;
  ExpectFails([&](auto *error) { return call(placed, error); }, expected);
}

// ---- Structs that a function takes

// Calls one of the functions that make a layer.
constexpr int kMakers = 3;
mha_status MakeLayer(int function, const mha_layer_config *config, const mha_layer_weights *weights,
                     const mha_layer_options *options, mha_error *error) {
  static const Memory buffer(1 << 16, Place::kBeforeGuard, 64);
  size_t bytes;
  if (function == 0) return mha_layer_pack_size(config, weights, options, &bytes, error);
  if (function == 1)
    return mha_layer_pack(config, weights, options, buffer.data(), buffer.size(), error);
  mha_layer *layer = nullptr;
  const mha_status status = mha_layer_create(config, weights, options, &layer, error);
  EXPECT_EQ(layer == nullptr, status != MHA_OK);
  mha_layer_destroy(layer);
  return status;
}

TEST(StructSize, IsCheckedInStructsOfALayer) {
  const LayerData data{SmallLayer()};
  for (int f = 0; f < kMakers; f++) {
    SCOPED_TRACE(f);
    ExpectStructSizeRule(data.config, 1, [&](const mha_layer_config *config, mha_error *error) {
      return MakeLayer(f, config, &data.weights, nullptr, error);
    });
    ExpectStructSizeRule(data.weights, 2, [&](const mha_layer_weights *weights, mha_error *error) {
      return MakeLayer(f, &data.config, weights, nullptr, error);
    });
    ExpectStructSizeRule(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
      return MakeLayer(f, &data.config, &data.weights, options, error);
    });
  }
  const Memory packed = data.Pack(), storage(mha_layer_view_size());
  ExpectStructSizeRule(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
    const mha_layer *layer;
    return mha_layer_view(packed.data(), packed.size(), options, storage.data(), storage.size(),
                          &layer, error);
  });
}

// Runs the call with these arguments; it writes its outputs unless it fails.
template <typename Data, typename Run>
mha_status WritesUnlessItFails(Data *data, const Run &run) {
  data->PoisonOutputs();
  const mha_status status = run();
  EXPECT_EQ(data->OutputsAreUntouched(), status != MHA_OK);
  return status;
}

TEST(StructSize, IsCheckedInArgumentsOfACall) {
  size_t bytes;
  mha_call_info info = Zeroed<mha_call_info>();
  const Memory workspace(1 << 20);
  FullForward forward;
  const mha_layer *layer = forward.layer.get();
  ExpectStructSizeRule(forward.args, 2, [&](const mha_forward_args *args, mha_error *error) {
    return mha_forward_workspace(layer, args, &bytes, error);
  });
  ExpectStructSizeRule(forward.args, 2, [&](const mha_forward_args *args, mha_error *error) {
    return mha_forward_info(layer, args, &info, error);
  });
  ExpectStructSizeRule(forward.args, 2, [&](const mha_forward_args *args, mha_error *error) {
    return WritesUnlessItFails(&forward.data, [&] {
      return mha_forward(layer, args, workspace.data(), workspace.size(), error);
    });
  });
  FullAttention attention;
  ExpectStructSizeRule(attention.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    return mha_attention_workspace(args, &bytes, error);
  });
  ExpectStructSizeRule(attention.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    return mha_attention_info(args, &info, error);
  });
  ExpectStructSizeRule(attention.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    return WritesUnlessItFails(&attention.data, [&] {
      return mha_attention(args, workspace.data(), workspace.size(), error);
    });
  });
  ChoiceProblem problem;
  problem.n_kv = 20;
  static_cast<AttentionProblem &>(problem) = NormalAttention(problem);
  problem.weights = {1.0f};
  ChoiceData choice(problem);
  ExpectStructSizeRule(choice.choice, 1, [&](const mha_choose_keys_args *args, mha_error *error) {
    return mha_choose_keys_workspace(args, &bytes, error);
  });
  ExpectStructSizeRule(choice.choice, 1, [&](const mha_choose_keys_args *args, mha_error *error) {
    return WritesUnlessItFails(
        &choice, [&] { return mha_choose_keys(args, workspace.data(), workspace.size(), error); });
  });
  ExpectStructSizeRule(choice.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    choice.choice.attention = args;
    return mha_choose_keys_workspace(&choice.choice, &bytes, error);
  });
}

TEST(StructSize, IsCheckedInArgumentsOfCallsWithStates) {
  const Memory workspace(1 << 20);
  size_t bytes;
  mha_call_info info = Zeroed<mha_call_info>();
  Random random(1);
  const auto expect_rule = [&](auto *data) {
    using Args = std::decay_t<decltype(data->args)>;
    const auto run = [&](const Args *args, mha_error *error) {
      return data->Run(workspace.data(), workspace.size(), error, args);
    };
    ExpectStructSizeRule(data->args, 1, [&](const Args *args, mha_error *error) {
      return data->Workspace(&bytes, error, args);
    });
    ExpectStructSizeRule(data->args, 1, [&](const Args *args, mha_error *error) {
      return WritesUnlessItFails(data, [&] { return run(args, error); });
    });
    ExpectStructSizeRule(data->sequences, 1, [&](const mha_sequences *given, mha_error *error) {
      data->args.sequences = given;
      return run(&data->args, error);
    });
  };
  RecurrentData recurrent(MakeRecurrent(&random, 1, 2, 1, 1, 1, 3, 4, 1, true));
  ExpectStructSizeRule(recurrent.args, 1, [&](const mha_recurrent_args *args, mha_error *error) {
    return mha_recurrent_attention_info(args, &info, error);
  });
  expect_rule(&recurrent);
  ConvolutionData convolution(MakeConvolution(&random, 1, 2, 5, 3));
  expect_rule(&convolution);
}

TEST(StructSize, IsCheckedInRopeConfigAndStates) {
  float cos[1], sin[1];
  mha_rope_config config = Zeroed<mha_rope_config>();
  config.dims = 2;
  config.num_positions = 1;
  ExpectStructSizeRule(config, 1, [&](const mha_rope_config *given, mha_error *error) {
    return mha_rope_tables(given, cos, sin, error);
  });
  float states[6] = {}, lse[1];
  mha_partials_args args = Zeroed<mha_partials_args>();
  args.batch = args.num_heads = args.n_q = 1;
  args.head_dim_v = 4;
  args.partials = states;
  args.lse = lse;
  ExpectStructSizeRule(args, 1, mha_partials_finish);
}

// ---- Structs that the arguments point at

// Checks the call itself with mha_forward, and both size queries.
template <typename Struct>
void ExpectStructSizeRuleOfCalls(const Struct &valid, const Struct *mha_call::*field) {
  FullForward forward;
  FullAttention attention;
  const Memory workspace(1 << 20);
  size_t bytes;
  ExpectStructSizeRule(valid, 2, [&](const Struct *given, mha_error *error) {
    forward.args.call.*field = given;
    return mha_forward_workspace(forward.layer.get(), &forward.args, &bytes, error);
  });
  ExpectStructSizeRule(valid, 2, [&](const Struct *given, mha_error *error) {
    forward.args.call.*field = given;
    return WritesUnlessItFails(&forward.data, [&] {
      return mha_forward(forward.layer.get(), &forward.args, workspace.data(), workspace.size(),
                         error);
    });
  });
  ExpectStructSizeRule(valid, 1, [&](const Struct *given, mha_error *error) {
    attention.args.call.*field = given;
    return mha_attention_workspace(&attention.args, &bytes, error);
  });
}

TEST(StructSize, IsCheckedInStructsThatArgumentsPointAt) {
  const float numbers[8] = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
  const int64_t positions[2] = {1, 2};
  const FullForward forward;
  mha_outputs outputs = forward.data.outputs;
  outputs.q = outputs.k = outputs.v = nullptr;  // which mha_attention does not have
  ExpectStructSizeRuleOfCalls(outputs, &mha_call::outputs);
  mha_sequences sequences = Zeroed<mha_sequences>();
  sequences.q_first_positions = positions;
  ExpectStructSizeRuleOfCalls(sequences, &mha_call::sequences);
  mha_score_options options = Zeroed<mha_score_options>();
  options.softcap = 3;
  ExpectStructSizeRuleOfCalls(options, &mha_call::score);
  mha_score_arrays arrays = Zeroed<mha_score_arrays>();
  arrays.q_scales = numbers;
  ExpectStructSizeRuleOfCalls(arrays, &mha_call::score_arrays);
  mha_norm norm = Zeroed<mha_norm>();
  norm.epsilon = 1;
  ExpectStructSizeRuleOfCalls(norm, &mha_call::norm);
  mha_rope rope = Zeroed<mha_rope>();
  rope.dims = 2;
  rope.num_positions = 8;
  rope.cos = rope.sin = numbers;
  ExpectStructSizeRuleOfCalls(rope, &mha_call::rope);
}

// ---- Structs that a function fills

// A function that fills a struct refuses one that is smaller than its first version and leaves it
// alone. Otherwise it fills exactly struct_size bytes, whatever they held before, and zeroes what a
// later version has beyond this one.
template <typename Struct, typename Call>
void ExpectFilledStructSizeRule(uint32_t argument, size_t first_bytes, const Call &call) {
  Struct filled = {};
  filled.struct_size = sizeof filled;
  ExpectSucceeds([&](auto *error) { return call(&filled, error); });
  const std::string whole(reinterpret_cast<const char *>(&filled), sizeof filled);
  for (size_t size = 0; size <= sizeof(Struct) + 24; ++size) {
    SCOPED_TRACE("struct_size " + std::to_string(size));
    Memory memory(std::max(size, sizeof size), Place::kBeforeGuard, alignof(Struct));
    memory.Fill(0x5A);
    std::memcpy(memory.data(), &size, sizeof size);
    const std::string before = memory.Bytes();
    auto *placed = reinterpret_cast<Struct *>(memory.data());
    if (size < first_bytes) {
      ExpectFails([&](auto *error) { return call(placed, error); },
                  {MHA_ERROR_STRUCT_SIZE, {argument}, {"struct_size"}});
      EXPECT_EQ(memory.Bytes(), before);
    } else {
      ExpectSucceeds([&](auto *error) { return call(placed, error); });
      EXPECT_EQ(placed->struct_size, size);
      std::string expected = whole;
      expected.resize(size);  // with zeros
      EXPECT_EQ(memory.Bytes().substr(sizeof size), expected.substr(sizeof size));
    }
  }
}

// These are the last fields of the first versions.
TEST(StructSize, IsCheckedInStructsThatAreFilled) {
  FullForward forward;
  FullAttention attention;
  constexpr size_t first_config = offsetof(mha_layer_config, gate_dim) + sizeof(int64_t),
                   first_info = offsetof(mha_call_info, bytes) + sizeof(uint64_t),
                   first_cache_config = offsetof(mha_kv_cache_config, num_blocks) + sizeof(int64_t);
  ExpectFilledStructSizeRule<mha_layer_config>(
      2, first_config, [&](mha_layer_config *config, mha_error *error) {
        return mha_layer_shape(forward.layer.get(), config, error);
      });
  ExpectFilledStructSizeRule<mha_call_info>(
      3, first_info, [&](mha_call_info *info, mha_error *error) {
        return mha_forward_info(forward.layer.get(), &forward.args, info, error);
      });
  ExpectFilledStructSizeRule<mha_call_info>(
      2, first_info, [&](mha_call_info *info, mha_error *error) {
        return mha_attention_info(&attention.args, info, error);
      });
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = config.num_kv_heads = config.head_dim = 1;
  config.capacity = 16;
  Memory buffer(4096, Place::kAfterGuard);
  mha_kv_cache *cache = nullptr;
  ASSERT_EQ(mha_kv_cache_init(&config, buffer.data(), buffer.size(), &cache, nullptr), MHA_OK);
  ExpectFilledStructSizeRule<mha_kv_cache_config>(
      2, first_cache_config, [&](mha_kv_cache_config *shape, mha_error *error) {
        return mha_kv_cache_shape(cache, shape, error);
      });
}

}  // namespace
