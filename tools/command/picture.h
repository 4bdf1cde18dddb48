// Small pictures inside of a page.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace command {

struct Colour {
  uint8_t red, green, blue;
};

// A PNG of width * height pixels as a data: URI. A pixel is the number of a colour of the palette, of at most 256; number 0 is transparent.
// The pixels are stored, not compressed: 4/3 of a character for each.
std::string png_uri(int64_t width, int64_t height, const std::vector<Colour> &palette, const std::vector<uint8_t> &pixels);

}  // namespace command
