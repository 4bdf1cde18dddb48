// A space of options: dimensions, each with a few values, and which values cannot stand together.
// Cases are choices of a value in each dimension: first as few as contain every pair of values that
// can stand together, then random ones.
#ifndef MHA_TESTS_SUPPORT_CHOICES_H
#define MHA_TESTS_SUPPORT_CHOICES_H

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "support/random.h"

namespace support {

// Of a dimension. Random cases take it as often as its weight says, which is for values that take
// long to compute.
struct Value {
  std::string name;
  double weight;
};

inline std::vector<std::string> WordsOf(const std::string &text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// Values that occur together, "cache=ring causal=no", as dimensions and values. "a|b" is either of
// two values, "!a|b" any other one.
inline std::vector<std::pair<std::string, std::string>> TermsOf(const std::string &together) {
  std::vector<std::pair<std::string, std::string>> terms;
  for (const std::string &word : WordsOf(together)) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) throw std::runtime_error("'" + word + "' is no OPTION=VALUE");
    terms.emplace_back(word.substr(0, equals), word.substr(equals + 1));
  }
  return terms;
}

// The number of a value in each dimension; -1: not chosen yet.
using Choice = std::vector<int>;

// Two values of two dimensions, the lower dimension first.
struct Pair {
  int dimension1, value1, dimension2, value2;
};

class Space {
 public:
  struct Axis {
    std::string_view name;
    std::vector<Value> values;
  };

  // refusals: values that cannot stand together.
  Space(std::vector<Axis> axes, const std::vector<std::string> &refusals)
      : axes_(std::move(axes)), rules_of_(axes_.size()) {
    if (axes_.size() > kMost)
      throw std::runtime_error("more dimensions than a set of them has bits");
    for (size_t d = 0; d < axes_.size(); d++) numbers_[axes_[d].name] = static_cast<int>(d);
    for (const std::string &refusal : refusals) {
      Rule rule;
      for (const auto &[dimension, values] : TermsOf(refusal)) {
        rule.terms.push_back({NumberOf(dimension), BitsOf(NumberOf(dimension), values)});
        rule.dimensions.set(static_cast<size_t>(rule.terms.back().dimension));
      }
      for (const Term &term : rule.terms)
        rules_of_[term.dimension].push_back(static_cast<int>(rules_.size()));
      rules_.push_back(std::move(rule));
    }
  }

  int size() const { return static_cast<int>(axes_.size()); }
  const Axis &axis(int dimension) const { return axes_[dimension]; }
  int CountOf(int dimension) const { return static_cast<int>(axis(dimension).values.size()); }

  int NumberOf(std::string_view dimension) const {
    const auto found = numbers_.find(dimension);
    if (found == numbers_.end())
      throw std::runtime_error("there is no dimension " + std::string(dimension));
    return found->second;
  }

  // A bit for each of the values that are meant. A name that no value has is an error.
  uint32_t BitsOf(int dimension, std::string_view values) const {
    const bool is_any_other = values.substr(0, 1) == "!";
    if (is_any_other) values.remove_prefix(1);
    uint32_t bits = 0;
    while (true) {
      const std::string_view name = values.substr(0, values.find('|'));
      bits |= 1u << ValueNumber(dimension, name);
      if (name.size() == values.size()) break;
      values.remove_prefix(name.size() + 1);
    }
    return is_any_other ? ~bits & ((1u << CountOf(dimension)) - 1) : bits;
  }
  int ValueNumber(int dimension, std::string_view value) const {
    const std::vector<Value> &values = axis(dimension).values;
    for (size_t v = 0; v < values.size(); v++) {
      if (values[v].name == value) return static_cast<int>(v);
    }
    throw std::runtime_error(std::string(axis(dimension).name) + " has no value " +
                             std::string(value));
  }

  bool Is(const Choice &choice, std::string_view dimension, std::string_view values) const {
    const int d = NumberOf(dimension);
    return (BitsOf(d, values) >> choice[d] & 1) != 0;
  }
  std::string_view NameOfValue(const Choice &choice, int dimension) const {
    return axis(dimension).values[choice[static_cast<size_t>(dimension)]].name;
  }

  // Whether the values that are chosen so far can stand together, as far as one rule tells.
  bool Allows(const Choice &choice) const {
    return std::none_of(rules_.begin(), rules_.end(),
                        [&](const Rule &rule) { return Refuses(rule, choice); });
  }

  // Chooses values where there are none yet, of each dimension the first in order(dimension,
  // choice) that leads to the end. False: there is no such choice.
  template <typename Order>
  bool Complete(const Order &order, Choice *choice) const {
    if (!Allows(*choice)) return false;
    return Complete(order, choice, 0).is_complete;
  }

  // "cache=ring causal=yes", without the first values of dimensions, which are the plain ones.
  std::string Describe(const Choice &choice) const {
    std::string text;
    for (int d = 0; d < size(); d++) {
      if (choice[d] <= 0) continue;
      text += (text.empty() ? "" : " ") + std::string(axis(d).name) + "=" +
              std::string(NameOfValue(choice, d));
    }
    return text;
  }

 private:
  static constexpr size_t kMost = 128;
  using Dimensions = std::bitset<kMost>;
  struct Term {
    int dimension;
    uint32_t values;
  };
  struct Rule {
    std::vector<Term> terms;
    Dimensions dimensions;
  };
  struct Outcome {
    bool is_complete;
    Dimensions because;  // else: the dimensions to whose values it is owed
  };

  static bool Refuses(const Rule &rule, const Choice &choice) {
    return std::all_of(rule.terms.begin(), rule.terms.end(), [&](const Term &term) {
      const int value = choice[term.dimension];
      return value >= 0 && (term.values >> value & 1) != 0;
    });
  }

  // From this dimension on. Where none of its values will do, it goes back to the last dimension
  // that has to do with it.
  template <typename Order>
  Outcome Complete(const Order &order, Choice *choice, int dimension) const {
    if (dimension == size()) return {true, {}};
    const size_t at = static_cast<size_t>(dimension);
    if ((*choice)[at] >= 0) return Complete(order, choice, dimension + 1);
    Dimensions because;
    for (const int value : order(dimension, *choice)) {
      (*choice)[at] = value;
      const auto refusing = std::find_if(rules_of_[at].begin(), rules_of_[at].end(),
                                         [&](int rule) { return Refuses(rules_[rule], *choice); });
      if (refusing != rules_of_[at].end()) {
        because |= rules_[*refusing].dimensions;
        continue;
      }
      const Outcome outcome = Complete(order, choice, dimension + 1);
      if (outcome.is_complete) return outcome;
      if (!outcome.because[at]) {
        (*choice)[at] = -1;
        return outcome;
      }
      because |= outcome.because;
    }
    (*choice)[at] = -1;
    because.reset(at);
    return {false, because};
  }

  std::vector<Axis> axes_;
  std::unordered_map<std::string_view, int> numbers_;
  std::vector<Rule> rules_;
  std::vector<std::vector<int>> rules_of_;  // by dimension
};

// Which pairs of values occur in some choices.
class Pairing {
 public:
  explicit Pairing(const Space &space) : space_(space) {
    for (int d = 0; d < space.size(); d++) {
      first_.push_back(values_);
      values_ += space.CountOf(d);
    }
    seen_.assign(static_cast<size_t>(values_) * static_cast<size_t>(values_), false);
  }

  bool Has(const Pair &pair) const {
    return seen_[IndexOf(pair.dimension1, pair.value1, pair.dimension2, pair.value2)];
  }
  void Add(const Choice &choice) {
    for (int d = 0; d < space_.size(); d++) {
      for (int e = d + 1; e < space_.size(); e++) {
        seen_[IndexOf(d, choice[d], e, choice[e])] = true;
      }
    }
  }

  // How many pairs would be new if this dimension had this value, beside what is chosen.
  int Gain(const Choice &choice, int dimension, int value) const {
    int gain = 0;
    for (int e = 0; e < space_.size(); e++) {
      const int other = choice[e];
      if (e == dimension || other < 0) continue;
      gain +=
          !(e < dimension ? Has({e, other, dimension, value}) : Has({dimension, value, e, other}));
    }
    return gain;
  }

  template <typename Function>
  void ForEachMissing(const Function &function) const {
    for (int d = 0; d < space_.size(); d++) {
      for (int e = d + 1; e < space_.size(); e++) {
        for (int v = 0; v < space_.CountOf(d); v++) {
          for (int w = 0; w < space_.CountOf(e); w++) {
            if (!Has({d, v, e, w})) function(Pair{d, v, e, w});
          }
        }
      }
    }
  }

 private:
  size_t IndexOf(int d, int v, int e, int w) const {
    return static_cast<size_t>(first_[d] + v) * static_cast<size_t>(values_) +
           static_cast<size_t>(first_[e] + w);
  }

  const Space &space_;
  std::vector<int> first_;
  int values_ = 0;
  std::vector<bool> seen_;
};

// The values of a dimension in a random order, those of more weight rather in front.
inline std::vector<int> RandomOrder(const Space &space, int dimension, Random *random,
                                    double chance_of_plain = 0) {
  const std::vector<Value> &values = space.axis(dimension).values;
  std::vector<std::pair<double, int>> keyed;
  for (size_t v = 0; v < values.size(); v++)
    keyed.push_back({random->Unit() / values[v].weight, static_cast<int>(v)});
  if (random->Chance(chance_of_plain)) keyed[0].first = -1;
  std::sort(keyed.begin(), keyed.end());
  std::vector<int> order;
  for (const auto &[key, v] : keyed) order.push_back(v);
  return order;
}

// Choices in which every pair of values occurs that can stand together.
inline std::vector<Choice> EveryPair(const Space &space) {
  std::vector<Choice> choices;
  Pairing done(space);
  std::vector<Pair> missing;
  done.ForEachMissing([&](const Pair &pair) { missing.push_back(pair); });
  Random random(1);
  for (size_t n = missing.size(); n > 1; n--) {
    std::swap(missing[n - 1], missing[random.Below(static_cast<int64_t>(n))]);
  }
  for (const Pair &pair : missing) {
    if (done.Has(pair)) continue;
    Choice choice(static_cast<size_t>(space.size()), -1);
    choice[pair.dimension1] = pair.value1;
    choice[pair.dimension2] = pair.value2;
    const auto most_new_pairs_first = [&](int dimension, const Choice &so_far) {
      std::vector<int> order = RandomOrder(space, dimension, &random);
      const auto gain = [&](int value) { return done.Gain(so_far, dimension, value); };
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return gain(a) > gain(b); });
      return order;
    };
    if (!space.Complete(most_new_pairs_first, &choice)) continue;
    done.Add(choice);
    choices.push_back(std::move(choice));
  }
  return choices;
}

// A random choice, the same for the same seed. What a dimension gets depends on its name and the
// others' values only, so that a new dimension changes few cases. A third of all choices is plain
// in most dimensions. A few dimensions choose before all others, so that values that go with few
// others are not rare.
inline Choice RandomChoice(const Space &space, uint64_t seed) {
  const double chance_of_plain = seed % 3 == 0 ? 0.8 : 0;
  Choice choice(static_cast<size_t>(space.size()), -1);
  const auto order = [&](int dimension, const Choice &) {
    uint64_t own = seed;
    for (const char letter : space.axis(dimension).name)
      own = own * 1099511628211u + static_cast<unsigned char>(letter);
    Random random(own);
    return RandomOrder(space, dimension, &random, chance_of_plain);
  };
  Random random(seed);
  std::vector<int> first;
  for (int n = 0; n < 6; n++) {
    const int dimension = static_cast<int>(random.Below(space.size()));
    int &value = choice[dimension];
    if (value >= 0) continue;
    value = order(dimension, choice)[0];
    if (space.Allows(choice)) {
      first.push_back(dimension);
    } else {
      value = -1;
    }
  }
  while (!space.Complete(order, &choice)) {
    if (first.empty()) throw std::runtime_error("no values can stand together");
    choice[first.back()] = -1;
    first.pop_back();
  }
  return choice;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_CHOICES_H
