// The measuring program of the performance gate. perf_gate.py runs it, and judges what it says.
//   mha_gate times ROUNDS LIBRARY.so NAME... SHAPE...
//     A line for each shape: "absent" and why, if a base lacks it; or the difference of the
//     outputs; then of each sample the number of the library, the seconds of a call and the rates
//     of bench/slots.h before and after. There are as many libraries as MHA_GATE_INCLUDES of
//     CMakeLists.txt has folders.
//   mha_gate call INDEX LIBRARY.so SHAPE...
//     One call of each shape, whose instructions valgrind counts, with the headers of that index.
// A SHAPE is numbers and a text, as read_shape has them. Exit status: 0, or 4 with a sentence where
// it cannot measure.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#include "bench/clock.h"
#include "bench/slots.h"
#include "calls.h"
#include "tests/support/amx.h"

// valgrind counts from where this function begins to where it ends. It has a name that valgrind can
// find, and no copy elsewhere.
extern "C" __attribute__((noinline, visibility("default"))) void mha_gate_counted_call(
    const gate::Calls &calls) {
  calls.call();
}

namespace gate {
namespace {

constexpr double sample_seconds = 5e-3;
constexpr int samples_per_round = 4;  // of each library

template <size_t... indices>
std::vector<Structs> structs_of(std::index_sequence<indices...>) {
  return {structs<indices>()...};
}
const std::vector<Structs> all_structs = structs_of(std::make_index_sequence<MHA_GATE_LIBRARIES>());

Shape read_shape(const char *text) {
  std::istringstream words(text);
  Shape shape;
  words >> shape.is_layer >> shape.is_recurrent >> shape.batch >> shape.n >> shape.n_kv >>
      shape.width >> shape.heads >> shape.kv_heads >> shape.head_dim >> shape.past >>
      shape.is_causal >> shape.threads >> shape.kv_type >> shape.weight_type >> shape.arithmetic >>
      shape.instruction_set;
  std::getline(words >> std::ws, shape.text);
  return shape;
}

struct Sample {
  size_t library;
  double seconds;  // of a call
  bench::SlotRates before, after;
};

// One shape while it is measured.
struct Measurement {
  std::unique_ptr<Calls> calls;
  std::string absent;  // why there are no calls
  double difference;
  int64_t count = 1;  // of the calls of one sample
  std::vector<Sample> samples;

  Sample sample(size_t library) const {
    // Several threads wait for each other, which is a part of what they take.
    const bench::Clock clock =
        calls->shape().threads == 1 ? bench::Clock::processor : bench::Clock::wall;
    calls->use(library);
    const bench::SlotRates before = bench::slot_rates();
    const double begin = bench::seconds_now(clock);
    for (int64_t i = 0; i < count; ++i) calls->call();
    const double taken = bench::seconds_now(clock) - begin;
    return {library, taken / static_cast<double>(count), before, bench::slot_rates()};
  }

  // As many calls as fill a sample, by the fastest library.
  void calibrate() {
    for (;; count *= 2) {
      double taken = INFINITY;
      for (size_t library = 0; library < all_structs.size(); ++library)
        taken = std::min(taken, sample(library).seconds * static_cast<double>(count));
      if (taken < sample_seconds / 2) continue;
      count =
          std::max<int64_t>(1, std::llround(static_cast<double>(count) * sample_seconds / taken));
      return;
    }
  }

  // The libraries take turns in one order and then in the reverse, so that each is as often early
  // as late.
  void run_round(std::mt19937 &random) {
    std::vector<size_t> order(all_structs.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int i = 0; i < samples_per_round; ++i) {
      for (const size_t library : order) samples.push_back(sample(library));
      std::reverse(order.begin(), order.end());
    }
  }
};

void measure_times(int rounds, const std::vector<Library> &libraries,
                   const std::vector<Shape> &shapes) {
  std::vector<Measurement> measurements(shapes.size());
  std::vector<Measurement *> in_turns;
  for (size_t i = 0; i < shapes.size(); ++i) {
    for (const Library &library : libraries) {
      if (shapes[i].instruction_set == 0 ||
          library.instruction_sets() >> shapes[i].instruction_set & 1)
        continue;
      throw CannotMeasure("the shape '" + shapes[i].text +
                          "' needs an instruction set that this machine or " + library.name +
                          " does not have");
    }
    try {
      measurements[i].calls = std::make_unique<Calls>(shapes[i], libraries);
    } catch (const NotInBase &reason) {
      measurements[i].absent = reason.what();
      const std::vector<Library> newest = {libraries.back()};
      Calls(shapes[i], newest);  // throws if it is not in the newest either
      continue;
    }
    measurements[i].difference = measurements[i].calls->difference();
    if (rounds > 0) measurements[i].calibrate();
    in_turns.push_back(&measurements[i]);
  }
  std::mt19937 random{std::random_device{}()};
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(in_turns.begin(), in_turns.end(), random);
    for (Measurement *measurement : in_turns) measurement->run_round(random);
  }
  for (const Measurement &measurement : measurements) {
    if (!measurement.calls) {
      printf("absent %s\n", measurement.absent.c_str());
      continue;
    }
    printf("%.3g", measurement.difference);
    for (const Sample &sample : measurement.samples)
      printf(" %zu %.9g %.4g %.4g %.4g %.4g", sample.library, sample.seconds, sample.before.alone,
             sample.before.with_no_ops, sample.after.alone, sample.after.with_no_ops);
    printf("\n");
  }
}

int run(const std::vector<std::string> &words) {
  const bool is_count = words.size() > 2 && words[0] == "call";
  const size_t first_shape = is_count ? 3 : 2 + 2 * all_structs.size();
  if (words.size() <= first_shape || (!is_count && words[0] != "times"))
    throw CannotMeasure("mha_gate is run by tools/perf_gate.sh");
  std::vector<Shape> shapes;
  for (size_t i = first_shape; i < words.size(); ++i)
    shapes.push_back(read_shape(words[i].c_str()));
  std::vector<Library> libraries;
  if (!is_count) {
    for (size_t i = 0; i < all_structs.size(); ++i) {
      libraries.push_back(load_library(words[2 + 2 * i], words[3 + 2 * i], all_structs[i]));
      if (i > 0 && libraries[i].forward == libraries[i - 1].forward)
        throw CannotMeasure("the loader gave one library for two files");
    }
    measure_times(atoi(words[1].c_str()), libraries, shapes);
    return 0;
  }
  libraries.push_back(
      load_library(words[2], words[2], all_structs.at(strtoul(words[1].c_str(), nullptr, 10))));
  for (const Shape &shape : shapes) {
    Calls calls(shape, libraries);
    calls.use(0);
    mha_gate_counted_call(calls);
  }
  return 0;
}

}  // namespace
}  // namespace gate

int main(int argc, char **argv) {
  try {
    return gate::run({argv + 1, argv + argc});
  } catch (const std::exception &failure) {
    fprintf(stderr, "%s\n", failure.what());
    return 4;
  }
}
