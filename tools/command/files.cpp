#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>

#include "error.h"

namespace command {
namespace {

std::string system_message(int error) { return strerror(error); }

std::string kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "no regular file";
}

// The file behind symbolic links, so that renaming replaces the file and not the link.
std::string resolved(const std::string &path) {
  char target[PATH_MAX];
  return realpath(path.c_str(), target) != nullptr ? target : path;
}

// The temporary file of the one output that is being written, for the signal handler.
char pending_file[PATH_MAX];

// Whose turn it is: a file must not come into being while the handler looks for it, and a signal may be handled on a thread of a BLAS's.
enum Turn { nobody, creating, ending };
std::atomic<int> turn{nobody};

bool take_turn(Turn mine) {
  int expected = nobody;
  return turn.compare_exchange_strong(expected, mine);
}

void remove_pending_file(int signal_number) {
  while (!take_turn(ending) && turn != ending) {
  }
  if (pending_file[0] != '\0') unlink(pending_file);
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

void handle_signals() {
  for (int signal_number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction old;
    if (sigaction(signal_number, nullptr, &old) == 0 && old.sa_handler == SIG_IGN) continue;  // nohup
    signal(signal_number, remove_pending_file);
  }
}

// While one of these exists, a signal that would end the command waits, on whichever thread it arrives.
class SignalsWait {
 public:
  SignalsWait() {
    sigset_t ending_signals;
    sigemptyset(&ending_signals);
    for (int signal_number : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&ending_signals, signal_number);
    pthread_sigmask(SIG_BLOCK, &ending_signals, &before_);
    while (!take_turn(creating)) pause();  // the command is ending
  }
  ~SignalsWait() {
    turn = nobody;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsWait(const SignalsWait &) = delete;
  SignalsWait &operator=(const SignalsWait &) = delete;

 private:
  sigset_t before_;
};

}  // namespace

MappedFile::MappedFile(const std::string &path) : path_(path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block
  if (file < 0) fail(path, ": cannot be read: ", system_message(errno));
  struct stat status;
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(file);
    fail(path, ": is ", kind_of(status.st_mode), "; a file is expected");
  }
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) {  // an empty mapping is not possible
    close(file);
    data_ = reinterpret_cast<const unsigned char *>("");
    return;
  }
  void *memory = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED) fail(path, ": cannot be mapped: ", system_message(error));
  data_ = static_cast<const unsigned char *>(memory);
}

MappedFile::~MappedFile() {
  if (size_ > 0) munmap(const_cast<unsigned char *>(data_), size_);
}

void check_output(const std::string &output, const std::vector<std::pair<const char *, std::string>> &inputs, const char *output_option) {
  if (output == "-") fail(output_option, ": the result does not go to standard output; name a file (./- if it is called so)");
  struct stat written;
  if (stat(output.c_str(), &written) != 0) return;  // a new file is none of the inputs
  for (const auto &[option, path] : inputs) {
    struct stat read;
    if (path.empty() || stat(path.c_str(), &read) != 0) continue;
    if (read.st_dev == written.st_dev && read.st_ino == written.st_ino) {
      fail(output_option, ": ", output, " is also the ", option, "; name another file");
    }
  }
}

OutputFile::OutputFile(const std::string &path) : path_(path) {
  struct stat status;
  const bool exists = stat(path.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) fail(path, ": is a directory; the name of a file to write is expected");
  if (exists && !S_ISREG(status.st_mode)) {
    file_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (file_ < 0) fail_to_write();
    return;
  }
  if (exists && access(path.c_str(), W_OK) != 0) fail_to_write();  // renaming would replace even a write-protected file

  path_ = exists ? resolved(path) : path;
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path_.substr(0, slash + 1);
  std::string pattern = folder + ".mha-XXXXXX";
  handle_signals();
  {
    const SignalsWait wait;
    file_ = mkostemp(pattern.data(), O_CLOEXEC);
    if (file_ < 0) fail_to_write();
    temporary_ = pattern;
    if (temporary_.size() < sizeof pending_file) memcpy(pending_file, temporary_.c_str(), temporary_.size() + 1);
  }

  const mode_t mask = umask(0);
  umask(mask);
  fchmod(file_, exists ? status.st_mode & 0777 : 0666 & ~mask);
}

OutputFile::~OutputFile() {
  if (file_ >= 0) close(file_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
  pending_file[0] = '\0';
}

void OutputFile::write(const void *data, size_t bytes) {
  const char *next = static_cast<const char *>(data);
  while (bytes > 0) {
    const size_t most = size_t{1} << 30;  // one call writes at most 2 GiB
    const ssize_t written = ::write(file_, next, bytes < most ? bytes : most);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_to_write();
    next += written;
    bytes -= static_cast<size_t>(written);
  }
}

void OutputFile::commit() {
  if (!temporary_.empty() && fsync(file_) != 0) fail_to_write();
  const int file = file_;
  file_ = -1;
  if (close(file) != 0) fail_to_write();
  if (temporary_.empty()) return;
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_to_write();
  temporary_.clear();
  pending_file[0] = '\0';
}

void OutputFile::fail_to_write() const { fail(path_, ": cannot be written: ", system_message(errno)); }

}  // namespace command
