// The last-level caches, read from folders as the system shows them.
#include "base/last_level_cache.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"

namespace tfdist {
namespace {

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/tfdist-caches-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

  void Add(int cpu, int index, int level, const std::string& type, const std::string& size,
           const std::string& shared) const {
    const std::string cache =
        path_ + "/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index);
    std::filesystem::create_directories(cache);
    std::ofstream(cache + "/level") << level << "\n";
    std::ofstream(cache + "/type") << type << "\n";
    std::ofstream(cache + "/size") << size << "\n";
    std::ofstream(cache + "/shared_cpu_list") << shared << "\n";
  }

 private:
  std::string path_;
};

TEST(each_cache_counts_once) {
  const Folder folder;
  for (int cpu = 0; cpu < 8; ++cpu) {
    folder.Add(cpu, 0, 1, "Data", "32K", std::to_string(cpu));
    folder.Add(cpu, 1, 1, "Instruction", "32K", std::to_string(cpu));
    folder.Add(cpu, 2, 2, "Unified", "1024K", std::to_string(cpu));
    folder.Add(cpu, 3, 3, "Unified", "32768K", cpu < 4 ? "0-3" : "4-7");
  }
  std::filesystem::create_directories(folder.path() + "/cpu9");  // switched off
  std::filesystem::create_directories(folder.path() + "/cpufreq");
  CHECK_EQ(LastLevelCacheBytesIn(folder.path()), int64_t{64} << 20);
}

TEST(the_largest_level_is_the_last_whatever_it_is) {
  const Folder folder;
  for (int cpu = 0; cpu < 2; ++cpu) {
    folder.Add(cpu, 0, 2, "Unified", "2M", std::to_string(cpu));
    folder.Add(cpu, 1, 1, "Data", "64K", std::to_string(cpu));
  }
  CHECK_EQ(LastLevelCacheBytesIn(folder.path()), int64_t{4} << 20);
}

TEST(what_the_system_does_not_tell_is_nothing) {
  const Folder folder;
  CHECK_EQ(LastLevelCacheBytesIn(folder.path()), int64_t{0});
  CHECK_EQ(LastLevelCacheBytesIn(folder.path() + "/missing"), int64_t{0});
  for (const char* size : {"", "none", "-1K", "12", "99999999999999999999K"}) {
    folder.Add(0, 0, 3, "Unified", size, "0");
    CHECK_EQ_IN(LastLevelCacheBytesIn(folder.path()), int64_t{0}, size);
  }
}

TEST(this_machine_is_the_same_each_time) {
  CHECK(LastLevelCacheBytes() >= 0);
  CHECK_EQ(LastLevelCacheBytes(), LastLevelCacheBytesIn("/sys/devices/system/cpu"));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
