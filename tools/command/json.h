// Objects in JSON of which every key has to be known.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "error.h"

namespace command {

// Each key stands in its object once, and nothing is nested so deep that copying it takes much of
// the stack. name begins the sentences. Where this is not JSON, the result is none of the types of
// JSON.
inline nlohmann::json parse_json(const std::string &name, const char *begin, const char *end) {
  using Json = nlohmann::json;
  std::vector<std::set<std::string>> keys;  // of each object around
  const auto check = [&](int depth, Json::parse_event_t event, Json &parsed) {
    if (depth > 32) fail(name, ": has JSON nested more than 32 deep");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed).second) {
      fail(name, ": has ", in_quotes(parsed.get<std::string>()), " twice in one object");
    }
    return true;
  };
  return Json::parse(begin, end, check, /*allow_exceptions=*/false);
}

// Each key is taken once; finish refuses those that nobody took. null stands for an absent key.
class JsonObject {
 public:
  using Json = nlohmann::json;

  // name begins the sentences: "config.json", "config.json: rope_scaling".
  JsonObject(std::string name, Json object) : name_(std::move(name)), object_(std::move(object)) {
    if (!object_.is_object()) fail(name_, ": is not a JSON object");
  }

  const std::string &name() const { return name_; }
  bool has(const std::string &key) const {
    return object_.contains(key) && !object_[key].is_null();
  }

  // A key whose absence stands for a number, where null stands for none.
  void expect_said(const std::string &key) const {
    if (!object_.contains(key))
      fail(name_, ": has no ", in_quotes(key), ", which is needed; null says that there is none");
  }

  std::optional<double> number(const std::string &key) {
    return take<double>(key, "a number from -3.4e38 to 3.4e38", is_number);
  }
  std::optional<double> share(const std::string &key) {
    return take<double>(key, "a number above 0 and up to 1", [](const Json &value) {
      return is_number(value) && value > 0 && value <= 1;
    });
  }
  std::optional<bool> flag(const std::string &key) {
    return take<bool>(key, "true or false", is_boolean);
  }
  std::optional<std::string> string(const std::string &key) {
    return take<std::string>(key, "a string", is_string);
  }
  std::optional<int64_t> whole_number(const std::string &key) {
    return take<int64_t>(key, "a whole number of at least 1", is_count);
  }
  std::vector<float> floats(const std::string &key) {
    return list<float>(key, "a list of numbers", is_number);
  }
  std::vector<std::string> strings(const std::string &key) {
    return list<std::string>(key, "a list of strings", is_string);
  }
  std::optional<JsonObject> object(const std::string &key) {
    taken_.insert(key);
    if (!has(key)) return {};
    return JsonObject(name_ + ": " + key, object_[key]);
  }

  template <typename Value>
  Value needed(const std::optional<Value> &value, const std::string &key) const {
    if (!value) fail(name_, ": has no ", in_quotes(key), ", which is needed");
    return *value;
  }
  void ignore(const std::string &key) { taken_.insert(key); }
  void finish(const std::string &advice) const {
    for (const auto &[key, value] : object_.items()) {
      if (!value.is_null() && taken_.count(key) == 0)
        fail(name_, ": has ", in_quotes(key), ", which this version does not know", advice);
    }
  }

 private:
  static bool is_number(const Json &value) {
    return value.is_number() && std::abs(value.get<double>()) <= FLT_MAX;
  }
  static bool is_boolean(const Json &value) { return value.is_boolean(); }
  static bool is_count(const Json &value) {
    return value.is_number_unsigned() && value >= 1 && value < (1u << 31);
  }
  static bool is_string(const Json &value) { return value.is_string(); }

  template <typename Value, typename Check>
  std::optional<Value> take(const std::string &key, const char *expected, const Check &is_fine) {
    taken_.insert(key);
    if (!has(key)) return {};
    if (!is_fine(object_[key]))
      fail(name_, ": ", in_quotes(key), " is ", in_quotes(object_[key].dump()), "; ", expected,
           " is expected");
    return object_[key].get<Value>();
  }
  template <typename Value, typename Check>
  std::vector<Value> list(const std::string &key, const char *expected, const Check &is_fine) {
    const auto is_list = [&](const Json &value) {
      return value.is_array() && std::all_of(value.begin(), value.end(), is_fine);
    };
    return take<std::vector<Value>>(key, expected, is_list).value_or(std::vector<Value>());
  }

  std::string name_;
  Json object_;
  std::set<std::string> taken_;
};

}  // namespace command
