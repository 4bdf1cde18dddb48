#include "picture.h"

#include <algorithm>
#include <array>

namespace command {
namespace {

std::string big_endian(uint32_t number) {
  return {static_cast<char>(number >> 24), static_cast<char>(number >> 16), static_cast<char>(number >> 8), static_cast<char>(number)};
}

uint32_t crc32(const std::string &bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = (rest & 1) != 0 ? 0xEDB88320u ^ rest >> 1 : rest >> 1;
      made[byte] = rest;
    }
    return made;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (const char c : bytes) crc = table[(crc ^ static_cast<uint8_t>(c)) & 255] ^ crc >> 8;
  return ~crc;
}

uint32_t adler32(const std::string &bytes) {
  uint32_t low = 1, high = 0;
  for (const char c : bytes) {
    low = (low + static_cast<uint8_t>(c)) % 65521;
    high = (high + low) % 65521;
  }
  return high << 16 | low;
}

// A zlib stream of stored blocks.
std::string zlib_stream(const std::string &bytes) {
  std::string stream = "\x78\x01";
  size_t begin = 0;
  do {
    const size_t length = std::min<size_t>(bytes.size() - begin, 65535);
    const bool is_last = begin + length == bytes.size();
    const uint32_t complement = ~static_cast<uint32_t>(length);
    stream += {static_cast<char>(is_last), static_cast<char>(length), static_cast<char>(length >> 8), static_cast<char>(complement),
               static_cast<char>(complement >> 8)};
    stream.append(bytes, begin, length);
    begin += length;
  } while (begin < bytes.size());
  return stream + big_endian(adler32(bytes));
}

std::string chunk(const std::string &type, const std::string &data) {
  return big_endian(static_cast<uint32_t>(data.size())) + type + data + big_endian(crc32(type + data));
}

std::string base64(const std::string &bytes) {
  const char *const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t three = 0;
    for (size_t j = 0; j < 3; ++j) three = three << 8 | (i + j < bytes.size() ? static_cast<uint8_t>(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) text += i + j <= bytes.size() ? digits[three >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

}  // namespace

std::string png_uri(int64_t width, int64_t height, const std::vector<Colour> &palette, const std::vector<uint8_t> &pixels) {
  std::string colours, rows;
  for (const Colour &colour : palette) {
    colours += {static_cast<char>(colour.red), static_cast<char>(colour.green), static_cast<char>(colour.blue)};
  }
  for (int64_t row = 0; row < height; ++row) {
    rows += '\0';  // not filtered
    rows.append(reinterpret_cast<const char *>(pixels.data()) + row * width, static_cast<size_t>(width));
  }
  const std::string eight_bits_of_a_palette = {8, 3, 0, 0, 0};
  const std::string header = big_endian(static_cast<uint32_t>(width)) + big_endian(static_cast<uint32_t>(height)) + eight_bits_of_a_palette;
  const std::string png = "\x89PNG\r\n\x1a\n" + chunk("IHDR", header) + chunk("PLTE", colours) + chunk("tRNS", std::string(1, '\0')) +
                          chunk("IDAT", zlib_stream(rows)) + chunk("IEND", "");
  return "data:image/png;base64," + base64(png);
}

}  // namespace command
