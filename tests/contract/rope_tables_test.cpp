// mha_rope_tables: the values that the header promises, against long double; the bits that the
// contract promises, against its specification; and its errors.
#include "spec/rope_tables.h"

#include <cfloat>

#include "support/interface_support.h"
#include "support/rounds.h"

namespace {

using namespace support;  // NOLINT: errors and guarded memory

constexpr int64_t kEndOfPositions = int64_t{1} << 31;

mha_rope_config Config(int64_t dims, int64_t first_position, int64_t num_positions) {
  mha_rope_config config = Zeroed<mha_rope_config>();
  config.dims = dims;
  config.first_position = first_position;
  config.num_positions = num_positions;
  return config;
}

mha_rope_config YarnConfig(int64_t dims, double base, double factor, int64_t original_positions) {
  mha_rope_config config = Config(dims, 0, 1);
  config.base = base;
  config.yarn_factor = factor;
  config.original_positions = original_positions;
  return config;
}

struct Tables {
  std::vector<float> cos, sin;
};

Tables TablesOf(const mha_rope_config &config) {
  // Exactly what the tables need, so that a write beside them faults.
  const size_t bytes =
      static_cast<size_t>(config.num_positions * (config.dims / 2)) * sizeof(float);
  const Memory cos(bytes), sin(bytes);
  mha_error error;
  const mha_status status = mha_rope_tables(&config, cos.floats(), sin.floats(), &error);
  ExpectNoError(status, error);
  return {{cos.floats(), cos.floats() + bytes / sizeof(float)},
          {sin.floats(), sin.floats() + bytes / sizeof(float)}};
}

void ExpectSameBits(const Tables &a, const Tables &b) {
  EXPECT_TRUE(SameBits(a.cos, b.cos)) << "the cosines differ";
  EXPECT_TRUE(SameBits(a.sin, b.sin)) << "the sines differ";
}

// ---- The formulas of the header, in long double

// One unit in the last place that a float of exact's size has.
long double Ulp(long double exact) {
  return ldexpl(1, (exact == 0 ? -126 : std::max(ilogbl(exact), -126)) - 23);
}

// Ranges of positions: the first ones, those around powers of two and the last ones that are
// allowed.
constexpr struct {
  int64_t first, count;
} kRanges[] = {{0, 300},      {4090, 30},     {131060, 30},
               {1048546, 30}, {16777200, 30}, {kEndOfPositions - 30, 30}};

long double PlainTheta(const mha_rope_config &config, int64_t i) {
  const long double theta =
      powl(config.base, -2 * static_cast<long double>(i) / static_cast<long double>(config.dims));
  return theta / config.linear_factor / (config.pair_factors ? config.pair_factors[i] : 1);
}

// The bound of the header. `steepness`: by how much a ramp magnifies what it is rounded from.
void ExpectTheFormula(mha_rope_config config,
                      long double (*theta_of)(const mha_rope_config &, int64_t),
                      long double attention_factor, long double steepness = 1) {
  if (LDBL_MANT_DIG < 64)
    GTEST_SKIP() << "long double is as narrow as double here, too narrow for the formula";
  if (config.base == 0) config.base = 10000;
  if (config.linear_factor == 0) config.linear_factor = 1;
  for (const auto &range : kRanges) {
    config.first_position = range.first;
    config.num_positions = range.count;
    const Tables tables = TablesOf(config);
    for (int64_t i = 0; i < config.dims / 2; i++) {
      const long double theta = theta_of(config, i);
      for (int64_t row = 0; row < range.count; row++) {
        const long double position = static_cast<long double>(range.first + row),
                          angle = position * theta;
        for (const auto &[table, exact] :
             {std::pair{&tables.cos, cosl(angle)}, std::pair{&tables.sin, sinl(angle)}}) {
          const float y = (*table)[row * (config.dims / 2) + i];
          const long double scaled = exact * attention_factor, error = fabsl(y - scaled);
          ASSERT_LE(error,
                    0.5001l * Ulp(scaled) + attention_factor * steepness * position * 0x1p-51l)
              << "position " << range.first + row << " column " << i << " dims " << config.dims
              << " base " << config.base << " original " << config.original_positions << ": "
              << HexFloat(y);
        }
      }
    }
  }
}

TEST(RopeTables, AreWithinTheirErrorBound) {
  for (const double number : {10000.0, 500000.0, 1e6, 100.5, 1.0, 4.7, 0x1p64}) {
    for (const int64_t dims : {2, 64, 80, 128}) {
      mha_rope_config config = Config(dims, 0, 0);
      config.base = number;
      ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, PlainTheta, 1));
      config.base = 0;
      config.linear_factor = number == 0x1p64 ? 2 : number;
      ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, PlainTheta, 1));
    }
  }
}

TEST(RopeTables, HaveNoNegativeZeroAndStartWithOneAndZero) {
  const Tables tables = TablesOf(Config(64, 0, 1));
  EXPECT_EQ(tables.cos, std::vector<float>(32, 1.0f));
  EXPECT_TRUE(SameBits(tables.sin, std::vector<float>(32, 0.0f)));
}

// ---- YaRN

long double YarnTheta(const mha_rope_config &config, int64_t i) {
  const long double base = config.base, dims = static_cast<long double>(config.dims);
  const auto d = [&](long double beta) {
    return dims *
           logl(static_cast<long double>(config.original_positions) / (2 * acosl(-1) * beta)) /
           (2 * logl(base));
  };
  const long double d_fast = d(config.yarn_beta_fast == 0 ? 32 : config.yarn_beta_fast);
  const long double d_slow = d(config.yarn_beta_slow == 0 ? 1 : config.yarn_beta_slow);
  const long double low = std::max(config.yarn_unrounded ? d_fast : floorl(d_fast), 0.0l);
  const long double high = std::min(config.yarn_unrounded ? d_slow : ceill(d_slow), dims - 1);
  const long double column = static_cast<long double>(i);
  const long double ramp = low == high
                               ? (column > low ? 1 : 0)
                               : std::min(std::max((column - low) / (high - low), 0.0l), 1.0l);
  return powl(base, -2 * column / dims) * (1 - ramp + ramp / config.yarn_factor);
}

TEST(RopeTables, WithYarnFollowTheFormulas) {
  std::vector<mha_rope_config> configs = {
      YarnConfig(128, 10000, 4, 4096),       YarnConfig(128, 10000, 32, 4096),
      YarnConfig(64, 150000, 32, 4096),      YarnConfig(128, 1e6, 4, 32768),
      YarnConfig(80, 500000, 3.3, 8192),     YarnConfig(2, 10000, 2, 2048),
      YarnConfig(64, 10000, 1, 2048),        YarnConfig(64, 1.01, 1000, 4096),
      YarnConfig(64, 10000, 4, 1),            // both before the first pair
      YarnConfig(64, 3, 4, kEndOfPositions),  // low beyond high
  };
  configs.push_back(YarnConfig(96, 10000, 8, 4096));
  configs.back().yarn_beta_fast = 20;
  configs.back().yarn_beta_slow = 2.5;
  for (const double beta : {660, 5}) {  // low = high: 0, between two pairs if not rounded
    configs.push_back(YarnConfig(64, 10000, 8, 4096));
    configs.back().yarn_beta_fast = configs.back().yarn_beta_slow = beta;
  }
  configs.push_back(YarnConfig(64, 10000, 8, 4096));
  configs.back().attention_factor = 0.75;
  for (mha_rope_config config : configs) {
    const long double factor = config.attention_factor == 0 ? 0.1l * logl(config.yarn_factor) + 1
                                                            : config.attention_factor;
    for (config.yarn_unrounded = 0; config.yarn_unrounded < 2; config.yarn_unrounded++)
      ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, YarnTheta, factor));
  }
}

// ---- Llama 3, LongRoPE and dynamic NTK

mha_rope_config Llama3Config(int64_t dims, double base, double factor, int64_t original_positions) {
  mha_rope_config config = Config(dims, 0, 1);
  config.base = base;
  config.llama3_factor = factor;
  config.original_positions = original_positions;
  return config;
}

long double Llama3Theta(const mha_rope_config &config, int64_t i) {
  const long double theta =
      powl(config.base, -2 * static_cast<long double>(i) / static_cast<long double>(config.dims));
  const long double low = config.llama3_low_freq_factor == 0 ? 1 : config.llama3_low_freq_factor;
  const long double high = config.llama3_high_freq_factor == 0 ? 4 : config.llama3_high_freq_factor;
  const long double turns =
      static_cast<long double>(config.original_positions) * theta / (2 * acosl(-1));
  const long double ramp = std::min(std::max((high - turns) / (high - low), 0.0l), 1.0l);
  return theta * (1 - ramp + ramp / config.llama3_factor);
}

TEST(RopeTables, WithLlama3FollowTheFormulas) {
  std::vector<mha_rope_config> configs = {
      Llama3Config(128, 500000, 8, 8192), Llama3Config(64, 500000, 32, 8192),
      Llama3Config(80, 10000, 1, 4096),   Llama3Config(2, 10000, 4, 8),
      Llama3Config(64, 10000, 4.7, 1),    Llama3Config(260, 3, 1000, 100),
      Llama3Config(64, 1.5, 2, 20),       Llama3Config(64, 10000, 4, kEndOfPositions),
      Llama3Config(64, 1, 4, 12),
  };
  configs.push_back(Llama3Config(128, 500000, 8, 8192));
  configs.back().llama3_low_freq_factor = 0x1p-20;
  configs.back().llama3_high_freq_factor = 3000;
  for (const mha_rope_config &config : configs)
    ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, Llama3Theta, 1));
  mha_rope_config steep = configs.front();
  steep.llama3_low_freq_factor = 2;
  steep.llama3_high_freq_factor = 2.001;
  ExpectTheFormula(steep, Llama3Theta, 1, 2000);
}

TEST(RopeTables, WithPairFactorsAreWithinTheirErrorBound) {
  Random random(77);
  std::vector<double> factors;
  for (int i = 0; i < 48; i++)
    factors.push_back(i % 3 == 0 ? std::ldexp(1.5, i / 3) : 1 + std::fabs(random.Uniform()));
  factors[5] = 1;
  factors[47] = 0x1p31;
  factors[0] = 0.5;
  mha_rope_config config = Config(96, 0, 0);
  config.pair_factors = factors.data();
  ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, PlainTheta, 1));
  config.linear_factor = 3;
  ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, PlainTheta, 1));
}

mha_rope_config NtkConfig(int64_t dims, double factor, int64_t original_positions,
                          int64_t positions) {
  mha_rope_config config = Config(dims, 0, 1);
  config.base = 10000;
  config.ntk_factor = factor;
  config.original_positions = original_positions;
  config.ntk_positions = positions;
  return config;
}

long double NtkTheta(const mha_rope_config &config, int64_t i) {
  const long double original = static_cast<long double>(config.original_positions),
                    dims = static_cast<long double>(config.dims);
  const long double length = std::max(original, static_cast<long double>(config.ntk_positions));
  const long double base =
      config.base *
      powl(config.ntk_factor * length / original - (config.ntk_factor - 1), dims / (dims - 2));
  return powl(base, -2 * static_cast<long double>(i) / dims);
}

TEST(RopeTables, WithDynamicNtkFollowTheFormulas) {
  const std::vector<mha_rope_config> configs = {
      NtkConfig(128, 4, 2048, 4096),        NtkConfig(64, 2.5, 4096, 4097),
      NtkConfig(4, 8, 2048, 100000),        NtkConfig(80, 1, 2048, 8192),
      NtkConfig(64, 1, 1, kEndOfPositions), NtkConfig(64, 1e6, 3000, 1 << 20),
  };
  for (const mha_rope_config &config : configs)
    ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, NtkTheta, 1));
}

TEST(RopeTables, WithDynamicNtkOfNoMorePositionsAreThoseWithoutIt) {
  for (const int64_t positions : {1, 2047, 2048})
    ExpectSameBits(TablesOf(NtkConfig(64, 4, 2048, positions)), TablesOf(Config(64, 0, 1)));
}

// The angles of a config by the tables of position 1, and those that transformers 5.23 gives in
// float (ROPE_INIT_FUNCTIONS).
void ExpectAngles(const mha_rope_config &given, const std::vector<double> &angles,
                  size_t first_pair = 0) {
  mha_rope_config config = given;
  config.first_position = config.num_positions = 1;
  const Tables tables = TablesOf(config);
  for (size_t i = 0; i < angles.size(); i++) {
    const double angle = std::atan2(tables.sin.at(first_pair + i), tables.cos.at(first_pair + i));
    EXPECT_NEAR(angle / angles[i], 1.0, 2e-6) << "pair " << first_pair + i;
  }
}

TEST(RopeTables, HaveTheAnglesOfTransformers) {
  ExpectAngles(Llama3Config(32, 500000, 8, 8192),
               {1, 0.440366626, 0.193922758, 0.0853971019, 0.0376060307, 0.0165604409,
                0.00729266508, 0.00321144611, 0.000524846022, 7.78465546e-05, 3.42810235e-05,
                1.50962178e-05, 6.64786967e-06, 2.92749974e-06, 1.28917316e-06, 5.6770881e-07});
  ExpectAngles(Llama3Config(32, 500000, 32, 8192),
               {1, 0.440366626, 0.193922758, 0.0853971019, 0.0376060307, 0.0165604409,
                0.00729266508, 0.00321144611, 0.000429556705, 1.94616387e-05, 8.57025589e-06,
                3.77405445e-06, 1.66196742e-06, 7.31874934e-07, 3.22293289e-07, 1.41927202e-07});
  mha_rope_config gpt_oss = YarnConfig(64, 150000, 32, 4096),
                  small = YarnConfig(16, 10000, 4, 2048);
  gpt_oss.yarn_unrounded = small.yarn_unrounded = 1;
  ExpectAngles(gpt_oss, {1, 0.689044297, 0.47478205, 0.327145875, 0.225418001, 0.155322984,
                         0.107024424, 0.0737445652, 0.0508132726, 0.0317056961, 0.0193349998,
                         0.0115920492, 0.00679495931, 0.00386035908, 0.00209379266, 0.00105260219});
  ExpectAngles(gpt_oss,
               {0.000456483918, 0.000129318694, 3.83088118e-05, 2.63964685e-05, 1.8188337e-05,
                1.25325696e-05, 8.63549576e-06, 5.95023948e-06, 4.09997847e-06, 2.82506676e-06,
                1.94659629e-06, 1.34129095e-06, 9.24208962e-07, 6.36820914e-07, 4.38797855e-07,
                3.0235114e-07},
               16);
  ExpectAngles(small, {1, 0.316227764, 0.100000001, 0.0238701962, 0.00505697168, 0.000811290462,
                       0.000250000012, 7.90569466e-05});
  ExpectAngles(NtkConfig(16, 4, 2048, 4096),
               {1, 0.251273751, 0.0631385073, 0.0158650484, 0.0039864704, 0.0010016954,
                0.000251699792, 6.32455485e-05});
  const double factors[] = {1.0, 1.1, 1.3, 0.9977997, 2.0, 4.5, 8.25, 64.0};
  mha_rope_config longrope = Config(16, 1, 1);
  longrope.pair_factors = factors;
  ExpectAngles(longrope, {1, 0.287479758, 0.0769230798, 0.0316925123, 0.00499999989, 0.000702728401,
                          0.000121212121, 4.94105916e-06});
}

// ---- M-RoPE

// axes: of each pair, which of the three positions it goes by.
void ExpectAxes(int64_t interleaved, const std::vector<int64_t> &section,
                const std::vector<int64_t> &axes) {
  const int64_t pairs = static_cast<int64_t>(axes.size()), rows = 3;
  const std::vector<int64_t> positions = {5, 6, 7, 100, 0, 300, 4000, 40, 4};  // [axis][row]
  mha_rope_config config = YarnConfig(2 * pairs, 1e6, 4, 32768), mrope = config;
  mrope.num_positions = rows;
  mrope.mrope_section = section.data();
  mrope.mrope_positions = positions.data();
  mrope.mrope_interleaved = interleaved;
  const Tables tables = TablesOf(mrope);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < pairs; i++) {
      config.first_position = positions[axes[static_cast<size_t>(i)] * rows + row];
      const Tables plain = TablesOf(config);
      const size_t at = static_cast<size_t>(row * pairs + i), pair = static_cast<size_t>(i);
      EXPECT_TRUE(tables.cos[at] == plain.cos[pair] && tables.sin[at] == plain.sin[pair])
          << "row " << row << " pair " << i;
    }
  }
}

TEST(RopeTables, WithMropeTurnEachPairByThePositionOfItsSection) {
  ExpectAxes(0, {2, 3, 3}, {0, 0, 1, 1, 1, 2, 2, 2});
  ExpectAxes(0, {0, 8, 0}, {1, 1, 1, 1, 1, 1, 1, 1});
  ExpectAxes(1, {4, 2, 2}, {0, 1, 2, 0, 1, 2, 0, 0});
  ExpectAxes(1, {3, 3, 2}, {0, 1, 2, 0, 1, 2, 0, 1});
  ExpectAxes(1, {5, 0, 2}, {0, 0, 2, 0, 0, 2, 0});
}

// Columns are computed 128 at a time.
TEST(RopeTables, WithMropeOfManyPairsTurnEachByThePositionOfItsSection) {
  std::vector<int64_t> in_order, in_turn;
  for (int64_t i = 0; i < 140; i++) {
    in_order.push_back(i < 50 ? 0 : i < 100 ? 1 : 2);
    in_turn.push_back(i < 135 ? i % 3 : 0);
  }
  ExpectAxes(0, {50, 50, 40}, in_order);
  ExpectAxes(1, {50, 45, 45}, in_turn);
}

// ---- The specification

void ExpectTheBitsOfTheSpecification(const mha_rope_config &config) {
  const auto otherwise = [](double value, double fallback) {
    return value == 0 ? fallback : value;
  };
  const spec::RopeConfig resolved = {config.dims,
                                     config.first_position,
                                     config.num_positions,
                                     otherwise(config.base, 10000),
                                     otherwise(config.linear_factor, 1),
                                     config.yarn_factor,
                                     config.original_positions,
                                     otherwise(config.yarn_beta_fast, 32),
                                     otherwise(config.yarn_beta_slow, 1),
                                     config.attention_factor,
                                     config.yarn_unrounded != 0,
                                     config.llama3_factor,
                                     otherwise(config.llama3_low_freq_factor, 1),
                                     otherwise(config.llama3_high_freq_factor, 4),
                                     config.pair_factors,
                                     config.ntk_factor,
                                     config.ntk_positions,
                                     config.mrope_section,
                                     config.mrope_positions,
                                     config.mrope_interleaved != 0};
  Tables expected;
  expected.cos.resize(config.num_positions * (config.dims / 2));
  expected.sin = expected.cos;
  spec::RopeTables(resolved, expected.cos.data(), expected.sin.data());
  SCOPED_TRACE("dims " + std::to_string(config.dims) + " first_position " +
               std::to_string(config.first_position) + " base " + std::to_string(config.base) +
               " original_positions " + std::to_string(config.original_positions) +
               (config.yarn_factor != 0 ? " yarn" : "") +
               (config.llama3_factor != 0 ? " llama3" : "") +
               (config.ntk_factor != 0 ? " ntk" : "") + (config.mrope_section ? " mrope" : ""));
  ExpectSameBits(TablesOf(config), expected);
}

TEST(RopeTables, AreTheSpecificationsBitForBitInRandomCases) {
  Random random(2104);
  // Numbers of any magnitude from 1 to 2^exponent.
  const auto number = [&](int exponent) {
    return std::ldexp(1 + (random.Coin() ? 0 : std::fabs(random.Uniform())),
                      static_cast<int>(random.Below(exponent)));
  };
  for (int i = 0; i < support::Rounds(300) && !testing::Test::HasFailure(); i++) {
    mha_rope_config config =
        Config(2 * random.Between(1, 70), random.Below(int64_t{1} << random.Between(1, 31)),
               random.Between(1, 3));
    config.first_position = std::min(config.first_position, kEndOfPositions - config.num_positions);
    config.base = random.Coin() ? 0 : number(64);
    config.linear_factor = random.Coin() ? 0 : number(random.Coin() ? 4 : 31);
    const int64_t original_positions = random.Between(1, int64_t{1} << random.Between(0, 31));
    std::vector<double> factors;
    switch (random.Between(0, 5)) {
      case 0:
      case 1:
        config.yarn_factor = number(random.Coin() ? 6 : 31);
        config.original_positions = original_positions;
        if (config.base == 1) config.base = 10000;
        if (random.Coin()) config.yarn_beta_fast = number(20);
        if (random.Coin()) config.yarn_beta_slow = 1 / number(20);
        config.yarn_unrounded = random.Coin();
        break;
      case 2:
        config.llama3_factor = number(random.Coin() ? 6 : 31);
        config.original_positions = original_positions;
        if (random.Coin()) config.llama3_high_freq_factor = 1.5 * number(20);
        if (random.Coin()) config.llama3_low_freq_factor = 1 / number(20);
        break;
      case 3:
        config.ntk_factor = number(random.Coin() ? 6 : 31);
        config.original_positions = original_positions;
        config.ntk_positions = random.Between(1, int64_t{1} << random.Between(0, 31));
        config.dims = std::max<int64_t>(config.dims, 4);
        break;
      case 4:
        for (int64_t n = 0; n < config.dims / 2; n++)
          factors.push_back(random.Coin() ? number(31) : number(3) / 2);
        config.pair_factors = factors.data();
        break;
      default:
        break;
    }
    if (random.Coin()) config.attention_factor = random.Coin() ? number(31) : 1 / number(31);
    int64_t section[3];
    std::vector<int64_t> positions;
    if (random.Coin()) {
      const int64_t pairs = config.dims / 2;
      config.mrope_interleaved = random.Coin();
      section[1] = random.Between(0, config.mrope_interleaved ? (pairs + 1) / 3 : pairs);
      section[2] = random.Between(0, config.mrope_interleaved ? pairs / 3 : pairs - section[1]);
      section[0] = pairs - section[1] - section[2];
      for (int64_t n = 0; n < 3 * config.num_positions; n++)
        positions.push_back(random.Below(int64_t{1} << random.Between(1, 31)));
      config.first_position = 0;
      config.mrope_section = section;
      config.mrope_positions = positions.data();
    }
    ExpectTheBitsOfTheSpecification(config);
  }
}

// ---- Errors

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr mha_status kWrong = MHA_ERROR_INVALID_VALUE, kLarge = MHA_ERROR_TOO_LARGE;

void ExpectRefused(const mha_rope_config &config, const Expected &expected) {
  Memory cos(4 * sizeof(float)), sin(4 * sizeof(float));
  cos.Forbid();
  sin.Forbid();
  ExpectFails(
      [&](mha_error *error) { return mha_rope_tables(&config, cos.floats(), sin.floats(), error); },
      expected);
}

mha_rope_config Plain() { return Config(8, 0, 1); }
mha_rope_config Yarn() { return YarnConfig(8, 0, 4, 2048); }
mha_rope_config Llama3() { return Llama3Config(8, 0, 8, 8192); }
mha_rope_config Ntk() { return NtkConfig(8, 4, 2048, 4096); }

const double kPairFactors[] = {1, 1, 1, 0.25, kNan, 0x1p32, 1, 1, 1};
mha_rope_config PairFactors() {
  mha_rope_config config = Plain();
  config.pair_factors = kPairFactors;
  return config;
}

// A config with one field that is wrong, or wrong beside the others, and what the error says.
struct Wrong {
  template <typename T>
  Wrong(const mha_rope_config &from, T mha_rope_config::*field, std::common_type_t<T> value,
        const Words &words, mha_status status = kWrong)
      : config(from), expected({status, {1}, words}) {
    config.*field = value;
  }
  mha_rope_config config;
  Expected expected;
};

TEST(RopeTables, NameTheWrongFieldAndWriteNothing) {
  using Field = mha_rope_config;
  const Wrong all[] = {
      {Yarn(), &Field::dims, kEndOfPositions, {"dims", "2147483648"}, kLarge},
      {Yarn(), &Field::dims, kMax, {"dims"}, kLarge},
      {Yarn(), &Field::first_position, kEndOfPositions, {"first_position", "2147483648"}, kLarge},
      {Yarn(), &Field::num_positions, kEndOfPositions + 1, {"num_positions", "2147483649"}, kLarge},
      {Yarn(), &Field::base, 1, {"base", "yarn_factor"}},
      {Yarn(), &Field::original_positions, 0, {"original_positions", "yarn_factor"}},
      {Yarn(), &Field::yarn_beta_slow, 33, {"yarn_beta_slow", "33", "yarn_beta_fast", "32"}},
      {Plain(), &Field::original_positions, 2048, {"original_positions", "yarn_factor"}},
      {Plain(), &Field::yarn_beta_fast, kNan, {"yarn_beta_fast", "yarn_factor"}},
      {Plain(), &Field::yarn_beta_slow, 1, {"yarn_beta_slow", "yarn_factor"}},
      {Plain(), &Field::yarn_unrounded, 1, {"yarn_unrounded", "yarn_factor"}},
      {Yarn(), &Field::llama3_factor, 8, {"yarn_factor", "llama3_factor", "one of them"}},
      {Llama3(), &Field::ntk_factor, 8, {"llama3_factor", "ntk_factor"}},
      {Yarn(), &Field::pair_factors, kPairFactors, {"yarn_factor", "pair_factors"}},
      {Plain(), &Field::pair_factors, kPairFactors, {"pair_factors[3]", "0.25"}},
      {Plain(), &Field::pair_factors, kPairFactors + 4, {"pair_factors[0]", "nan"}},
      {Plain(), &Field::pair_factors, kPairFactors + 5, {"pair_factors[0] is 4.29497e+09"}},
      {PairFactors(), &Field::original_positions, 4096, {"original_positions"}},
      {Llama3(), &Field::original_positions, 0, {"original_positions", "llama3_factor"}},
      {Llama3(),
       &Field::llama3_low_freq_factor,
       4,
       {"llama3_high_freq_factor", "4", "llama3_low_freq_factor"}},
      {Yarn(), &Field::llama3_low_freq_factor, 1, {"llama3_low_freq_factor", "llama3_factor"}},
      {Yarn(), &Field::llama3_high_freq_factor, 4, {"llama3_high_freq_factor", "llama3_factor"}},
      {Ntk(), &Field::original_positions, 0, {"original_positions", "ntk_factor"}},
      {Ntk(), &Field::ntk_positions, 0, {"ntk_positions", "ntk_factor"}},
      {Ntk(), &Field::dims, 2, {"dims is 2", "ntk_factor"}},
      {Yarn(), &Field::ntk_positions, 4096, {"ntk_positions", "ntk_factor"}},
  };
  for (const Wrong &wrong : all) {
    SCOPED_TRACE(*wrong.expected.words.begin());
    ExpectRefused(wrong.config, wrong.expected);
  }
  mha_rope_config config = Yarn();
  config.first_position = config.num_positions = kMax;  // the sum overflows
  ExpectRefused(config, {kLarge, {1}, {"first_position", "num_positions"}});
}

TEST(RopeTables, NameWhatIsWrongWithMropeAndWriteNothing) {
  const int64_t positions[] = {0, 1, 2}, negative[] = {0, -1, 2}, late[] = {2, kEndOfPositions, 4},
                negative_third[] = {4, 5, -6};
  const struct {
    std::vector<int64_t> section;
    uint32_t interleaved;
    const int64_t *positions;
    Expected expected;
  } rows[] = {
      {{2, 1, 2}, 0, positions, {kWrong, {1}, {"mrope_section is 2, 1, 2", "sum", "4"}}},
      {{2, 1, 0}, 0, positions, {kWrong, {1}, {"mrope_section is 2, 1, 0", "sum", "4"}}},
      {{-1, 4, 1}, 0, positions, {kWrong, {1}, {"mrope_section is -1, 4, 1"}}},
      {{kMin, 1, 1}, 0, positions, {kWrong, {1}, {"mrope_section is -9223372036854775808"}}},
      {{kMax, kMax, 6}, 0, positions, {kWrong, {1}, {"mrope_section"}}},
      {{-1, 2, 2}, 0, positions, {kWrong, {1}, {"mrope_section is -1, 2, 2"}}},
      {{4, -1, 1}, 0, positions, {kWrong, {1}, {"mrope_section is 4, -1, 1"}}},
      {{1, 1, 2}, 1, positions, {kWrong, {1}, {"mrope_section is 1, 1, 2", "at most a third"}}},
      {{1, 2, 1}, 1, positions, {kWrong, {1}, {"mrope_section is 1, 2, 1", "at most a third"}}},
      {{2, 1, 1}, 0, nullptr, {MHA_ERROR_NULL_POINTER, {1}, {"mrope_positions"}}},
      {{2, 1, 1}, 0, negative, {kWrong, {1}, {"mrope_positions[1][0] is -1"}}},
      {{2, 1, 1}, 0, late, {kWrong, {1}, {"mrope_positions[1][0] is 2147483648"}}},
      {{2, 1, 1}, 0, negative_third, {kWrong, {1}, {"mrope_positions[2][0] is -6"}}},
      {{}, 0, positions, {kWrong, {1}, {"mrope_positions", "mrope_section"}}},
      {{}, 1, nullptr, {kWrong, {1}, {"mrope_interleaved", "mrope_section"}}},
  };
  for (const auto &row : rows) {
    SCOPED_TRACE(&row - rows);
    mha_rope_config config = Yarn();
    config.mrope_section = row.section.empty() ? nullptr : row.section.data();
    config.mrope_interleaved = row.interleaved;
    config.mrope_positions = row.positions;
    ExpectRefused(config, row.expected);
  }
  const int64_t section[] = {2, 1, 1};
  mha_rope_config config = Yarn();
  config.mrope_section = section;
  config.mrope_positions = positions;
  config.first_position = 3;
  ExpectRefused(config, {kWrong, {1}, {"first_position is 3", "mrope_positions"}});
}

TEST(RopeTables, NameTheirNullPointers) {
  const mha_rope_config config = Plain();
  float number[4];
  const auto expect = [&](const mha_rope_config *given, float *cos, float *sin, uint32_t argument,
                          const char *word) {
    ExpectFails([&](mha_error *error) { return mha_rope_tables(given, cos, sin, error); },
                {MHA_ERROR_NULL_POINTER, {argument}, {word}});
  };
  expect(nullptr, number, number, 1, "mha_rope_config");
  expect(&config, nullptr, number, 2, "cos");
  expect(&config, number, nullptr, 3, "sin");
}

}  // namespace
