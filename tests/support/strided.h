// A tensor [batch, rows, heads, width] anywhere in memory: with gaps, and with batch, rows and
// heads in any order.
#ifndef MHA_TESTS_SUPPORT_STRIDED_H
#define MHA_TESTS_SUPPORT_STRIDED_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support/memory.h"
#include "support/random.h"

namespace support {

struct Layout {
  bool heads_outside = false;  // [batch, heads, rows, width] instead of [batch, rows, heads, width]
  int64_t batch_gap = 0;
  int64_t row_gap = 0;
  int64_t head_gap = 0;
  bool rows_outside = false;  // [rows, batch, heads, width]

  // Then strides are given as 0.
  bool is_default() const {
    return !heads_outside && !rows_outside && batch_gap == 0 && row_gap == 0 && head_gap == 0;
  }
};

inline constexpr Layout kDense = {}, kHeadsOutside = {true}, kRowsOutside = {false, 0, 0, 0, true},
                        kGaps = {false, 5, 3, 2};

Layout RandomLayout(Random *random, bool heads);

std::string Describe(const Layout &layout);

class Strided {
 public:
  Strided() = default;

  // Every byte is 0xff at first, which makes NaN: in a gap between inputs it would be seen if it
  // were used, in an output if it were not written. There is no element after the last one of the
  // tensor.
  Strided(const Layout &layout, int64_t batch, int64_t rows, int64_t heads, int64_t width,
          Place place);

  // As a call takes them.
  int64_t batch_stride() const { return is_default_ ? 0 : batch_stride_; }
  int64_t row_stride() const { return is_default_ ? 0 : row_stride_; }
  int64_t head_stride() const { return is_default_ ? 0 : head_stride_; }

  // dense is [batch, rows, heads, width].
  void Set(const std::vector<float> &dense);

  std::vector<float> Get() const;

  bool GapsAreUntouched() const;

  Memory memory;

 private:
  int64_t Offset(int64_t b, int64_t row, int64_t head) const {
    return b * batch_stride_ + row * row_stride_ + head * head_stride_;
  }

  void Copy(const float *from, float *to) const { std::memcpy(to, from, width_ * sizeof(float)); }

  template <typename Function>
  void ForEachVector(Function function) const {
    int64_t dense_offset = 0;
    for (int64_t b = 0; b < batch_; b++) {
      for (int64_t row = 0; row < rows_; row++) {
        for (int64_t head = 0; head < heads_; head++, dense_offset += width_)
          function(Offset(b, row, head), dense_offset);
      }
    }
  }

  int64_t batch_ = 0, rows_ = 0, heads_ = 0, width_ = 0;
  int64_t batch_stride_ = 0, row_stride_ = 0, head_stride_ = 0;
  bool is_default_ = true;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_STRIDED_H
