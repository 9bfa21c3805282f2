// Many seeds of the membership simulation.
//
//   sim --seeds 1000 --first 1      stops at the first seed that fails, with its trace
//   sim --first 4711 --seeds 1 -v   replays one
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "membership_sim.h"

int main(int argc, char** argv) {
  using tfdist::sim::MembershipResult;
  using tfdist::sim::MembershipSim;
  uint64_t seeds = 1000;
  uint64_t first = 1;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "-v") == 0) verbose = true;
    if (i + 1 == argc) break;
    if (std::strcmp(argv[i], "--seeds") == 0) seeds = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--first") == 0) first = std::strtoull(argv[i + 1], nullptr, 10);
  }
  const auto begin = std::chrono::steady_clock::now();
  std::map<std::string, std::vector<int64_t>> detections;
  int64_t verdicts = 0;
  int64_t steps = 0;
  int64_t outcomes[6] = {0, 0, 0, 0, 0, 0};
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    MembershipResult result = MembershipSim(seed, verbose).Run();
    if (!result.violation.empty()) {
      std::printf("FAILED seed %llu: %s\n", static_cast<unsigned long long>(seed),
                  result.violation.c_str());
      result = MembershipSim(seed, true).Run();
      for (const std::string& line : result.trace) std::printf("%s\n", line.c_str());
      return 1;
    }
    for (const std::string& line : result.trace) std::printf("%s\n", line.c_str());
    verdicts += result.verdicts;
    steps += result.steps;
    for (int o = 0; o < 6; ++o) outcomes[o] += result.outcomes[o];
    if (result.detection_us >= 0) detections[result.single_fault].push_back(result.detection_us);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%llu seeds, 0 violations, %.0f seeds/s; %lld steps, %lld verdicts\n",
              static_cast<unsigned long long>(seeds), static_cast<double>(seeds) / seconds,
              static_cast<long long>(steps), static_cast<long long>(verdicts));
  for (int o = 1; o < 6; ++o) {
    std::printf("  %-12s %lld ranks\n", OutcomeName(static_cast<tfdist::Outcome>(o)),
                static_cast<long long>(outcomes[o]));
  }
  std::printf("from a single fault to the verdict of the last rank that it left alone, s:\n");
  for (auto& [kind, times] : detections) {
    std::sort(times.begin(), times.end());
    const auto at = [&times](double part) {
      return static_cast<double>(
                 times[static_cast<size_t>(part * static_cast<double>(times.size() - 1))]) /
             1e6;
    };
    std::printf("  %-26s %6zu seeds  p50 %.3f  p99 %.3f  max %.3f\n", kind.c_str(), times.size(),
                at(0.5), at(0.99), at(1));
  }
  return 0;
}
