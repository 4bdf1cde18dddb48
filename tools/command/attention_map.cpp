#include "attention_map.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace command {
namespace {

constexpr int64_t kLongestSide = 1024;  // of a map: more than what a screen has room for
constexpr Colour kNan = {214, 48, 86};

// Viridis at each tenth of it; in between, straight lines.
constexpr Colour kViridis[] = {{68, 1, 84},    {72, 36, 117},  {65, 68, 135},  {53, 95, 141},  {42, 120, 142}, {33, 145, 140},
                               {34, 168, 132}, {68, 191, 112}, {122, 209, 81}, {189, 223, 38}, {253, 231, 37}};
constexpr int kSteps = 10;

int64_t squares(int64_t count, int64_t side) { return (count + side - 1) / side; }

}  // namespace

MapSize map_size(int64_t num_maps, int64_t n_q, int64_t n_kv) {
  const int64_t most = kMostCells / std::min(num_maps, kMostMaps);
  int64_t side = std::max<int64_t>(1, squares(std::max(n_q, n_kv), kLongestSide));
  while (squares(n_q, side) * squares(n_kv, side) > most) ++side;
  return {squares(n_q, side), squares(n_kv, side), side};
}

AttentionMap map_of(const HeadScores &scores, const MapSize &size) {
  AttentionMap map;
  map.size = size;
  std::vector<double> sums(static_cast<size_t>(size.cells()));
  std::vector<int64_t> counts(sums.size());
  double entropies = 0, distances = 0;
  int64_t good_rows = 0;
  for (int64_t row = 0; row < scores.rows; ++row) {
    bool has_key = false, has_nan = false;
    double entropy = 0, distance = 0;
    for (int64_t column = 0; column < scores.columns; ++column) {
      const size_t pair = static_cast<size_t>(row * scores.columns + column);
      if (scores.masked_scores[pair] == -INFINITY) continue;
      const double weight = static_cast<double>(scores.weights[pair]);
      const size_t cell = static_cast<size_t>(row / size.side * size.columns + column / size.side);
      has_key = true;
      has_nan = has_nan || std::isnan(weight);
      sums[cell] += weight;
      ++counts[cell];
      if (weight > 0) entropy -= weight * std::log(weight);
      distance += weight * static_cast<double>(std::abs(scores.columns - scores.rows + row - column));
    }
    if (!has_key) map.rows_without_key.push_back(row);
    if (has_nan) map.rows_with_nan.push_back(row);
    if (!has_key || has_nan) continue;
    ++good_rows;
    entropies += entropy;
    distances += distance;
  }
  if (good_rows > 0) {
    map.spread = std::exp(entropies / static_cast<double>(good_rows));
    map.distance = distances / static_cast<double>(good_rows);
  }
  for (size_t cell = 0; cell < sums.size(); ++cell) {
    map.cells.push_back(counts[cell] == 0 ? AttentionMap::kMasked : static_cast<float>(sums[cell] / static_cast<double>(counts[cell])));
  }
  return map;
}

ColourScale::ColourScale(int64_t num_keys) : power_(num_keys <= 4 ? 1 : std::log(0.25) / std::log(1 / static_cast<double>(num_keys))) {}

double ColourScale::place(double weight) const { return std::pow(std::min(std::max(weight, 0.0), 1.0), power_); }

Colour ColourScale::colour(double place) {
  const double step = std::min(std::max(place, 0.0), 1.0) * kSteps;
  const int below = std::min(static_cast<int>(step), kSteps - 1);
  const auto between = [&](uint8_t from, uint8_t to) { return static_cast<uint8_t>(std::lround(from + (step - below) * (to - from))); };
  const Colour &from = kViridis[below], &to = kViridis[below + 1];
  return {between(from.red, to.red), between(from.green, to.green), between(from.blue, to.blue)};
}

std::string ColourScale::css_gradient() {
  std::string stops;
  for (const Colour &colour : kViridis) stops += ", " + css_colour(colour);
  return "linear-gradient(to right" + stops + ")";
}

std::vector<Colour> ColourScale::palette() {
  std::vector<Colour> colours = {{0, 0, 0}, kNan};
  for (int i = first; i < 256; ++i) colours.push_back(colour((i - first) / static_cast<double>(255 - first)));
  return colours;
}

uint8_t ColourScale::number(float cell) const {
  if (std::isnan(cell)) return nan;
  if (cell == AttentionMap::kMasked) return masked;
  return static_cast<uint8_t>(first + std::lround(place(static_cast<double>(cell)) * (255 - first)));
}

std::string css_colour(const Colour &colour) {
  char text[8];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", colour.red, colour.green, colour.blue);
  return text;
}

}  // namespace command
