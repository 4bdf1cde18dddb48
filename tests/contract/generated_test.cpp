// The whole space of options (support/generated_options.h): generated calls, among them every pair
// of values of any two options, have the bits of the specification on each instruction set. The
// number of cases is multiplied by the environment variable MHA_TEST_ROUNDS. A case that fails runs
// alone with MHA_TEST_CASE: its number, or "NUMBER OPTION=VALUE ..." for the same with other
// options, or "NUMBER plain OPTION=VALUE ..." with these options alone.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/choices.h"
#include "support/generated_options.h"
#include "support/instruction_sets.h"
#include "support/rounds.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr int64_t kCases = 20'000, kParts = 8;

const std::vector<Choice> &Pairwise() {
  static const std::vector<Choice> choices = EveryPair(OptionSpace());
  return choices;
}

// The first cases have every pair of values, all others are random.
Choice ChoiceOf(int64_t number) {
  if (number < static_cast<int64_t>(Pairwise().size())) return Pairwise()[number];
  return RandomChoice(OptionSpace(), static_cast<uint64_t>(number));
}

std::vector<uint32_t> SetsOfThisMachine() {
  std::vector<uint32_t> sets;
  for (const uint32_t set : SetsOfTheArchitecture(Sets::kAll)) {
    if (mha_instruction_sets() >> set & 1) sets.push_back(set);
  }
  return sets;
}

// Whether the set has loops of its own for the attention of a case: of integers, all have.
bool IsWorthRunning(uint32_t set, const Case &c) {
  static const std::vector<uint32_t> kWithKernels = SetsOfTheArchitecture(Sets::kWithKernels);
  return c.whole.is_in_integers ||
         std::find(kWithKernels.begin(), kWithKernels.end(), set) != kWithKernels.end();
}

// The case at work, for whoever reads of a crash: an access beyond an array is one.
int64_t case_at_work = -1;

void SayWhichCase(int signal) {
  std::fprintf(stderr, "a crash in case %lld; again: MHA_TEST_CASE=%lld\n",
               static_cast<long long>(case_at_work), static_cast<long long>(case_at_work));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class CrashesAreNamed {
 public:
  CrashesAreNamed() {
    const auto before = std::signal(SIGSEGV, SayWhichCase);
    if (before != SIG_DFL) std::signal(SIGSEGV, before);  // a sanitizer's
  }
};
const CrashesAreNamed crashes_are_named;

// What is wrong with a case on some instruction sets; empty if nothing is.
std::string Differences(const Choice &choice, int64_t number, const std::vector<uint32_t> &sets) {
  case_at_work = number;
  const Case c = MakeCase(choice, static_cast<uint64_t>(number));
  const Outputs expected = Specify(c);
  std::string text;
  for (const uint32_t set : sets) {
    if (!IsWorthRunning(set, c)) continue;
    const std::string differences = CaseRun(c, expected, set).Differences();
    if (!differences.empty())
      text += std::string("on ") + mha_instruction_set_name(set) + " " + differences;
  }
  return text;
}

// The same with as few options as it still fails with.
Choice Shrink(Choice choice, int64_t number, const std::vector<uint32_t> &sets) {
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (int d = OptionSpace().size(); d-- > 0;) {
      Choice simpler = choice;
      if (simpler[d] == 0) continue;
      simpler[d] = 0;
      if (!OptionSpace().Allows(simpler) || Differences(simpler, number, sets).empty()) continue;
      choice = simpler;
      has_changed = true;
    }
  }
  return choice;
}

void ExpectTheSpecification(const Choice &choice, int64_t number,
                            const std::vector<uint32_t> &sets) {
  const std::string differences = Differences(choice, number, sets);
  if (differences.empty()) return;
  const Choice simplest = Shrink(choice, number, sets);
  const Case c = MakeCase(simplest, static_cast<uint64_t>(number));
  ADD_FAILURE() << "case " << number << " with " << OptionSpace().Describe(choice) << "\n"
                << differences
                << "the least with which it fails: " << OptionSpace().Describe(simplest) << "\n"
                << Differences(simplest, number, sets) << Describe(c.whole)
                << "\nagain: MHA_TEST_CASE=" << number << " or MHA_TEST_CASE='" << number
                << " plain " << OptionSpace().Describe(simplest) << "'";
}

// The case that the environment asks for alone. False: for none.
bool RunsOneCase(const std::vector<uint32_t> &sets) {
  const char *const text = std::getenv("MHA_TEST_CASE");
  if (!text) return false;
  std::istringstream words(text);
  int64_t number = -1;
  if (!(words >> number) || number < 0)
    throw std::runtime_error("MHA_TEST_CASE begins with the number of a case");
  Choice choice = ChoiceOf(number);
  for (std::string word; words >> word;) {
    if (word == "plain") std::fill(choice.begin(), choice.end(), 0);
    if (word == "plain") continue;
    for (const auto &[name, value] : TermsOf(word)) {
      const int dimension = OptionSpace().NumberOf(name);
      choice[dimension] = OptionSpace().ValueNumber(dimension, value);
    }
  }
  if (!OptionSpace().Allows(choice))
    throw std::runtime_error("the options of MHA_TEST_CASE cannot stand together");
  std::cout << "case " << number << ": " << OptionSpace().Describe(choice) << std::endl;
  ExpectTheSpecification(choice, number, sets);
  return true;
}

std::vector<int> InOrder(const Space &space, int dimension) {
  std::vector<int> values;
  for (int v = 0; v < space.CountOf(dimension); v++) values.push_back(v);
  return values;
}

// What is left out as refused is refused indeed: each value of each line, everything else being
// plain.
TEST(GeneratedCases, LeaveOutWhatTheLibraryRefuses) {
  for (const std::string &refusal : RefusedByTheLibrary()) {
    const Space space = SpaceWith(Refusals(refusal));
    std::vector<Choice> refused = {Choice(static_cast<size_t>(space.size()), -1)};
    for (const auto &[name, values] : TermsOf(refusal)) {
      const int dimension = space.NumberOf(name);
      std::vector<Choice> more;
      for (const Choice &choice : refused) {
        for (int v = 0; v < space.CountOf(dimension); v++) {
          if ((space.BitsOf(dimension, values) >> v & 1) == 0) continue;
          more.push_back(choice);
          more.back()[dimension] = v;
        }
      }
      refused = more;
    }
    int calls = 0;
    for (Choice &choice : refused) {
      if (!space.Complete([&](int dimension, const Choice &) { return InOrder(space, dimension); },
                          &choice))
        continue;
      calls++;
      const Case c = MakeCase(choice, 1);
      EXPECT_NE(CaseRun(c, Outputs(), MHA_INSTRUCTION_SET_SCALAR).Refusal(), "")
          << space.Describe(choice);
    }
    EXPECT_GT(calls, 0) << space.Describe(refused[0])
                        << " cannot stand together for another reason";
  }
}

// On all instruction sets of this machine at once, since the specification takes longer than the
// library.
class GeneratedPart : public testing::TestWithParam<int64_t> {};

TEST_P(GeneratedPart, EqualsTheSpecification) {
  const std::vector<uint32_t> sets = SetsOfThisMachine();
  if (GetParam() == 0 && RunsOneCase(sets)) return;
  if (std::getenv("MHA_TEST_CASE")) GTEST_SKIP() << "the first part has the case of MHA_TEST_CASE";
  const int64_t count = std::max<int64_t>(Rounds(kCases), static_cast<int64_t>(Pairwise().size()));
  for (int64_t number = GetParam(); number < count && !HasFailure(); number += kParts) {
    ExpectTheSpecification(ChoiceOf(number), number, sets);
  }
}

INSTANTIATE_TEST_SUITE_P(Of8, GeneratedPart, testing::Range<int64_t>(0, kParts));

// The cases with every pair, for each instruction set alone, so that emulators can take one.
class GeneratedPairs : public InstructionSetTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GeneratedPairs);

TEST_P(GeneratedPairs, EqualTheSpecification) {
  if (std::getenv("MHA_TEST_CASE")) GTEST_SKIP() << "another test has the case of MHA_TEST_CASE";
  for (size_t number = 0; number < Pairwise().size() && !HasFailure(); number++) {
    ExpectTheSpecification(Pairwise()[number], static_cast<int64_t>(number), {instruction_set()});
  }
}

// Those of them that have a value first, so that each occurs: for emulators that have no time for
// every pair.
class GeneratedValues : public InstructionSetTest {};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(GeneratedValues);

TEST_P(GeneratedValues, EqualTheSpecification) {
  std::set<std::pair<size_t, int>> seen;  // dimension and value
  for (size_t number = 0; number < Pairwise().size() && !HasFailure(); number++) {
    const Choice &choice = Pairwise()[number];
    bool has_new = false;
    for (size_t d = 0; d < choice.size(); d++)
      has_new = seen.insert({d, choice[d]}).second || has_new;
    if (has_new) ExpectTheSpecification(choice, static_cast<int64_t>(number), {instruction_set()});
  }
}

}  // namespace
