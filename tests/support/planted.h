// What tools/mutate.py --refusals puts around each check of the library: environment variables say
// which one is left out, and where to write which ones a test depends on.
#pragma once

#include <stdio.h>
#include <stdlib.h>

struct Faults {
  const char *chosen = getenv("MHA_FAULT"), *to = getenv("MHA_FAULTS_SEEN");
  int planted = chosen ? atoi(chosen) : -1;
  char seen[1 << 13] = {};  // of each fault, whether it would change what happens
  ~Faults() {
    if (to) fwrite(seen, 1, sizeof seen, fopen(to, "w"));
  }
};
inline Faults faults;

template <class T>
T fault(int n, T value, T is) {
  faults.seen[n] |= is != value;
  return faults.planted == n ? value : is;
}
