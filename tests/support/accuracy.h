// Computed values against exact ones and their a-priori bound, and against what naive float32 code
// makes of the same problem.
#ifndef MHA_TESTS_SUPPORT_ACCURACY_H
#define MHA_TESTS_SUPPORT_ACCURACY_H

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "oracle/oracle.h"
#include "support/fixtures.h"

namespace support {

// The error in units of its bound, for which at most 1 is right. Infinite where only one of the two
// is NaN, or where they are different infinities; what is exact in both needs no bound.
double BoundRatio(double actual, double exact, double bound);

// Prints how far an output [rows, width] of a case is off, and expects it within the bound and
// about as good as naive code.
//
// Against naive code, a case is judged by its worst row and by the root of the mean square over its
// rows, the error of a row being that of its worst element in ulp of the largest value of the case.
// Row by row would be unfair either way: where scores are large, a row's error is hardly more than
// the one rounding error of its largest score, which naive code gets right by chance in some rows
// and in others not.
void ExpectAccurate(const std::string &case_name, const char *name,
                    const std::vector<float> &actual, const std::vector<float> &naive,
                    const std::vector<double> &exact, const std::vector<double> &bound,
                    int64_t width);

// ---- Whole cases

std::vector<double> Widen(const std::vector<float> &x);

// Compares outputs of a batch of 1, without norm and rotation, with the oracle.
void ExpectAccurate(const std::string &case_name, const AttentionProblem &problem,
                    const Outputs &actual);
void ExpectAccurate(const std::string &case_name, const LayerProblem &problem,
                    const Outputs &actual);

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_ACCURACY_H
