// Many seeds of the simulated engine: engine_sim, with the arguments of seeds.h. Every hundredth
// seed runs twice and must go the same way both times.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "base/logging.h"
#include "engine_world.h"
#include "seeds.h"

int main(int argc, char** argv) {
  using tfdist::sim::EngineResult;
  using tfdist::sim::EngineWorld;
  tfdist::SetLogLevel(tfdist::LogLevel::kError);              // stall warnings are part of the game
  std::map<std::string, std::pair<int64_t, int64_t>> faults;  // seeds, of them with unlike verdicts
  std::vector<int64_t> detections;
  int64_t operations = 0;
  int64_t failed = 0;
  int64_t deadlocks = 0;
  const auto run = [](uint64_t seed, bool trace) {
    EngineResult result = EngineWorld(seed, trace).Run();
    const bool twice = result.violation.empty() && seed % 100 == 0;
    if (twice && EngineWorld(seed, false).Run().digest != result.digest) {
      result.violation = "two runs of the seed differ";
    }
    return result;
  };
  const auto note = [&](const EngineResult& result) {
    auto& [count, unlike] = faults[result.fault.empty() ? "none" : result.fault];
    ++count;
    if (result.culprits_differ) ++unlike;
    if (result.deadlock) ++deadlocks;
    operations += result.operations;
    failed += result.failed;
    if (result.detection_us >= 0) detections.push_back(result.detection_us);
  };
  if (!tfdist::sim::RunSeeds(argc, argv, run, note)) return 1;
  std::printf("operations: %lld ended OK, %lld failed\n", static_cast<long long>(operations),
              static_cast<long long>(failed));
  std::printf("ranks that wait for each other, found in %lld seeds\n",
              static_cast<long long>(deadlocks));
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
