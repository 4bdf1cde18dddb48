// Random numbers that are the same on every platform, which the distributions of the C++ library
// are not.
#ifndef MHA_TESTS_SUPPORT_RANDOM_H
#define MHA_TESTS_SUPPORT_RANDOM_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace support {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // splitmix64. Inlined at every level of optimisation: most inputs of tests come from here, a
  // dozen numbers for each normal one.
  [[gnu::always_inline]] inline uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  int64_t Below(int64_t end) { return static_cast<int64_t>(Next() % static_cast<uint64_t>(end)); }

  // low and high included
  int64_t Between(int64_t low, int64_t high) { return low + Below(high - low + 1); }

  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  float Uniform() {
    return static_cast<float>(static_cast<int64_t>(Next() >> 40) - (1 << 23)) * 0x1p-23f;
  }  // [-1, 1)

  std::vector<float> Uniforms(int64_t count,
                              float factor = 1) {  // factor: for exact results a power of two
    std::vector<float> x(count);
    for (float &value : x) value = Uniform() * factor;
    return x;
  }

  bool Chance(double probability) { return Unit() < probability; }

  bool Coin() { return Chance(0.5); }

  template <typename T, size_t count>
  T Pick(const T (&choices)[count]) {
    return choices[Below(count)];
  }

  template <typename T>
  T Pick(const std::vector<T> &choices) {
    return choices[Below(static_cast<int64_t>(choices.size()))];
  }

  // Normal enough: the sum of 12 uniform numbers. Box and Muller's way would need libm, whose last
  // bits differ. In integers, for floating point is slow where it is emulated.
  float Normal() {
    uint64_t sum = 0;
    for (int n = 0; n < 12; n++) sum += Next() >> 11;
    return static_cast<float>(static_cast<int64_t>(sum - (uint64_t{6} << 53))) * 0x1p-53f;
  }

  std::vector<float> Normals(int64_t count, float factor = 1) {
    std::vector<float> x(count);
    for (float &value : x) value = Normal() * factor;
    return x;
  }

 private:
  uint64_t state_;
};

// Kinds of values that the arithmetic can be wrong about.
enum class Values {
  kNormal,
  kWide,     // scores far apart: most weights vanish
  kTies,     // small integers: equal scores, zeros, negative zeros
  kTiny,     // subnormal numbers and products
  kHuge,     // some so large that products and scores overflow to either infinity
  kSpecial,  // a few NaN (of any sign and payload) and infinities
  kAny,  // any bits, one number or all of them: a few that come again and again, or each another
};

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float SpecialValue(Random *random) {
  const float infinity = std::numeric_limits<float>::infinity();
  switch (random->Between(0, 4)) {
    case 0:
      // A quiet NaN.
      return FromBits(0x7fc00000u | static_cast<uint32_t>(random->Next() & 0x803fffffu));
    case 1:
      // A signalling NaN.
      return FromBits(0x7f800001u | static_cast<uint32_t>(random->Next() & 0x803ffffeu));
    case 2:
      return infinity;
    default:
      return -infinity;
  }
}

// Any bits, rather those at the borders of what the arithmetic tells apart: of types, of codes, of
// exp, of zero.
inline float AnyNumber(Random *random) {
  const float sign = random->Coin() ? 1.0f : -1.0f;
  switch (random->Between(0, 11)) {
    case 0:
      return FromBits(static_cast<uint32_t>(random->Next()));
    case 1:
      return SpecialValue(random);
    case 2:
      return FromBits(static_cast<uint32_t>(random->Next()) & 0x807fffffu);  // subnormal
    case 3:
      return std::ldexp(sign, static_cast<int>(random->Between(-149, 127)));
    case 4:
      return std::ldexp(sign * random->Uniform(), static_cast<int>(random->Between(-30, 60)));
    case 5:
      return sign * static_cast<float>(random->Between(0, 130)) + 0.5f;
    case 6:
      return sign * FromBits(0x3f800000u + static_cast<uint32_t>(random->Between(-2, 2)));
    case 7:
      return sign * 0.0f;
    case 8:
      return sign * random->Pick({0x1p-126f, 0x1p-149f, 0x1p-100f, 0x1.fffffep+127f, 0x1p-14f,
                                  0x1p-24f, 0x1p-25f});
    case 9:
      return sign * random->Pick({65504.0f, 65519.0f, 65520.0f, 0x1.feffffp+127f, 0x1.5d589ep+6f,
                                  0x1.5d58a0p+6f, 0x1.8p+23f});
    default:
      return random->Normal();
  }
}

// Makes normal numbers times factor special as kind says.
inline void MakeSpecial(Random *random, Values kind, float factor, std::vector<float> *numbers) {
  std::vector<float> &x = *numbers;
  const int64_t count = static_cast<int64_t>(x.size());
  switch (kind) {
    case Values::kNormal:
      break;
    case Values::kWide:
      for (float &value : x) value *= 8;
      break;
    case Values::kTies:
      for (float &value : x) value = std::nearbyint(value / factor * 1.5f);  // -0 included
      break;
    case Values::kTiny:
      for (float &value : x) value = std::ldexp(value, static_cast<int>(-random->Between(55, 150)));
      break;
    case Values::kHuge:
      for (float &value : x) {
        if (random->Chance(0.03))
          value = std::ldexp(value, static_cast<int>(random->Between(50, 125)));
      }
      break;
    case Values::kSpecial:
      for (int64_t n = 0; n < 1 + count / 300; n++) {
        if (count > 0) x[random->Between(0, count - 1)] = SpecialValue(random);
      }
      break;
    case Values::kAny: {
      if (count == 0) break;
      const double chance = random->Pick({0.0, 0.02, 0.3, 1.0});
      const std::vector<float> again = {AnyNumber(random), AnyNumber(random), 0.0f,
                                        AnyNumber(random)};
      const bool are_few = random->Coin();
      x[random->Below(count)] = again[0];
      for (float &value : x) {
        if (random->Chance(chance)) value = are_few ? random->Pick(again) : AnyNumber(random);
      }
      break;
    }
  }
}

inline std::vector<float> RandomValues(Random *random, Values kind, int64_t count,
                                       float factor = 1) {
  std::vector<float> x = random->Normals(count, factor);
  MakeSpecial(random, kind, factor, &x);
  return x;
}

inline Values RandomKind(Random *random) {
  return random->Pick({Values::kNormal, Values::kNormal, Values::kNormal, Values::kWide,
                       Values::kTies, Values::kTiny, Values::kHuge, Values::kHuge, Values::kSpecial,
                       Values::kSpecial});
}

inline const char *NameOf(Values kind) {
  constexpr const char *names[] = {"normal", "wide", "ties", "tiny", "huge", "special", "any"};
  return names[static_cast<int>(kind)];
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_RANDOM_H
