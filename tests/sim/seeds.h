// The command line of the simulations: many seeds, or one with its trace.
//
//   --seeds 1000 --first 1      stops at the first seed that fails, with its trace
//   --first 4711 --seeds 1 -v   replays one
#ifndef TFDIST_TESTS_SIM_SEEDS_H_
#define TFDIST_TESTS_SIM_SEEDS_H_

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace tfdist::sim {

inline void Print(const std::vector<std::string>& trace) {
  for (const std::string& line : trace) std::printf("%s\n", line.c_str());
}

// Hands what `run(seed, with_trace)` returns to `note`, seed by seed. False: one has failed, which
// is printed; else the first half of a line about all of them is.
template <typename Run, typename Note>
bool RunSeeds(int argc, char** argv, const Run& run, const Note& note) {
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
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const auto result = run(seed, verbose);
    if (!result.violation.empty()) {
      std::printf("FAILED seed %llu: %s\n", static_cast<unsigned long long>(seed),
                  result.violation.c_str());
      Print(verbose ? result.trace : run(seed, true).trace);
      return false;
    }
    Print(result.trace);
    note(result);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%llu seeds, 0 violations, %.0f seeds/s; ", static_cast<unsigned long long>(seeds),
              static_cast<double>(seeds) / seconds);
  return true;
}

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_SEEDS_H_
