// Reads choices from the bytes of a fuzzer. Reading never fails: all bytes after the end are zero,
// for which each choice takes its first or least value.
#ifndef MHA_TESTS_FUZZ_BYTES_H
#define MHA_TESTS_FUZZ_BYTES_H

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>

// Every target defines this function, which libFuzzer calls.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace fuzz {

// Fails where a target finds something wrong. libFuzzer keeps the input, replay.cpp names it.
inline void Expect(bool holds, const char *what, const char *detail = "") {
  if (holds) return;
  std::fprintf(stderr, "%s%s%s\n", what, *detail == '\0' ? "" : ": ", detail);
  std::abort();
}

class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : next_(data), end_(data + size) {}

  bool AtEnd() const { return next_ == end_; }
  uint8_t Byte() { return AtEnd() ? 0 : *next_++; }

  // The next `count` bytes, the first one lowest.
  uint64_t Raw(int count) {
    uint64_t value = 0;
    for (int i = 0; i < count; i++) value |= uint64_t{Byte()} << (8 * i);
    return value;
  }

  bool Boolean() { return (Byte() & 1) != 0; }
  bool OneIn(int count) {
    return Byte() % count == count - 1;
  }  // rarely true, and never behind the end

  // low .. high, both included, from as few bytes as the range needs.
  int64_t Integer(int64_t low, int64_t high) {
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    int count = 1;
    while (count < 8 && range >> (8 * count) != 0) count++;
    const uint64_t value = range == UINT64_MAX ? Raw(8) : Raw(count) % (range + 1);
    return static_cast<int64_t>(static_cast<uint64_t>(low) + value);
  }

  template <typename T, size_t count>
  T Choice(const T (&values)[count]) {
    return values[Byte() % count];
  }

  // Any number of 64 bits, and often one at which sums and products overflow.
  int64_t AnyInteger() {
    const uint8_t kind = Byte();
    if (kind < 64) return static_cast<int8_t>(Byte());
    if (kind < 128) return static_cast<int64_t>(Raw(8));
    const uint64_t power = uint64_t{1} << (kind & 63);
    return static_cast<int64_t>((kind < 192 ? power : uint64_t{0} - power) +
                                static_cast<uint64_t>(static_cast<int8_t>(Byte())));
  }

  // Mostly small numbers; now and then NaN, an infinity, a subnormal, a huge one, or any 4 bytes.
  float Float() {
    const uint8_t kind = Byte();
    if (kind < 224) return (kind % 2 == 0 ? 0.03125f : -0.03125f) * static_cast<float>(kind / 2);
    const float sign = kind % 2 == 0 ? 1.0f : -1.0f;
    switch ((kind - 224) / 4) {
      case 0:
        return sign * std::numeric_limits<float>::infinity();
      case 1:
        return sign * std::numeric_limits<float>::quiet_NaN();
      case 2:
        return sign * std::numeric_limits<float>::denorm_min() * static_cast<float>(Byte());
      case 3:
        return sign * std::numeric_limits<float>::max();
      case 4:
        return sign * 0.0f;
      case 5:
        return sign * 65519.0f;  // the greatest that rounds to a finite f16
      default: {
        const uint32_t bits = static_cast<uint32_t>(Raw(4));
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
      }
    }
  }

 private:
  const uint8_t *next_;
  const uint8_t *end_;
};

}  // namespace fuzz

#endif  // MHA_TESTS_FUZZ_BYTES_H
