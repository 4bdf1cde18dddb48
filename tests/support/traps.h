// Traps for what a call must not do: allocate, or call the system. To be included by one source
// file of a program, whose malloc it replaces.
#ifndef MHA_TESTS_SUPPORT_TRAPS_H
#define MHA_TESTS_SUPPORT_TRAPS_H

#include <errno.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>

#include "support/interface_support.h"

#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

// ---- The allocation trap
//
// This program's malloc and its relatives count what is asked of them while somebody watches, and
// can be told to fail.

#if defined(__GLIBC__) && defined(__LP64__) && !MHA_TEST_SANITIZED
#define MHA_TEST_HAS_ALLOCATION_TRAP 1
#else
#define MHA_TEST_HAS_ALLOCATION_TRAP 0
#endif

namespace {

std::atomic<bool> g_watching{false};
std::atomic<int> g_first_failing{0},
    g_last_failing{0};  // allocations that are to fail, counted from 1; 0 = none
std::atomic<int> g_allocations{0};
std::atomic<int> g_releases{0};

// What the system was advised about memory while somebody watches.
struct Advice {
  int count;
  unsigned char *memory;
  size_t bytes;
  int advice;
};
[[maybe_unused]] Advice g_advice;  // of the last call

// Counts an allocation; true if it is to fail.
[[maybe_unused]] bool CountAllocation() {
  if (!g_watching.load(std::memory_order_relaxed)) return false;
  const int number = ++g_allocations;
  if (number < g_first_failing || number > g_last_failing) return false;
  errno = ENOMEM;
  return true;
}
[[maybe_unused]] void CountRelease(const void *memory) {
  if (memory != nullptr && g_watching.load(std::memory_order_relaxed)) ++g_releases;
}

// Counts from here on. While one lives, the test itself must not allocate: no EXPECT that may fail,
// no string.
class AllocationWatch {
 public:
  explicit AllocationWatch(int first_failing = 0, int last_failing = 0) {
    g_allocations = 0;
    g_releases = 0;
    g_advice = {};
    g_first_failing = first_failing;
    g_last_failing = last_failing;
    g_watching = true;
  }
  ~AllocationWatch() { Stop(); }
  void Stop() {
    g_watching = false;
    g_last_failing = 0;
  }
  int allocations() const { return g_allocations; }
  int releases() const { return g_releases; }
  Advice advice() const { return g_advice; }
};

}  // namespace

#if MHA_TEST_HAS_ALLOCATION_TRAP
extern "C" {
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *memory);

void *malloc(size_t bytes) noexcept { return CountAllocation() ? nullptr : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) noexcept {
  return CountAllocation() ? nullptr : __libc_calloc(count, bytes);
}
void *realloc(void *memory, size_t bytes) noexcept {
  return CountAllocation() ? nullptr : __libc_realloc(memory, bytes);
}
void *memalign(size_t alignment, size_t bytes) noexcept {
  return CountAllocation() ? nullptr : __libc_memalign(alignment, bytes);
}
void *aligned_alloc(size_t alignment, size_t bytes) noexcept {
  return CountAllocation() ? nullptr : __libc_memalign(alignment, bytes);
}
int posix_memalign(void **memory, size_t alignment, size_t bytes) noexcept {
  *memory = CountAllocation() ? nullptr : __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}
void free(void *memory) noexcept {
  CountRelease(memory);
  __libc_free(memory);
}
void *mmap(void *address, size_t bytes, int protection, int flags, int file,
           off_t offset) noexcept {
  if (CountAllocation()) return MAP_FAILED;
  return reinterpret_cast<void *>(
      syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}
int madvise(void *address, size_t bytes, int advice) noexcept {
  if (!g_watching.load(std::memory_order_relaxed))
    return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
  g_advice = {g_advice.count + 1, static_cast<unsigned char *>(address), bytes, advice};
  errno = EINVAL;
  return -1;  // as from a kernel without huge pages
}
int munmap(void *address, size_t bytes) noexcept {
  CountRelease(address);
  return static_cast<int>(syscall(SYS_munmap, address, bytes));
}
}
#endif

namespace {

// The compiler may remove an allocation that nobody uses; not this one.
[[maybe_unused]] void *Escape(void *memory) {
  asm volatile("" : "+r"(memory) : : "memory");
  return memory;
}

#define SKIP_WITHOUT_ALLOCATION_TRAP() \
  if (!MHA_TEST_HAS_ALLOCATION_TRAP) GTEST_SKIP() << "malloc can't be replaced in this build"

// ---- The system call trap

struct SystemCalls {
  bool supported = false;
  long first = -1;     // number of the first system call that was made; -1 = none
  int exit_code = -1;  // what the function returned; -1 = it was stopped
};

#if defined(__linux__) && !MHA_TEST_SANITIZED
long *g_first_system_call = nullptr;  // in memory shared with the parent

constexpr int kStopped = 101;
constexpr int kNoFilter = 102;

void OnSystemCall(int, siginfo_t *info, void *) {
  *g_first_system_call = info->si_syscall;
  _exit(kStopped);
}

// Runs a function in a child process in which every system call but the one to exit is trapped. The
// function returns an exit code.
template <typename Function>
SystemCalls WatchSystemCalls(const Function &function) {
  SystemCalls result;
  void *shared = mmap(nullptr, support::PageBytes(), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return result;
  g_first_system_call = static_cast<long *>(shared);
  *g_first_system_call = -1;
  const pid_t child = fork();
  if (child == 0) {
    struct sigaction action = {};
    action.sa_sigaction = OnSystemCall;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSYS, &action, nullptr);
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) != 0)
      _exit(kNoFilter);
    _exit(function());
  }
  int status = 0;
  waitpid(child, &status, 0);
  result.first = *g_first_system_call;
  munmap(shared, support::PageBytes());
  if (WIFEXITED(status)) {
    result.supported = WEXITSTATUS(status) != kNoFilter;
    if (WEXITSTATUS(status) != kStopped) result.exit_code = WEXITSTATUS(status);
  } else {
    result.supported = true;  // and it crashed: exit_code stays -1
  }
  return result;
}
#else
template <typename Function>
SystemCalls WatchSystemCalls(const Function &) {
  return SystemCalls();
}
#endif

#define SKIP_WITHOUT_SYSTEM_CALL_TRAP()              \
  if (!WatchSystemCalls([] { return 0; }).supported) \
  GTEST_SKIP() << "system calls can't be trapped here"

}  // namespace

#endif  // MHA_TESTS_SUPPORT_TRAPS_H
