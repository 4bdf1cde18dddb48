// The same program in C++: the header compiles there without a warning, and its structs have the
// same layout.
#include "c99_test.c"  // NOLINT
