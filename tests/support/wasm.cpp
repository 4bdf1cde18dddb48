// Exceptions end a program for WebAssembly, whose C++ library has none.
#include <cstdio>
#include <cstdlib>
#include <exception>

extern "C" {
void *__cxa_allocate_exception(size_t bytes) { return std::malloc(bytes); }
void __cxa_throw(void *exception, void *, void (*)(void *)) {
  std::fprintf(stderr, "%s\n", static_cast<std::exception *>(exception)->what());
  std::exit(1);
}
}
