// Many seeds of the membership simulation: sim, with the arguments of seeds.h.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "membership_sim.h"
#include "seeds.h"

int main(int argc, char** argv) {
  using tfdist::sim::MembershipResult;
  using tfdist::sim::MembershipSim;
  std::map<std::string, std::vector<int64_t>> detections;
  int64_t verdicts = 0;
  int64_t steps = 0;
  int64_t outcomes[6] = {0, 0, 0, 0, 0, 0};
  const auto run = [](uint64_t seed, bool trace) { return MembershipSim(seed, trace).Run(); };
  const auto note = [&](const MembershipResult& result) {
    verdicts += result.verdicts;
    steps += result.steps;
    for (int o = 0; o < 6; ++o) outcomes[o] += result.outcomes[o];
    if (result.detection_us >= 0) detections[result.single_fault].push_back(result.detection_us);
  };
  if (!tfdist::sim::RunSeeds(argc, argv, run, note)) return 1;
  std::printf("%lld steps, %lld verdicts\n", static_cast<long long>(steps),
              static_cast<long long>(verdicts));
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
