// Many seeds of the simulated engine.
//
//   engine_sim --seeds 1000 --first 1      stops at the first seed that fails, with its trace
//   engine_sim --first 4711 --seeds 1 -v   replays one
// Every hundredth seed runs twice and must go the same way both times.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/logging.h"
#include "engine_world.h"

int main(int argc, char** argv) {
  using tfdist::sim::EngineResult;
  using tfdist::sim::EngineWorld;
  uint64_t seeds = 1000;
  uint64_t first = 1;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "-v") == 0) verbose = true;
    if (i + 1 == argc) break;
    if (std::strcmp(argv[i], "--seeds") == 0) seeds = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--first") == 0) first = std::strtoull(argv[i + 1], nullptr, 10);
  }
  tfdist::SetLogLevel(tfdist::LogLevel::kError);  // stall warnings are part of the game
  const auto begin = std::chrono::steady_clock::now();
  std::map<std::string, std::pair<int64_t, int64_t>> faults;  // seeds, of them with unlike verdicts
  std::vector<int64_t> detections;
  int64_t operations = 0;
  int64_t failed = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    EngineResult result = EngineWorld(seed, verbose).Run();
    if (result.violation.empty() && seed % 100 == 0) {
      const EngineResult again = EngineWorld(seed, verbose).Run();
      if (again.digest != result.digest) result.violation = "two runs of the seed differ";
    }
    if (!result.violation.empty()) {
      std::printf("FAILED seed %llu: %s\n", static_cast<unsigned long long>(seed),
                  result.violation.c_str());
      result = EngineWorld(seed, true).Run();
      for (const std::string& line : result.trace) std::printf("%s\n", line.c_str());
      return 1;
    }
    for (const std::string& line : result.trace) std::printf("%s\n", line.c_str());
    auto& [count, unlike] = faults[result.fault.empty() ? "none" : result.fault];
    ++count;
    if (result.culprits_differ) ++unlike;
    operations += result.operations;
    failed += result.failed;
    if (result.detection_us >= 0) detections.push_back(result.detection_us);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%llu seeds, 0 violations, %.0f seeds/s; operations: %lld ended OK, %lld failed\n",
              static_cast<unsigned long long>(seeds), static_cast<double>(seeds) / seconds,
              static_cast<long long>(operations), static_cast<long long>(failed));
  for (const auto& [name, counts] : faults) {
    std::printf("  %-16s %5lld seeds, in %lld ranks that live blame different ranks\n",
                name.c_str(), static_cast<long long>(counts.first),
                static_cast<long long>(counts.second));
  }
  if (!detections.empty()) {
    std::sort(detections.begin(), detections.end());
    std::printf("from a kill to the last rank that knows, ms: p50 %.2f  max %.2f\n",
                static_cast<double>(detections[detections.size() / 2]) / 1e3,
                static_cast<double>(detections.back()) / 1e3);
  }
  return 0;
}
