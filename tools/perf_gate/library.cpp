#include "library.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "failure.h"

namespace gate {
namespace {

template <class Function>
void find(void *handle, const char *symbol, const std::string &name, Function *function) {
  *function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (!*function) throw CannotMeasure(name + " has no function " + symbol + "; is it a libmha.so of version 0.1.0 or later?");
}

std::string version_text(const Library &library) {
  const uint32_t version = library.version();
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

// The file's bytes in a file of their own in memory. Returns its descriptor, which stays open: a number used again would be a path used
// again, and dlopen knows libraries by path, device and inode.
int private_copy(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file || bytes.empty()) throw CannotMeasure("the library '" + path + "' cannot be read");
  const int copy = memfd_create("libmha", MFD_CLOEXEC);
  if (copy < 0) throw CannotMeasure(std::string("there is no memory for a copy of '") + path + "': " + strerror(errno));
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t written = write(copy, bytes.data() + done, bytes.size() - done);
    if (written <= 0) throw CannotMeasure("there is no memory for a copy of '" + path + "': " + strerror(errno));
    done += static_cast<size_t>(written);
  }
  return copy;
}

}  // namespace

Library load_library(const std::string &path, const std::string &name, const Structs &structs) {
  const std::string copy = "/proc/self/fd/" + std::to_string(private_copy(path));
  void *const handle = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    std::string reason = dlerror();
    if (reason.rfind(copy, 0) == 0) reason = path + reason.substr(copy.size());
    throw CannotMeasure("the library cannot be loaded: " + reason);
  }
  Library library;
  library.name = name;
  library.structs = &structs;
  find(handle, "mha_version", name, &library.version);
  find(handle, "mha_instruction_sets", name, &library.instruction_sets);
  find(handle, "mha_layer_pack_size", name, &library.layer_pack_size);
  find(handle, "mha_layer_pack", name, &library.layer_pack);
  find(handle, "mha_layer_view_size", name, &library.layer_view_size);
  find(handle, "mha_layer_view", name, &library.layer_view);
  find(handle, "mha_forward_workspace", name, &library.forward_workspace);
  find(handle, "mha_forward", name, &library.forward);
  find(handle, "mha_attention_workspace", name, &library.attention_workspace);
  find(handle, "mha_attention", name, &library.attention);
  library.kv_cache_size = nullptr;
  if (dlsym(handle, "mha_kv_cache_size")) {
    find(handle, "mha_kv_cache_size", name, &library.kv_cache_size);
    find(handle, "mha_kv_cache_init", name, &library.kv_cache_init);
    find(handle, "mha_kv_cache_view", name, &library.kv_cache_view);
    find(handle, "mha_kv_cache_append", name, &library.kv_cache_append);
    find(handle, "mha_kv_cache_truncate", name, &library.kv_cache_truncate);
  }
  return library;
}

void check_comparable(const Library &base, const Library &candidate) {
  if (base.forward == candidate.forward) throw CannotMeasure("the loader gave one library for both files, so there is nothing to compare");
  for (const Library *library : {&base, &candidate}) {
    if (library->version() / 10000 == MHA_VERSION_MAJOR) continue;
    throw CannotMeasure("base (" + base.name + ") is version " + version_text(base) + " and new (" + candidate.name + ") is version " +
                        version_text(candidate) + ", and this gate knows the interface of version " + std::to_string(MHA_VERSION_MAJOR) +
                        ".x; compare versions of one major number, with the gate of that version");
  }
}

}  // namespace gate
