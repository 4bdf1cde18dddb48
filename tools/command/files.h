// Files as the command needs them: read by mapping, written whole or not at all.
#pragma once

#include <cstddef>
#include <string>

namespace command {

// A whole file, mapped read-only. Processes that map the same file share its memory.
class MappedFile {
 public:
  explicit MappedFile(const std::string &path);  // throws InputError
  ~MappedFile();
  MappedFile(const MappedFile &) = delete;
  MappedFile &operator=(const MappedFile &) = delete;

  const std::string &path() const { return path_; }
  const unsigned char *data() const { return data_; }  // aligned to a page; not NULL
  size_t size() const { return size_; }

 private:
  std::string path_;
  const unsigned char *data_ = nullptr;
  size_t size_ = 0;
};

// A file that appears under its name only when it is complete: until commit, the bytes go to a
// temporary file beside it, NAME.partial-XXXXXX, which vanishes with this object, and by signals
// that end the process; only SIGKILL leaves it. What is no regular file (a pipe, /dev/null) is
// written directly. There is one at a time.
class OutputFile {
 public:
  // Throws InputError, so that an output that can't be written is found before the work.
  explicit OutputFile(const std::string &path);
  ~OutputFile();
  OutputFile(const OutputFile &) = delete;
  OutputFile &operator=(const OutputFile &) = delete;

  void write(const void *data, size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail_to_write() const;

  std::string path_;
  int file_ = -1;
};

// From here on signals that end the process remove the temporary file first, and a mapped file that
// becomes shorter ends it with a sentence.
void handle_signals();
void remove_temporary();  // before the process ends otherwise

// Whether two paths name one file that is there.
bool is_same_file(const std::string &a, const std::string &b);

}  // namespace command
