// Runs a target of tests/fuzz over stored inputs, without a fuzzer: a main for every compiler and
// machine.
//
// replay [--damaged] FILE...      of *.hex each line is an input in hexadecimal digits; any other
// file is one input --damaged: each input also cut short at each byte, and with one bit of each
// byte changed
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
  // In memory of its own size, so that a target that reads past its input is found by the address
  // sanitizer.
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

int Digit(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool FromHex(const std::string &line, std::vector<uint8_t> *input) {
  if (line.size() % 2 != 0) return false;
  for (size_t i = 0; i < line.size(); i += 2) {
    if (Digit(line[i]) < 0 || Digit(line[i + 1]) < 0) return false;
    input->push_back(static_cast<uint8_t>(Digit(line[i]) * 16 + Digit(line[i + 1])));
  }
  return true;
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
    if (name.size() > 4 && name.compare(name.size() - 4, 4, ".hex") == 0) {
      std::string line;
      for (long number = 1; std::getline(file, line); number++) {
        std::vector<uint8_t> input;
        if (!line.empty() && line.back() == '\r') line.pop_back();
        std::snprintf(current, sizeof current, "%s, line %ld,", argv[i], number);
        if (!FromHex(line, &input)) {
          std::fprintf(stderr, "%s is not pairs of hexadecimal digits\n", current);
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
