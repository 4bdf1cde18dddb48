#include "call.h"

#include <cstring>
#include <utility>

#include "json.h"

namespace command {
namespace {

constexpr char kMagic[] = "mha call";
constexpr size_t kTail = 24;  // checksum, length, magic
constexpr int kVersion = 1;

struct Angle {
  const char *key;
  double mha_rope_config::*number;
};
constexpr Angle kAngles[] = {
    {"base", &mha_rope_config::base},
    {"linear_factor", &mha_rope_config::linear_factor},
    {"yarn_factor", &mha_rope_config::yarn_factor},
    {"yarn_beta_fast", &mha_rope_config::yarn_beta_fast},
    {"yarn_beta_slow", &mha_rope_config::yarn_beta_slow},
    {"llama3_factor", &mha_rope_config::llama3_factor},
    {"llama3_low_freq_factor", &mha_rope_config::llama3_low_freq_factor},
    {"llama3_high_freq_factor", &mha_rope_config::llama3_high_freq_factor},
    {"attention_factor", &mha_rope_config::attention_factor},
};

uint64_t checksum(const unsigned char *bytes, size_t count) {  // FNV-1a
  uint64_t sum = 0xcbf29ce484222325;
  for (size_t i = 0; i < count; ++i) sum = (sum ^ bytes[i]) * 0x100000001b3;
  return sum;
}

std::string little_endian(uint64_t number) {
  std::string bytes;
  for (int i = 0; i < 64; i += 8) bytes += static_cast<char>(number >> i);
  return bytes;
}

uint64_t little_endian(const unsigned char *bytes) {
  uint64_t number = 0;
  for (int i = 7; i >= 0; --i) number = number << 8 | bytes[i];
  return number;
}

}  // namespace

std::string Call::text() const {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  out.precision(15);
  out << (is_causal ? "causal" : "not causal");
  if (norm) out << ", normalised (RMS" << (norm->is_of_all_heads ? " of all heads together)" : ")");
  if (rotation) {
    const char *before = ", rotated (";
    for (const Angle &angle : kAngles) {
      if (const double number = *rotation.*angle.number; number != 0)
        out << std::exchange(before, ", ") << angle.key << " " << number;
    }
    out << (rotation->dims != 0 ? command::text(", ", rotation->dims, " elements)") : ")");
  }
  if (window != 0) out << ", window of " << count_text(window, "row");
  if (softcap != 0) out << ", softcap " << softcap;
  if (!sinks.empty()) out << ", sinks";
  return out.str();
}

std::string packed_call(const Call &call) {
  nlohmann::json json = {{"version", kVersion}, {"causal", call.is_causal}};
  if (call.window != 0) json["window"] = call.window;
  if (call.softcap != 0) json["softcap"] = call.softcap;
  if (!call.sinks.empty()) json["sinks"] = call.sinks;
  if (call.norm) {
    json["norm"] = {{"epsilon", call.norm->epsilon},
                    {"all_heads", call.norm->is_of_all_heads},
                    {"q_weight", call.norm->q_weight},
                    {"k_weight", call.norm->k_weight}};
  }
  if (call.rotation) {
    nlohmann::json &rope = json["rope"] = nlohmann::json::object();
    for (const Angle &angle : kAngles) {
      if (const double number = *call.rotation.*angle.number; number != 0) rope[angle.key] = number;
    }
    if (call.rotation->dims != 0) rope["dims"] = call.rotation->dims;
    if (call.rotation->original_positions != 0)
      rope["original_positions"] = call.rotation->original_positions;
    if (call.rotation->yarn_unrounded != 0) rope["yarn_unrounded"] = 1;
  }
  const std::string bytes = json.dump();
  const uint64_t sum =
      checksum(reinterpret_cast<const unsigned char *>(bytes.data()), bytes.size());
  return bytes + little_endian(sum) + little_endian(bytes.size()) + kMagic;
}

Call read_packed_call(const std::string &name, const unsigned char *file, size_t bytes,
                      const mha_layer_config &shape) {
  const unsigned char *tail = file + bytes - std::min(bytes, kTail);
  if (bytes < kTail || memcmp(tail + 16, kMagic, 8) != 0) {
    fail(name,
         ": has no call settings (rotation, norm, causal or not); pack the layer with this version "
         "of mha pack");
  }
  const uint64_t length = little_endian(tail + 8);
  if (length > bytes - kTail || checksum(tail - length, length) != little_endian(tail)) {
    fail(name, ": is damaged: the checksum of its call settings does not match");
  }
  const char *const end = reinterpret_cast<const char *>(tail);
  JsonObject json(name, parse_json(name, end - length, end));
  const std::string advice = "; a later version of mha wrote it";
  if (json.needed(json.whole_number("version"), "version") != kVersion)
    fail(name, ": has call settings of another version", advice);
  Call call;
  call.source = name;
  call.is_causal = json.needed(json.flag("causal"), "causal");
  call.window = json.whole_number("window").value_or(0);
  call.softcap = json.number("softcap").value_or(0);
  call.sinks = json.floats("sinks");
  if (std::optional<JsonObject> norm = json.object("norm")) {
    call.norm.emplace();
    call.norm->epsilon = static_cast<float>(norm->needed(norm->number("epsilon"), "epsilon"));
    call.norm->is_of_all_heads = norm->needed(norm->flag("all_heads"), "all_heads");
    call.norm->q_weight = norm->floats("q_weight");
    call.norm->k_weight = norm->floats("k_weight");
    norm->finish(advice);
    const bool is_of_all = call.norm->is_of_all_heads;
    const auto width = [&](int64_t heads) {
      return static_cast<size_t>((is_of_all ? heads : 1) * shape.head_dim);
    };
    if (call.norm->q_weight.size() != width(shape.num_heads) ||
        call.norm->k_weight.size() != width(shape.num_kv_heads)) {
      fail(name, ": has norm weights whose number does not match the layer's heads");
    }
  }
  if (!call.sinks.empty() && call.sinks.size() != static_cast<size_t>(shape.num_heads))
    fail(name, ": needs one sink for each head");
  if (std::optional<JsonObject> rope = json.object("rope")) {
    mha_rope_config &angles = call.rotation.emplace();
    for (const Angle &angle : kAngles) angles.*angle.number = rope->number(angle.key).value_or(0);
    angles.dims = rope->whole_number("dims").value_or(0);
    angles.original_positions = rope->whole_number("original_positions").value_or(0);
    angles.yarn_unrounded = static_cast<uint32_t>(rope->whole_number("yarn_unrounded").value_or(0));
    rope->finish(advice);
  }
  json.finish(advice);
  return call;
}

PreparedCall::PreparedCall(const Call &call, const mha_layer_config &shape, int64_t num_positions)
    : call_(call) {
  if (call.rotation) {
    mha_rope_config config = *call.rotation;
    config.struct_size = sizeof config;
    if (config.dims == 0) config.dims = shape.head_dim;
    if (config.dims % 2 != 0 || config.dims > shape.head_dim) {
      fail(call.source, ": ", config.dims, " elements of a head of ", shape.head_dim,
           " cannot be rotated; an even number of them can");
    }
    config.num_positions = num_positions;
    cos_.resize(static_cast<size_t>(num_positions * config.dims / 2));
    sin_.resize(cos_.size());
    mha_error error;
    check(mha_rope_tables(&config, cos_.data(), sin_.data(), &error), error, call.source);
    rope_.struct_size = sizeof rope_;
    rope_.style = MHA_ROPE_HALF;
    rope_.dims = config.dims;
    rope_.num_positions = num_positions;
    rope_.cos = cos_.data();
    rope_.sin = sin_.data();
  }
  if (call.norm) {
    norm_.struct_size = sizeof norm_;
    norm_.flags = call.norm->is_of_all_heads ? MHA_NORM_ALL_HEADS : 0;
    norm_.epsilon = call.norm->epsilon;
    norm_.q_weight = call.norm->q_weight.data();
    norm_.k_weight = call.norm->k_weight.data();
  }
  if (call.softcap != 0 || !call.sinks.empty()) {
    score_.struct_size = sizeof score_;
    score_.softcap = static_cast<float>(call.softcap);
    score_.sinks = call.sinks.empty() ? nullptr : call.sinks.data();
  }
}

void PreparedCall::add_to(mha_forward_args *args) const {
  if (call_.is_causal) args->flags |= MHA_CAUSAL;
  if (call_.window != 0) {
    args->flags |= MHA_WINDOW_LEFT;
    args->window_left = call_.window - 1;
  }
  if (rope_.struct_size != 0) args->rope = &rope_;
  if (norm_.struct_size != 0) args->norm = &norm_;
  if (score_.struct_size != 0) args->score = &score_;
}

}  // namespace command
