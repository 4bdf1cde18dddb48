// Structs of the interface grow at their end, and a program and a library of different versions
// understand each other. Made-up versions of a struct stand for theirs; the library's own functions
// read and fill them.
#include "base/structs.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "support/interface_support.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// The same struct in three versions.
struct First {
  size_t struct_size;
  int64_t a;
  uint32_t b, c;
};
struct Second {
  size_t struct_size;
  int64_t a;
  uint32_t b, c;
  int64_t d;
};
struct Third {
  size_t struct_size;
  int64_t a;
  uint32_t b, c;
  int64_t d;
  double e;
};

constexpr unsigned char kUnwritten = 0x5A;

}  // namespace

namespace mha {

template <>
[[maybe_unused]] constexpr size_t first_version_bytes<First> = sizeof(First);
template <>
[[maybe_unused]] constexpr size_t first_version_bytes<Second> = sizeof(First);
template <>
[[maybe_unused]] constexpr size_t first_version_bytes<Third> = sizeof(First);

}  // namespace mha

namespace {

// A struct of the program's version, which ends at an inaccessible page.
template <typename Struct>
struct Given {
  explicit Given(const Struct &filled)
      : memory(sizeof(Struct), support::Place::kBeforeGuard, alignof(Struct)) {
    std::memcpy(memory.data(), &filled, sizeof filled);
  }
  // As a library of another version sees it.
  template <typename Known>
  Known *As() const {
    return reinterpret_cast<Known *>(memory.data());
  }
  Memory memory;
};

template <typename Struct>
Struct Unwritten() {
  Struct filled;
  std::memset(&filled, kUnwritten, sizeof filled);
  filled.struct_size = sizeof filled;
  return filled;
}

template <typename Struct>
mha_status Read(const Struct *given, Struct *copy, mha_error *error) {
  mha::Reporter report(error, 3);
  return mha::read_struct(report, "mha_made_up", given, copy);
}

template <typename Struct>
mha_status Write(const Struct &filled, Struct *to, mha_error *error) {
  mha::Reporter report(error, 3);
  return mha::write_struct(report, "mha_made_up", filled, to);
}

TEST(ReadStruct, LeavesNewFieldsOfAnEarlierVersionZero) {
  const Given<First> first({sizeof(First), 1, 2, 3});
  Third copy = Unwritten<Third>();
  ExpectSucceeds([&](auto *error) { return Read(first.As<Third>(), &copy, error); });
  EXPECT_EQ(copy.a, 1);
  EXPECT_EQ(copy.b, 2u);
  EXPECT_EQ(copy.c, 3u);
  EXPECT_EQ(copy.d, 0);
  EXPECT_EQ(copy.e, 0.0);
  const Given<Second> second({sizeof(Second), 1, 2, 3, 4});
  ExpectSucceeds([&](auto *error) { return Read(second.As<Third>(), &copy, error); });
  EXPECT_EQ(copy.d, 4);
  EXPECT_EQ(copy.e, 0.0);
}

TEST(ReadStruct, AcceptsALaterVersionThatUsesNothingNew) {
  First copy = Unwritten<First>();
  const Given<Third> plain({sizeof(Third), 1, 2, 3, 0, 0.0});
  ExpectSucceeds([&](auto *error) { return Read(plain.As<First>(), &copy, error); });
  EXPECT_EQ(copy.a, 1);
  EXPECT_EQ(copy.c, 3u);
  const Given<Third> modern({sizeof(Third), 1, 2, 3, 0, 1.0});
  ExpectFails([&](auto *error) { return Read(modern.As<First>(), &copy, error); },
              {MHA_ERROR_STRUCT_SIZE, {3}, {"mha_made_up.struct_size", "40", "24"}});
}

TEST(WriteStruct, EndsWhereAnEarlierVersionEnds) {
  const Third filled = {0, 1, 2, 3, 4, 5.0};
  const Given<First> first(Unwritten<First>());
  ExpectSucceeds([&](auto *error) { return Write(filled, first.As<Third>(), error); });
  const First *seen = first.As<First>();
  EXPECT_EQ(seen->struct_size, sizeof(First));
  EXPECT_EQ(seen->a, 1);
  EXPECT_EQ(seen->b, 2u);
  EXPECT_EQ(seen->c, 3u);
  const Given<Second> second(Unwritten<Second>());
  ExpectSucceeds([&](auto *error) { return Write(filled, second.As<Third>(), error); });
  EXPECT_EQ(second.As<Second>()->struct_size, sizeof(Second));
  EXPECT_EQ(second.As<Second>()->d, 4);
}

TEST(WriteStruct, ZeroesFieldsOfALaterVersion) {
  const Given<Third> given(Unwritten<Third>());
  ExpectSucceeds([&](auto *error) { return Write(First{0, 1, 2, 3}, given.As<First>(), error); });
  const Third *seen = given.As<Third>();
  EXPECT_EQ(seen->struct_size, sizeof(Third));
  EXPECT_EQ(seen->a, 1);
  EXPECT_EQ(seen->c, 3u);
  EXPECT_EQ(seen->d, 0);
  EXPECT_EQ(seen->e, 0.0);
}

// Reading and writing refuse a size that no version has.
TEST(Structs, SizesThatNoVersionHasAreRefused) {
  for (const size_t size : {size_t{0}, sizeof(First) - 1, size_t{1} << 32, ~size_t{0}}) {
    SCOPED_TRACE(size);
    Third wrong = Unwritten<Third>(), copy = {};
    wrong.struct_size = size;
    const Third before = wrong;
    const support::Expected expected = {
        MHA_ERROR_STRUCT_SIZE, {3}, {"mha_made_up.struct_size", std::to_string(size)}};
    ExpectFails([&](auto *error) { return Read(&wrong, &copy, error); }, expected);
    ExpectFails([&](auto *error) { return Write(Third{}, &wrong, error); }, expected);
    EXPECT_EQ(std::memcmp(&wrong, &before, sizeof before), 0);
  }
  Third copy;
  ExpectFails([&](auto *error) { return Read<Third>(nullptr, &copy, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"mha_made_up"}});
  ExpectFails([&](auto *error) { return Write<Third>({}, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"mha_made_up"}});
}

}  // namespace
