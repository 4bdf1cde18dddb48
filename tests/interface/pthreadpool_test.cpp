// The schedulers of mha::pthreadpool keep the rules of mha.h, and a call on a pool has the bits of
// one without.
#include <gtest/gtest.h>
#include <mha.h>
#include <mha_pthreadpool.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "support/fixtures.h"
#include "support/same_bits.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// The two kinds of schedulers. The first one is slow where the pool has more threads than there are
// free processors: a loop may take as long as the system's time slices, so it gets fewer rounds.
struct Kind {
  const char *name;
  void (*fill)(pthreadpool_t pool, mha_scheduler *scheduler);
  int calls;
};
constexpr Kind kAwake = {"awake", mha_pthreadpool_scheduler, 30};
constexpr Kind kYielding = {"yielding", mha_pthreadpool_yielding_scheduler, 1000};
constexpr Kind kKinds[] = {kAwake, kYielding};

// A pool and the scheduler over it.
class Pool {
 public:
  Pool(const Kind &kind, size_t num_threads) : pool_(pthreadpool_create(num_threads)) {
    EXPECT_NE(pool_, nullptr);
    kind.fill(pool_, &scheduler_);
  }
  ~Pool() { pthreadpool_destroy(pool_); }
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;
  pthreadpool_t get() const { return pool_; }
  const mha_scheduler *scheduler() const { return &scheduler_; }

 private:
  pthreadpool_t pool_;
  mha_scheduler scheduler_;
};

template <typename Task>
void ParallelFor(const mha_scheduler *scheduler, uint32_t count, Task task) {
  scheduler->parallel_for(
      scheduler->context, count,
      [](void *context, uint32_t index) { (*static_cast<Task *>(context))(index); }, &task);
}

constexpr size_t kThreadCounts[] = {1, 2, 3, 8};

// ---- The schedulers

mha_scheduler FilledOverGarbage(const Kind &kind, pthreadpool_t pool) {
  mha_scheduler scheduler;
  std::memset(&scheduler, 0xff, sizeof scheduler);
  kind.fill(pool, &scheduler);
  return scheduler;
}

TEST(SchedulerOverAPool, HasEveryFieldSet) {
  for (const Kind &kind : kKinds) {
    for (const size_t num_threads : kThreadCounts) {
      const Pool pool(kind, num_threads);
      const mha_scheduler scheduler = FilledOverGarbage(kind, pool.get());
      EXPECT_EQ(scheduler.num_threads, num_threads) << kind.name;
      EXPECT_EQ(scheduler.reserved, 0u) << kind.name;
    }
  }
}

TEST(SchedulerOverAPool, RunsEachIndexOnceAndReturnsAfterAll) {
  for (const Kind &kind : kKinds) {
    for (const size_t num_threads : kThreadCounts) {
      const Pool pool(kind, num_threads);
      for (uint32_t count = 0; count <= num_threads; count++) {
        for (int round = 0; round < kind.calls / 15; round++) {
          std::vector<int> runs(num_threads,
                                0);  // plain numbers: what a task wrote must be visible afterwards
          ParallelFor(pool.scheduler(), count, [&](uint32_t index) { runs.at(index)++; });
          for (uint32_t index = 0; index < num_threads; index++) {
            ASSERT_EQ(runs[index], index < count ? 1 : 0)
                << "index " << index << " of " << count << ", " << kind.name;
          }
        }
      }
    }
  }
}

TEST(SchedulerOverAPool, RunsTasksAtTheSameTime) {
  for (const Kind &kind : kKinds) {
    const Pool pool(kind, 2);
    std::atomic<int> started{0};
    std::atomic<bool> met[2] = {};
    ParallelFor(pool.scheduler(), 2, [&](uint32_t index) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      for (started++; started < 2 && std::chrono::steady_clock::now() < deadline;)
        std::this_thread::yield();
      met[index] = started == 2;
    });
    EXPECT_TRUE(met[0] && met[1]) << "one task ended before the other began, " << kind.name;
  }
}

// Flushing them to zero, as pthreadpool can, would change bits.
TEST(SchedulerOverAPool, LeavesSubnormalNumbersAlone) {
  for (const Kind &kind : kKinds) {
    const Pool pool(kind, 2);
    std::vector<float> halves(2, 0);
    const volatile float smallest_normal = 0x1p-126f;
    ParallelFor(pool.scheduler(), 2,
                [&](uint32_t index) { halves[index] = smallest_normal * 0.5f; });
    for (const float half : halves) EXPECT_EQ(half, 0x1p-127f) << kind.name;
  }
}

TEST(SchedulerWithoutAPool, RunsOnTheCallingThread) {
  for (const Kind &kind : kKinds) {
    const mha_scheduler scheduler = FilledOverGarbage(kind, nullptr);
    EXPECT_EQ(scheduler.num_threads, 1u) << kind.name;
    EXPECT_EQ(scheduler.reserved, 0u) << kind.name;
    std::thread::id runner;
    ParallelFor(&scheduler, 1, [&](uint32_t) { runner = std::this_thread::get_id(); });
    EXPECT_EQ(runner, std::this_thread::get_id()) << kind.name;
  }
}

// ---- The results

LayerProblem RandomLayer(uint64_t seed, int64_t batch, int64_t n, int64_t num_heads,
                         int64_t num_kv_heads, int64_t head_dim) {
  LayerProblem problem;
  problem.batch = batch;
  problem.n_q = problem.n_kv = n;
  problem.num_heads = num_heads;
  problem.num_kv_heads = num_kv_heads;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.query_dim = problem.key_dim = problem.value_dim = problem.output_dim =
      num_heads * head_dim;
  problem.is_causal = seed % 2 == 0;
  return NormalLayer(problem, seed);
}

Outputs AttendOn(const mha_scheduler *scheduler, const AttentionProblem &problem) {
  AttentionCall call;
  call.scheduler = scheduler;
  return Attend(problem, call);
}
Outputs ForwardOn(const mha_scheduler *scheduler, const mha_layer *layer,
                  const LayerProblem &problem) {
  LayerCall call;
  call.scheduler = scheduler;
  return Forward(layer, problem, call);
}

// compute(scheduler) gives the same on every kind and size of pool as without one.
template <typename Compute>
void ExpectSameOnPools(const LayerProblem &problem, const Compute &compute) {
  const Outputs alone = compute(static_cast<const mha_scheduler *>(nullptr));
  for (const Kind &kind : kKinds) {
    for (const size_t num_threads : kThreadCounts) {
      const Pool pool(kind, num_threads);
      EXPECT_TRUE(SameBits(compute(pool.scheduler()), alone))
          << Describe(problem) << " threads " << num_threads << ", " << kind.name;
    }
  }
}

TEST(OnAPool, AttentionGivesTheSameBits) {
  for (const LayerProblem &problem :
       {RandomLayer(1, 1, 1, 1, 1, 8), RandomLayer(2, 1, 300, 2, 2, 16),
        RandomLayer(3, 3, 70, 4, 2, 20), RandomLayer(4, 1, 270, 1, 1, 33),
        RandomLayer(5, 2, 130, 3, 1, 16)}) {
    const AttentionProblem middle = NormalAttention(problem);
    ExpectSameOnPools(problem, [&](auto *scheduler) { return AttendOn(scheduler, middle); });
  }
}

TEST(OnAPool, ForwardGivesTheSameBits) {
  for (const LayerProblem &problem :
       {RandomLayer(1, 1, 1, 1, 1, 8), RandomLayer(2, 1, 300, 4, 2, 16),
        RandomLayer(3, 4, 40, 6, 6, 24)}) {
    const Layer layer = MakeLayer(problem);
    ExpectSameOnPools(problem,
                      [&](auto *scheduler) { return ForwardOn(scheduler, layer.get(), problem); });
  }
}

// One scheduler serves a thousand calls: state that a loop leaves in the pool would affect the next
// one.
TEST(OnAPool, AThousandCallsGiveTheSameBits) {
  const LayerProblem problem = RandomLayer(10, 2, 30, 2, 1, 8);
  const Layer layer = MakeLayer(problem);
  const Outputs alone = ForwardOn(nullptr, layer.get(), problem);
  for (const Kind &kind : kKinds) {
    const Pool pool(kind, 2);
    for (int call = 0; call < kind.calls; call++) {
      ASSERT_TRUE(SameBits(ForwardOn(pool.scheduler(), layer.get(), problem), alone))
          << "call " << call << ", " << kind.name;
    }
  }
}

// Two threads call one layer, each with its own pool or both with the same one.
TEST(OnAPool, CallsAtTheSameTimeGiveTheSameBits) {
  const LayerProblem problem = RandomLayer(12, 1, 100, 4, 4, 16);
  const Layer layer = MakeLayer(problem);
  const Outputs alone = ForwardOn(nullptr, layer.get(), problem);
  const Pool one(kYielding, 2), another(kYielding, 3);
  for (const Pool *second : {&another, &one}) {
    std::atomic<int> different{0};
    std::vector<std::thread> threads;
    for (const Pool *pool : {&one, second}) {
      threads.emplace_back([&, pool] {
        for (int call = 0; call < 50; call++) {
          if (!SameBits(ForwardOn(pool->scheduler(), layer.get(), problem), alone)) different++;
        }
      });
    }
    for (std::thread &thread : threads) thread.join();
    EXPECT_EQ(different, 0) << (second == &one ? "calls that share a pool"
                                               : "calls with a pool each");
  }
}

}  // namespace
