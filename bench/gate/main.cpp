// The measuring program of the performance gate. perf_gate.py runs it, and judges what it says.
//   mha_gate times ROUNDS BASE.so NAME NEW.so NAME SHAPE...  a line for each shape: the difference
//   of the outputs, and for each round the
//                                                            seconds of a call of both
//   mha_gate call base|new LIBRARY.so SHAPE...               one call of each shape, whose
//   instructions valgrind counts
// A SHAPE is numbers and a text, as read_shape has them. Exit status: 0, or 4 with a sentence where
// it cannot measure.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>

#include "bench/clock.h"
#include "calls.h"

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

Shape read_shape(const char *text) {
  std::istringstream words(text);
  Shape shape;
  words >> shape.is_layer >> shape.batch >> shape.n >> shape.n_kv >> shape.width >> shape.heads >>
      shape.kv_heads >> shape.head_dim >> shape.past >> shape.is_causal >> shape.threads >>
      shape.kv_type >> shape.instruction_set;
  std::getline(words >> std::ws, shape.text);
  return shape;
}

// One shape while it is measured.
struct Measurement {
  std::unique_ptr<Calls> calls;
  double difference;
  int64_t count = 1;  // of the calls of one sample
  std::vector<double> seconds[2];

  double sample(size_t library) const {
    // Several threads wait for each other, which is a part of what they take.
    const bench::Clock clock =
        calls->shape().threads == 1 ? bench::Clock::processor : bench::Clock::wall;
    calls->use(library);
    const double begin = bench::seconds_now(clock);
    for (int64_t i = 0; i < count; ++i) calls->call();
    return (bench::seconds_now(clock) - begin) / static_cast<double>(count);
  }

  // As many calls as fill a sample, by the faster library.
  void calibrate() {
    for (;; count *= 2) {
      const double taken = std::min(sample(0), sample(1)) * static_cast<double>(count);
      if (taken < sample_seconds / 2) continue;
      count =
          std::max<int64_t>(1, std::llround(static_cast<double>(count) * sample_seconds / taken));
      return;
    }
  }

  // The libraries take turns, each as often first as second: base new new base, or the other way
  // round. What disturbs a machine only ever adds time, so the fastest sample of a library stands
  // for the round.
  void run_round(bool new_begins) {
    double fastest[2] = {INFINITY, INFINITY};
    for (int i = 0; i < 2 * samples_per_round; ++i) {
      const size_t library = ((i + 1) / 2 % 2 == 1) != new_begins;
      fastest[library] = std::min(fastest[library], sample(library));
    }
    for (size_t library = 0; library < 2; ++library) seconds[library].push_back(fastest[library]);
  }
};

void measure_times(int rounds, const std::vector<Library> &libraries,
                   const std::vector<Shape> &shapes) {
  if (libraries[0].forward == libraries[1].forward)
    throw CannotMeasure("the loader gave one library for both files");
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
    measurements[i].calls = std::make_unique<Calls>(shapes[i], libraries);
    measurements[i].difference = measurements[i].calls->difference();
    if (rounds > 0) measurements[i].calibrate();
    in_turns.push_back(&measurements[i]);
  }
  std::mt19937 random{std::random_device{}()};
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(in_turns.begin(), in_turns.end(), random);
    for (Measurement *measurement : in_turns) measurement->run_round(random() & 1);
  }
  for (const Measurement &measurement : measurements) {
    printf("%.3g", measurement.difference);
    for (size_t i = 0; i < measurement.seconds[0].size(); ++i)
      printf(" %.9g %.9g", measurement.seconds[0][i], measurement.seconds[1][i]);
    printf("\n");
  }
}

int run(const std::vector<std::string> &words) {
  const bool is_count = words.size() > 2 && words[0] == "call";
  if (!is_count && (words.size() < 7 || words[0] != "times"))
    throw CannotMeasure("mha_gate is run by tools/perf_gate.sh");
  std::vector<Shape> shapes;
  for (size_t i = is_count ? 3 : 6; i < words.size(); ++i)
    shapes.push_back(read_shape(words[i].c_str()));
  if (!is_count) {
    measure_times(atoi(words[1].c_str()),
                  {load_library(words[2], words[3], base_structs),
                   load_library(words[4], words[5], new_structs)},
                  shapes);
    return 0;
  }
  const std::vector<Library> library = {
      load_library(words[2], words[2], words[1] == "base" ? base_structs : new_structs)};
  for (const Shape &shape : shapes) {
    Calls calls(shape, library);
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
