// Preloaded into a program: from its main on, the allocations MHA_FAIL_FIRST to MHA_FAIL_LAST,
// counted from 1, fail. The first that does makes the file MHA_FAIL_SEEN. With MHA_FAIL_IN, those
// alone count that a shared library of such a name asks for, if only by libstdc++.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <unwind.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static atomic_long count;
static long first, last;
static const char *seen, *within;
static __thread int is_asking;  // a stack is looked at, which may allocate

struct search {
  int depth, is_within;
};

// The first frame of a library beside this one and libstdc++ says whose allocation it is.
static _Unwind_Reason_Code look(struct _Unwind_Context *context, void *data) {
  struct search *const search = data;
  Dl_info info;
  if (++search->depth > 12 || !dladdr((void *)_Unwind_GetIP(context), &info) || !info.dli_fname)
    return _URC_END_OF_STACK;
  if (strstr(info.dli_fname, "failing_malloc") || strstr(info.dli_fname, "libstdc++"))
    return _URC_NO_REASON;
  search->is_within = strstr(info.dli_fname, within) != NULL;
  return _URC_END_OF_STACK;
}

static int fails(void) {
  if (last == 0 || is_asking) return 0;
  if (within) {
    struct search search = {0, 0};
    is_asking = 1;
    _Unwind_Backtrace(look, &search);
    is_asking = 0;
    if (!search.is_within) return 0;
  }
  const long number = atomic_fetch_add(&count, 1) + 1;
  if (number < first || number > last) return 0;
  if (number == first && seen) close(open(seen, O_CREAT | O_WRONLY, 0600));
  errno = ENOMEM;
  return 1;
}

void *malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void *calloc(size_t number, size_t bytes) { return fails() ? NULL : __libc_calloc(number, bytes); }
void *realloc(void *memory, size_t bytes) { return fails() ? NULL : __libc_realloc(memory, bytes); }
void *memalign(size_t alignment, size_t bytes) {
  return fails() ? NULL : __libc_memalign(alignment, bytes);
}
void *aligned_alloc(size_t alignment, size_t bytes) {
  return fails() ? NULL : __libc_memalign(alignment, bytes);
}
int posix_memalign(void **memory, size_t alignment, size_t bytes) {
  void *const given = fails() ? NULL : __libc_memalign(alignment, bytes);
  if (!given) return ENOMEM;
  *memory = given;
  return 0;
}

// For a program that chooses the moment itself.
void mha_fail_allocations(long from, long to) {
  atomic_store(&count, 0);
  first = from;
  last = to;
}

static int (*program)(int, char **, char **);
static int run(int argc, char **argv, char **environment) {
  const char *const from = getenv("MHA_FAIL_FIRST"), *const to = getenv("MHA_FAIL_LAST");
  seen = getenv("MHA_FAIL_SEEN");
  within = getenv("MHA_FAIL_IN");
  if (from && to) mha_fail_allocations(atol(from), atol(to));
  return program(argc, argv, environment);
}

typedef int start(int (*main)(int, char **, char **), int, char **, void (*)(void), void (*)(void),
                  void (*)(void), void *);
int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void),
                      void (*fini)(void), void (*end)(void), void *stack) {
  program = main;
  return ((start *)dlsym(RTLD_NEXT, "__libc_start_main"))(run, argc, argv, init, fini, end, stack);
}
