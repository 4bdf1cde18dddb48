// Packed layers: bytes that can be copied, written to a file and viewed again, and whose damage is
// found; and layers whose projections run in the caller's matrix product.

#include <array>
#include <climits>

#include "support/cache.h"
#include "support/instruction_sets.h"
#include "support/interface_support.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Widths that all differ and are multiples of nothing, grouped heads and all biases; no output
// projection; several panels and sum blocks. The calls have 7 queries and 11 keys.
const std::vector<LayerProblem> kProblems = [] {
  std::vector<LayerProblem> problems;
  for (LayerProblem sizes : {SmallSizes(), SquareSizes(1, 1, 1, 1), SquareSizes(65, 6, 3, 17),
                             SquareSizes(300, 2, 1, 50)}) {
    sizes.n_q = 7;
    sizes.n_kv = 11;
    problems.push_back(NormalLayer(sizes));
    if (problems.size() == 1) problems.push_back(NormalLayer(sizes, 1, kNoBiases, false));
  }
  return problems;
}();

Outputs Result(const LayerProblem &problem, const mha_layer *layer) {
  return ForwardData(layer, problem, {Guarded(kAskAll)}).Compute();
}

// A copy of the bytes at another address, with the same alignment, before a guard page.
Memory Copy(const Memory &buffer, size_t bytes) {
  Memory copy(bytes, Place::kBeforeGuard, 64);
  std::memcpy(copy.data(), buffer.data(), bytes);
  return copy;
}

mha_status Verify(const void *buffer, size_t bytes) {
  mha_error error = UnwrittenError();
  const mha_status status = mha_layer_verify(buffer, bytes, &error);
  EXPECT_EQ(error.status, status);
  return status;
}

// View and verify reject these bytes.
void ExpectNoPackedLayer(const void *buffer, size_t bytes,
                         const mha_layer_options *options = nullptr) {
  Memory storage(mha_layer_view_size(), Place::kBeforeGuard, 16);
  const mha_layer *layer = nullptr;
  ExpectFails({MHA_ERROR_PACKED_FORMAT, {1, 2}, {}}, mha_layer_view, buffer, bytes, options,
              storage.data(), storage.size(), &layer);
  ExpectFails({MHA_ERROR_PACKED_FORMAT, {1, 2}, {}}, mha_layer_verify, buffer, bytes);
}

// ---- Round trips

class PackedLayer : public InstructionSetTest {};

TEST_P(PackedLayer, GivesTheBitsOfACreatedOne) {
  const mha_layer_options options = Options(instruction_set());
  for (const LayerProblem &problem : kProblems) {
    SCOPED_TRACE(Describe(problem));
    const LayerData data(problem);
    const Layer created = Create(data, instruction_set());
    const Outputs expected = Result(problem, created.get());

    Memory buffer = data.Pack();
    const View view(buffer, &options);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    EXPECT_TRUE(SameBits(Result(problem, view.layer), expected));

    Memory copy = Copy(buffer, buffer.size());
    buffer.Forbid();  // the copy must do without the original
    copy.Freeze();
    const View of_copy(copy, &options);
    ASSERT_EQ(of_copy.status, MHA_OK) << of_copy.error.message;
    EXPECT_TRUE(SameBits(Result(problem, of_copy.layer), expected));
  }
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(PackedLayer);

TEST(Pack, GivesTheSameBytesForEveryInstructionSet) {
  const LayerData data{SmallLayer()};
  const std::string expected = data.Pack().Bytes();
  for (uint32_t set : InstructionSets()) {
    const mha_layer_options options = Options(set);
    EXPECT_EQ(data.Pack(&options).Bytes(), expected) << mha_instruction_set_name(set);
  }
}

TEST(Pack, WritesEveryByteOfThePackedLayerAndNoOther) {
  for (const LayerProblem &problem : kProblems) {
    for (mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
      const LayerData data(problem);
      const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
      const Memory over_zeros = data.Pack(&options, 0x00);
      const Memory over_ones = data.Pack(&options, 0xFF);
      EXPECT_EQ(over_zeros.Bytes(), over_ones.Bytes())
          << "some bytes were not written for " << Describe(problem);

      Memory larger(over_zeros.size() + 200, Place::kAfterGuard);
      larger.Fill(0x5A);
      ASSERT_EQ(mha_layer_pack(&data.config, &data.weights, &options, larger.data(), larger.size(),
                               nullptr),
                MHA_OK);
      EXPECT_EQ(larger.Bytes(), over_zeros.Bytes() + std::string(200, 0x5A));
    }
  }
}

TEST(Pack, OfDifferentWeightsGivesDifferentBytes) {
  EXPECT_NE(LayerData(NormalLayer(SmallSizes(), 1)).Pack().Bytes(),
            LayerData(NormalLayer(SmallSizes(), 2)).Pack().Bytes());
}

// One matrix, stored transposed, strided and fused, with widths around those of the blocks that
// packing uses.
TEST(Pack, GivesTheSameBytesForEveryForm) {
  for (mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    for (int64_t dim : {10, 16, 31, 48, 65, 128}) {
      for (int64_t head_dim : {3, 8, 16, 24, 40, 64}) {
        const LayerProblem problem = SquareLayer(dim, 4, 2, head_dim);
        const std::string expected = LayerData(problem).Pack(&options).Bytes();
        for (int which = 0; which < 16; which++) {
          LayerForm form;
          form.form = which & 1 ? WeightForm::kFused : WeightForm::kThreeMatrices;
          form.layout = which & 2 ? MHA_LAYOUT_OUT_IN : MHA_LAYOUT_IN_OUT;
          form.fused_biases = (which & 4) != 0;
          form.row_gap = which & 8 ? 1 + dim % 5 : 0;
          const LayerData data(problem, Place::kBeforeGuard, form);
          ASSERT_EQ(data.Pack(&options).Bytes(), expected)
              << Describe(problem) << " " << Describe(form) << (sgemm ? " for sgemm" : "");
        }
      }
    }
  }
}

// ---- Views

class LayerView : public testing::Test {
 protected:
  const LayerProblem problem_ = SmallLayer();
  const LayerData data_{problem_};
  const Memory buffer_ = data_.Pack();
  const Layer created_ = Create(data_);
  const Outputs expected_ = Result(problem_, created_.get());
};

TEST_F(LayerView, AcceptsABufferThatIsLargerThanNeeded) {
  for (size_t more : {size_t{1}, size_t{63}, size_t{64}, size_t{5000}}) {
    Memory larger(buffer_.size() + more, Place::kAfterGuard);
    larger.Fill(0xEE);
    std::memcpy(larger.data(), buffer_.data(), buffer_.size());
    const View view(larger);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    EXPECT_TRUE(SameBits(Result(problem_, view.layer), expected_));
    EXPECT_EQ(Verify(larger.data(), larger.size()), MHA_OK);
  }
}

// Storage is a pointer to void, so it may have any alignment.
TEST_F(LayerView, AcceptsStorageOfAnyAlignment) {
  for (size_t offset = 0; offset < 64; ++offset) {
    Memory storage(mha_layer_view_size() + 64, Place::kAfterGuard);
    storage.Fill(0xA7);
    const mha_layer *layer = nullptr;
    mha_error error;
    ASSERT_EQ(mha_layer_view(buffer_.data(), buffer_.size(), nullptr, storage.data() + offset,
                             mha_layer_view_size(), &layer, &error),
              MHA_OK)
        << error.message << " offset " << offset;
    EXPECT_TRUE(SameBits(Result(problem_, layer), expected_)) << offset;
    std::memset(storage.data() + offset, 0xA7, mha_layer_view_size());
    EXPECT_TRUE(storage.Holds(0xA7))
        << "something was written beside the storage at offset " << offset;
  }
}

TEST_F(LayerView, LiesInItsStorageAndBorrowsTheBuffer) {
  const View view(buffer_);
  ASSERT_EQ(view.status, MHA_OK);
  const auto *object = reinterpret_cast<const unsigned char *>(view.layer);
  EXPECT_GE(object, view.storage.data());
  EXPECT_LT(object, view.storage.data() + view.storage.size());
  const std::string before = buffer_.Bytes() + view.storage.Bytes();
  mha_layer_destroy(const_cast<mha_layer *>(view.layer));
  EXPECT_EQ(buffer_.Bytes() + view.storage.Bytes(), before) << "destroying it is nothing";
}

// A header is smaller than a page, and a view reads nothing after it.
TEST_F(LayerView, ReadsTheHeaderOnly) {
  const LayerProblem problem = SquareLayer(300, 2, 1, 50);
  const LayerData data(problem);
  const Memory buffer = data.Pack();
  Memory mostly_forbidden(buffer.size(), Place::kAfterGuard);
  std::memcpy(mostly_forbidden.data(), buffer.data(), buffer.size());
  ASSERT_GT(buffer.size(), 4 * PageBytes());
  mostly_forbidden.ForbidFrom(PageBytes());
  const View view(mostly_forbidden);
  ASSERT_EQ(view.status, MHA_OK) << view.error.message;
  mha_layer_config config = Zeroed<mha_layer_config>();
  EXPECT_EQ(mha_layer_shape(view.layer, &config, nullptr), MHA_OK);
  EXPECT_EQ(config.query_dim, 300);
  mostly_forbidden.Thaw();
  const Layer created = Create(data);
  EXPECT_TRUE(SameBits(Result(problem, view.layer), Result(problem, created.get())));
}

TEST_F(LayerView, RefusesALayerPackedForAnotherBackEnd) {
  const mha_layer_options native = Options();
  const mha_layer_options sgemm = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const Memory sgemm_buffer = data_.Pack(&sgemm), storage(mha_layer_view_size());
  const auto view = [&](const Memory &buffer, const mha_layer_options *options) {
    return [&, options](auto *error) {
      const mha_layer *layer = nullptr;
      return mha_layer_view(buffer.data(), buffer.size(), options, storage.data(), storage.size(),
                            &layer, error);
    };
  };
  ExpectSucceeds(view(buffer_, &native));
  ExpectSucceeds(view(buffer_, nullptr));
  ExpectSucceeds(view(sgemm_buffer, &sgemm));
  const Expected refused = {MHA_ERROR_PACKED_FORMAT, {1, 3}, {"sgemm"}};
  ExpectFails(view(buffer_, &sgemm), refused);
  ExpectFails(view(sgemm_buffer, &native), refused);
  ExpectFails(view(sgemm_buffer, nullptr), refused);
  EXPECT_EQ(Verify(buffer_.data(), buffer_.size()), MHA_OK);
  EXPECT_EQ(Verify(sgemm_buffer.data(), sgemm_buffer.size()), MHA_OK);
}

// ---- Damage

// Changes every byte of a small layer, header and padding included. Verify must notice; a view may
// not notice, but must do no harm.
TEST(Damage, VerifyFindsDamageOfAnyByte) {
  for (mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const LayerData data(SquareLayer(3, 2, 1, 2));
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    Memory buffer = data.Pack(&options);
    ASSERT_EQ(Verify(buffer.data(), buffer.size()), MHA_OK);
    for (size_t i = 0; i < buffer.size(); ++i) {
      const unsigned char good = buffer.data()[i];
      std::vector<int> flips = {0x01, 0x80, 0xFF};
      if (i < 512)
        flips = {0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF};  // where a header may be
      for (int flip : flips) {
        buffer.data()[i] = static_cast<unsigned char>(good ^ flip);
        const mha_status verified = Verify(buffer.data(), buffer.size());
        EXPECT_TRUE(verified == MHA_ERROR_PACKED_FORMAT || verified == MHA_ERROR_PACKED_CHECKSUM)
            << Name(verified) << " for byte " << i << " of " << buffer.size() << " xor " << flip;
        const View view(buffer, &options);
        EXPECT_TRUE(view.status == MHA_OK || view.status == MHA_ERROR_PACKED_FORMAT)
            << Name(view.status) << " for byte " << i;
        // A view rejects what verify calls a bad format.
        if (verified == MHA_ERROR_PACKED_FORMAT) {
          EXPECT_EQ(Name(view.status), Name(MHA_ERROR_PACKED_FORMAT)) << "byte " << i;
        }
      }
      buffer.data()[i] = good;
      if (HasFailure()) break;
    }
  }
}

// Calls change() to damage the weights, and again to restore them.
template <typename Change>
void ExpectDamageIsFound(const Memory &buffer, const Change &change) {
  change();
  ExpectFails({MHA_ERROR_PACKED_CHECKSUM, {1}, {}}, mha_layer_verify, buffer.data(), buffer.size());
  change();
}

TEST(Damage, DamagedWeightsHaveTheirOwnStatus) {
  const LayerData data(SquareLayer(300, 2, 1, 50));
  const Memory buffer = data.Pack();
  Random random(41);
  for (int i = 0; i < 200; ++i) {
    // After the first page there are only weights.
    const auto at =
        static_cast<size_t>(random.Between(4096, static_cast<int64_t>(buffer.size()) - 1));
    const auto flip = static_cast<unsigned char>(1 << random.Below(8));
    ExpectDamageIsFound(buffer, [&] {
      buffer.data()[at] ^= flip;
      EXPECT_EQ(View(buffer).status, MHA_OK) << "a view reads no weights";
    });
  }
  EXPECT_EQ(Verify(buffer.data(), buffer.size()), MHA_OK);
}

// Two equal flips, or two blocks that changed places, cancel out in a sum or an exclusive or.
TEST(Damage, VerifyFindsDamageThatCancelsOutInASum) {
  const LayerData data(SquareLayer(300, 2, 1, 50));
  const Memory buffer = data.Pack();
  const auto expect_exchange_is_found = [&](size_t at, size_t distance, size_t count) {
    unsigned char *const first = buffer.data() + at;
    ASSERT_NE(std::memcmp(first, first + distance, count), 0) << "nothing to exchange";
    SCOPED_TRACE(std::to_string(at) + " exchanged with " + std::to_string(distance) + " behind");
    ExpectDamageIsFound(buffer, [&] { std::swap_ranges(first, first + count, first + distance); });
  };
  for (size_t distance : {size_t{4}, size_t{8}, size_t{64}, size_t{192}, size_t{4096}}) {
    for (size_t at : {size_t{4096}, size_t{10000}}) {
      ExpectDamageIsFound(buffer, [&] {
        buffer.data()[at] ^= 0x10;
        buffer.data()[at + distance] ^= 0x10;
      });
      expect_exchange_is_found(at, distance, 4);
    }
  }
  // Whole tiles, of which the checksum is a sum: 16 rows of a panel, after a header of 256 bytes.
  constexpr size_t kTile = 16 * 192;
  for (size_t other : {size_t{1}, size_t{2}, size_t{5}, size_t{17}})
    expect_exchange_is_found(256, other * kTile, kTile);
  EXPECT_EQ(Verify(buffer.data(), buffer.size()), MHA_OK);
}

// No bit of a word may drop out of a sum, as the highest ones could, in any row.
TEST(Damage, VerifyFindsOneBitFlippedInTwoWords) {
  const LayerData data(SquareLayer(64, 2, 1, 32));
  const Memory buffer = data.Pack();
  for (size_t distance :
       {size_t{8}, size_t{16}, size_t{192}, size_t{384}, size_t{3072}, size_t{12288}}) {
    for (size_t row = 0; row < 16; ++row) {
      for (size_t bit = 0; bit < 64; ++bit) {
        const size_t at = 4096 + row * 192 + bit / 8;
        const auto flip = static_cast<unsigned char>(1 << bit % 8);
        SCOPED_TRACE("bit " + std::to_string(bit) + ", row " + std::to_string(row) + ", " +
                     std::to_string(distance));
        ExpectDamageIsFound(buffer, [&] {
          buffer.data()[at] ^= flip;
          buffer.data()[at + distance] ^= flip;
        });
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_EQ(Verify(buffer.data(), buffer.size()), MHA_OK);
}

// The copy of a file that was cut off ends at an inaccessible page.
TEST(Damage, TruncationAtAnyLengthIsAnError) {
  for (mha_sgemm sgemm : {mha_sgemm{nullptr}, mha_sgemm{PlainSgemm}}) {
    const LayerData data(SquareLayer(20, 2, 1, 5));
    const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, sgemm);
    const Memory buffer = data.Pack(&options);
    for (size_t length = 0; length < buffer.size();
         length += length < 600 || length + 200 > buffer.size() ? 1 : 61) {
      SCOPED_TRACE(length);
      const Memory cut = Copy(buffer, length);
      ExpectNoPackedLayer(cut.data(), cut.size(), &options);
      if (HasFailure()) break;
    }
  }
}

TEST(Damage, ForeignBytesAreNoPackedLayer) {
  Random random(42);
  for (size_t bytes :
       {size_t{1}, size_t{8}, size_t{64}, size_t{128}, size_t{256}, size_t{4096}, size_t{100000}}) {
    SCOPED_TRACE(bytes);
    Memory foreign(bytes, Place::kBeforeGuard, 64);
    foreign.Fill(0x00);
    ExpectNoPackedLayer(foreign.data(), foreign.size());
    foreign.Fill(0xFF);
    ExpectNoPackedLayer(foreign.data(), foreign.size());
    for (int i = 0; i < 20; ++i) {
      for (size_t b = 0; b < bytes; ++b)
        foreign.data()[b] = static_cast<unsigned char>(random.Next());
      ExpectNoPackedLayer(foreign.data(), foreign.size());
    }
  }
}

// The dimensions of a config, and of the problems that have them.
constexpr struct {
  int64_t mha_layer_config::*of_config;
  int64_t LayerProblem::*of_problem;
} kDimensions[] = {{&mha_layer_config::query_dim, &LayerProblem::query_dim},
                   {&mha_layer_config::key_dim, &LayerProblem::key_dim},
                   {&mha_layer_config::value_dim, &LayerProblem::value_dim},
                   {&mha_layer_config::output_dim, &LayerProblem::output_dim},
                   {&mha_layer_config::num_heads, &LayerProblem::num_heads},
                   {&mha_layer_config::num_kv_heads, &LayerProblem::num_kv_heads},
                   {&mha_layer_config::head_dim, &LayerProblem::head_dim},
                   {&mha_layer_config::head_dim_v, &LayerProblem::head_dim_v}};

// The sizes that a config has, nothing left to defaults.
LayerProblem ProblemOf(const mha_layer_config &config) {
  LayerProblem sizes = SmallSizes();
  for (const auto &dimension : kDimensions)
    sizes.*dimension.of_problem = config.*dimension.of_config;
  return sizes;
}

// query_dim, key_dim, value_dim, output_dim, num_heads, num_kv_heads, head_dim, head_dim_v
mha_layer_config Config(std::array<int64_t, 8> dimensions, float scale = 0) {
  mha_layer_config config = Zeroed<mha_layer_config>();
  for (size_t i = 0; i < dimensions.size(); i++) config.*kDimensions[i].of_config = dimensions[i];
  config.scale = scale;
  return config;
}

// ---- Headers that somebody made up, with the right checksum

// Where the fields of a header are (PackedHeader in src/objects/pack.cpp), their width, and whether
// a layer's size may follow from it.
struct Field {
  const char *name;
  size_t offset, width;
  bool is_of_shape;
};
constexpr size_t kHeaderBytes = 256;
const Field kFields[] = {
    {"magic", 0, 8, false},          {"byte_order", 8, 4, false},  {"version", 12, 4, false},
    {"contract", 16, 4, false},      {"kind", 20, 4, true},        {"bytes", 24, 8, false},
    {"checksum", 32, 8, false},      {"query_dim", 40, 8, true},   {"key_dim", 48, 8, true},
    {"value_dim", 56, 8, true},      {"output_dim", 64, 8, true},  {"num_heads", 72, 8, true},
    {"num_kv_heads", 80, 8, true},   {"head_dim", 88, 8, true},    {"head_dim_v", 96, 8, true},
    {"scale", 104, 4, false},        {"has_output", 108, 4, true}, {"gate", 112, 4, true},
    {"arithmetic", 116, 4, true},    {"gate_dim", 120, 8, true},   {"group", 128, 8, true},
    {"scale_storage", 136, 4, true}, {"offsets", 140, 4, true},    {"reserved", 144, 8, false}};
const Field &kSize = kFields[5], &kHasOutput = kFields[16], &kOffsets = kFields[22];
const int64_t kEdges[] = {
    0,         1,         2,         3,       4,       5,       6,         7,         8,
    9,         10,        15,        16,      17,      31,      32,        33,        47,
    48,        49,        63,        64,      65,      96,      97,        127,       128,
    255,       256,       1 << 16,   1 << 17, 1 << 24, 1 << 30, INT32_MAX, 1ll << 31, UINT32_MAX,
    1ll << 32, 1ll << 61, 1ll << 62, kMax,    -1,      -2,      INT32_MIN, kMin,      kMin + 1};

// The format's checksum of 256 bytes: eight lanes, each of which takes 8 bytes of every 64 by an
// addition and a rotation.
uint64_t ChecksumOfHeader(const unsigned char *header) {
  const auto mix = [](uint64_t sum) {
    sum *= 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 32;
  };
  uint64_t words[kHeaderBytes / 8], lanes[8] = {}, sum = 0;
  std::memcpy(words, header, sizeof words);
  words[31] = 0;
  for (size_t i = 0; i < 32; ++i) {
    const uint64_t word = lanes[i % 8] + words[i];
    lanes[i % 8] = word << 25 | word >> 39;
  }
  for (const uint64_t lane : lanes) sum = mix(sum ^ lane);
  return mix(sum);
}

// A small layer of each kind, including gates and layers of only W_O or only W_Q.
struct Packed {
  std::string name;
  mha_layer_config config;
  bool has_output;
  mha_sgemm sgemm;
  bool only_asks = false;
};
std::vector<Packed> AllKinds() {
  std::vector<Packed> all;
  const auto add = [&](const WeightFormat &format, mha_sgemm sgemm = nullptr,
                       uint32_t scale_type = 0) {
    mha_layer_config config = Config({6, 5, 7, 9, 4, 2, 3, 8});
    config.format.type = static_cast<uint32_t>(format.stored);
    config.format.group_size = static_cast<uint32_t>(format.group);
    config.format.scale_type = scale_type;
    config.format.arithmetic = static_cast<uint32_t>(format.arithmetic);
    all.push_back({format.name, config, true, sgemm});
    mha_layer_config linear = Config({70, 0, 0, 5, 0, 0, 0, 0});
    linear.format = config.format;
    if (!sgemm) all.push_back({std::string(format.name) + ", W_O alone", linear, true, nullptr});
  };
  for (const WeightFormat &format : kWeightFormats) add(format);
  add({Stored::kF32, Arithmetic::kF32, "sgemm"}, PlainSgemm);
  add({Stored::kInt8, Arithmetic::kF32, "int8 by 16", 16});
  add({Stored::kInt4, Arithmetic::kInt8, "int4 by 64 in int8", 64});
  add({Stored::kInt5, Arithmetic::kInt16, "int5 by 32", 32});
  add({Stored::kInt6, Arithmetic::kInt8, "int6 by 16, scales in blocks", 16}, nullptr,
      MHA_TYPE_INT8);
  all.push_back({"one width, without W_O", Config({8, 0, 0, 0, 2, 0, 4, 0}), false, nullptr});
  all.push_back({"one width, sgemm", Config({8, 0, 0, 0, 2, 0, 4, 0}), true, PlainSgemm});
  all.push_back({"gate", Config({8, 0, 0, 0, 2, 0, 4, 0}), true, nullptr});
  all.back().config.gate = MHA_FUNCTION_SIGMOID;
  all.push_back({"gate of heads, sgemm", Config({8, 0, 0, 0, 2, 0, 4, 0}), true, PlainSgemm});
  all.back().config.gate = MHA_FUNCTION_SOFTPLUS;
  all.back().config.gate_dim = 1;
  all.push_back({"W_Q alone", Config({8, 0, 0, 0, 2, 0, 4, 0}), true, nullptr, true});
  all.push_back({"W_Q alone, sgemm", Config({6, 0, 0, 9, 4, 2, 3, 8}), true, PlainSgemm, true});
  return all;
}

class MadeUpHeader : public testing::Test {
 public:
  // Only the header changes; the memory after it keeps the bytes of the good layer, and zeros.
  void Begin(const Packed &kind) {
    kind_ = kind;
    options_ = Options(MHA_INSTRUCTION_SET_AUTO, kind.sgemm);
    SetLayer(kind.config, kind.has_output, kind.only_asks);
    const Memory packed = data_.Pack(&options_);
    good_bytes_ = packed.size();
    ASSERT_LE(good_bytes_, room_.size()) << kind.name;
    room_.Fill(0);
    std::memcpy(room_.data(), packed.data(), good_bytes_);
    std::memcpy(good_, room_.data(), kHeaderBytes);
    uint64_t sum = 0;
    std::memcpy(&sum, good_ + 248, 8);
    ASSERT_EQ(ChecksumOfHeader(good_), sum) << "the checksum is another one now";
    std::memcpy(header_, good_, kHeaderBytes);
  }
  void Reset() { std::memcpy(header_, good_, kHeaderBytes); }
  void Set(const Field &field, int64_t value) {
    std::memcpy(header_ + field.offset, &value, field.width);
  }

  // The status of a view. A failure must have a message.
  mha_status ViewIt() {
    const uint64_t sum = ChecksumOfHeader(header_);
    std::memcpy(header_ + 248, &sum, 8);
    std::memcpy(room_.data(), header_, kHeaderBytes);
    const mha_status status = mha_layer_view(room_.data(), room_.size(), &options_, storage_.data(),
                                             storage_.size(), &layer_, &error_);
    if (status != MHA_OK) {
      EXPECT_EQ(Name(status), Name(MHA_ERROR_PACKED_FORMAT)) << error_.message;
      EXPECT_GT(std::strlen(error_.message), 20u);
    }
    return status;
  }

  // Tries the given size and every size that there is room for. At most one of them is that of the
  // shape, and it makes a layer.
  void TryAllSizes(const std::string &what) {
    ViewIt();
    int accepted = 0;
    for (int64_t bytes = 256; bytes <= static_cast<int64_t>(room_.size()) && accepted < 2;
         bytes += 64) {
      Set(kSize, bytes);
      if (ViewIt() != MHA_OK) continue;
      ++accepted;
      ++accepted_;
      Use(static_cast<size_t>(bytes), what);
    }
    EXPECT_LE(accepted, 1) << what;
  }

  // What a view accepts is a layer like one that the library packs, and no call reads beyond its
  // bytes, which end at an inaccessible page.
  void Use(size_t bytes, const std::string &what) {
    SCOPED_TRACE(kind_.name + ", " + what);
    const Memory exact = Copy(room_, bytes);
    const View view(exact, &options_);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    const mha_status verified = mha_layer_verify(exact.data(), exact.size(), nullptr);
    EXPECT_TRUE(verified == MHA_OK || verified == MHA_ERROR_PACKED_CHECKSUM) << Name(verified);
    mha_layer_config config = Zeroed<mha_layer_config>();
    ASSERT_EQ(mha_layer_shape(view.layer, &config, nullptr), MHA_OK);
    uint32_t has_output = 0, offsets = 0;
    std::memcpy(&has_output, header_ + kHasOutput.offset, 4);
    std::memcpy(&offsets, header_ + kOffsets.offset, 4);
    mha_layer_config same = config;
    if (!has_output) same.output_dim = 0;
    if (same.scale == 0.0f) same.scale = 0.0f;  // -0, too
    const bool only_asks = config.num_heads != 0 && config.key_dim == 0;
    SetLayer(same, has_output != 0, only_asks);
    SetGroups(offsets);
    EXPECT_EQ(data_.PackSize(&options_), bytes);
    Random random(7);
    if (config.num_heads == 0) {
      Memory x(static_cast<size_t>(3 * config.query_dim) * 4, Place::kBeforeGuard),
          y(static_cast<size_t>(3 * config.output_dim) * 4, Place::kBeforeGuard);
      x.Fill(0x3C);
      mha_linear_args args = Zeroed<mha_linear_args>();
      args.rows = 3;
      args.x.data = x.data();
      args.output.data = y.data();
      size_t room = 0;
      ASSERT_EQ(mha_linear_workspace(view.layer, &args, &room, nullptr), MHA_OK);
      Memory workspace(room);
      ASSERT_EQ(mha_linear(view.layer, &args, workspace.data(), workspace.size(), nullptr), MHA_OK);
      return;
    }
    LayerProblem says = ProblemOf(config);
    says.n_q = says.n_kv = 3;
    says.w_o.resize(1);  // so that the output is as wide as it says
    FillInputs(&random, &says);
    ForwardData run(view.layer, says, {Guarded()});
    const Cache empty(CacheConfigOf(says, {MHA_CACHE_KIND_CONTIGUOUS, 0}, says.batch, 1));
    if (only_asks) run.args.call.cache_read = empty.get(), run.args.key = run.args.value = {};
    Memory workspace(run.WorkspaceBytes());
    ASSERT_EQ(run.Run(workspace.data(), workspace.size(), nullptr), MHA_OK);
  }

  int accepted() const { return accepted_; }
  std::string message() const { return error_.message; }
  size_t good_bytes() const { return good_bytes_; }

 private:
  void SetLayer(const mha_layer_config &config, bool has_output, bool only_asks) {
    static const float numbers[4096] = {0.5f, -0.25f, 1.0f};
    data_.config = config;
    data_.weights = Zeroed<mha_layer_weights>();
    if (config.num_heads != 0) data_.weights.w_q.data = numbers;
    if (config.num_heads != 0 && !only_asks)
      data_.weights.w_k.data = data_.weights.w_v.data = numbers;
    if (config.gate != MHA_FUNCTION_NONE) data_.weights.w_g.data = numbers;
    if (has_output) data_.weights.w_o.data = numbers;
    SetGroups(0);
  }
  // Floats have no offsets, and no scales but floats.
  void SetGroups(uint32_t offsets) {
    const mha_weight_format &format = data_.config.format;
    if (offsets == 0 && format.scale_type <= MHA_TYPE_F32 && format.type < MHA_TYPE_INT5) return;
    static const float zeros[4096] = {};
    const bool are_in_blocks = format.scale_type == MHA_TYPE_INT8;
    mha_layer_weights &w = data_.weights;
    w.type = format.type < MHA_TYPE_INT5 ? format.type : MHA_TYPE_INT8;
    w.layout = MHA_LAYOUT_OUT_IN;
    for (mha_matrix *matrix : {&w.w_q, &w.w_g, &w.w_k, &w.w_v, &w.w_o}) {
      if (matrix->data) {
        matrix->data = matrix->scales = zeros;
        matrix->offsets = offsets & 1 ? zeros : nullptr;
        matrix->block_scales = are_in_blocks ? zeros : nullptr;
        matrix->block_offsets = are_in_blocks && offsets & 1 ? zeros : nullptr;
      }
      offsets >>= 1;
    }
  }

  Packed kind_;
  LayerData data_{SmallLayer()};
  mha_layer_options options_;
  Memory room_{16384, Place::kBeforeGuard, 64};
  Memory storage_{mha_layer_view_size(), Place::kBeforeGuard, 16};
  unsigned char good_[kHeaderBytes], header_[kHeaderBytes];
  const mha_layer *layer_ = nullptr;
  mha_error error_;
  int accepted_ = 0;
  size_t good_bytes_ = 0;
};

TEST_F(MadeUpHeader, IsALayerOrRefusedForAnyFieldAtTheEdges) {
  for (const Packed &kind : AllKinds()) {
    ASSERT_NO_FATAL_FAILURE(Begin(kind));
    const int before = accepted();
    TryAllSizes("as it was");
    ASSERT_EQ(accepted(), before + 1) << kind.name;
    for (const Field &field : kFields) {
      for (const int64_t value : kEdges) {
        Reset();
        Set(field, value);
        if (field.is_of_shape)
          TryAllSizes(field.name + (" = " + std::to_string(value)));
        else if (ViewIt() == MHA_OK)
          Use(good_bytes(), field.name + (" = " + std::to_string(value)));
        Reset();
        Set(field, value);
        Set(kSize, kMin);  // a size that no buffer has
        EXPECT_NE(ViewIt(), MHA_OK);
      }
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(accepted(), 1000);  // dimensions of other layers that are as small
}

TEST_F(MadeUpHeader, OfAnotherFormatIsNamed) {
  ASSERT_NO_FATAL_FAILURE(Begin(AllKinds()[0]));
  const char *const words[] = {"buffer does not hold a packed layer", "has the other byte order",
                               "version 99 of the format", "arithmetic contract 99"};
  for (size_t field = 0; field < std::size(words); ++field) {
    Reset();
    Set(kFields[field], 99);
    EXPECT_EQ(ViewIt(), MHA_ERROR_PACKED_FORMAT);
    EXPECT_NE(message().find(words[field]), std::string::npos) << message();
  }
  Reset();
  Set(kFields[7], INT32_MAX);  // query_dim and, of 4 heads, head_dim: 2^64 bytes
  Set(kFields[13], INT32_MAX / 4);
  Set(kSize, -1);
  EXPECT_EQ(ViewIt(), MHA_ERROR_PACKED_FORMAT);
  EXPECT_NE(message().find("sizes contradict each other"), std::string::npos) << message();
}

TEST_F(MadeUpHeader, UnknownKindIsRefused) {
  for (const Packed &kind : AllKinds()) {
    for (const int64_t number : {0, 12}) {
      ASSERT_NO_FATAL_FAILURE(Begin(kind));
      Set(kFields[4], number);
      EXPECT_EQ(ViewIt(), MHA_ERROR_PACKED_FORMAT) << kind.name;
    }
  }
}

// A later version may give meaning to these fields.
TEST_F(MadeUpHeader, FieldsThatThisVersionDoesNotKnowAreRefused) {
  for (const Packed &kind : AllKinds()) {
    ASSERT_NO_FATAL_FAILURE(Begin(kind));
    Set(kHasOutput, 2);
    EXPECT_EQ(ViewIt(), MHA_ERROR_PACKED_FORMAT) << kind.name;
    for (size_t at = kFields[23].offset; at < 248; ++at) {
      Reset();
      Set({"reserved", at, 1, false}, 1);
      EXPECT_EQ(ViewIt(), MHA_ERROR_PACKED_FORMAT) << kind.name << ", byte " << at;
    }
  }
}

// ---- The shape of a layer

TEST(Shape, DefaultsAreResolved) {
  const struct {
    mha_layer_config given;
    bool has_output;
    mha_layer_config resolved;
  } cases[] = {
      {Config({16, 0, 0, 0, 4, 0, 0, 0}), true, Config({16, 16, 16, 16, 4, 4, 4, 4}, 0.5f)},
      {Config({16, 0, 0, 0, 4, 0, 0, 3}), false, Config({16, 16, 16, 12, 4, 4, 4, 3}, 0.5f)},
      {Config({6, 0, 0, 0, 4, 0, 9, 0}), true, Config({6, 6, 6, 6, 4, 4, 9, 9}, 1.0f / 3.0f)},
      {Config({4, 7, 0, 0, 2, 0, 0, 0}, 2), true, Config({4, 7, 7, 4, 2, 2, 2, 2}, 2)},
      {Config({16, 0, 0, 5, 4, 2, 0, 0}, -1), true, Config({16, 16, 16, 5, 4, 2, 4, 4}, -1)},
      {Config({2, 3, 5, 7, 9, 3, 11, 13}, 0.125f), true,
       Config({2, 3, 5, 7, 9, 3, 11, 13}, 0.125f)},
  };
  for (const auto &[given, has_output, resolved] : cases) {
    SCOPED_TRACE(Describe(ProblemOf(resolved)));
    LayerData data(NormalLayer(ProblemOf(resolved), 1, kAllBiases, has_output));
    data.config = given;
    const Layer created = Create(data);
    const Memory buffer = data.Pack();
    const View view(buffer);
    ASSERT_EQ(view.status, MHA_OK) << view.error.message;
    for (const mha_layer *layer : {static_cast<const mha_layer *>(created.get()), view.layer}) {
      mha_layer_config config;
      std::memset(&config, 0xFF, sizeof config);
      config.struct_size = sizeof config;
      ExpectSucceeds(mha_layer_shape, layer, &config);
      EXPECT_EQ(config.struct_size, sizeof config);
      for (const auto &dimension : kDimensions)
        EXPECT_EQ(config.*dimension.of_config, resolved.*dimension.of_config);
      EXPECT_EQ(config.scale, resolved.scale);
      EXPECT_EQ(config.format.type, static_cast<uint32_t>(MHA_TYPE_F32));
    }
  }
}

TEST(Shape, DefaultScaleIsOneOverTheSquareRoot) {
  for (int64_t head_dim : {1, 2, 3, 5, 7, 16, 33, 64, 100, 128, 256}) {
    const LayerData data(SquareLayer(4, 1, 1, head_dim));
    const Layer layer = Create(data);
    mha_layer_config config = Zeroed<mha_layer_config>();
    ASSERT_EQ(mha_layer_shape(layer.get(), &config, nullptr), MHA_OK);
    EXPECT_EQ(config.scale, 1.0f / std::sqrt(static_cast<float>(head_dim)))
        << head_dim;  // both operations are correctly rounded
  }
}

// A resolved shape describes the same layer.
TEST(Shape, ResolvedShapeMakesTheSameLayer) {
  const LayerProblem problem = SmallLayer();
  LayerData data(problem);
  const Layer first = Create(data);
  const Outputs expected = Result(problem, first.get());
  ASSERT_EQ(mha_layer_shape(first.get(), &data.config, nullptr), MHA_OK);
  const Layer second = Create(data);
  EXPECT_TRUE(SameBits(Result(problem, second.get()), expected));
}

// ---- The caller's matrix product

// The calls since this was last cleared. One thread uses it.
struct SgemmRecord {
  int calls = 0;
  int wrong = 0;
  const void *thread = nullptr;
  bool other_thread = false;
} g_sgemm;
thread_local char t_place;  // each thread has its own

void RecordingSgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                    const float *a, int lda, const float *b, int ldb, float beta, float *c,
                    int ldc) {
  if (g_sgemm.calls++ > 0 && g_sgemm.thread != &t_place) g_sgemm.other_thread = true;
  g_sgemm.thread = &t_place;
  const bool right = order == 101 && trans_a == 111 && trans_b == 111 && alpha == 1.0f &&
                     beta == 0.0f && m >= 1 && n >= 1 && k >= 1 && lda >= k && ldb >= n &&
                     ldc >= n && a != nullptr && b != nullptr && c != nullptr;
  if (!right) ++g_sgemm.wrong;
  PlainSgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

class Sgemm : public InstructionSetTest {};

// With a scheduler too, the caller's product runs on the thread that called mha_forward.
TEST_P(Sgemm, RunsOnTheCallingThread) {
  const mha_layer_options options = Options(instruction_set(), RecordingSgemm);
  LayerProblem sizes = SquareSizes(65, 6, 3, 17);
  sizes.n_q = 40;
  sizes.n_kv = 50;
  const LayerProblem problem = NormalLayer(sizes);
  const Layer layer = Create(LayerData(problem), &options);
  const Outputs expected = ForwardData(layer.get(), problem, {Guarded()}).Compute();
  const Scheduler scheduler(3, RunOnThreads);
  ForwardData threaded(layer.get(), problem, {Guarded()});
  threaded.SetScheduler(scheduler.get());
  g_sgemm = SgemmRecord();
  EXPECT_TRUE(SameBits(threaded.Compute(), expected));
  EXPECT_GT(g_sgemm.calls, 0);
  EXPECT_EQ(g_sgemm.wrong, 0);
  EXPECT_FALSE(g_sgemm.other_thread);
  EXPECT_EQ(g_sgemm.thread, &t_place);
}

// The caller's product writes exactly what it is asked for; the library must not expect more.
TEST_P(Sgemm, StaysInsideGuardPages) {
  const mha_layer_options options = Options(instruction_set(), PlainSgemm);
  Random random(52);
  for (LayerProblem problem : kProblems) {
    for (Place place : {Place::kBeforeGuard, Place::kAfterGuard}) {
      LayerData data(problem, place);
      data.Freeze();
      Memory buffer = data.Pack(&options, 0xCC, place);
      buffer.Freeze();
      const View view(buffer, &options);
      ASSERT_EQ(view.status, MHA_OK) << view.error.message;
      for (int64_t n : {1, 5, 17}) {
        problem.n_q = n;
        problem.n_kv = n + 3;
        problem.is_causal = true;
        FillInputs(&random, &problem);
        ForwardData run(view.layer, problem, {Guarded(kAskAll, place)});
        run.FreezeInputs();
        const Outputs poisoned = run.Compute(0xFF, place);
        EXPECT_TRUE(SameBits(run.Compute(0x00, place), poisoned))
            << "the workspace's contents reach the result of " << Describe(problem);
      }
    }
  }
}

// The product takes rows at one stride: a call for each sequence where sequences lie apart, and
// copies where some rows are padding.
TEST_P(Sgemm, TakesSequencesThatLieApartAndPadding) {
  const mha_layer_options options = Options(instruction_set(), PlainSgemm);
  LayerProblem problem = OfItself(SquareSizes(12, 4, 2, 3), 5);
  problem.batch = 2;
  problem.is_causal = true;
  problem = NormalLayer(problem);
  const Layer layer = Create(LayerData(problem), &options);
  LayerCall call = {Guarded()};
  std::vector<float> expected = ForwardData(layer.get(), problem, call).Compute().y;
  call.query.batch_gap = 7;
  EXPECT_TRUE(SameBits("y", ForwardData(layer.get(), problem, call).Compute().y, expected));
  problem.q_lengths = {5, 3};
  std::fill(expected.begin() + 8 * problem.y_width(), expected.end(), 0.0f);
  EXPECT_TRUE(SameBits("y", ForwardData(layer.get(), problem, {Guarded()}).Compute().y, expected));
  ForwardData repeated(layer.get(), problem, {Guarded()});
  repeated.args.query.strides.row = MHA_BROADCAST;
  size_t bytes = 0;
  ExpectFails([&](auto *error) { return repeated.Workspace(&bytes, error); },
              {MHA_ERROR_INVALID_VALUE, {2}, {"MHA_BROADCAST", "sgemm"}});
}

MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Sgemm);

// The caller's product counts with int. These layers are only shapes: nothing is allocated and no
// array is read.
TEST(SgemmDimensions, DimensionsBeyondIntAreTooLarge) {
  constexpr int64_t kBeyond = int64_t{INT_MAX} + 1;
  const float number = 0;
  mha_layer_weights weights = Zeroed<mha_layer_weights>();
  weights.w_q.data = weights.w_k.data = weights.w_v.data = weights.w_o.data = &number;
  const mha_layer_options sgemm = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const mha_layer_config small = Config({2, 2, 2, 2, 2, 2, 1, 1});
  const auto expect_too_large = [&](const mha_layer_config &config) {
    size_t bytes = 4711;
    ExpectFails({MHA_ERROR_TOO_LARGE, {1}, {}}, mha_layer_pack_size, &config, &weights, &sgemm,
                &bytes);
    EXPECT_EQ(bytes, 4711u);
  };
  const auto expect_fine = [&](const mha_layer_config &config) {
    size_t bytes = 0;
    ExpectSucceeds(mha_layer_pack_size, &config, &weights, &sgemm, &bytes);
  };
  expect_fine(small);
  mha_layer_config config = small;
  for (int64_t mha_layer_config::*field :
       {&mha_layer_config::query_dim, &mha_layer_config::key_dim, &mha_layer_config::value_dim,
        &mha_layer_config::output_dim, &mha_layer_config::head_dim,
        &mha_layer_config::head_dim_v}) {
    const bool is_of_heads =
        field == &mha_layer_config::head_dim || field == &mha_layer_config::head_dim_v;
    config = small;
    config.*field = is_of_heads ? kBeyond / 2 : kBeyond;  // 2 heads of 2^30
    expect_too_large(config);
  }
  // A large layer far below that is fine.
  config = small;
  config.query_dim = config.key_dim = config.value_dim = config.output_dim = 1 << 20;
  expect_fine(config);
}

}  // namespace
