// Runs a target of tests/fuzz over stored inputs, without a fuzzer: a main for every compiler and
// machine.
//
// replay [--damaged] FILE...
//
// A file *.corpus holds the inputs that corpus.py packed; any other file is one input. --damaged
// also runs each input cut short at each byte, and with one bit of each byte changed.
#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/bytes.h"

namespace {

char current[4096];  // which input runs

void Report(int signal) {
  std::fprintf(stderr, "%s ends with signal %d\n", current, signal);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

bool damages = false;
long count = 0;

void Run(const std::vector<uint8_t> &input) {
  count++;
  // The copy has exactly the input's size, so that the address sanitizer finds reads past it.
  uint8_t *copy = static_cast<uint8_t *>(std::malloc(input.size()));
  if (!input.empty()) std::memcpy(copy, input.data(), input.size());
  LLVMFuzzerTestOneInput(copy, input.size());
  std::free(copy);
}

void RunStored(const std::vector<uint8_t> &input) {
  Run(input);
  for (size_t i = 0; i < input.size() && damages; i++) {
    Run({input.begin(), input.begin() + static_cast<ptrdiff_t>(i)});
    std::vector<uint8_t> changed = input;
    changed[i] ^= static_cast<uint8_t>(1 << i % 8);
    Run(changed);
  }
}

// The input after `input` in a file that corpus.py packs: how many first bytes they share, the
// length of the rest in two bytes, the rest.
bool ReadNext(std::istream &file, std::vector<uint8_t> *input) {
  const int shared = file.get(), low = file.get(), high = file.get();
  if (high < 0 || static_cast<size_t>(shared) > input->size()) return false;
  const int rest = low + 256 * high;
  input->resize(static_cast<size_t>(shared + rest));
  return rest == 0 || file.read(reinterpret_cast<char *>(input->data()) + shared, rest);
}

}  // namespace

int main(int argc, char **argv) {
  for (int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGILL}) std::signal(signal, Report);
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (name == "--damaged") {
      damages = true;
      continue;
    }
    std::ifstream file(name, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "%s cannot be read\n", argv[i]);
      return 2;
    }
    const std::string ending = ".corpus";
    if (name.size() > ending.size() &&
        name.compare(name.size() - ending.size(), ending.size(), ending) == 0) {
      std::vector<uint8_t> input;
      for (long number = 0; file.peek() != EOF; number++) {
        std::snprintf(current, sizeof current, "%s, input %ld,", argv[i], number);
        if (!ReadNext(file, &input)) {
          std::fprintf(stderr, "%s is damaged\n", current);
          return 2;
        }
        RunStored(input);
      }
    } else {
      std::snprintf(current, sizeof current, "%s", argv[i]);
      RunStored(std::vector<uint8_t>(std::istreambuf_iterator<char>(file), {}));
    }
  }
  std::printf("%ld inputs\n", count);
  return count > 0 ? 0 : 1;  // a test that ran nothing proves nothing
}
