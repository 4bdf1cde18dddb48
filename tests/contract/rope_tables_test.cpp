// mha_rope_tables: the values that the header promises, against long double; the bits that the
// contract promises, against its specification; and its errors.
#include "spec/rope_tables.h"

#include <cfloat>

#include "support/interface_support.h"
#include "support/rounds.h"

namespace {

using namespace support;  // NOLINT: errors and guarded memory
using support::HexFloat;

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
          const float y = (*table)[static_cast<size_t>(row * (config.dims / 2) + i)];
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
  for (const double base : {10000.0, 500000.0, 1e6, 100.5, 1.0, 0x1p64}) {
    for (const int64_t dims : {2, 64, 80, 128}) {
      mha_rope_config config = Config(dims, 0, 0);
      config.base = base;
      ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, PlainTheta, 1));
    }
  }
}

TEST(RopeTables, AreWithinTheirErrorBoundWithALinearFactor) {
  for (const double factor : {1.0, 2.0, 3.0, 4.7, 8.0, 1e6}) {
    mha_rope_config config = Config(96, 0, 0);
    config.linear_factor = factor;
    ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, PlainTheta, 1));
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
      YarnConfig(64, 10000, 40, 4096),       YarnConfig(128, 1e6, 4, 32768),
      YarnConfig(80, 500000, 3.3, 8192),     YarnConfig(2, 10000, 2, 2048),
      YarnConfig(64, 10000, 1, 2048),        YarnConfig(64, 1.0001, 1000, 4096),
      YarnConfig(64, 10000, 4, 1),            // both before the first pair
      YarnConfig(64, 3, 4, kEndOfPositions),  // low beyond high
  };
  configs.push_back(YarnConfig(96, 10000, 8, 4096));
  configs.back().yarn_beta_fast = 20;
  configs.back().yarn_beta_slow = 2.5;
  configs.push_back(YarnConfig(64, 10000, 8, 4096));  // low = high = 0
  configs.back().yarn_beta_fast = configs.back().yarn_beta_slow = 660;
  configs.push_back(YarnConfig(64, 10000, 8, 4096));
  configs.back().attention_factor = 0.75;
  for (const mha_rope_config &config : configs) {
    const long double factor = config.attention_factor == 0 ? 0.1l * logl(config.yarn_factor) + 1
                                                            : config.attention_factor;
    ASSERT_NO_FATAL_FAILURE(ExpectTheFormula(config, YarnTheta, factor));
  }
}

TEST(RopeTables, WithYarnUnroundedFollowTheFormulas) {
  std::vector<mha_rope_config> configs = {
      YarnConfig(64, 150000, 32, 4096),  YarnConfig(128, 10000, 4, 4096),
      YarnConfig(80, 500000, 3.3, 8192), YarnConfig(2, 10000, 2, 2048),
      YarnConfig(64, 10000, 1, 2048),    YarnConfig(64, 1.01, 1000, 4096),
      YarnConfig(64, 10000, 4, 1),       YarnConfig(64, 3, 4, kEndOfPositions),  // low beyond high
  };
  configs.push_back(YarnConfig(96, 10000, 8, 4096));
  configs.back().yarn_beta_fast = 20;
  configs.back().yarn_beta_slow = 2.5;
  configs.push_back(YarnConfig(64, 10000, 8, 4096));  // low = high = 0
  configs.back().yarn_beta_fast = configs.back().yarn_beta_slow = 660;
  configs.push_back(YarnConfig(64, 10000, 8, 4096));  // low = high between two pairs
  configs.back().yarn_beta_fast = configs.back().yarn_beta_slow = 5;
  for (mha_rope_config config : configs) {
    config.yarn_unrounded = 1;
    ASSERT_NO_FATAL_FAILURE(
        ExpectTheFormula(config, YarnTheta, 0.1l * logl(config.yarn_factor) + 1));
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
void ExpectAngles(const mha_rope_config &given, const std::vector<double> &angles) {
  mha_rope_config config = given;
  config.first_position = config.num_positions = 1;
  const Tables tables = TablesOf(config);
  ASSERT_EQ(tables.sin.size(), angles.size());
  for (size_t i = 0; i < angles.size(); i++) {
    EXPECT_NEAR(std::atan2(tables.sin[i], tables.cos[i]) / angles[i], 1.0, 2e-6) << "pair " << i;
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
  ExpectAngles(gpt_oss, {1,
                         0.689044297,
                         0.47478205,
                         0.327145875,
                         0.225418001,
                         0.155322984,
                         0.107024424,
                         0.0737445652,
                         0.0508132726,
                         0.0317056961,
                         0.0193349998,
                         0.0115920492,
                         0.00679495931,
                         0.00386035908,
                         0.00209379266,
                         0.00105260219,
                         0.000456483918,
                         0.000129318694,
                         3.83088118e-05,
                         2.63964685e-05,
                         1.8188337e-05,
                         1.25325696e-05,
                         8.63549576e-06,
                         5.95023948e-06,
                         4.09997847e-06,
                         2.82506676e-06,
                         1.94659629e-06,
                         1.34129095e-06,
                         9.24208962e-07,
                         6.36820914e-07,
                         4.38797855e-07,
                         3.0235114e-07});
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
      config.first_position =
          positions[static_cast<size_t>(axes[static_cast<size_t>(i)] * rows + row)];
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
  expected.cos.resize(static_cast<size_t>(config.num_positions * (config.dims / 2)));
  expected.sin = expected.cos;
  spec::RopeTables(resolved, expected.cos.data(), expected.sin.data());
  SCOPED_TRACE(
      "dims " + std::to_string(config.dims) + " first_position " +
      std::to_string(config.first_position) + " base " + std::to_string(config.base) +
      " linear_factor " + std::to_string(config.linear_factor) + " yarn_factor " +
      std::to_string(config.yarn_factor) + " original_positions " +
      std::to_string(config.original_positions) + " unrounded " +
      std::to_string(config.yarn_unrounded) + " llama3_factor " +
      std::to_string(config.llama3_factor) + " ntk_factor " + std::to_string(config.ntk_factor) +
      " ntk_positions " + std::to_string(config.ntk_positions) +
      (config.mrope_section ? " mrope interleaved " + std::to_string(config.mrope_interleaved)
                            : ""));
  ExpectSameBits(TablesOf(config), expected);
}

TEST(RopeTables, AreTheSpecificationsBitForBitWithoutScaling) {
  for (const double base : {0.0, 500000.0, 1e6, 1.0, 2.0, 0x1p64}) {
    for (const int64_t dims : {2, 6, 64, 80, 128, 260}) {
      for (const int64_t first :
           {int64_t{0}, int64_t{131070}, int64_t{1048574}, kEndOfPositions - 4}) {
        mha_rope_config config = Config(dims, first, 4);
        config.base = base;
        ExpectTheBitsOfTheSpecification(config);
      }
    }
  }
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
    config.base = random.Coin() ? 10000 : number(64);
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

struct Call {
  Call()
      : config(YarnConfig(8, 0, 4, 2048)),
        cos(4 * sizeof(float)),
        sin(4 * sizeof(float)),
        cos_table(cos.floats()),
        sin_table(sin.floats()) {}
  mha_rope_config &Plain() { return config = Config(8, 0, 1); }
  mha_rope_config &Llama3() { return config = Llama3Config(8, 0, 8, 8192); }
  mha_rope_config &Mrope(const int64_t *section) {
    static const int64_t positions[] = {0, 1, 2};
    config.mrope_section = section;
    config.mrope_positions = positions;
    return config;
  }
  mha_rope_config &Ntk() { return config = NtkConfig(8, 4, 2048, 4096); }

  mha_rope_config config;
  Memory cos, sin;
  float *cos_table, *sin_table;
};

struct Case {
  const char *name;
  void (*change)(Call &);
  Expected expected;
};
void PrintTo(const Case &row, std::ostream *stream) { *stream << row.name; }

class RopeTablesErrors : public testing::TestWithParam<Case> {};

TEST_P(RopeTablesErrors, AreSentencesAndNothingIsWritten) {
  Call call;
  GetParam().change(call);
  call.cos.Forbid();
  call.sin.Forbid();
  ExpectFails(
      [&](mha_error *error) {
        return mha_rope_tables(&call.config, call.cos_table, call.sin_table, error);
      },
      GetParam().expected);
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

constexpr mha_status kWrong = MHA_ERROR_INVALID_VALUE;
const double kPairFactors[] = {1, 1, 1, 0.25, kNan, 1, 1, 1};
const int64_t kSections[][3] = {{2, 1, 1},       {2, 1, 2}, {2, 1, 0}, {-1, 4, 1},
                                {kMax, kMax, 6}, {1, 1, 2}, {1, 2, 1}, {kMin, 1, 1}};
const int64_t kBadPositions[] = {0, -1, 2, kEndOfPositions, 4, 5, -6};

const Case kCases[] = {
    {"StructSizeIsZero", [](Call &c) { c.config.struct_size = 0; }, {MHA_ERROR_STRUCT_SIZE, {1}, {"mha_rope_config", "160"}}},
    {"StructSizeIsShort", [](Call &c) { c.config.struct_size = 152; }, {MHA_ERROR_STRUCT_SIZE, {1}, {"152", "160"}}},
    {"DimsIsZero", [](Call &c) { c.config.dims = 0; }, {kWrong, {1}, {"dims", "0", "even"}}},
    {"DimsIsOdd", [](Call &c) { c.config.dims = 7; }, {kWrong, {1}, {"dims", "7", "even"}}},
    {"DimsIsNegative", [](Call &c) { c.config.dims = -8; }, {kWrong, {1}, {"dims"}}},
    {"DimsIsTheLeastInteger", [](Call &c) { c.config.dims = kMin; }, {kWrong, {1}, {"dims"}}},
    {"DimsIsTooLarge", [](Call &c) { c.config.dims = kEndOfPositions; }, {MHA_ERROR_TOO_LARGE, {1}, {"dims", "2147483648"}}},
    {"DimsIsTheLargestInteger", [](Call &c) { c.config.dims = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {"dims"}}},
    {"FirstPositionIsNegative", [](Call &c) { c.config.first_position = -1; }, {kWrong, {1}, {"first_position", "-1"}}},
    {"NumPositionsWasNeverSet",
     [](Call &c) { c.config.num_positions = 0; },
     {kWrong, {1}, {"num_positions is 0; set it to the rows of cos and sin"}}},
    {"NumPositionsIsNegative", [](Call &c) { c.config.num_positions = -1; }, {kWrong, {1}, {"num_positions", "-1"}}},
    {"FirstPositionIsTooLarge",
     [](Call &c) { c.config.first_position = kEndOfPositions; },
     {MHA_ERROR_TOO_LARGE, {1}, {"first_position", "2147483648"}}},
    {"NumPositionsIsTooLarge",
     [](Call &c) { c.config.num_positions = kEndOfPositions + 1; },
     {MHA_ERROR_TOO_LARGE, {1}, {"num_positions", "2147483649"}}},
    {"TheSumOfPositionsOverflows",
     [](Call &c) { c.config.first_position = c.config.num_positions = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {"first_position", "num_positions"}}},
    {"BaseIsNegative", [](Call &c) { c.config.base = -10000; }, {kWrong, {1}, {"base", "10000"}}},
    {"BaseIsLessThanOne", [](Call &c) { c.config.base = 0.5; }, {kWrong, {1}, {"base"}}},
    {"BaseIsTooLarge", [](Call &c) { c.config.base = 1e20; }, {kWrong, {1}, {"base"}}},
    {"BaseIsInfinite", [](Call &c) { c.config.base = kInfinity; }, {kWrong, {1}, {"base", "inf"}}},
    {"BaseIsNan", [](Call &c) { c.config.base = kNan; }, {kWrong, {1}, {"base"}}},
    {"BaseIsOneWithYarn", [](Call &c) { c.config.base = 1; }, {kWrong, {1}, {"base", "yarn_factor"}}},
    {"LinearFactorIsNegative", [](Call &c) { c.config.linear_factor = -2; }, {kWrong, {1}, {"linear_factor"}}},
    {"LinearFactorIsLessThanOne", [](Call &c) { c.config.linear_factor = 0.5; }, {kWrong, {1}, {"linear_factor"}}},
    {"LinearFactorIsTooLarge", [](Call &c) { c.config.linear_factor = 0x1.8p31; }, {kWrong, {1}, {"linear_factor"}}},
    {"LinearFactorIsInfinite", [](Call &c) { c.config.linear_factor = kInfinity; }, {kWrong, {1}, {"linear_factor"}}},
    {"LinearFactorIsNan", [](Call &c) { c.config.linear_factor = kNan; }, {kWrong, {1}, {"linear_factor"}}},
    {"YarnFactorIsNegative", [](Call &c) { c.config.yarn_factor = -4; }, {kWrong, {1}, {"yarn_factor"}}},
    {"YarnFactorIsLessThanOne", [](Call &c) { c.config.yarn_factor = 0.25; }, {kWrong, {1}, {"yarn_factor"}}},
    {"YarnFactorIsInfinite", [](Call &c) { c.config.yarn_factor = kInfinity; }, {kWrong, {1}, {"yarn_factor"}}},
    {"YarnFactorIsNan", [](Call &c) { c.config.yarn_factor = kNan; }, {kWrong, {1}, {"yarn_factor"}}},
    {"YarnWithoutOriginalPositions",
     [](Call &c) { c.config.original_positions = 0; },
     {kWrong, {1}, {"original_positions", "yarn_factor"}}},
    {"OriginalPositionsAreNegative", [](Call &c) { c.config.original_positions = -2048; }, {kWrong, {1}, {"original_positions"}}},
    {"OriginalPositionsAreTooMany", [](Call &c) { c.config.original_positions = kMax; }, {kWrong, {1}, {"original_positions"}}},
    {"BetaFastIsNegative", [](Call &c) { c.config.yarn_beta_fast = -1; }, {kWrong, {1}, {"yarn_beta_fast"}}},
    {"BetaFastIsInfinite", [](Call &c) { c.config.yarn_beta_fast = kInfinity; }, {kWrong, {1}, {"yarn_beta_fast"}}},
    {"BetaFastIsNan", [](Call &c) { c.config.yarn_beta_fast = kNan; }, {kWrong, {1}, {"yarn_beta_fast"}}},
    {"BetaSlowIsNegative", [](Call &c) { c.config.yarn_beta_slow = -1; }, {kWrong, {1}, {"yarn_beta_slow"}}},
    {"BetaSlowIsSubnormal", [](Call &c) { c.config.yarn_beta_slow = 1e-310; }, {kWrong, {1}, {"yarn_beta_slow"}}},
    {"BetaSlowIsNan", [](Call &c) { c.config.yarn_beta_slow = kNan; }, {kWrong, {1}, {"yarn_beta_slow"}}},
    {"BetaSlowIsGreaterThanBetaFast",
     [](Call &c) { c.config.yarn_beta_slow = 33; },
     {kWrong, {1}, {"yarn_beta_slow", "33", "yarn_beta_fast", "32"}}},
    {"AttentionFactorIsNegative", [](Call &c) { c.config.attention_factor = -1; }, {kWrong, {1}, {"attention_factor"}}},
    {"AttentionFactorIsInfinite", [](Call &c) { c.config.attention_factor = kInfinity; }, {kWrong, {1}, {"attention_factor"}}},
    {"AttentionFactorIsNan", [](Call &c) { c.config.attention_factor = kNan; }, {kWrong, {1}, {"attention_factor"}}},
    {"OriginalPositionsWithoutYarn",
     [](Call &c) { c.Plain().original_positions = 2048; },
     {kWrong, {1}, {"original_positions", "yarn_factor"}}},
    {"BetaFastWithoutYarn", [](Call &c) { c.Plain().yarn_beta_fast = kNan; }, {kWrong, {1}, {"yarn_beta_fast", "yarn_factor"}}},
    {"BetaSlowWithoutYarn", [](Call &c) { c.Plain().yarn_beta_slow = 1; }, {kWrong, {1}, {"yarn_beta_slow", "yarn_factor"}}},
    {"UnroundedWithoutYarn", [](Call &c) { c.Plain().yarn_unrounded = 1; }, {kWrong, {1}, {"yarn_unrounded", "yarn_factor"}}},
    {"UnroundedIsNeitherZeroNorOne", [](Call &c) { c.config.yarn_unrounded = 2; }, {kWrong, {1}, {"yarn_unrounded", "2"}}},
    {"YarnAndLlama3", [](Call &c) { c.config.llama3_factor = 8; }, {kWrong, {1}, {"yarn_factor", "llama3_factor", "one of them"}}},
    {"Llama3AndNtk", [](Call &c) { c.Llama3().ntk_factor = 8; }, {kWrong, {1}, {"llama3_factor", "ntk_factor"}}},
    {"YarnAndPairFactors", [](Call &c) { c.config.pair_factors = kPairFactors; }, {kWrong, {1}, {"yarn_factor", "pair_factors"}}},
    {"APairFactorIsTooSmall", [](Call &c) { c.Plain().pair_factors = kPairFactors; }, {kWrong, {1}, {"pair_factors[3]", "0.25"}}},
    {"APairFactorIsNan", [](Call &c) { c.Plain().pair_factors = kPairFactors + 4; }, {kWrong, {1}, {"pair_factors[0]", "nan"}}},
    {"OriginalPositionsWithPairFactors",
     [](Call &c) {
       c.Plain().pair_factors = kPairFactors;
       c.config.original_positions = 4096;
     },
     {kWrong, {1}, {"original_positions"}}},
    {"Llama3FactorIsLessThanOne", [](Call &c) { c.Llama3().llama3_factor = 0.5; }, {kWrong, {1}, {"llama3_factor"}}},
    {"Llama3FactorIsNan", [](Call &c) { c.Llama3().llama3_factor = kNan; }, {kWrong, {1}, {"llama3_factor"}}},
    {"Llama3WithoutOriginalPositions",
     [](Call &c) { c.Llama3().original_positions = 0; },
     {kWrong, {1}, {"original_positions", "llama3_factor"}}},
    {"LowFreqFactorIsNegative", [](Call &c) { c.Llama3().llama3_low_freq_factor = -1; }, {kWrong, {1}, {"llama3_low_freq_factor"}}},
    {"HighFreqFactorIsInfinite",
     [](Call &c) { c.Llama3().llama3_high_freq_factor = kInfinity; },
     {kWrong, {1}, {"llama3_high_freq_factor"}}},
    {"HighFreqFactorIsNotGreater",
     [](Call &c) { c.Llama3().llama3_low_freq_factor = 4; },
     {kWrong, {1}, {"llama3_high_freq_factor", "4", "llama3_low_freq_factor"}}},
    {"LowFreqFactorWithoutLlama3",
     [](Call &c) { c.config.llama3_low_freq_factor = 1; },
     {kWrong, {1}, {"llama3_low_freq_factor", "llama3_factor"}}},
    {"HighFreqFactorWithoutLlama3",
     [](Call &c) { c.config.llama3_high_freq_factor = 4; },
     {kWrong, {1}, {"llama3_high_freq_factor", "llama3_factor"}}},
    {"NtkFactorIsLessThanOne", [](Call &c) { c.Ntk().ntk_factor = 0.5; }, {kWrong, {1}, {"ntk_factor"}}},
    {"NtkWithoutOriginalPositions", [](Call &c) { c.Ntk().original_positions = 0; }, {kWrong, {1}, {"original_positions", "ntk_factor"}}},
    {"NtkWithoutPositions", [](Call &c) { c.Ntk().ntk_positions = 0; }, {kWrong, {1}, {"ntk_positions", "ntk_factor"}}},
    {"NtkPositionsAreTooMany", [](Call &c) { c.Ntk().ntk_positions = kMax; }, {kWrong, {1}, {"ntk_positions"}}},
    {"NtkOfOnePair", [](Call &c) { c.Ntk().dims = 2; }, {kWrong, {1}, {"dims is 2", "ntk_factor"}}},
    {"NtkPositionsWithoutNtk", [](Call &c) { c.config.ntk_positions = 4096; }, {kWrong, {1}, {"ntk_positions", "ntk_factor"}}},
    {"MropeOfTooManyPairs", [](Call &c) { c.Mrope(kSections[1]); }, {kWrong, {1}, {"mrope_section is 2, 1, 2", "sum", "4"}}},
    {"MropeOfTooFewPairs", [](Call &c) { c.Mrope(kSections[2]); }, {kWrong, {1}, {"mrope_section is 2, 1, 0", "sum", "4"}}},
    {"MropeOfNegativePairs", [](Call &c) { c.Mrope(kSections[3]); }, {kWrong, {1}, {"mrope_section is -1, 4, 1"}}},
    {"MropeOfTheLeastNumber", [](Call &c) { c.Mrope(kSections[7]); }, {kWrong, {1}, {"mrope_section is -9223372036854775808"}}},
    {"MropeOfPairsWhoseSumOverflows", [](Call &c) { c.Mrope(kSections[4]); }, {kWrong, {1}, {"mrope_section"}}},
    {"MropeInterleavedWithTooWideAThird",
     [](Call &c) { c.Mrope(kSections[5]).mrope_interleaved = 1; },
     {kWrong, {1}, {"mrope_section is 1, 1, 2", "at most a third"}}},
    {"MropeInterleavedWithTooWideASecond",
     [](Call &c) { c.Mrope(kSections[6]).mrope_interleaved = 1; },
     {kWrong, {1}, {"mrope_section is 1, 2, 1", "at most a third"}}},
    {"MropeInterleavedIsTwo", [](Call &c) { c.Mrope(kSections[0]).mrope_interleaved = 2; }, {kWrong, {1}, {"mrope_interleaved is 2"}}},
    {"MropeInterleavedIsTheGreatestNumber",
     [](Call &c) { c.Mrope(kSections[0]).mrope_interleaved = UINT32_MAX; },
     {kWrong, {1}, {"mrope_interleaved is 4294967295"}}},
    {"MropeWithoutPositions",
     [](Call &c) { c.Mrope(kSections[0]).mrope_positions = nullptr; },
     {MHA_ERROR_NULL_POINTER, {1}, {"mrope_positions"}}},
    {"MropeWithAFirstPosition",
     [](Call &c) { c.Mrope(kSections[0]).first_position = 3; },
     {kWrong, {1}, {"first_position is 3", "mrope_positions"}}},
    {"MropeOfANegativePosition",
     [](Call &c) { c.Mrope(kSections[0]).mrope_positions = kBadPositions; },
     {kWrong, {1}, {"mrope_positions[1][0] is -1"}}},
    {"MropeOfTooLateAPosition",
     [](Call &c) { c.Mrope(kSections[0]).mrope_positions = kBadPositions + 2, c.config.num_positions = 1; },
     {kWrong, {1}, {"mrope_positions[1][0] is 2147483648"}}},
    {"MropeOfANegativePositionOfTheThirdAxis",
     [](Call &c) { c.Mrope(kSections[0]).mrope_positions = kBadPositions + 4; },
     {kWrong, {1}, {"mrope_positions[2][0] is -6"}}},
    {"MropePositionsWithoutSections",
     [](Call &c) { c.config.mrope_positions = kBadPositions; },
     {kWrong, {1}, {"mrope_positions", "mrope_section"}}},
    {"MropeInterleavedWithoutSections",
     [](Call &c) { c.config.mrope_interleaved = 1; },
     {kWrong, {1}, {"mrope_interleaved", "mrope_section"}}},
    {"NoCos", [](Call &c) { c.cos_table = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"cos"}}},
    {"NoSin", [](Call &c) { c.sin_table = nullptr; }, {MHA_ERROR_NULL_POINTER, {3}, {"sin"}}},
};
INSTANTIATE_TEST_SUITE_P(Each, RopeTablesErrors, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case> &info) {
                           return std::string(info.param.name);
                         });

TEST(RopeTables, WithoutAConfigIsAnError) {
  float number;
  ExpectFails([&](mha_error *error) { return mha_rope_tables(nullptr, &number, &number, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"mha_rope_config"}});
}

TEST(RopeTables, TakeALongerStructWhoseNewFieldsAreZero) {
  struct {
    mha_rope_config config;
    int64_t newer;
  } longer = {Config(8, 0, 1), 0};
  longer.config.struct_size = sizeof longer;
  float cos[4], sin[4];
  ExpectSucceeds(
      [&](mha_error *error) { return mha_rope_tables(&longer.config, cos, sin, error); });
  longer.newer = 1;
  ExpectFails([&](mha_error *error) { return mha_rope_tables(&longer.config, cos, sin, error); },
              {MHA_ERROR_STRUCT_SIZE, {1}, {"struct_size"}});
}

}  // namespace
