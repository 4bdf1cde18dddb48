#include "limits.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "machine.h"
#include "memory.h"
#include "pool.h"
#include "probes.h"
#include "workers.h"

namespace bench {
namespace {

// Long enough for the clock, short enough to fall between interruptions.
constexpr double piece_seconds = 0.5e-3;
constexpr double try_seconds = 10e-3;
constexpr int least_pieces = 3, pieces_per_candidate = 5;

// Work that every thread repeats; all threads together do `amount` (operations or bytes) in one
// repetition.
struct Loop {
  double amount;
  std::function<void(uint32_t thread, int64_t repetitions)> run;
  int64_t repetitions = 1;
};

// All threads start when the last one is there; the time ends with the last one.
double seconds_of(const Loop &loop, const LimitsOf &of) {
  if (of.threads == 1) {
    const double begin = seconds_now(of.clock);
    loop.run(0, loop.repetitions);
    return seconds_now(of.clock) - begin;
  }
  struct Piece {
    const Loop &loop;
    std::atomic<uint32_t> missing;
    std::vector<double> begin, end;
  } piece{loop, {of.threads}, std::vector<double>(of.threads), std::vector<double>(of.threads)};
  const mha_scheduler scheduler = pool_scheduler(of.threads);
  scheduler.parallel_for(
      scheduler.context, of.threads,
      [](void *context, uint32_t thread) {
        Piece &piece = *static_cast<Piece *>(context);
        --piece.missing;
        while (piece.missing > 0) pause_briefly();
        piece.begin[thread] = seconds_now(Clock::wall);
        piece.loop.run(thread, piece.loop.repetitions);
        piece.end[thread] = seconds_now(Clock::wall);
      },
      &piece);
  return *std::max_element(piece.end.begin(), piece.end.end()) -
         *std::min_element(piece.begin.begin(), piece.begin.end());
}

double rate_of(const Loop &loop, const LimitsOf &of) {
  return loop.amount * static_cast<double>(loop.repetitions) / seconds_of(loop, of);
}

Loop fastest_of(std::vector<Loop> loops, const LimitsOf &of) {
  for (Loop &loop : loops) {
    while (seconds_of(loop, of) < piece_seconds) loop.repetitions *= 2;
  }
  std::vector<double> best(loops.size(), 0.0);
  for (int piece = 0; piece < pieces_per_candidate; ++piece) {  // in turns: a slow moment hits all
    for (size_t i = 0; i < loops.size(); ++i) best[i] = std::max(best[i], rate_of(loops[i], of));
  }
  return loops[static_cast<size_t>(std::max_element(best.begin(), best.end()) - best.begin())];
}

double best_rate(const Loop &loop, const LimitsOf &of) {
  double best = 0;
  const double begin = seconds_now(of.clock);
  for (int piece = 0; piece < least_pieces || seconds_now(of.clock) - begin < try_seconds; ++piece)
    best = std::max(best, rate_of(loop, of));
  return best;
}

std::vector<Loop> fma_loops(const LimitsOf &of) {
  std::vector<Loop> loops;
  for (const FmaProbe &probe : probes_of(of.instruction_set).fma) {
    constexpr int64_t steps = 1000;
    loops.push_back({probe.flops_per_step * steps * of.threads,
                     [probe](uint32_t, int64_t repetitions) { probe.run(steps * repetitions); }});
  }
  return loops;
}

// Working sets in a few sizes, 2^k and 1.5 * 2^k bytes, rounded down: a smaller buffer is never
// read more slowly. What is small lies in a level-1 cache, what is large in none.
int64_t buffer_bytes(double working_set_bytes) {
  constexpr int64_t smallest = int64_t{16} << 10;
  int64_t largest = int64_t{256} << 20;
  while (largest < 3 * last_level_cache_bytes()) largest *= 2;
  int64_t bytes = smallest;
  while (bytes < largest && static_cast<double>(2 * bytes) <= working_set_bytes) bytes *= 2;
  return bytes < largest && static_cast<double>(bytes + bytes / 2) <= working_set_bytes
             ? bytes + bytes / 2
             : bytes;
}

// One buffer for all sizes, as large as the largest so far.
Array<char> buffer;
int64_t buffer_size = 0;

void enlarge_buffer(int64_t bytes) {
  if (buffer_size >= bytes) return;
  buffer_size = 0;
  buffer.reset();
  buffer = make_array<char>(bytes);
  buffer_size = bytes;
}

// A large buffer is read in slices, one in a repetition, so that a piece stays short. Each goes on
// where the one before ended, whichever loop that was: what has just been read may still be in a
// cache.
constexpr int64_t least_slice_bytes = int64_t{32} << 20;
std::vector<int64_t> slices_read;  // by thread

std::vector<Loop> read_loops(const LimitsOf &of) {
  const int64_t part_bytes = buffer_bytes(of.working_set_bytes) / of.threads;  // of a thread
  const int64_t wanted = of.bytes_at_once / of.threads;
  const int64_t slices = std::max<int64_t>(1, part_bytes / (wanted ? wanted : least_slice_bytes));
  if (slices_read.size() < of.threads) slices_read.resize(of.threads);
  std::vector<Loop> loops;
  for (const ReadProbe &probe : probes_of(of.instruction_set).read) {
    int64_t steps = (wanted ? wanted : part_bytes / slices) / probe.streams / read_step;
    // Streams at a distance of a power of two get into each other's way.
    if (steps % 2 == 0 && steps > 1) --steps;
    if (steps == 0) continue;  // more streams than there is to read
    const int64_t stream_bytes = steps * read_step, slice_bytes = probe.streams * stream_bytes;
    loops.push_back(
        {static_cast<double>(slice_bytes * of.threads), [=](uint32_t thread, int64_t repetitions) {
           for (int64_t i = 0; i < repetitions; ++i) {
             const int64_t slice = slices_read[thread]++ % slices;
             probe.run(buffer.get() + (thread * slices + slice) * slice_bytes, stream_bytes);
           }
         }});
  }
  return loops;
}

enum class What { fma, read };
using Key = std::tuple<What, uint32_t, uint32_t, int64_t, int64_t>;
std::map<Key, Loop> fastest_loops;

Key key_of(What what, const LimitsOf &of) {
  return {what, of.instruction_set, of.threads,
          what == What::read ? buffer_bytes(of.working_set_bytes) : 0, of.bytes_at_once};
}

const Loop &fastest(What what, const LimitsOf &of) {
  if (what == What::read) enlarge_buffer(buffer_bytes(of.working_set_bytes));
  auto found = fastest_loops.find(key_of(what, of));
  if (found == fastest_loops.end()) {
    const std::vector<Loop> loops = what == What::fma ? fma_loops(of) : read_loops(of);
    found = fastest_loops.emplace(key_of(what, of), fastest_of(loops, of)).first;
  }
  return found->second;
}

}  // namespace

Limits measure_limits(const LimitsOf &of) {
  return {best_rate(fastest(What::fma, of), of), best_rate(fastest(What::read, of), of)};
}

void read_once(const LimitsOf &of) {
  const Loop &loop = fastest(What::read, of);
  seconds_of({loop.amount, loop.run}, of);
}

void forget_fastest_loops(const LimitsOf &of) {
  fastest_loops.erase(key_of(What::fma, of));
  fastest_loops.erase(key_of(What::read, of));
}

}  // namespace bench
