#include "machine.h"

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace bench {

int64_t last_level_cache_bytes() {
  int64_t largest = 0;
  for (const benchmark::CPUInfo::CacheInfo &cache : benchmark::CPUInfo::Get().caches)
    largest = std::max<int64_t>(largest, cache.size);
  return largest ? largest : int64_t{32} << 20;
}

int64_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string name; file >> name;) {
    int64_t kibibytes;
    if (name == "MemAvailable:" && file >> kibibytes) return kibibytes << 10;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 2;
}

}  // namespace bench
