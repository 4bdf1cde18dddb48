// What a head attends to, as the cells of a heat map, and their colours.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "picture.h"
#include "taps.h"

namespace command {

// The cells of the maps of one call, the same for each head: all its weights, or where these are too many, squares of them.
struct MapSize {
  int64_t rows, columns;
  int64_t side;  // of a square, in weights

  int64_t cells() const { return rows * columns; }
};

constexpr int64_t kMostCells = int64_t{1} << 20;  // of all maps together
constexpr int64_t kMostMaps = 256;
MapSize map_size(int64_t num_maps, int64_t n_q, int64_t n_kv);

// A cell is the mean of those of its weights that are not masked; NaN where one of them is; kMasked where there is none.
struct AttentionMap {
  static constexpr float kMasked = -1;

  MapSize size;
  std::vector<float> cells;  // [rows, columns]
  std::vector<int64_t> rows_without_key, rows_with_nan;
  double spread = 0;    // over how many keys a row's weights are spread, on average: the exponential of the mean entropy
  double distance = 0;  // between the places of a row and of the keys that it attends to, on average

  float at(int64_t row, int64_t column) const { return cells[static_cast<size_t>(row * size.columns + column)]; }
};
AttentionMap map_of(const HeadScores &scores, const MapSize &size);

// Colours for weights from 0 to 1, of even steps to the eye. Small weights are stretched, or rows of many keys would all be dark: an even
// share of num_keys has a quarter of the scale.
class ColourScale {
 public:
  explicit ColourScale(int64_t num_keys);

  double power() const { return power_; }
  double place(double weight) const;  // on the scale, from 0 to 1
  static Colour colour(double place);
  static std::string css_gradient();

  // Numbers in palette().
  static constexpr uint8_t masked = 0, nan = 1, first = 2;
  static std::vector<Colour> palette();
  uint8_t number(float cell) const;

 private:
  double power_;
};

std::string css_colour(const Colour &colour);

}  // namespace command
