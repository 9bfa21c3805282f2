#include "base/last_level_cache.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <system_error>

namespace tfdist {
namespace {

constexpr int kMostIndices = 8;

// The first word of a file; "" without one.
std::string WordIn(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// "32768K" and "32M"; 0 for anything else.
int64_t BytesOf(const std::string& size) {
  char* unit = nullptr;
  const int64_t number = std::strtoll(size.c_str(), &unit, 10);
  if (number <= 0 || number > (int64_t{1} << 30)) return 0;
  switch (*unit) {
    case 'K':
      return number << 10;
    case 'M':
      return number << 20;
    default:
      return 0;
  }
}

}  // namespace

int64_t LastLevelCacheBytesIn(const std::string& folder) {
  int64_t bytes = 0;
  std::set<std::string> seen;  // the processors of each cache
  std::error_code none;        // no folder: no caches
  for (const auto& processor : std::filesystem::directory_iterator(folder, none)) {
    const std::string caches = processor.path().string() + "/cache/index";
    int64_t last_level = 0;
    std::string last;
    for (int index = 0; index < kMostIndices; ++index) {
      const std::string cache = caches + std::to_string(index);
      const int64_t level = std::strtoll(WordIn(cache + "/level").c_str(), nullptr, 10);
      if (level <= last_level || WordIn(cache + "/type") == "Instruction") continue;
      last_level = level;
      last = cache;
    }
    if (last.empty() || !seen.insert(WordIn(last + "/shared_cpu_list")).second) continue;
    bytes += BytesOf(WordIn(last + "/size"));
  }
  return bytes;
}

int64_t LastLevelCacheBytes() {
  static const int64_t bytes = LastLevelCacheBytesIn("/sys/devices/system/cpu");
  return bytes;
}

}  // namespace tfdist
