#include "counting.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "failure.h"

// valgrind starts to count where this function begins and stops where it ends. It has a name that valgrind can find, and no copy elsewhere.
extern "C" __attribute__((noinline, visibility("default"))) void mha_perf_gate_counted_call(const gate::Workload &workload) {
  workload.call();
}

namespace gate {
namespace {

// A file in memory, which other processes can open by its path, and which is gone when this one ends.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("mha_perf_gate", MFD_CLOEXEC)) {
    if (descriptor_ < 0) throw CannotMeasure(std::string("there is no memory for what valgrind writes: ") + strerror(errno));
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile &) = delete;
  int descriptor() const { return descriptor_; }
  std::string path() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor_); }
  std::string text() const {
    std::ifstream file(path());
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  int descriptor_;
};

// A command that runs, whose output goes to a file. It does not outlive this.
class Command {
 public:
  Command(const std::vector<std::string> &command, const MemoryFile &output) {
    std::vector<char *> arguments;
    for (const std::string &word : command) arguments.push_back(const_cast<char *>(word.c_str()));
    arguments.push_back(nullptr);
    child_ = fork();
    if (child_ < 0) throw CannotMeasure(std::string("no process can be started: ") + strerror(errno));
    if (child_ == 0) {
      if (dup2(output.descriptor(), STDOUT_FILENO) < 0 || dup2(output.descriptor(), STDERR_FILENO) < 0) _exit(126);
      execvp(arguments[0], arguments.data());
      _exit(errno == ENOENT ? 127 : 126);
    }
  }
  ~Command() {
    if (has_ended_) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  Command(const Command &) = delete;

  // Its exit status, 127 if there is no such command.
  int wait() {
    int status;
    while (waitpid(child_, &status, 0) < 0) {
      if (errno != EINTR) throw CannotMeasure(std::string("valgrind cannot be waited for: ") + strerror(errno));
    }
    has_ended_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t child_;
  bool has_ended_ = false;
};

std::string path_of_this_program() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0 || length == sizeof path) throw CannotMeasure("/proc does not say where this program lies, which valgrind is to run");
  return {path, static_cast<size_t>(length)};
}

// Counts the instructions of one call of each shape, which valgrind writes as one part of its file each.
class Count {
 public:
  Count(const std::string &path, const Library &library, const std::vector<Shape> &shapes)
      : name_(library.name), shapes_(shapes.size()), valgrind_(command(path, library, shapes), log_) {}

  // Waits for them.
  std::vector<uint64_t> instructions() {
    const int status = valgrind_.wait();
    if (status == 127) throw CannotMeasure("valgrind, which counts the instructions, is not installed (Debian: apt-get install valgrind)");
    if (status) throw CannotMeasure("valgrind ended with status " + std::to_string(status) + " on " + name_ + ":\n" + log_.text());

    std::vector<uint64_t> counts;
    std::istringstream lines(profile_.text());
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("totals: ", 0) == 0) counts.push_back(strtoull(line.c_str() + 8, nullptr, 10));
    }
    if (counts.size() == shapes_ + 1 && counts.back() == 0) counts.pop_back();  // between the last call and the end
    bool is_complete = counts.size() == shapes_;
    for (const uint64_t instructions : counts) is_complete = is_complete && instructions > 0;
    if (!is_complete) {
      throw CannotMeasure("valgrind has not counted each of the " + std::to_string(shapes_) + " calls of " + name_ + ":\n" + log_.text());
    }
    return counts;
  }

 private:
  std::vector<std::string> command(const std::string &path, const Library &library, const std::vector<Shape> &shapes) const {
    const std::string function = "mha_perf_gate_counted_call";
    std::vector<std::string> command = {"valgrind",
                                        "--tool=callgrind",
                                        "--collect-atstart=no",
                                        "--toggle-collect=" + function,
                                        "--dump-after=" + function,
                                        "--combine-dumps=yes",
                                        "--callgrind-out-file=" + profile_.path(),
                                        path_of_this_program(),
                                        "--counted-calls",
                                        library.structs == &base_structs ? "base" : "new",
                                        path};
    for (const Shape &shape : shapes) command.push_back(shape.text);
    fprintf(stderr, "perf gate: counting the instructions of %zu calls of %s\n", shapes.size(), library.name.c_str());
    return command;
  }

  std::string name_;
  size_t shapes_;
  MemoryFile profile_, log_;
  Command valgrind_;
};

}  // namespace

void make_counted_calls(const Structs &structs, const std::string &path, const std::vector<std::string> &lines) {
  const std::vector<Library> library = {load_library(path, path, structs)};
  for (const std::string &line : lines) {
    Workload workload(parse_shape(line), library);
    workload.use(0);
    mha_perf_gate_counted_call(workload);
  }
}

std::vector<Result> count_instructions(std::vector<Shape> shapes, const std::vector<Library> &libraries, const std::string paths[2],
                                       double threshold) {
  for (Shape &shape : shapes) {
    if (shape.threads > 1)
      throw CannotMeasure("the shape '" + shape.text + "' has several threads; instructions are counted of one thread");
    if (shape.instruction_set == MHA_INSTRUCTION_SET_AVX512 || shape.instruction_set == MHA_INSTRUCTION_SET_AVX512_VNNI ||
        shape.instruction_set == MHA_INSTRUCTION_SET_AVX2_VNNI) {
      throw CannotMeasure("the shape '" + shape.text +
                          "' wants AVX-512 or AVX-VNNI, which valgrind does not know; leave instruction_set out for AVX2");
    }
    if (shape.instruction_set == MHA_INSTRUCTION_SET_AUTO) {
      shape.instruction_set = MHA_INSTRUCTION_SET_AVX2;
      shape.text += " instruction_set=avx2";
    }
    for (const Library &library : libraries) {
      if (library.instruction_sets() >> shape.instruction_set & 1) continue;
      throw CannotMeasure("the shape '" + shape.text + "' needs an instruction set that this machine or " + library.name +
                          " does not have");
    }
  }
  std::vector<Result> results;
  for (const Shape &shape : shapes) {
    Result result = {};
    result.shape = shape;
    result.difference = Workload(shape, libraries).compare();
    results.push_back(result);
  }
  Count count_base(paths[0], libraries[0], shapes), count_new(paths[1], libraries[1], shapes);  // side by side
  const std::vector<uint64_t> base = count_base.instructions(), candidate = count_new.instructions();
  for (size_t i = 0; i < shapes.size(); ++i) {
    Result &result = results[i];
    result.base_instructions = base[i];
    result.new_instructions = candidate[i];
    result.ratio = static_cast<double>(candidate[i]) / static_cast<double>(base[i]);
    result.verdict = result.ratio > 1 + threshold ? Verdict::regression : Verdict::ok;
  }
  return results;
}

}  // namespace gate
