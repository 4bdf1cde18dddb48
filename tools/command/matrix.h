// Matrices as text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "terminal.h"

namespace command {

// A matrix somewhere in memory; strides count elements.
struct Matrix {
  const float *data;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  int64_t column_stride = 1;

  float at(int64_t row, int64_t column) const { return data[row * row_stride + column * column_stride]; }
};

// Which of count things are shown: all if they are at most so many, else so many first and last ones, with -1 in between.
std::vector<int64_t> shown_indices(int64_t count, int64_t most, int64_t first, int64_t last);

// What stands in a place of a matrix that is shown: a number, or "..." for those left out.
struct Cell {
  std::string text;
  float number = 0;
  bool is_gap = false;
};

// A titled matrix. A block without cells stands for those left out.
struct Block {
  std::string title;
  std::vector<std::vector<Cell>> cells;
};
Block matrix_block(const std::string &title, const Matrix &matrix);

// One block for each head or token, or for a few at either end of many: title and matrix come from make(index).
inline std::vector<int64_t> shown_blocks(int64_t count) { return shown_indices(count, 4, 2, 1); }
inline Block gap_block() { return {"...", {}}; }
template <typename Make>
std::vector<Block> blocks_of(int64_t count, Make make) {
  std::vector<Block> blocks;
  for (const int64_t index : shown_blocks(count)) blocks.push_back(index < 0 ? gap_block() : make(index));
  return blocks;
}

// Prints blocks beside each other, as many as fit into the width.
void print_blocks(const std::vector<Block> &blocks, const Palette &palette, int width);

}  // namespace command
