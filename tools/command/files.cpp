#include "files.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.h"

namespace command {
namespace {

char temporary[PATH_MAX];  // what a signal removes; "" = nothing
pthread_t main_thread;     // which blocks signals while it makes that file

extern "C" void end_by_signal(int signal) {
  // The system may choose any thread, such as one of OpenBLAS's, unless the signal comes from what
  // the thread itself has done.
  if (signal != SIGBUS && signal != SIGABRT && !pthread_equal(pthread_self(), main_thread)) {
    pthread_kill(main_thread, signal);
    return;
  }
  remove_temporary();
  if (signal == SIGBUS) {
    static const char sentence[] =
        "mha: a file became shorter, or its disk failed, while it was read\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, sentence, sizeof sentence - 1);
    _exit(2);
  }
  struct sigaction by_default = {};
  by_default.sa_handler = SIG_DFL;
  sigaction(signal, &by_default, nullptr);
  raise(signal);  // which ends the process when this returns
}

}  // namespace

void remove_temporary() {
  if (temporary[0] != '\0') unlink(temporary);
}

void handle_signals() {
  main_thread = pthread_self();
  struct sigaction action = {}, before;
  action.sa_handler = end_by_signal;
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU, SIGABRT, SIGBUS}) {
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
      sigaction(signal, &action, nullptr);
  }
  signal(SIGXFSZ, SIG_IGN);  // so that writing too long a file fails
}

MappedFile::MappedFile(const std::string &path)
    : path_(path), data_(reinterpret_cast<const unsigned char *>("")) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block
  if (file < 0) fail(path, ": cannot be read: ", strerror(errno));
  struct stat status = {};
  const bool is_file = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  size_ = is_file ? static_cast<size_t>(status.st_size) : 0;
  void *memory = size_ > 0 ? mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0)
                           : nullptr;  // an empty mapping is not possible
  const int error = errno;
  close(file);
  if (!is_file)
    fail(path, ": is ", S_ISDIR(status.st_mode) ? "a directory" : "not a regular file",
         "; a file is expected");
  if (memory == MAP_FAILED) fail(path, ": cannot be mapped: ", strerror(error));
  if (memory != nullptr) data_ = static_cast<const unsigned char *>(memory);
}

MappedFile::~MappedFile() {
  if (size_ > 0) munmap(const_cast<unsigned char *>(data_), size_);
}

bool is_same_file(const std::string &a, const std::string &b) {
  struct stat first, second;
  if (stat(a.c_str(), &first) != 0 || stat(b.c_str(), &second) != 0) return false;
  return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

OutputFile::OutputFile(const std::string &path) : path_(path) {
  struct stat status;
  const bool exists = stat(path.c_str(), &status) == 0;
  if (path == "-")
    fail(
        "--output: the result cannot go to standard output; name a file (./- for a file of that "
        "name)");
  if (exists && S_ISDIR(status.st_mode))
    fail(path, ": is a directory; the name of a file to write is expected");
  if (exists && !S_ISREG(status.st_mode)) {
    file_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (file_ < 0) fail_to_write();
    return;
  }
  if (exists && access(path.c_str(), W_OK) != 0)
    fail_to_write();  // renaming would replace even a write-protected file
  char target[PATH_MAX];
  if (exists && realpath(path.c_str(), target) != nullptr)
    path_ = target;  // so that renaming replaces the file and not a link to it
  const size_t name = path_.rfind('/') + 1;
  std::string pattern = path_.substr(0, name) + path_.substr(name, 200) +
                        ".partial-XXXXXX";  // a name has 255 bytes at most
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  file_ = mkostemp(pattern.data(), O_CLOEXEC);
  if (file_ >= 0) strcpy(temporary, pattern.c_str());
  sigprocmask(SIG_SETMASK, &before, nullptr);
  if (file_ < 0) fail_to_write();
  const mode_t mask = umask(0);
  umask(mask);
  fchmod(file_, exists ? status.st_mode & 0777 : 0666 & ~mask);
}

OutputFile::~OutputFile() {
  if (file_ >= 0) close(file_);
  remove_temporary();
  temporary[0] = '\0';
}

void OutputFile::write(const void *data, size_t bytes) {
  const char *next = static_cast<const char *>(data);
  while (bytes > 0) {
    const ssize_t written =
        ::write(file_, next, std::min<size_t>(bytes, 1 << 30));  // one call writes at most 2 GiB
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_to_write();
    next += written;
    bytes -= static_cast<size_t>(written);
  }
}

void OutputFile::commit() {
  if (temporary[0] != '\0' && fsync(file_) != 0) fail_to_write();
  const int file = file_;
  file_ = -1;
  if (close(file) != 0) fail_to_write();
  if (temporary[0] != '\0' && rename(temporary, path_.c_str()) != 0) fail_to_write();
  temporary[0] = '\0';
}

void OutputFile::fail_to_write() const { fail(path_, ": cannot be written: ", strerror(errno)); }

}  // namespace command
