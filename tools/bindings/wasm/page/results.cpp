// Recomputes the published results for page/index.html.
#include "contract/results.h"

// A line for each published result: 1 if this engine computes the same bits, a blank, its name.
extern "C" const char *compare() {
  static std::string text;
  const results::Checksums actual = results::Compute(MHA_INSTRUCTION_SET_AUTO, nullptr);
  text.clear();
  for (const auto &[name, sum] : results::Published()) {
    const auto found = actual.find(name);
    text += found != actual.end() && found->second == sum ? "1 " : "0 ";
    text += name + "\n";
  }
  return text.c_str();
}
