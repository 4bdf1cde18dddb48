// The same program in C++.
#include "layer.c"  // NOLINT
