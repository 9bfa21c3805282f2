// Shared by the two-level algorithms: which rank owns which part, and the steps inside a host for
// the parts that a rank does not own.
#ifndef TFDIST_OPS_COLLECTIVE_TWO_LEVEL_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_TWO_LEVEL_STEPS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {

enum TwoLevelPhase : uint16_t { kInside = 0, kAcross = 1, kAcrossBack = 2, kInsideBack = 3 };

// The data is cut into S parts, S = the smallest number of ranks on a host, and each part into one
// slice per host. On every host part s belongs to local rank s. Slice s * hosts + h belongs to
// part s and host h.
struct TwoLevels {
  explicit TwoLevels(const ScheduleArgs& args) : ranks(RanksByHost(args)) {
    parts = static_cast<int>(ranks[0].size());
    for (size_t h = 0; h < ranks.size(); ++h) {
      parts = std::min(parts, static_cast<int>(ranks[h].size()));
      for (size_t l = 0; l < ranks[h].size(); ++l) {
        if (ranks[h][l] != args.rank) continue;
        host = static_cast<int>(h);
        local = static_cast<int>(l);
      }
    }
  }
  int hosts() const { return static_cast<int>(ranks.size()); }
  int32_t SliceOf(int part, int h) const { return part * hosts() + h; }
  int32_t OwnerOf(int part, int h) const {
    return ranks[static_cast<size_t>(h)][static_cast<size_t>(part)];
  }
  // The owners of a part on the other hosts, ascending.
  std::vector<int32_t> OtherOwners(int part) const {
    std::vector<int32_t> owners;
    for (int h = 0; h < hosts(); ++h) {
      if (h != host) owners.push_back(OwnerOf(part, h));
    }
    std::sort(owners.begin(), owners.end());
    return owners;
  }

  std::vector<std::vector<int32_t>> ranks;  // by host
  int parts = 0;
  int host = 0;   // of this rank
  int local = 0;  // this rank among those of its host
};

// AlgorithmEntry::parts of both.
int TwoLevelParts(const ScheduleArgs& args);

// The parts that other ranks of this host own: sent to them, and received from them at the end.
Schedule BeginTwoLevels(const TwoLevels& layout);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_TWO_LEVEL_STEPS_H_
