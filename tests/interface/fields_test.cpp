// Every field of every struct is given what its comment in the header excludes, and struct_size all
// sizes: programs may have been compiled with an older or a newer header.

#include <cfloat>
#include <map>
#include <set>
#include <typeindex>

#include "interface/calls.h"
#include "support/choice.h"
#include "support/recurrent.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// ---- What fields must not be

struct WrongValue {
  std::string bytes;
  std::vector<std::string> words;  // of which the message says one after the field's name
  mha_status status = kInvalid;
};
struct Field {
  std::string name;
  size_t offset;
  std::vector<WrongValue> wrong;
  std::type_index part = typeid(void);  // of a struct inside; its fields' names follow `name`
};
using Fields = std::vector<Field>;

template <typename T>
WrongValue Wrongly(T value, mha_status status = kInvalid) {
  std::vector<std::string> words;
  for (const char *format : {" is %g", " is %.15g"}) {
    char number[64];
    std::snprintf(number, sizeof number, format, static_cast<double>(value));
    words.push_back(number);
  }
  if constexpr (std::is_integral_v<T>) words[0] = " is " + std::to_string(value);
  return {std::string(reinterpret_cast<const char *>(&value), sizeof value), words, status};
}

template <typename T>
using Bound = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
template <typename T>
std::vector<WrongValue> OutOfRange(Bound<T> least, Bound<T> most,
                                   mha_status status_above = kInvalid) {
  std::vector<T> below, above;
  if constexpr (std::is_integral_v<T>) {
    below = {static_cast<T>(least - 1)};
    if (std::is_signed_v<T>)
      below.insert(below.end(), {static_cast<T>(-1), static_cast<T>(kMin + 1)});
    if (most < std::numeric_limits<T>::max())
      above = {static_cast<T>(most + 1), static_cast<T>(kMax)};
  } else {
    below = {kNan, -kInfinity};
    above = {kInfinity};
    if (least >= 0) below.insert(below.end(), {T{-1}, static_cast<T>(least > 0 ? least / 2 : -1)});
    if (most < FLT_MAX) above.push_back(static_cast<T>(most * 2));
  }
  std::vector<WrongValue> wrong;
  for (const T value : below) wrong.push_back(Wrongly(value));
  for (const T value : above) wrong.push_back(Wrongly(value, status_above));
  return wrong;
}

std::vector<WrongValue> OtherFlags(uint32_t known) {
  std::vector<WrongValue> wrong;
  for (int bit = 0; bit < 32; bit++) {
    WrongValue flag = Wrongly(uint32_t{1} << bit);
    char words[64];
    std::snprintf(words, sizeof words, " has the unknown bits 0x%x", 1u << bit);
    flag.words = {words};
    if ((known >> bit & 1) == 0) wrong.push_back(flag);
  }
  return wrong;
}

// Small numbers and the constants of other fields.
std::vector<WrongValue> OtherChoices(std::vector<uint32_t> numbers,
                                     const std::vector<uint32_t> &known) {
  for (uint32_t number = 0; number <= 32; number++) numbers.push_back(number);
  std::vector<WrongValue> wrong;
  for (const uint32_t number : numbers) {
    if (std::count(known.begin(), known.end(), number) == 0) wrong.push_back(Wrongly(number));
  }
  return wrong;
}

// By the type of the struct.
std::map<std::type_index, Fields> ReadTable() {
  std::map<std::type_index, Fields> fields;
#define TYPE(S, field) decltype(std::declval<S>().field)
#define WRONG_VALUES(S, field, ...) \
  fields[typeid(S)].push_back({#field, offsetof(S, field), __VA_ARGS__})
#define CONSTANTS(...) const std::vector<uint32_t> constants = {__VA_ARGS__, UINT32_MAX};
#define RANGE(S, field, least, most) \
  WRONG_VALUES(S, field, OutOfRange<TYPE(S, field)>(least, most));
#define SIZE(S, field, least) \
  WRONG_VALUES(S, field, OutOfRange<TYPE(S, field)>(least, INT32_MAX, kTooLarge));
#define EVEN(S, field) WRONG_VALUES(S, field, {Wrongly<int64_t>(3)});
#define FLAGS(S, field, known) WRONG_VALUES(S, field, OtherFlags(known));
#define CHOICE(S, field, ...) WRONG_VALUES(S, field, OtherChoices(constants, {__VA_ARGS__}));
#define RESERVED(S, field) WRONG_VALUES(S, field, {{std::string(sizeof(TYPE(S, field)), 1), {""}}});
#define NEEDED(S, field) WRONG_VALUES(S, field, {{std::string(sizeof(void *), 0), {""}, kNull}});
#define STRUCT(S) fields[typeid(S)];
#define PART(S, field, name, type) \
  fields[typeid(S)].push_back({name, offsetof(S, field), {}, typeid(type)});
#include "wrong_values.inc"
  return fields;
}

std::set<std::type_index> seen;
Fields FieldsOf(std::type_index type) {
  static const std::map<std::type_index, Fields> table = ReadTable();
  seen.insert(type);
  Fields all;
  for (const Field &field : table.at(type)) {
    if (field.part == typeid(void)) all.push_back(field);
    if (field.part == typeid(void)) continue;
    for (Field inner : FieldsOf(field.part)) {
      inner.name = field.name + inner.name;
      inner.offset += field.offset;
      all.push_back(inner);
    }
  }
  return all;
}

// Calls with each wrong value in turn. prefix: of the field's name in messages. Only calls that
// read arrays need them. call: mha_status(const Struct *, mha_error *).
template <typename Struct, typename Call>
void ExpectWrongValuesRefused(const Struct &valid, uint32_t argument, const std::string &prefix,
                              bool reads_arrays, const Call &call) {
  for (const Field &field : FieldsOf(typeid(Struct))) {
    for (const WrongValue &wrong : field.wrong) {
      if (wrong.status == kNull && !reads_arrays) continue;
      std::string words;
      for (const std::string &said : wrong.words)
        words += (words.empty() ? "" : "|") + prefix + field.name + said;
      SCOPED_TRACE(words);
      Struct given = valid;
      std::memcpy(reinterpret_cast<char *>(&given) + field.offset, wrong.bytes.data(),
                  wrong.bytes.size());
      ExpectFails([&](auto *error) { return call(&given, error); },
                  {wrong.status, {argument}, Words({words})});
    }
  }
}

// ---- struct_size

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
  for (const size_t size : {size_t{65537}, size_t{SIZE_MAX}}) {
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

template <typename Struct, typename Call>
void ExpectRules(const Struct &valid, uint32_t argument, const Call &call,
                 const std::string &prefix = "", bool reads_arrays = true) {
  SCOPED_TRACE(typeid(Struct).name());
  if constexpr (!std::is_same_v<Struct, mha_scheduler>) ExpectStructSizeRule(valid, argument, call);
  ExpectWrongValuesRefused(valid, argument, prefix, reads_arrays, call);
}

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

void ExpectRulesOfALayer() {
  const LayerData data{SmallLayer()};
  for (int f = 0; f < kMakers; f++) {
    SCOPED_TRACE(f);
    ExpectRules(data.config, 1, [&](const mha_layer_config *config, mha_error *error) {
      return MakeLayer(f, config, &data.weights, nullptr, error);
    });
    ExpectRules(data.weights, 2, [&](const mha_layer_weights *weights, mha_error *error) {
      return MakeLayer(f, &data.config, weights, nullptr, error);
    });
    ExpectRules(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
      return MakeLayer(f, &data.config, &data.weights, options, error);
    });
  }
  const Memory packed = data.Pack(), storage(mha_layer_view_size());
  ExpectRules(Options(), 3, [&](const mha_layer_options *options, mha_error *error) {
    const mha_layer *layer;
    return mha_layer_view(packed.data(), packed.size(), options, storage.data(), storage.size(),
                          &layer, error);
  });
  const Memory buffer(1 << 16, Place::kBeforeGuard, 64);
  const mha_linear_weights linear = LinearOf(data.config, data.weights);
  ExpectRules(linear, 1, [&](const mha_linear_weights *weights, mha_error *error) {
    return mha_linear_pack(weights, nullptr, buffer.data(), buffer.size(), error);
  });
}

void ExpectRulesOfACache() {
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = config.num_kv_heads = config.head_dim = 1;
  config.capacity = 16;
  const Memory buffer(4096, Place::kAfterGuard);
  size_t bytes;
  ExpectRules(config, 1, [&](const mha_kv_cache_config *given, mha_error *error) {
    return mha_kv_cache_size(given, &bytes, error);
  });
  ExpectRules(config, 1, [&](const mha_kv_cache_config *given, mha_error *error) {
    mha_kv_cache *cache;
    return mha_kv_cache_init(given, buffer.data(), buffer.size(), &cache, error);
  });
  config.kind = MHA_CACHE_KIND_POOL;
  config.block_positions = 16;
  config.num_blocks = 1;
  mha_kv_pool pool = Zeroed<mha_kv_pool>();
  pool.k = buffer.data();
  pool.v = buffer.data() + 2048;
  ExpectRules(pool, 2, [&](const mha_kv_pool *given, mha_error *error) {
    mha_kv_cache *cache;
    alignas(64) unsigned char header[256];
    return mha_kv_pool_init(&config, given, header, sizeof header, &cache, error);
  });
}

// Runs the call, which writes its outputs unless it fails.
template <typename Data, typename Run>
mha_status WritesUnlessItFails(Data *data, const Run &run) {
  data->PoisonOutputs();
  const mha_status status = run();
  EXPECT_EQ(data->OutputsAreUntouched(), status != MHA_OK);
  return status;
}

// visit(reads_arrays, function) for each function that takes the arguments of a call.
template <typename Visit>
void ForEachFunction(FullForward *call, const Visit &visit) {
  using Args = mha_forward_args;
  const mha_layer *layer = call->layer.get();
  const Memory workspace(1 << 20);
  size_t bytes;
  mha_call_info info = Zeroed<mha_call_info>();
  visit(false, [&](const Args *args, mha_error *error) {
    return mha_forward_workspace(layer, args, &bytes, error);
  });
  visit(false, [&](const Args *args, mha_error *error) {
    return mha_forward_info(layer, args, &info, error);
  });
  visit(true, [&](const Args *args, mha_error *error) {
    return WritesUnlessItFails(&call->data, [&] {
      return mha_forward(layer, args, workspace.data(), workspace.size(), error);
    });
  });
}
template <typename Visit>
void ForEachFunction(FullAttention *call, const Visit &visit) {
  using Args = mha_attention_args;
  const Memory workspace(1 << 20);
  size_t bytes;
  mha_call_info info = Zeroed<mha_call_info>();
  visit(false, [&](const Args *args, mha_error *error) {
    return mha_attention_workspace(args, &bytes, error);
  });
  visit(false,
        [&](const Args *args, mha_error *error) { return mha_attention_info(args, &info, error); });
  visit(true, [&](const Args *args, mha_error *error) {
    return WritesUnlessItFails(&call->data, [&] {
      return mha_attention(args, workspace.data(), workspace.size(), error);
    });
  });
}

// The same of a struct that `field` of the arguments points at.
template <typename Call, typename Struct>
void ExpectRulesOf(Call *call, const Struct &valid, const std::string &prefix,
                   const Struct **field) {
  const Struct *const before = *field;
  ForEachFunction(call, [&](bool reads_arrays, const auto &function) {
    ExpectRules(
        valid, kArgs<Call>,
        [&](const Struct *given, mha_error *error) {
          *field = given;
          return function(&call->args, error);
        },
        prefix, reads_arrays);
  });
  *field = before;
}

template <typename Call>
void ExpectRulesOfCalls() {
  Call call;
  auto &args = call.args;
  ForEachFunction(&call, [&](bool reads_arrays, const auto &function) {
    ExpectRules(args, kArgs<Call>, function, "", reads_arrays);
  });
  ExpectRulesOf(&call, call.scheduler.scheduler, "scheduler.", &args.call.scheduler);
  ExpectRulesOf(&call, call.data.sequences, "sequences.", &args.call.sequences);
  ExpectRulesOf(&call, call.data.outputs, "outputs.", &args.call.outputs);
  ExpectRulesOf(&call, call.Norm(), "norm.", &args.call.norm);
  ExpectRulesOf(&call, call.Rope(), "rope.", &args.call.rope);
  args.call.outputs = nullptr;  // of which some have a number for each key
  call.Score();
  call.Bias(), call.Mask(), call.RelativeRows(), call.ChosenKeys(1);
  ExpectRulesOf(&call, call.Score(), "score.", &args.call.score);
  ExpectRulesOf(&call, call.Arrays(), "score_arrays.", &args.call.score_arrays);
}

void ExpectRulesOfAChoice() {
  ChoiceProblem problem;
  problem.n_kv = 20;
  static_cast<AttentionProblem &>(problem) = NormalAttention(problem);
  problem.weights = {1.0f};
  ChoiceData choice(problem);
  const Memory workspace(1 << 20);
  size_t bytes;
  using Args = mha_choose_keys_args;
  ExpectRules(
      choice.choice, 1,
      [&](const Args *args, mha_error *error) {
        return mha_choose_keys_workspace(args, &bytes, error);
      },
      "", false);
  const auto run = [&](const Args *args, mha_error *error) {
    return WritesUnlessItFails(
        &choice, [&] { return mha_choose_keys(args, workspace.data(), workspace.size(), error); });
  };
  ExpectRules(choice.choice, 1, run);
  ExpectStructSizeRule(choice.args, 1, [&](const mha_attention_args *args, mha_error *error) {
    choice.choice.attention = args;
    return run(&choice.choice, error);
  });
}

void ExpectRulesOfRecurrentCalls() {
  const Memory workspace(1 << 20);
  size_t bytes;
  mha_call_info info = Zeroed<mha_call_info>();
  Random random(1);
  const auto expect_rules = [&](auto *data) {
    using Args = std::decay_t<decltype(data->args)>;
    const auto run = [&](const Args *args, mha_error *error) {
      return WritesUnlessItFails(
          data, [&] { return data->Run(workspace.data(), workspace.size(), error, args); });
    };
    ExpectRules(
        data->args, 1,
        [&](const Args *args, mha_error *error) { return data->Workspace(&bytes, error, args); },
        "", false);
    ExpectRules(data->args, 1, run);
    const auto expect_rules_of = [&](const auto &valid, const char *prefix, auto field) {
      const auto set_and_run = [&](const auto *given, mha_error *error) {
        data->args.*field = given;
        return run(&data->args, error);
      };
      ExpectRules(valid, 1, set_and_run, prefix);
      data->args.*field = nullptr;
    };
    expect_rules_of(data->sequences, "sequences.", &Args::sequences);
    expect_rules_of(SerialScheduler(2).scheduler, "scheduler.", &Args::scheduler);
  };
  RecurrentData recurrent(MakeRecurrent(&random, 1, 2, 1, 1, 1, 3, 4, 1, true));
  ExpectRules(
      recurrent.args, 1,
      [&](const mha_recurrent_args *args, mha_error *error) {
        return mha_recurrent_attention_info(args, &info, error);
      },
      "", false);
  expect_rules(&recurrent);
  ConvolutionData convolution(MakeConvolution(&random, 1, 2, 5, 3));
  expect_rules(&convolution);
}

void ExpectRulesOfOtherCalls() {
  float cos[1], sin[1];
  mha_rope_config config = Zeroed<mha_rope_config>();
  config.dims = 2;
  config.num_positions = 1;
  ExpectRules(config, 1, [&](const mha_rope_config *given, mha_error *error) {
    return mha_rope_tables(given, cos, sin, error);
  });
  float partials[6] = {}, lse[1], numbers[20] = {}, y[11];
  mha_partials_args args = Zeroed<mha_partials_args>();
  args.batch = args.num_heads = args.n_q = 1;
  args.head_dim_v = 4;
  args.partials = partials;
  args.lse = lse;
  args.output.data = y;
  ExpectRules(args, 1, mha_partials_finish);
  const Layer layer = Create(LayerData(SmallLayer()));  // W_O is [20, 11]
  const Memory workspace(1 << 16);
  mha_linear_args linear = Zeroed<mha_linear_args>();
  linear.rows = 1;
  linear.x.data = linear.residual.data = numbers;
  linear.output.data = y;
  const auto run = [&](const mha_linear_args *given, mha_error *error) {
    return mha_linear(layer.get(), given, workspace.data(), workspace.size(), error);
  };
  ExpectRules(linear, 2, run);
  const auto run_with = [&](const mha_scheduler *given, mha_error *error) {
    linear.scheduler = given;
    return run(&linear, error);
  };
  ExpectRules(SerialScheduler(2).scheduler, 2, run_with, "scheduler.");
}

TEST(Fields, OfEveryStructAreChecked) {
  ExpectRulesOfALayer();
  ExpectRulesOfACache();
  ExpectRulesOfCalls<FullForward>();
  ExpectRulesOfCalls<FullAttention>();
  ExpectRulesOfAChoice();
  ExpectRulesOfRecurrentCalls();
  ExpectRulesOfOtherCalls();
  EXPECT_EQ(seen.size(), ReadTable().size());
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
TEST(Fields, OfStructsThatAreFilledKeepTheirSize) {
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
