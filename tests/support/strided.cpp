#include "support/strided.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace support {

Layout RandomLayout(Random *random, bool heads) {
  Layout layout;
  if (random->Chance(0.4)) return layout;
  if (heads) layout.heads_outside = random->Chance(0.5);
  if (random->Chance(0.5)) layout.batch_gap = random->Between(0, 9);
  if (random->Chance(0.5)) layout.row_gap = random->Between(0, 17);
  if (heads && random->Chance(0.5)) layout.head_gap = random->Between(0, 5);
  return layout;
}

std::string Describe(const Layout &layout) {
  if (layout.is_default()) return "contiguous";
  return std::string(layout.heads_outside  ? "[b,h,n,d]"
                     : layout.rows_outside ? "[n,b,h,d]"
                                           : "[b,n,h,d]") +
         " gaps " + std::to_string(layout.batch_gap) + "," + std::to_string(layout.row_gap) + "," +
         std::to_string(layout.head_gap);
}

Strided::Strided(const Layout &layout, int64_t batch, int64_t rows, int64_t heads, int64_t width,
                 Place place)
    : batch_(batch), rows_(rows), heads_(heads), width_(width), is_default_(layout.is_default()) {
  if (layout.heads_outside) {
    row_stride_ = width + layout.row_gap;
    head_stride_ =
        std::max<int64_t>(rows, 1) * row_stride_ + layout.head_gap;  // as if there were a row
    batch_stride_ = heads * head_stride_ + layout.batch_gap;
  } else {
    head_stride_ = width + layout.head_gap;
    row_stride_ = heads * head_stride_ + layout.row_gap;
    batch_stride_ = std::max<int64_t>(rows, 1) * row_stride_ + layout.batch_gap;
    if (layout.rows_outside) {
      batch_stride_ = row_stride_;
      row_stride_ = batch * batch_stride_;
    }
  }
  const bool empty = batch == 0 || rows == 0 || heads == 0 || width == 0;
  const int64_t extent = empty ? 0 : Offset(batch - 1, rows - 1, heads - 1) + width;
  memory = Memory(static_cast<size_t>(extent) * sizeof(float), place);
  memory.Fill(0xff);
}

void Strided::Set(const std::vector<float> &dense) {
  ForEachVector([&](int64_t offset, int64_t dense_offset) {
    Copy(dense.data() + dense_offset, memory.floats() + offset);
  });
}

std::vector<float> Strided::Get() const {
  std::vector<float> dense(batch_ * rows_ * heads_ * width_);
  ForEachVector([&](int64_t offset, int64_t dense_offset) {
    Copy(memory.floats() + offset, dense.data() + dense_offset);
  });
  return dense;
}

bool Strided::GapsAreUntouched() const {
  std::vector<unsigned char> gaps(memory.data(), memory.data() + memory.size());
  ForEachVector([&](int64_t offset, int64_t) {
    std::memset(gaps.data() + offset * sizeof(float), 0xff, width_ * sizeof(float));
  });
  return std::all_of(gaps.begin(), gaps.end(), [](unsigned char byte) { return byte == 0xff; });
}

}  // namespace support
