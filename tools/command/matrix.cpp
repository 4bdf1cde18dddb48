#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace command {
namespace {

constexpr int kIndent = 2;
constexpr int kGap = 4;

std::string padded_left(const std::string &text, size_t width) { return std::string(width - std::min(width, text.size()), ' ') + text; }
std::string padded_right(const std::string &text, size_t width) { return text + std::string(width - std::min(width, text.size()), ' '); }

std::string number_text(float number, bool has_exponent) {
  if (std::isnan(number)) return "nan";  // whatever its sign
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, has_exponent ? "%.4e" : "%.4f", static_cast<double>(number));
  return buffer;
}

// Fainter: what is not a number to read.
std::string with_faint_words(std::string line, const Palette &palette) {
  for (const std::string word : {"-inf", "..."}) {
    const std::string faint = palette.faint(word);
    for (size_t at = line.find(word); at != std::string::npos; at = line.find(word, at + faint.size())) {
      line.replace(at, word.size(), faint);
    }
  }
  return line;
}

// A block as lines of the same width.
struct Lines {
  std::string title;
  std::vector<std::string> lines;

  size_t width() const {
    size_t width = title.size();
    for (const std::string &line : lines) width = std::max(width, line.size());
    return width;
  }
};

Lines lines_of(const Block &block) {
  size_t width = 0;
  for (const std::vector<Cell> &row : block.cells) {
    for (const Cell &cell : row) width = std::max(width, cell.is_gap ? 0 : cell.text.size());
  }
  Lines result{block.title, {}};
  for (const std::vector<Cell> &row : block.cells) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool is_narrow = block.cells[0][i].is_gap;
      line += (i == 0 ? "" : "  ") + padded_left(row[i].text, is_narrow ? 3 : width);
    }
    result.lines.push_back(line);
  }
  return result;
}

void print_row_of_blocks(const std::vector<Lines> &blocks, size_t first, size_t last, const Palette &palette) {
  size_t height = 0;
  for (size_t i = first; i < last; ++i) height = std::max(height, blocks[i].lines.size());
  const std::string indent(kIndent, ' ');
  const std::string gap(kGap, ' ');

  std::string line;
  for (size_t i = first; i < last; ++i) {
    line += (i == first ? indent : gap) + palette.strong(padded_right(blocks[i].title, i + 1 == last ? 0 : blocks[i].width()));
  }
  std::printf("%s\n", line.c_str());
  for (size_t row = 0; row < height; ++row) {
    line.clear();
    for (size_t i = first; i < last; ++i) {
      const std::string cells = row < blocks[i].lines.size() ? blocks[i].lines[row] : "";
      line += (i == first ? indent : gap) + padded_right(cells, i + 1 == last ? 0 : blocks[i].width());
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", with_faint_words(line, palette).c_str());
  }
}

}  // namespace

std::vector<int64_t> shown_indices(int64_t count, int64_t most, int64_t first, int64_t last) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < count; ++i) {
    if (count > most && i == first) {
      indices.push_back(-1);
      i = count - last;
    }
    indices.push_back(i);
  }
  return indices;
}

Block matrix_block(const std::string &title, const Matrix &matrix) {
  const std::vector<int64_t> rows = shown_indices(matrix.rows, 8, 3, 3);
  const std::vector<int64_t> columns = shown_indices(matrix.columns, 8, 3, 3);
  float largest = 0;
  for (const int64_t row : rows) {
    for (const int64_t column : columns) {
      if (row < 0 || column < 0) continue;
      const float magnitude = std::fabs(matrix.at(row, column));
      if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
    }
  }
  const bool has_exponent = largest >= 1e6f;

  Block result{title, {}};
  for (const int64_t row : rows) {
    result.cells.emplace_back();
    for (const int64_t column : columns) {
      const bool is_gap = row < 0 || column < 0;
      const float number = is_gap ? 0 : matrix.at(row, column);
      result.cells.back().push_back({is_gap ? "..." : number_text(number, has_exponent), number, is_gap});
    }
  }
  return result;
}

void print_blocks(const std::vector<Block> &blocks, const Palette &palette, int width) {
  std::vector<Lines> lines;
  for (const Block &block : blocks) lines.push_back(lines_of(block));
  for (size_t first = 0; first < lines.size();) {
    size_t last = first;
    size_t used = 0;
    while (last < lines.size()) {
      const size_t with_next = used + (last == first ? kIndent : kGap) + lines[last].width();
      if (last > first && with_next > static_cast<size_t>(width)) break;
      used = with_next;
      ++last;
    }
    if (first > 0) std::printf("\n");
    print_row_of_blocks(lines, first, last, palette);
    first = last;
  }
}

}  // namespace command
