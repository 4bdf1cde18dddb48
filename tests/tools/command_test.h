// What the tests of the command share: running it, a folder for its files, and files in its formats, good and bad.
#ifndef MHA_TESTS_COMMAND_TEST_H
#define MHA_TESTS_COMMAND_TEST_H

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// Sanitizers take memory of their own, which the tests of memory can't tell from the command's.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MHA_COMMAND_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define MHA_COMMAND_SANITIZED 1
#endif
#endif
#ifndef MHA_COMMAND_SANITIZED
#define MHA_COMMAND_SANITIZED 0
#endif

namespace command_test {

// ---- Running the command --------------------------------------------------------------------------------------------------------

using Arguments = std::vector<std::string>;

struct Result {
  int status = -1;  // of exit; -1 = ended by a signal
  std::string out;
  std::string err;
};

// In the child: becomes the command. It is ended by SIGALRM should it not end by itself.
[[noreturn]] inline void BecomeCommand(const Arguments &arguments) {
  std::vector<char *> argv = {const_cast<char *>("mha")};
  for (const std::string &argument : arguments) argv.push_back(const_cast<char *>(argument.c_str()));
  argv.push_back(nullptr);
  alarm(120);
  execv(MHA_COMMAND, argv.data());
  _exit(127);
}

inline int ExitStatus(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline std::string ReadAll(int file) {
  std::string text;
  char buffer[4096];
  for (ssize_t count; (count = read(file, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(count));
  return text;
}

// out_path: where standard output goes instead of Result::out.
inline Result Mha(const Arguments &arguments, const char *out_path = nullptr) {
  FILE *out = out_path != nullptr ? fopen(out_path, "w") : tmpfile();
  FILE *err = tmpfile();
  const pid_t child = fork();
  if (child == 0) {
    dup2(fileno(out), STDOUT_FILENO);
    dup2(fileno(err), STDERR_FILENO);
    BecomeCommand(arguments);
  }
  Result result;
  result.status = ExitStatus(child);
  rewind(out);
  rewind(err);
  result.out = ReadAll(fileno(out));
  result.err = ReadAll(fileno(err));
  fclose(out);
  fclose(err);
  return result;
}

// Starts the command without waiting for it; its messages are lost.
inline pid_t StartMha(const Arguments &arguments) {
  const pid_t child = fork();
  if (child == 0) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDERR_FILENO);
    BecomeCommand(arguments);
  }
  return child;
}

// Runs the command on a terminal of this width; out holds all that appears there.
inline Result MhaOnTerminal(const Arguments &arguments, unsigned short width, const char *no_color = nullptr) {
  winsize size = {};
  size.ws_col = width;
  size.ws_row = 50;
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, &size);
  if (child == 0) {
    setenv("TERM", "xterm", 1);
    unsetenv("NO_COLOR");
    if (no_color != nullptr) setenv("NO_COLOR", no_color, 1);
    BecomeCommand(arguments);
  }
  Result result;
  result.out = ReadAll(terminal);  // ends with an error when the child's side is closed
  result.status = ExitStatus(child);
  close(terminal);
  return result;
}

// ---- Files ----------------------------------------------------------------------------------------------------------------------

// A folder that vanishes with everything in it.
class Folder {
 public:
  Folder() {
    std::string pattern = testing::TempDir() + "mha-command-XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() {
    for (const std::string &name : Names()) unlink((path_ + "/" + name).c_str());
    rmdir(path_.c_str());
  }
  Folder(const Folder &) = delete;
  Folder &operator=(const Folder &) = delete;

  std::string operator/(const std::string &name) const { return path_ + "/" + name; }

  std::set<std::string> Names() const {
    std::set<std::string> names;
    DIR *folder = opendir(path_.c_str());
    while (const dirent *entry = readdir(folder)) {
      if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) names.insert(entry->d_name);
    }
    closedir(folder);
    return names;
  }

  // Writes a file and returns its path.
  std::string Write(const std::string &name, const std::string &bytes) const {
    std::ofstream(*this / name, std::ios::binary) << bytes;
    return *this / name;
  }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

inline std::string BytesOf(const std::vector<float> &values) {
  return std::string(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(float));
}

inline std::string JoinExtents(const std::vector<int64_t> &shape) {
  std::string text;
  for (size_t i = 0; i < shape.size(); i++) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text;
}

// A .npy file with this header text, whatever it says.
inline std::string NpyWithHeader(const std::string &header, const std::string &data) {
  const std::string length = {static_cast<char>(header.size() % 256), static_cast<char>(header.size() / 256)};
  return std::string("\x93NUMPY\x01\x00", 8) + length + header + data;
}

inline std::string NpyHeader(const std::string &descr, const std::string &fortran_order, const std::string &shape) {
  std::string header = "{'descr': " + descr + ", 'fortran_order': " + fortran_order + ", 'shape': " + shape + ", }";
  while ((header.size() + 11) % 64 != 0) header += ' ';
  return header + "\n";
}

inline std::string Npy(const std::vector<int64_t> &shape, const std::vector<float> &values) {
  return NpyWithHeader(NpyHeader("'<f4'", "False", "(" + JoinExtents(shape) + ")"), BytesOf(values));
}

// Reads what the command wrote: the exact form that numpy.save gives, and nothing else.
inline void ExpectNpy(const std::string &path, const std::vector<int64_t> &shape, std::vector<float> *values) {
  const std::string bytes = ReadFile(path);
  ASSERT_GT(bytes.size(), 10u) << path;
  const size_t length = static_cast<unsigned char>(bytes[8]) + 256u * static_cast<unsigned char>(bytes[9]);
  const std::string header = bytes.substr(0, 10 + length);
  EXPECT_EQ(header, NpyWithHeader(NpyHeader("'<f4'", "False", "(" + JoinExtents(shape) + ")"), ""));
  size_t count = 1;
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  ASSERT_EQ(bytes.size() - header.size(), count * sizeof(float));
  values->resize(count);
  std::memcpy(values->data(), bytes.data() + header.size(), count * sizeof(float));
}

// ---- Files of weights -----------------------------------------------------------------------------------------------------------

struct Stored {
  std::string name;
  std::vector<int64_t> shape;
  std::string bytes;
  std::string dtype = "F32";
};

inline Stored Store(const std::string &name, const std::vector<int64_t> &shape, const std::vector<float> &values) {
  return {name, shape, BytesOf(values)};
}

// matrix [rows, columns], stored as [columns, rows].
inline Stored StoreTransposed(const std::string &name, int64_t rows, int64_t columns, const std::vector<float> &matrix) {
  std::vector<float> out(matrix.size());
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t column = 0; column < columns; column++) out[column * rows + row] = matrix[row * columns + column];
  }
  return Store(name, {columns, rows}, out);
}

inline std::string SafetensorsWithHeader(const std::string &header, const std::string &data) {
  std::string length;
  for (int byte = 0; byte < 8; byte++) length += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * byte) & 255);
  return length + header + data;
}

inline std::string HeaderEntry(const Stored &tensor, size_t begin) {
  return "\"" + tensor.name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[" + JoinExtents(tensor.shape) + "],\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(begin + tensor.bytes.size()) + "]}";
}

// alignment: the data begin at such a multiple plus misalignment.
inline std::string Safetensors(const std::vector<Stored> &tensors, size_t misalignment = 0) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::string data;
  for (const Stored &tensor : tensors) {
    header += "," + HeaderEntry(tensor, data.size());
    data += tensor.bytes;
  }
  header += "}";
  while (header.size() % 8 != misalignment) header += ' ';
  return SafetensorsWithHeader(header, data);
}

// ---- What every refusal must look like ------------------------------------------------------------------------------------------

inline std::vector<std::string> Lines(const std::string &text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Exit status 2, one line on stderr with all of these words, nothing on stdout.
inline void ExpectRefusal(const Result &result, const std::vector<std::string> &words) {
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_EQ(result.err.rfind("mha: ", 0), 0u) << result.err;
  EXPECT_LT(result.err.size(), 600u);
  for (const std::string &word : words) EXPECT_NE(result.err.find(word), std::string::npos) << word << " is missing in: " << result.err;
  for (const char c : result.err.substr(0, result.err.size() - 1)) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << result.err;
}

}  // namespace command_test

#endif  // MHA_TESTS_COMMAND_TEST_H
