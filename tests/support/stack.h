// How much stack a function needs.
#ifndef MHA_TESTS_SUPPORT_STACK_H
#define MHA_TESTS_SUPPORT_STACK_H

#include <gtest/gtest.h>
#include <pthread.h>

#include <cstddef>

#include "support/memory.h"

namespace support {

inline constexpr size_t kMostStack = size_t{96} << 10;  // as the header says

// How much of its stack a thread uses.
inline size_t StackOfThread(void *(*run)(void *), void *argument) {
  Memory stack(size_t{1} << 18);
  stack.Fill(0xA5);
  pthread_attr_t attributes;
  pthread_t thread;
  pthread_attr_init(&attributes);
  if (pthread_attr_setstack(&attributes, stack.data(), stack.size()) != 0 ||
      pthread_create(&thread, &attributes, run, argument) != 0) {
    ADD_FAILURE() << "no thread could be made";
    return 0;
  }
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  size_t unused = 0;
  while (unused < stack.size() && stack.data()[unused] == 0xA5) ++unused;
  return stack.size() - unused;
}

// How much of it is the function's.
template <typename Function>
size_t StackOf(const Function &function) {
  const auto nothing = [](void *) -> void * { return nullptr; };
  const auto run = [](void *argument) -> void * {
    (*static_cast<const Function *>(argument))();
    return nullptr;
  };
  return StackOfThread(run, const_cast<Function *>(&function)) - StackOfThread(nothing, nullptr);
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_STACK_H
