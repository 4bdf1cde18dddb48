// To be read beside src/kernels/CONTRACT.md; the numbers of the sections are that page's.
//
// The inner loops run over independent results (columns, keys, values), each of which is computed
// in exactly the order of the page. MHA_SPEC_FUNCTIONS is the name under which this compilation
// hands out its functions. As one of the compilations is for a larger instruction set, everything
// else is in an anonymous namespace and nothing of the C++ library is used: an inline function
// shared with the rest of the program could otherwise end up with instructions that the machine
// lacks.
#include "spec/spec.h"

#ifdef __FAST_MATH__
#error "the specification needs IEEE arithmetic: compile without -ffast-math"
#endif

namespace spec {
namespace {

using support::Arithmetic;
using support::AttentionShape;
using support::Format;
using support::GateKind;
using support::LayerShape;
using support::LayerWeights;
using support::Norm;
using support::Rotation;
using support::Storage;
using support::Stored;

constexpr int64_t kProjectionBlock = 256;
constexpr int64_t kBf16Step = 32;
constexpr int64_t kScoreBlock = 32;
constexpr int64_t kCodedBlock = 512;
constexpr int64_t kChunk = 256;
constexpr int64_t kPartialSums = 16;
constexpr int64_t kOffsetBlock = 64;

const float kInfinity = __builtin_inff();

// Memory for the length of a scope.
class Floats {
 public:
  explicit Floats(int64_t count)
      : data_(new float[static_cast<decltype(sizeof 0)>(count > 0 ? count : 1)]) {}
  ~Floats() { delete[] data_; }
  Floats(const Floats &) = delete;
  Floats &operator=(const Floats &) = delete;
  operator float *() { return data_; }

 private:
  float *data_;
};

int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- 1. Operations

uint32_t Bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA) || \
    defined(__riscv_flen)
float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }  // an instruction
#else
// libm's fmaf rounds twice on some systems, so these are integers: a finite float is sign *
// significand * 2^exponent.
struct Parts {
  explicit Parts(float x) {
    const int32_t biased = static_cast<int32_t>(Bits(x) >> 23 & 0xffu);
    is_negative = Bits(x) >> 31 != 0;
    is_finite = biased != 255;
    significand = (Bits(x) & 0x007fffffu) | (biased ? 0x00800000u : 0u);
    exponent = (biased ? biased : 1) - 150;
  }
  bool is_negative, is_finite;
  uint32_t significand;
  int32_t exponent;
};

float Fma(float a, float b, float c) {
  using Integer = __int128;
  const Parts x(a), y(b), z(c);
  // Also where the product alone would overflow.
  if (x.is_finite && y.is_finite && !z.is_finite) return c;
  if (!x.is_finite || !y.is_finite || x.significand == 0 || y.significand == 0) return a * b + c;

  // Both terms as multiples of one power of two. Of a term so small that no bit of it can be
  // rounded to, it counts only that it is there.
  constexpr int32_t kFar = 70;
  Integer product = Integer{x.significand} * y.significand, addend = z.significand;
  const int32_t product_exponent = x.exponent + y.exponent,
                difference = product_exponent - z.exponent;
  int32_t exponent;
  if (difference > kFar) {
    exponent = product_exponent - kFar;
    product <<= kFar;
    addend = addend != 0;
  } else if (difference < -kFar) {
    exponent = z.exponent - kFar;
    addend <<= kFar;
    product = 1;
  } else if (difference > 0) {
    exponent = z.exponent;
    product <<= difference;
  } else {
    exponent = product_exponent;
    addend <<= -difference;
  }
  Integer sum =
      (x.is_negative != y.is_negative ? -product : product) + (z.is_negative ? -addend : addend);
  if (sum == 0) return 0.0f;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0u;
  if (sum < 0) sum = -sum;

  // Rounded to a multiple of the last place of a float of this size.
  int32_t bits = 0;
  while (sum >> bits != 0) bits++;
  const int32_t place = exponent + bits - 24 > -149 ? exponent + bits - 24 : -149,
                shift = place - exponent;
  Integer count;
  if (shift <= 0) {
    count = sum << -shift;
  } else if (shift > bits) {
    count = 0;  // less than half of the last place
  } else {
    const Integer half = Integer{1} << (shift - 1), rest = sum & (2 * half - 1);
    count = sum >> shift;
    if (rest > half || (rest == half && count % 2 == 1)) count++;
  }
  // The exponent's field follows the significand's: a count of 2^24 carries into it, and one beyond
  // the largest float gives infinity.
  if (place > 127 - 23) return FromBits(sign | 0x7f800000u);
  const uint32_t lowest_exponent = static_cast<uint32_t>(place + 149);  // 0 for subnormal numbers
  return FromBits(sign | ((lowest_exponent << 23) + static_cast<uint32_t>(count)));
}
#endif

float Canon(float x) { return x != x ? FromBits(0x7fc00000u) : x + 0.0f; }

// ---- 2. Stored numbers

// x to the nearest number of 11 significant bits that binary16 holds, by integers: what f16 stores,
// as f32.
float ThroughF16(float x) {
  const uint32_t sign = Bits(x) & 0x80000000u, magnitude = Bits(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return FromBits(0x7fc00000u);          // 0x7e00
  if (magnitude >= 0x477ff000u) return FromBits(sign | 0x7f800000u);  // 65520
  // The last place of a binary16 is 2^(exponent - 10), in the subnormal range 2^-24; x is counted
  // in quarters of it or finer, exactly.
  const int32_t exponent = static_cast<int32_t>(magnitude >> 23) - 127;
  const int32_t place = exponent < -14 ? -24 : exponent - 10;
  const uint32_t significand =
      magnitude < 0x00800000u ? magnitude : (magnitude & 0x007fffffu) | 0x00800000u;
  const int32_t shift =
      place - ((magnitude < 0x00800000u ? -126 : exponent) - 23);  // the bits below the last place
  // Below half of it.
  if (shift > 25) return FromBits(sign);
  uint32_t count = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
  if (rest > half || (rest == half && count % 2 == 1)) count++;
  float power = 1.0f;  // 2^place
  for (int32_t n = 0; n < place; n++) power = power * 2.0f;
  for (int32_t n = 0; n > place; n--) power = power * 0.5f;
  return FromBits(Bits(static_cast<float>(count) * power) | sign);
}

float ThroughBf16(float x) {
  const uint32_t bits = Bits(x), upper = bits >> 16, rest = bits & 0xffffu;
  if (x != x) return FromBits(0x7fc00000u);  // 0x7fc0
  const bool up = rest > 0x8000u || (rest == 0x8000u && upper % 2 == 1);
  return FromBits((upper + (up ? 1u : 0u)) << 16);
}

// To an integer, ties to even, for |x| < 2^51: adding 1.5 * 2^52 rounds to a multiple of 1.
double RoundToEven(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

// Codes of `terms` numbers that lie `stride` apart, and their scale.
void Encode(Stored stored, const float *x, int64_t terms, int64_t stride, float *codes,
            float *scale) {
  float m = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < terms; i++) {
    const float v = x[i * stride];
    if (v - v != 0.0f) is_finite = false;
    if (__builtin_fabsf(v) > __builtin_fabsf(m)) m = v;
  }
  const float a = __builtin_fabsf(m);
  const bool has_codes = is_finite && a >= 0x1p-100f;
  *scale = !is_finite                ? FromBits(0x7fc00000u)
           : !has_codes              ? 0.0f
           : stored == Stored::kInt8 ? a / 127.0f
                                     : m * -0x1p-3f;
  const float r = stored == Stored::kInt8 ? 127.0f / a : -8.0f / m;
  const double low = stored == Stored::kInt8 ? -127 : -8, high = stored == Stored::kInt8 ? 127 : 7;
  for (int64_t i = 0; i < terms; i++) {
    const double n = has_codes ? RoundToEven(x[i * stride] * r) : 0.0;
    codes[i * stride] = static_cast<float>(n < low ? low : n > high ? high : n);
  }
}

void StoreWeights(const Format &format, const float *w, int64_t in, int64_t out, float *numbers,
                  float *scales) {
  const Stored stored = format.stored;
  for (int64_t i = 0; i < in * out; i++) {
    if (stored == Stored::kF32) numbers[i] = w[i];
    if (stored == Stored::kF16) numbers[i] = ThroughF16(w[i]);
    if (stored == Stored::kBf16) numbers[i] = ThroughBf16(w[i]);
  }
  if (stored != Stored::kInt8 && stored != Stored::kInt4) return;
  const int64_t group = format.group ? format.group : in;
  for (int64_t n = 0; n < out; n++) {
    for (int64_t k = 0; k < in; k += group)
      Encode(stored, w + k * out + n, Min(group, in - k), out, numbers + k * out + n,
             scales + k / group * out + n);
  }
}

// The B of keys and of values; 1 where H is not stored.
int64_t HadamardBlock(int64_t width, int64_t other) {
  int64_t block = 1;
  while (block < 256 && width % (2 * block) == 0 && other % (2 * block) == 0) block *= 2;
  return block;
}

int64_t BlockOfKeys(const AttentionShape &shape) {
  if (shape.k_type != Storage::kInt8) return 1;
  return HadamardBlock(shape.head_dim, shape.values_in_keys ? shape.head_dim_v : shape.head_dim);
}

int64_t BlockOfValues(const AttentionShape &shape) {
  if (shape.values_in_keys) return BlockOfKeys(shape);
  return shape.v_type == Storage::kInt4 ? HadamardBlock(shape.head_dim_v, shape.head_dim_v) : 1;
}

// H(x), in place.
void Hadamard(int64_t block, int64_t width, float *y) {
  for (int64_t h = block / 2; h >= 1; h /= 2) {
    for (int64_t d = 0; d < width; d++) {
      if (d / h % 2 != 0) continue;
      const float a = y[d], b = y[d + h];
      y[d] = a + b;
      y[d + h] = a - b;
    }
  }
}

void HadamardBack(int64_t block, int64_t width, float *y) {
  Hadamard(block, width, y);
  const float factor = 1.0f / static_cast<float>(block);
  for (int64_t d = 0; d < width; d++) y[d] = y[d] * factor;
}

bool HasCodes(Storage type) { return type >= Storage::kInt8; }

// A row x as it is taken once stored; *scale is written for codes only.
void StoreRow(Storage type, int64_t block, const float *x, int64_t width, float *numbers,
              float *scale) {
  if (HasCodes(type)) {
    Floats y(width);
    for (int64_t d = 0; d < width; d++) y[d] = x[d];
    Hadamard(block, width, y);
    return Encode(type == Storage::kInt8 ? Stored::kInt8 : Stored::kInt4, y, width, 1, numbers,
                  scale);
  }
  for (int64_t d = 0; d < width; d++) {
    numbers[d] = type == Storage::kF16    ? ThroughF16(x[d])
                 : type == Storage::kBf16 ? ThroughBf16(x[d])
                                          : x[d];
  }
}

void Store(const AttentionShape &shape, bool are_keys, const float *x, int64_t rows, float *read) {
  const Storage type = are_keys ? shape.k_type : shape.v_type;
  const int64_t width = are_keys ? shape.head_dim : shape.head_dim_v,
                block = are_keys ? BlockOfKeys(shape) : BlockOfValues(shape);
  for (int64_t row = 0; row < rows; row++) {
    float *read_row = read + row * width;
    float scale = 1.0f;
    StoreRow(type, block, x + row * width, width, read_row, &scale);
    for (int64_t d = 0; d < width && HasCodes(type); d++) read_row[d] = read_row[d] * scale;
    HadamardBack(block, width, read_row);
    for (int64_t d = 0; d < width; d++) read_row[d] = Canon(read_row[d]);
  }
}

// ---- 3. dot(x, w) over K terms

// r[n] = dot(x, w[:, n]) for x [terms], w [terms, count], in blocks of `block` terms
void Dots(int64_t block, const float *x, const float *w, int64_t terms, int64_t count, float *r) {
  Floats c(count);
  for (int64_t first = 0; first < terms; first += block) {
    for (int64_t n = 0; n < count; n++) c[n] = 0.0f;
    for (int64_t k = first; k < Min(first + block, terms); k++) {
      const float *w_k = w + k * count;
      for (int64_t n = 0; n < count; n++) c[n] = Fma(x[k], w_k[n], c[n]);
    }
    for (int64_t n = 0; n < count; n++) r[n] = first == 0 ? c[n] : r[n] + c[n];
  }
}

// ---- 4. Projection

void Project(const float *x, const float *w, const float *bias, int64_t rows, int64_t in,
             int64_t out, float *y) {
  for (int64_t i = 0; i < rows; i++) {
    float *y_i = y + i * out;
    Dots(kProjectionBlock, x + i * in, w, in, out, y_i);
    for (int64_t n = 0; n < out; n++) y_i[n] = Canon(bias ? y_i[n] + bias[n] : y_i[n]);
  }
}

// The same in bf16 arithmetic, of weights as they are stored.
float Factor(float x) {
  const float rounded = ThroughBf16(x);
  return __builtin_fabsf(rounded) < 0x1p-50f ? 0.0f : rounded;
}

void ProjectBf16(const float *x, const float *w, const float *bias, int64_t rows, int64_t in,
                 int64_t out, float *y) {
  Floats factors(in * out), e(out), o(out);
  for (int64_t i = 0; i < in * out; i++) factors[i] = Factor(w[i]);
  for (int64_t i = 0; i < rows; i++) {
    float *y_i = y + i * out;
    for (int64_t n = 0; n < out; n++) y_i[n] = 0.0f;
    for (int64_t first = 0; first < in; first += kBf16Step) {
      for (int64_t n = 0; n < out; n++) e[n] = o[n] = 0.0f;
      for (int64_t k = first; k < Min(first + kBf16Step, in); k++) {
        const float x_k = Factor(x[i * in + k]), *w_k = factors + k * out;
        float *c = k % 2 == 0 ? e : o;
        for (int64_t n = 0; n < out; n++) c[n] = Fma(x_k, w_k[n], c[n]);
      }
      for (int64_t n = 0; n < out; n++) y_i[n] = y_i[n] + (e[n] + o[n]);
    }
    for (int64_t n = 0; n < out; n++) y_i[n] = Canon(bias ? y_i[n] + bias[n] : y_i[n]);
  }
}

// Codes of a piece of a row, whose largest is that of int8 or 32767, and its scale.
void EncodePiece(Arithmetic arithmetic, const float *x, int64_t terms, int64_t *codes,
                 float *scale) {
  const float largest = arithmetic == Arithmetic::kInt8 ? 127.0f : 32767.0f;
  float a = 0.0f;
  bool is_finite = true;
  for (int64_t k = 0; k < terms; k++) {
    if (x[k] - x[k] != 0.0f) is_finite = false;
    if (__builtin_fabsf(x[k]) > a) a = __builtin_fabsf(x[k]);
  }
  const bool has_codes = is_finite && a >= 0x1p-100f;
  *scale = !is_finite ? FromBits(0x7fc00000u) : has_codes ? a / largest : 0.0f;
  const float r = largest / a;
  for (int64_t k = 0; k < terms; k++) {
    const double n = has_codes ? RoundToEven(x[k] * r) : 0.0;
    codes[k] = static_cast<int64_t>(n < -largest ? -largest : n > largest ? largest : n);
  }
}

// The tree that adds up partial sums.
float SumPartials(float *t);

// What codes with offsets exceed those by that are multiplied.
float CentreOf(const Format &format) {
  return format.stored == Stored::kInt4   ? 8.0f
         : format.stored == Stored::kInt5 ? 16.0f
         : format.stored == Stored::kInt6 ? 32.0f
                                          : 0.0f;
}

// Code k of output n as it is multiplied.
float CodeOf(const Format &format, const float *w, int64_t k, int64_t out, int64_t n) {
  return w[k * out + n] - (format.offsets ? CentreOf(format) : 0.0f);
}

// The scale, or the offset, of group g of output n of a matrix with `in` inputs.
float ScaleOf(const Format &format, const float *scales, int64_t in, int64_t g, int64_t out,
              int64_t n) {
  const int64_t groups = (in + format.group - 1) / format.group;
  const float scale = scales[g * out + n];
  return format.are_in_blocks ? scale * scales[(groups + g * format.group / 256) * out + n] : scale;
}

void ProjectIntegers(const Format &format, Arithmetic arithmetic, const float *x, const float *w,
                     const float *scales, int64_t in, int64_t out, float *y, float *sums) {
  const bool has_groups = format.group != 0;
  int64_t piece = format.stored == Stored::kInt4 ? 32 : 64;
  if (has_groups) piece = Min(piece, format.group);
  for (int64_t at = 0; at < in; at += piece) {
    const int64_t terms = Min(piece, in - at);
    int64_t codes[64];
    float scale;
    EncodePiece(arithmetic, x + at, terms, codes, &scale);
    for (int64_t n = 0; n < out; n++) {
      int64_t sum = 0;
      for (int64_t k = 0; k < terms; k++)
        sum += codes[k] * static_cast<int64_t>(CodeOf(format, w, at + k, out, n));
      const float of_sum = static_cast<float>(sum);
      y[n] =
          Fma(has_groups ? of_sum * ScaleOf(format, scales, in, at / format.group, out, n) : of_sum,
              scale, y[n]);
    }
    int64_t sum = 0;
    for (int64_t k = 0; k < terms; k++) sum += codes[k];
    if (has_groups)
      sums[at / format.group] = Fma(static_cast<float>(sum), scale, sums[at / format.group]);
  }
}

void ProjectGroups(const Format &format, const float *x, const float *w, const float *scales,
                   int64_t in, int64_t out, float *y, float *sums) {
  for (int64_t k = 0; k < in; k += format.group) {
    const int64_t g = k / format.group, end = Min(k + format.group, in);
    for (int64_t n = 0; n < out; n++) {
      float c = 0.0f;
      for (int64_t i = k; i < end; i++) c = Fma(x[i], CodeOf(format, w, i, out, n), c);
      y[n] = Fma(c, scales[g * out + n], y[n]);
    }
    float t[kPartialSums] = {};
    for (int64_t i = k; i < end; i++) t[(i - k) % kPartialSums] = t[(i - k) % kPartialSums] + x[i];
    sums[g] = SumPartials(t);
  }
}

// y [out] + the products of the sums of the groups of a row with the offsets.
void AddOffsets(const Format &format, const float *scales, const float *sums, int64_t in,
                int64_t out, float *y) {
  const int64_t groups = (in + format.group - 1) / format.group;
  for (int64_t n = 0; n < out; n++) {
    for (int64_t first = 0; first < groups; first += kOffsetBlock) {
      float c = 0.0f;
      for (int64_t g = first; g < Min(first + kOffsetBlock, groups); g++) {
        float offset = ScaleOf(format, format.offsets, in, g, out, n);
        if (CentreOf(format) != 0.0f)
          offset = Fma(CentreOf(format), ScaleOf(format, scales, in, g, out, n), offset);
        c = Fma(sums[g], offset, c);
      }
      y[n] = y[n] + c;
    }
  }
}

void ProjectStored(const Format &format, Arithmetic arithmetic, const float *x, const float *w,
                   const float *scales, const float *bias, int64_t rows, int64_t in, int64_t out,
                   float *y) {
  if (arithmetic == Arithmetic::kBf16) return ProjectBf16(x, w, bias, rows, in, out, y);
  if (!HasCodes(format.stored)) return Project(x, w, bias, rows, in, out, y);
  const int64_t groups = format.group ? (in + format.group - 1) / format.group : 0;
  for (int64_t i = 0; i < rows; i++) {
    float *y_i = y + i * out;
    const float *x_i = x + i * in;
    Floats sums(groups);
    for (int64_t g = 0; g < groups; g++) sums[g] = 0.0f;
    for (int64_t n = 0; n < out; n++) y_i[n] = 0.0f;
    if (arithmetic != Arithmetic::kF32)
      ProjectIntegers(format, arithmetic, x_i, w, scales, in, out, y_i, sums);
    else if (groups)
      ProjectGroups(format, x_i, w, scales, in, out, y_i, sums);
    else
      Dots(kProjectionBlock, x_i, w, in, out, y_i);
    for (int64_t n = 0; !groups && n < out; n++) y_i[n] = y_i[n] * scales[n];
    if (format.offsets) AddOffsets(format, scales, sums, in, out, y_i);
    for (int64_t n = 0; n < out; n++) y_i[n] = Canon(bias ? y_i[n] + bias[n] : y_i[n]);
  }
}

void Linear(const Format &format, Arithmetic arithmetic, const float *x, const float *w,
            const float *scales, const float *bias, const float *residual, int64_t rows, int64_t in,
            int64_t out, float *y) {
  ProjectStored(format, arithmetic, x, w, scales, bias, rows, in, out, y);
  for (int64_t n = 0; residual && n < rows * out; n++) y[n] = Canon(y[n] + residual[n]);
}

// ---- 5. Norms and rotary position embedding

float SumPartials(float *t) {
  for (int64_t n = 0; n < 8; n++) t[n] = t[n] + t[n + 8];
  for (int64_t n = 0; n < 4; n++) t[n] = t[n] + t[n + 4];
  for (int64_t n = 0; n < 2; n++) t[n] = t[n] + t[n + 2];
  return t[0] + t[1];
}

// x [heads, width], which is one row. weight and bias are those of the first head.
void Normalize(bool is_layer, float epsilon, const float *weight, const float *bias,
               int64_t head_stride, int64_t heads, int64_t width, float *x) {
  const float count = static_cast<float>(heads * width);
  float mean = 0.0f, squares = 0.0f;
  for (int64_t h = 0; h < heads && is_layer; h++) {
    float t[kPartialSums] = {};
    for (int64_t d = 0; d < width; d++)
      t[d % kPartialSums] = t[d % kPartialSums] + x[h * width + d];
    const float sum = SumPartials(t);
    mean = h == 0 ? sum : mean + sum;
  }
  if (is_layer) mean = mean / count;
  for (int64_t h = 0; h < heads; h++) {
    float t[kPartialSums] = {};
    for (int64_t d = 0; d < width; d++) {
      const float y = x[h * width + d] - mean;
      t[d % kPartialSums] = Fma(y, y, t[d % kPartialSums]);
    }
    const float sum = SumPartials(t);
    squares = h == 0 ? sum : squares + sum;
  }
  const float r = 1.0f / __builtin_sqrtf(squares / count + epsilon);
  for (int64_t h = 0; h < heads; h++) {
    for (int64_t d = 0; d < width; d++) {
      const float y = (x[h * width + d] - mean) * r,
                  w = weight ? weight[h * head_stride + d] : 1.0f;
      x[h * width + d] = bias ? Fma(y, w, bias[h * head_stride + d]) : y * w;
    }
  }
}

// x [heads, width], each head or all of them together.
void NormalizeHeads(const Norm &norm, const float *weight, const float *bias, int64_t heads,
                    int64_t width, float *x) {
  const int64_t together = norm.is_of_all_heads ? heads : 1;
  for (int64_t h = 0; h < heads; h += together) {
    Normalize(norm.is_layer, norm.epsilon, weight ? weight + h * norm.head_stride : nullptr,
              bias ? bias + h * norm.head_stride : nullptr, norm.head_stride, together, width,
              x + h * width);
  }
}

void Rotate(const Rotation &rotation, int64_t r, int64_t heads, int64_t width, float *x) {
  for (int64_t h = 0; h < heads; h++) {
    float *x_h = x + h * width + rotation.offset;
    for (int64_t i = 0; i < rotation.dims / 2; i++) {
      float *first = rotation.is_interleaved ? x_h + 2 * i : x_h + i;
      float *second = rotation.is_interleaved ? x_h + 2 * i + 1 : x_h + i + rotation.dims / 2;
      const float cos = rotation.cos[r * rotation.table_stride + i];
      const float sin = rotation.sin[r * rotation.table_stride + i];
      const float a = *first, b = *second;
      *first = Fma(a, cos, -(b * sin));
      *second = Fma(b, cos, a * sin);
    }
  }
}

// ---- 6. Sequences, positions and caches

bool IsMasked(const AttentionShape &shape, int64_t i, int64_t j) {
  // Positions and windows may be as large as an int64_t, and then their sums are not.
  using Integer = __int128;
  const Integer largest = __INT64_MAX__, next = Integer{shape.q_start} + i,
                p = next < largest ? next : largest;
  const bool is_excluded = (shape.is_causal && j > p) ||
                           (shape.has_window_left && j < p - shape.window_left) ||
                           (shape.has_window_right && j > p + shape.window_right);
  if (!shape.score) return is_excluded;
  const support::ScoreOptions &options = *shape.score;
  if (j >= options.num_keys) return true;
  if (!options.q_segments) return is_excluded;
  const int64_t own = options.q_segments[i], other = options.kv_segments[j];
  if (options.segments_add_keys) return is_excluded && !(own >= 0 && own == other);
  return is_excluded || (other != support::kNoSegment && own != other);
}

// Of row i and a kv head with a list, the positions of the ranks 0, 1, 2, ...; returns how many
// there are.
int64_t Ranks(const AttentionShape &shape, int64_t kv_head, int64_t i, int64_t *positions) {
  const support::ScoreOptions &options = *shape.score;
  const int32_t *list = options.chosen + (kv_head * shape.n_q + i) * options.num_chosen;
  int64_t count = 0;
  for (int64_t e = 0; e * options.chosen_block < shape.n_kv; e++) {
    const int64_t begin = e * options.chosen_block,
                  end = Min(begin + options.chosen_block, shape.n_kv);
    bool is_listed = false, has_key = false;
    for (int64_t n = 0; n < options.num_chosen; n++) is_listed = is_listed || list[n] == e;
    for (int64_t j = begin; j < end; j++) has_key = has_key || !IsMasked(shape, i, j);
    for (int64_t j = begin; is_listed && has_key && j < end; j++) positions[count++] = j;
  }
  return count;
}

// ---- 7. Score

float ScaleOf(const AttentionShape &shape) {
  if (shape.has_equal_scores) return 0.0f;
  return shape.scale != 0.0f ? shape.scale
                             : 1.0f / __builtin_sqrtf(static_cast<float>(shape.head_dim));
}

bool TakesPart(const AttentionShape &shape, int64_t i, int64_t j, float s) {
  return !IsMasked(shape, i, j) && s != -kInfinity;
}

// ---- 11. exp, for x <= 0 or NaN

float Exp(float x) {
  const float t = Fma(x, 0x1.715476p+0f, 0x1.8p+23f);
  const float n = t - 0x1.8p+23f;
  float r = Fma(n, -0x1.62e43p-1f, x);
  r = Fma(n, 0x1.05c61p-29f, r);
  float p = 0x1.6a23d0p-10f;
  p = Fma(p, r, 0x1.123a20p-7f);
  p = Fma(p, r, 0x1.5558f2p-5f);
  p = Fma(p, r, 0x1.555492p-3f);
  p = Fma(p, r, 0x1.fffffcp-2f);
  p = Fma(p, r, 1.0f);
  p = Fma(p, r, 1.0f);
  const float y = FromBits(Bits(p) + (Bits(t) << 23));
  return x != x ? x : x < -0x1.5d589ep+6f ? 0.0f : y;
}

// ---- 12. log, for normal x > 0 or NaN

float Log(float x) {
  const uint32_t i = Bits(x);
  const int32_t k = static_cast<int32_t>(i - 0x3f3504f3u) >> 23;
  const float f = FromBits(i - (static_cast<uint32_t>(k) << 23)) - 1.0f;
  const float s = f / (2.0f + f);
  const float z = s * s;
  float r = 0x1.e2fdd2p-3f;
  r = Fma(r, z, 0x1.2438a8p-2f);
  r = Fma(r, z, 0x1.999a7cp-2f);
  r = Fma(r, z, 0x1.555554p-1f);
  r = r * z;
  const float h = (0.5f * f) * f;
  const float q = Fma(s, h + r, static_cast<float>(k) * -0x1.05c61p-29f);
  return x != x ? x : Fma(static_cast<float>(k), 0x1.62e43p-1f, f - (h - q));
}

// ---- 14. tanh

float Tanh(float x) {
  const float a = x > 0.0f - x ? x : 0.0f - x;
  const float z = x * x;
  float p = Fma(-0x1.82585ap-8f, z, 0x1.54b8a2p-6f);
  p = Fma(p, z, -0x1.b898dep-5f);
  p = Fma(p, z, 0x1.1109aep-3f);
  p = Fma(p, z, -0x1.55553ep-2f);
  if (a < 0x1.333334p-1f) return Fma(x * z, p, x);
  const float e = Exp(-2.0f * a);
  const float y = 1.0f - (e + e) / (1.0f + e);
  return x < 0.0f ? 0.0f - y : y;
}

// ---- 16. sigmoid and softplus

float Sigmoid(float x) {
  const float a = x > 0.0f - x ? x : 0.0f - x;
  const float e = Exp(0.0f - a);
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

float Softplus(float x) {
  const float a = x > 0.0f - x ? x : 0.0f - x;
  const float e = Exp(0.0f - a);
  const float s = e / (2.0f + e);
  const float z = s * s;
  float r = Fma(0x1.1ed7bep-2f, z, 0x1.1ebd0ep-2f);
  r = Fma(r, z, 0x1.99d208p-2f);
  r = Fma(r, z, 0x1.555502p-1f);
  r = r * z;
  const float h = (0.5f * e) * e;
  return (x > 0.0f ? x : 0.0f) + (e - (h - s * (h + r)));
}

// ---- 8. Chunks

// A kv head's values as they are taken: numbers [n_kv, head_dim_v], and a factor of each row where
// scales [n_kv] is not null; numbers are those of H, with this B.
struct Rows {
  const float *numbers;
  const float *scales;
  int64_t block;
};

// The partial of a row; o is [head_dim_v].
struct Partial {
  float m;
  float l;
  float *o;
};

bool IsEmpty(const Partial &partial) { return partial.l == 0.0f; }

// The products of a row of queries with keys of codes, [head_dim, n_kv].
void CodedDots(const float *q, const float *k_t, int64_t head_dim, int64_t n_kv, float *dots) {
  int64_t *codes = new int64_t[static_cast<decltype(sizeof 0)>(head_dim)];
  float scale;
  EncodePiece(Arithmetic::kInt16, q, head_dim, codes, &scale);
  for (int64_t j = 0; j < n_kv; j++) {
    float y = 0.0f;
    for (int64_t d = 0; d < head_dim; d += kCodedBlock) {
      int64_t sum = 0;
      for (int64_t i = d; i < Min(d + kCodedBlock, head_dim); i++)
        sum += codes[i] * static_cast<int64_t>(k_t[i * n_kv + j]);
      y = Fma(static_cast<float>(sum), scale, y);
    }
    dots[j] = y;
  }
  delete[] codes;
}

// The weighted sum of the values of a chunk, in integers. w [count] is 0 for keys that take no
// part.
void CodedSum(const float *w, int64_t count, const float *v, int64_t head_dim_v, float *o) {
  int64_t codes[kChunk];
  float scale;
  EncodePiece(Arithmetic::kInt16, w, count, codes, &scale);
  for (int64_t d = 0; d < head_dim_v; d++) {
    int64_t sum = 0;
    for (int64_t j = 0; j < count; j++)
      sum += codes[j] * static_cast<int64_t>(v[j * head_dim_v + d]);
    o[d] = static_cast<float>(sum) * scale;
  }
}

// The partial of chunk c of row i. p [n_kv] is scratch.
void ChunkPartial(const AttentionShape &shape, int64_t i, int64_t c, const float *s, const Rows &v,
                  float *p, Partial *partial) {
  const int64_t begin = kChunk * c;
  const int64_t end = Min(kChunk * (c + 1), shape.n_kv);

  float m = -kInfinity;
  for (int64_t j = begin; j < end; j++) {
    if (TakesPart(shape, i, j, s[j])) m = s[j] > m ? s[j] : m;
  }

  // Of every key, which is quicker; those that take no part are not used below.
  for (int64_t j = begin; j < end; j++) p[j] = Exp(s[j] - m);

  float t[kPartialSums] = {};
  for (int64_t j = begin; j < end; j++) {
    if (TakesPart(shape, i, j, s[j])) t[j % kPartialSums] = t[j % kPartialSums] + p[j];
  }
  const float l = SumPartials(t);

  float *o = partial->o;
  for (int64_t d = 0; d < shape.head_dim_v; d++) o[d] = 0.0f;
  partial->m = m;
  partial->l = l;
  if (shape.is_in_integers) {
    float w[kChunk];
    for (int64_t j = begin; j < end; j++)
      w[j - begin] = TakesPart(shape, i, j, s[j]) ? p[j] * v.scales[j] : 0.0f;
    if (begin < end)
      CodedSum(w, end - begin, v.numbers + begin * shape.head_dim_v, shape.head_dim_v, o);
  }
  for (int64_t j = begin; j < end && !shape.is_in_integers; j++) {
    if (!TakesPart(shape, i, j, s[j])) continue;
    const float *v_j = v.numbers + j * shape.head_dim_v;
    const float factor = v.scales ? p[j] * v.scales[j] : p[j];
    for (int64_t d = 0; d < shape.head_dim_v; d++) o[d] = Fma(factor, v_j[d], o[d]);
  }
  HadamardBack(v.block, shape.head_dim_v, o);
}

// ---- 9. Merging partials

void Copy(int64_t head_dim_v, const Partial &from, Partial *result) {
  result->m = from.m;
  result->l = from.l;
  for (int64_t d = 0; d < head_dim_v; d++) result->o[d] = from.o[d];
}

// partial1 holds the earlier keys; *result may be the same object.
void Merge(int64_t head_dim_v, const Partial &partial1, const Partial &partial2, Partial *result) {
  if (IsEmpty(partial1)) return Copy(head_dim_v, partial2, result);
  if (IsEmpty(partial2)) return Copy(head_dim_v, partial1, result);
  const float m = partial2.m > partial1.m ? partial2.m : partial1.m;
  const float a = Exp(partial1.m - m);
  const float b = Exp(partial2.m - m);
  result->l = Fma(partial1.l, a, partial2.l * b);
  for (int64_t d = 0; d < head_dim_v; d++) result->o[d] = Fma(partial1.o[d], a, partial2.o[d] * b);
  result->m = m;
}

// The partial of the whole row i: the perfect binary tree over the chunks. o [leaves, head_dim_v]
// and partial [leaves] are scratch; the result is partial[0].
void RowPartial(const AttentionShape &shape, int64_t i, const float *s, const Rows &v,
                int64_t leaves, float *p, float *o, Partial *partial) {
  for (int64_t c = 0; c < leaves; c++) {
    partial[c].o = o + c * shape.head_dim_v;
    ChunkPartial(shape, i, c, s, v, p,
                 &partial[c]);  // beyond the last chunk there are no keys: empty
  }
  for (int64_t width = leaves; width > 1; width /= 2) {
    for (int64_t c = 0; c < width / 2; c++)
      Merge(shape.head_dim_v, partial[2 * c], partial[2 * c + 1], &partial[c]);
  }
}

int64_t Leaves(int64_t n_kv) {
  int64_t leaves = 1;
  while (leaves * kChunk < n_kv) leaves *= 2;
  return leaves;
}

// ---- 10. What is handed out

// What score options make of the scaled scores of row i of head h: softcapped, then with ALiBi,
// bias and mask.
void Cap(const AttentionShape &shape, float *s) {
  if (!shape.score || shape.score->softcap == 0.0f) return;
  const float inverse = 1.0f / shape.score->softcap;
  for (int64_t j = 0; j < shape.n_kv; j++) s[j] = Tanh(s[j] * inverse) * shape.score->softcap;
}

// s + bias; a bias of -infinity excludes the key whatever s is.
float AddBias(float s, float bias) { return bias == -kInfinity ? bias : s + bias; }

void BiasAndMask(const AttentionShape &shape, int64_t h, int64_t i, float *s) {
  if (!shape.score) return;
  const support::ScoreOptions &options = *shape.score;
  const __int128 next = __int128{shape.q_start} + i;
  const int64_t p = static_cast<int64_t>(next < __INT64_MAX__ ? next : __INT64_MAX__);
  for (int64_t j = 0; j < shape.n_kv; j++) {
    const int64_t at = (h * shape.n_q + i) * shape.n_kv + j;
    if (options.alibi_slopes) {
      const float distance = static_cast<float>(j / 16 * 16 - p) + static_cast<float>(j % 16);
      s[j] = Fma(-options.alibi_slopes[h], distance > 0.0f - distance ? distance : 0.0f - distance,
                 s[j]);
    }
    if (options.relative_bias || options.relative_rows) {
      const __int128 distance = __int128{j} - p;
      const int64_t left = options.relative_left, right = options.relative_right;
      const int64_t column = distance < -left   ? 0
                             : distance > right ? left + right
                                                : static_cast<int64_t>(distance) + left;
      const float *rows = options.relative_rows
                              ? options.relative_rows + (h * shape.n_q + i) * (left + 1 + right)
                              : options.relative_bias + h * (left + 1 + right);
      s[j] = AddBias(s[j], rows[column]);
    }
    if (options.bias) s[j] = AddBias(s[j], options.bias[at]);
    if (options.mask && !options.mask[at]) s[j] = -kInfinity;
  }
}

void HandOutPartial(int64_t head_dim_v, const Partial &partial, float *to) {
  const bool empty = IsEmpty(partial);
  to[0] = empty ? -kInfinity : Canon(partial.m);
  to[1] = empty ? 0.0f : Canon(partial.l);
  for (int64_t d = 0; d < head_dim_v; d++) to[2 + d] = empty ? 0.0f : Canon(partial.o[d]);
}

void AddSink(int64_t head_dim_v, float sink, Partial *partial) {
  Floats nothing(head_dim_v);
  for (int64_t d = 0; d < head_dim_v; d++) nothing[d] = 0.0f;
  if (!IsEmpty(*partial)) Merge(head_dim_v, *partial, {sink, 1.0f, nothing}, partial);
}

// x times the gate of row i.
float Gated(const AttentionShape &shape, int64_t h, int64_t i, int64_t d, float x) {
  const float g =
      shape.gate.values[(i * shape.num_heads + h) * shape.gate.dim + (shape.gate.dim == 1 ? 0 : d)];
  return Canon(x * (shape.gate.kind == GateKind::kSigmoid ? Sigmoid(g) : Softplus(g)));
}

// The rows that W_O takes, x [n_q, num_heads, head_dim_v]: gated or, where the gate comes behind
// the norm, the context.
void FinishContext(const AttentionShape &shape, float *x) {
  const support::ContextNorm &norm = *shape.context_norm;
  const int64_t heads = shape.num_heads, width = shape.head_dim_v,
                together = norm.is_of_all_heads ? heads : 1;
  for (int64_t i = 0; i < shape.n_q; i++) {
    for (int64_t h = 0; h < heads; h += together) {
      Normalize(norm.is_layer, norm.epsilon,
                norm.weight ? norm.weight + h * norm.head_stride : nullptr,
                norm.bias ? norm.bias + h * norm.head_stride : nullptr, norm.head_stride, together,
                width, x + (i * heads + h) * width);
    }
    for (int64_t n = 0;
         !norm.is_after_gate && shape.gate.kind != GateKind::kNone && n < heads * width; n++) {
      x[i * heads * width + n] = Gated(shape, n / width, i, n % width, x[i * heads * width + n]);
    }
  }
}

void FinishRow(const AttentionShape &shape, int64_t h, int64_t i, const float *s,
               const Partial &partial, float *context, float *gated, float *lse, float *weights) {
  const bool empty = IsEmpty(partial);
  const float inv = 1.0f / partial.l;
  for (int64_t d = 0; d < shape.head_dim_v; d++) {
    float x = empty ? 0.0f : Canon(partial.o[d] * inv);
    if (!empty && shape.score && shape.score->head_scales)
      x = Canon(x * shape.score->head_scales[h]);
    if (context) context[d] = x;
    const bool is_late = shape.context_norm && !shape.context_norm->is_after_gate;
    if (!empty && !is_late && shape.gate.kind != GateKind::kNone) x = Gated(shape, h, i, d, x);
    if (gated) gated[d] = x;
  }
  if (lse) *lse = empty ? -kInfinity : Canon(partial.m + Log(partial.l));
  if (weights) {
    for (int64_t j = 0; j < shape.n_kv; j++) {
      weights[j] = TakesPart(shape, i, j, s[j]) ? Canon(Exp(s[j] - partial.m) * inv) : 0.0f;
    }
  }
}

void TapRow(const AttentionShape &shape, int64_t i, const float *dots, const float *scaled,
            const float *capped, const float *s, int64_t at, const AttentionOutputs &outputs) {
  for (int64_t j = 0; j < shape.n_kv; j++) {
    if (outputs.scores) outputs.scores[at + j] = Canon(dots[j]);
    if (outputs.scaled_scores) outputs.scaled_scores[at + j] = Canon(scaled[j]);
    if (outputs.softcapped_scores) outputs.softcapped_scores[at + j] = Canon(capped[j]);
    if (outputs.masked_scores)
      outputs.masked_scores[at + j] = IsMasked(shape, i, j) ? -kInfinity : Canon(s[j]);
  }
}

// A row of a head of scale 0: as padding.
void LeaveOutRow(const AttentionShape &shape, int64_t h, int64_t i,
                 const AttentionOutputs &outputs) {
  const int64_t row = h * shape.n_q + i;
  for (int64_t d = 0; d < shape.head_dim_v; d++) {
    const int64_t at = (i * shape.num_heads + h) * shape.head_dim_v + d;
    if (outputs.context) outputs.context[at] = 0.0f;
    if (outputs.gated) outputs.gated[at] = 0.0f;
  }
  if (outputs.lse) outputs.lse[row] = -kInfinity;
  for (int64_t at = row * shape.n_kv; at < (row + 1) * shape.n_kv; at++) {
    if (outputs.weights) outputs.weights[at] = 0.0f;
    if (outputs.scores) outputs.scores[at] = 0.0f;
    if (outputs.scaled_scores) outputs.scaled_scores[at] = 0.0f;
    if (outputs.softcapped_scores) outputs.softcapped_scores[at] = 0.0f;
    if (outputs.masked_scores) outputs.masked_scores[at] = -kInfinity;
  }
}

void MergePartials(int64_t head_dim_v, const float *left, const float *right, float *result) {
  Floats o1(head_dim_v), o2(head_dim_v), o(head_dim_v);
  for (int64_t d = 0; d < head_dim_v; d++) o1[d] = left[2 + d];
  for (int64_t d = 0; d < head_dim_v; d++) o2[d] = right[2 + d];
  Partial merged = {0.0f, 0.0f, o};
  Merge(head_dim_v, {left[0], left[1], o1}, {right[0], right[1], o2}, &merged);
  HandOutPartial(head_dim_v, merged, result);
}

void FinishPartial(int64_t head_dim_v, const float *given, const float *sink,
                   const float *head_scale, float *context, float *lse) {
  Floats o(head_dim_v);
  for (int64_t d = 0; d < head_dim_v; d++) o[d] = given[2 + d];
  Partial partial = {given[0], given[1], o};
  if (head_scale && *head_scale == 0.0f) partial.l = 0.0f;
  if (sink) AddSink(head_dim_v, *sink, &partial);
  AttentionShape shape = {};
  support::ScoreOptions options = {};
  options.head_scales = head_scale;
  shape.score = &options;
  shape.head_dim_v = head_dim_v;
  FinishRow(shape, 0, 0, nullptr, partial, context, nullptr, lse, nullptr);
}

// ---- 5 to 10 for every row of every head

// The rows of q, or of k.
void Prepare(const AttentionShape &shape, bool are_keys, float *x) {
  const int64_t rows = are_keys ? shape.n_kv : shape.n_q,
                heads = are_keys ? shape.num_kv_heads : shape.num_heads;
  const Rotation *rotation = shape.rotation;
  const Norm *norm = shape.norm;
  for (int64_t i = 0; i < rows; i++) {
    float *row = x + i * heads * shape.head_dim;
    const float *weight = !norm ? nullptr : are_keys ? norm->k_weight : norm->q_weight;
    const float *bias = !norm ? nullptr : are_keys ? norm->k_bias : norm->q_bias;
    if (norm && !norm->is_after_rotation)
      NormalizeHeads(*norm, weight, bias, heads, shape.head_dim, row);
    if (rotation) {
      const int64_t *positions = are_keys ? rotation->k_positions : rotation->q_positions;
      const int64_t r = positions  ? positions[i]
                        : are_keys ? shape.kv_position + i
                                   : shape.q_start + i;
      if (r >= 0) Rotate(*rotation, r, heads, shape.head_dim, row);
    }
    if (norm && norm->is_after_rotation)
      NormalizeHeads(*norm, weight, bias, heads, shape.head_dim, row);
  }
}

void PrepareKeys(const AttentionShape &shape, float *k, float *v) {
  Prepare(shape, true, k);
  for (int64_t n = 0; shape.norm && shape.norm->is_of_values && n < shape.n_kv * shape.num_kv_heads;
       n++) {
    Normalize(false, shape.norm->epsilon, nullptr, nullptr, 0, 1, shape.head_dim_v,
              v + n * shape.head_dim_v);
  }
}

void Attend(const AttentionShape &given, const float *given_q, const float *given_k,
            const float *given_v, const AttentionOutputs &outputs) {
  AttentionShape shape = given;
  const int64_t n_q = shape.n_q, n_kv = shape.n_kv, head_dim = shape.head_dim,
                head_dim_v = shape.head_dim_v;
  const int64_t leaves = Leaves(n_kv);
  const float scale = ScaleOf(shape);
  const int64_t q_count = n_q * shape.num_heads * head_dim,
                k_count = n_kv * shape.num_kv_heads * head_dim;
  const int64_t v_count = n_kv * shape.num_kv_heads * head_dim_v;
  Floats q(q_count), k(k_count), v(v_count);
  for (int64_t n = 0; n < q_count; n++) q[n] = given_q[n];
  for (int64_t n = 0; n < k_count; n++) k[n] = given_k[n];
  for (int64_t n = 0; n < v_count; n++) v[n] = given_v[n];
  Prepare(shape, false, q);
  for (int64_t n = 0; shape.score && shape.score->q_scales && n < q_count; n++) {
    q[n] = q[n] * shape.score->q_scales[n / (shape.num_heads * head_dim)];
  }
  const int64_t k_block = BlockOfKeys(shape), v_block = BlockOfValues(shape);
  for (int64_t n = 0; n < q_count; n += head_dim) HadamardBack(k_block, head_dim, &q[n]);
  PrepareKeys(shape, k, v);
  shape.q_start = shape.q_start - shape.kv_position;  // but for the rotation
  Floats k_row(head_dim);
  Floats k_t(head_dim * n_kv), k_scales(n_kv);  // the keys as columns, for Dots
  Floats v_rows(n_kv * head_dim_v), v_scales(n_kv);
  Floats dots(n_kv);
  Floats scaled(n_kv), capped(n_kv);
  Floats s(n_kv);
  Floats p(n_kv);
  Floats o(leaves * head_dim_v);
  Floats listed_s(n_kv), listed_scales(n_kv), listed_v(n_kv * head_dim_v);
  int64_t *positions = new int64_t[static_cast<decltype(sizeof 0)>(n_kv + 1)];
  Partial *partial = new Partial[static_cast<decltype(sizeof 0)>(leaves)];

  for (int64_t h = 0; h < shape.num_heads; h++) {
    const int64_t kv_head = h / (shape.num_heads / shape.num_kv_heads);
    for (int64_t j = 0; j < n_kv; j++) {
      StoreRow(shape.k_type, k_block, &k[(j * shape.num_kv_heads + kv_head) * head_dim], head_dim,
               k_row, &k_scales[j]);
      for (int64_t d = 0; d < head_dim; d++) k_t[d * n_kv + j] = k_row[d];
      if (shape.values_in_keys) {
        for (int64_t d = 0; d < head_dim_v; d++) v_rows[j * head_dim_v + d] = k_row[d];
        v_scales[j] = k_scales[j];
      } else {
        StoreRow(shape.v_type, v_block, v + (j * shape.num_kv_heads + kv_head) * head_dim_v,
                 head_dim_v, &v_rows[j * head_dim_v], &v_scales[j]);
      }
    }
    const Storage v_type = shape.values_in_keys ? shape.k_type : shape.v_type;
    const Rows v_head = {v_rows, HasCodes(v_type) ? static_cast<float *>(v_scales) : nullptr,
                         v_block};
    for (int64_t i = 0; i < n_q; i++) {
      if (shape.score && shape.score->head_scales && shape.score->head_scales[h] == 0.0f) {
        LeaveOutRow(shape, h, i, outputs);
        continue;
      }
      const float *q_i = &q[(i * shape.num_heads + h) * head_dim];
      if (shape.is_in_integers)
        CodedDots(q_i, k_t, head_dim, n_kv, dots);
      else
        Dots(kScoreBlock, q_i, k_t, head_dim, n_kv, dots);
      for (int64_t j = 0; j < n_kv; j++) {
        if (shape.k_type == Storage::kInt8) dots[j] = dots[j] * k_scales[j];
        scaled[j] = capped[j] = dots[j] * scale;
      }
      Cap(shape, capped);
      for (int64_t j = 0; j < n_kv; j++) s[j] = capped[j];
      BiasAndMask(shape, h, i, s);
      if (shape.score && shape.score->chosen) {
        // As keys of a sequence of their own, in which nothing is masked that is not by its score.
        AttentionShape listed = shape;
        listed.n_kv = Ranks(shape, kv_head, i, positions);
        listed.is_causal = listed.has_window_left = listed.has_window_right = false;
        listed.score = nullptr;
        for (int64_t r = 0; r < listed.n_kv; r++) {
          const int64_t j = positions[r];
          listed_s[r] = IsMasked(shape, i, j) ? -kInfinity : s[j];
          listed_scales[r] = v_scales[j];
          for (int64_t d = 0; d < head_dim_v; d++)
            listed_v[r * head_dim_v + d] = v_rows[j * head_dim_v + d];
        }
        const Rows rows = {listed_v, v_head.scales ? static_cast<float *>(listed_scales) : nullptr,
                           v_head.block};
        RowPartial(listed, i, listed_s, rows, Leaves(listed.n_kv), p, o, partial);
      } else {
        RowPartial(shape, i, s, v_head, leaves, p, o, partial);
      }
      const int64_t row = h * n_q + i;
      if (outputs.partials)
        HandOutPartial(head_dim_v, partial[0], outputs.partials + row * (2 + head_dim_v));
      if (shape.score && shape.score->sinks)
        AddSink(head_dim_v, shape.score->sinks[h], &partial[0]);
      const int64_t at = (i * shape.num_heads + h) * head_dim_v;
      FinishRow(shape, h, i, s, partial[0], outputs.context ? outputs.context + at : nullptr,
                outputs.gated ? outputs.gated + at : nullptr,
                outputs.lse ? outputs.lse + row : nullptr,
                outputs.weights ? outputs.weights + row * n_kv : nullptr);
      TapRow(shape, i, dots, scaled, capped, s, row * n_kv, outputs);
    }
  }
  delete[] partial;
  delete[] positions;
}

// ---- 17. Choosing keys

void ChooseKeys(const AttentionShape &given_shape, const float *q, const float *k,
                const float *weights, int64_t num_chosen, float *index_scores, int32_t *chosen) {
  AttentionShape shape = given_shape;
  shape.num_kv_heads = shape.head_dim_v = 1;
  shape.v_type = shape.k_type;
  const int64_t heads = shape.num_heads, n_q = shape.n_q, n_kv = shape.n_kv;
  Floats v(n_kv), s(heads * n_q * n_kv);  // s is canonical, of which no order or sum can tell
  for (int64_t j = 0; j < n_kv; j++) v[j] = 0.0f;
  AttentionOutputs outputs = {};
  outputs.scaled_scores = s;
  Attend(shape, q, k, v, outputs);
  Floats y(n_kv), is_left(n_kv);
  for (int64_t i = 0; i < n_q; i++) {
    for (int64_t j = 0; j < n_kv; j++) {
      is_left[j] = IsMasked(shape, i, j) ? 0.0f : 1.0f;
      y[j] = 0.0f;
      for (int64_t h = 0; h < heads; h++) {
        const float s_h = s[(h * n_q + i) * n_kv + j];
        y[j] = Fma(weights[i * heads + h], s_h < 0.0f ? 0.0f : s_h, y[j]);
      }
      index_scores[i * n_kv + j] = is_left[j] == 0.0f ? -kInfinity : Canon(y[j]);
      if (y[j] != y[j]) y[j] = -kInfinity;
    }
    int64_t count = 0;
    for (int64_t j = 0; j < n_kv; j++) {
      int64_t before = 0;  // of j
      for (int64_t other = 0; other < n_kv; other++) {
        before += is_left[other] != 0.0f && (y[other] > y[j] || (y[other] == y[j] && other < j));
      }
      if (is_left[j] != 0.0f && before < num_chosen)
        chosen[i * num_chosen + count++] = static_cast<int32_t>(j);
    }
    while (count < num_chosen) chosen[i * num_chosen + count++] = -1;
  }
}

// ---- 18. Recurrent attention

float ExpOfAny(float x) { return x > 0.0f ? 1.0f / Exp(0.0f - x) : Exp(x); }

float SumOfProducts(const float *x, const float *y, int64_t width) {
  float t[kPartialSums] = {};
  for (int64_t i = 0; i < width; i++) t[i % kPartialSums] = Fma(x[i], y[i], t[i % kPartialSums]);
  return SumPartials(t);
}

// x [width] as it takes part.
void Unit(float epsilon, const float *x, int64_t width, float *unit) {
  const float factor =
      epsilon > 0.0f ? 1.0f / __builtin_sqrtf(SumOfProducts(x, x, width) + epsilon) : 1.0f;
  for (int64_t i = 0; i < width; i++) unit[i] = epsilon > 0.0f ? x[i] * factor : x[i];
}

// Row t of state h, s [head_dim, head_dim_v], and its outputs.
void RecurOneRow(const Recurrence &a, int64_t t, int64_t h, float *s, float *output) {
  const int64_t width = a.head_dim, columns = a.head_dim_v,
                heads = a.num_q_heads > a.num_v_heads ? a.num_q_heads : a.num_v_heads,
                outputs = heads / a.num_v_heads;
  Floats k(width), q(width), own(width), r(columns), p(columns), u(columns);
  Unit(a.norm_epsilon, a.k + (t * a.num_k_heads + h / (a.num_v_heads / a.num_k_heads)) * width,
       width, k);
  float b = 1.0f;
  for (int64_t i = 0; i < width; i++) own[i] = 1.0f;  // A
  for (int64_t i = 0; a.decay && i < a.decay_dim; i++) {
    float g = a.decay[(t * a.num_v_heads + h) * a.decay_dim + i];
    if (a.dt_bias) g = g + a.dt_bias[h * a.decay_dim + i];
    if (a.a_log) g = (0.0f - ExpOfAny(a.a_log[h])) * Softplus(g);
    (a.decay_dim == 1 ? b : own[i]) = ExpOfAny(g);
  }
  for (int64_t j = 0; j < columns; j++) r[j] = 0.0f;
  for (int64_t i = 0; i < width; i++) {
    for (int64_t j = 0; j < columns; j++) r[j] = Fma(k[i] * own[i], s[i * columns + j], r[j]);
  }
  float beta = a.beta ? a.beta[t * a.num_v_heads + h] : 0.0f;
  if (a.beta_is_raw) beta = Sigmoid(beta);
  for (int64_t j = 0; j < columns; j++) {
    u[j] = a.v[(t * a.num_v_heads + h) * columns + j];
    if (a.beta) u[j] = beta * Fma(0.0f - b, r[j], u[j]);
  }
  const float scale = a.scale != 0.0f ? a.scale : 1.0f / __builtin_sqrtf(static_cast<float>(width));
  for (int64_t o = h * outputs; o < (h + 1) * outputs; o++) {
    Unit(a.norm_epsilon, a.q + (t * a.num_q_heads + o / (heads / a.num_q_heads)) * width, width, q);
    const float c = SumOfProducts(q, k, width);
    for (int64_t j = 0; j < columns; j++) p[j] = 0.0f;
    for (int64_t i = 0; i < width; i++) {
      for (int64_t j = 0; j < columns; j++) p[j] = Fma(q[i] * own[i], s[i * columns + j], p[j]);
    }
    for (int64_t j = 0; j < columns; j++)
      output[(t * heads + o) * columns + j] = Canon(scale * Fma(c, u[j], b * p[j]));
  }
  for (int64_t i = 0; i < width; i++) {
    for (int64_t j = 0; j < columns; j++)
      s[i * columns + j] = Fma(k[i], u[j], (b * own[i]) * s[i * columns + j]);
  }
}

void Recur(const Recurrence &a, const float *state, float *output, float *state_out,
           float *snapshots) {
  const int64_t size = a.head_dim * a.head_dim_v, all = a.num_v_heads * size;
  Floats s(all);
  for (int64_t n = 0; n < all; n++) s[n] = state ? state[n] : 0.0f;
  for (int64_t t = 0; t <= a.rows; t++) {
    for (int64_t m = 0; m < a.num_snapshots; m++) {
      if (t != (a.rows > m ? a.rows - m - 1 : 0)) continue;
      for (int64_t n = 0; n < all; n++) snapshots[m * all + n] = Canon(s[n]);
    }
    for (int64_t h = 0; t < a.rows && h < a.num_v_heads; h++)
      RecurOneRow(a, t, h, s + h * size, output);
  }
  for (int64_t n = 0; n < all; n++) state_out[n] = Canon(s[n]);
}

// ---- 19. Causal convolution

void Convolve(const Convolution &a, const float *state, float *output, float *state_out) {
  const int64_t before = a.kernel_size - 1;
  Floats x((before + a.rows) * a.channels);
  for (int64_t n = 0; n < before * a.channels; n++) x[n] = state ? state[n] : 0.0f;
  for (int64_t n = 0; n < a.rows * a.channels; n++) x[before * a.channels + n] = a.x[n];
  for (int64_t n = 0; n < a.rows * a.channels; n++) {
    const int64_t c = n % a.channels;
    float y = a.bias ? a.bias[c] : 0.0f;
    for (int64_t j = 0; j < a.kernel_size; j++)
      y = Fma(a.weights[c * a.kernel_size + j], x[n + j * a.channels], y);
    output[n] = Canon(a.is_silu ? y * Sigmoid(y) : y);
  }
  for (int64_t n = 0; n < before * a.channels; n++)
    state_out[n] = Canon(x[a.rows * a.channels + n]);
}

// ---- 4 to 10: the layer

void Forward(const LayerShape &shape, const LayerWeights &weights, const float *query,
             const float *key, const float *value, const LayerOutputs &outputs) {
  AttentionShape a = shape.attention;
  const int64_t merged_dim = a.num_heads * a.head_dim_v;
  const auto project = [&](const float *x, const float *w, const float *scales,
                           const float *offsets, const float *bias, int64_t rows, int64_t in,
                           int64_t out, float *y) {
    ProjectStored({weights.stored, weights.group, offsets, weights.are_in_blocks},
                  weights.arithmetic, x, w, scales, bias, rows, in, out, y);
  };
  project(query, weights.w_q, weights.s_q, weights.o_q, weights.b_q, a.n_q, shape.query_dim,
          a.num_heads * a.head_dim, outputs.q);
  project(key, weights.w_k, weights.s_k, weights.o_k, weights.b_k, a.n_kv, shape.key_dim,
          a.num_kv_heads * a.head_dim, outputs.k);
  project(value, weights.w_v, weights.s_v, weights.o_v, weights.b_v, a.n_kv, shape.value_dim,
          a.num_kv_heads * a.head_dim_v, outputs.v);
  Floats gate(a.n_q * a.num_heads * a.gate.dim);
  if (a.gate.kind != GateKind::kNone) {
    project(query, weights.w_g, weights.s_g, weights.o_g, weights.b_g, a.n_q, shape.query_dim,
            a.num_heads * a.gate.dim, gate);
    a.gate.values = gate;
  }
  Attend(a, outputs.q, outputs.k, outputs.v, outputs.attention);
  float *const context = outputs.attention.gated;
  if (a.context_norm) FinishContext(a, context);
  if (weights.w_o) {
    project(context, weights.w_o, weights.s_o, weights.o_o, weights.b_o, a.n_q, merged_dim,
            shape.output_dim, outputs.y);
  } else {
    for (int64_t n = 0; n < a.n_q * merged_dim; n++) outputs.y[n] = context[n];
  }
}

}  // namespace

const Functions MHA_SPEC_FUNCTIONS = {
    Fma,           Exp,        Log,    Tanh,        Sigmoid, Softplus, Project,
    StoreWeights,  Linear,     Rotate, PrepareKeys, Store,   Attend,   MergePartials,
    FinishPartial, ChooseKeys, Recur,  Convolve,    Forward};

}  // namespace spec
