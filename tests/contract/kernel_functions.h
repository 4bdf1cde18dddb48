// The functions of the kernels over arrays: their own headers, compiled for each instruction set
// with the flags of its kernels.
#ifndef MHA_TESTS_CONTRACT_KERNEL_FUNCTIONS_H
#define MHA_TESTS_CONTRACT_KERNEL_FUNCTIONS_H

#include <cstdint>

using Map = void(const float *x, int64_t count, float *y);  // count: a multiple of 16

// Whether the probe of an instruction for pairs of bf16 takes products as defined (0), all in one
// chain (1), or one chain after the other to the sum (2).
using TakesPairs = bool(int how);

struct KernelFunctions {
  uint32_t instruction_set;
  Map *exp, *exp_of_one, *tanh, *sigmoid, *softplus, *log, *inverse_root, *positive;
  Map *f16, *bf16;                          // there and back
  Map *code;                                // where the scale is 1
  Map *scale, *factor;                      // of an int8 row of which x is the greatest
  Map *greatest8, *greatest16, *greatest4;  // the code of x where it is the greatest of its row; of
                                            // int4 16 times that, and the code of -x
  TakesPairs *takes_pairs;
  Map *fma;  // of count triples, one after the other in x
};

#define MHA_SET(name, ...) extern const KernelFunctions name##_functions;
#include "../../src/kernels/sets.def"

#endif  // MHA_TESTS_CONTRACT_KERNEL_FUNCTIONS_H
