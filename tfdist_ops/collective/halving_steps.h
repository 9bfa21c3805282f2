// Halving and doubling: shared by the algorithms that halve the data with each partner and then
// give the results back the same way in reverse.
#ifndef TFDIST_OPS_COLLECTIVE_HALVING_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_HALVING_STEPS_H_

#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {

// One step of the halving: the slices that a rank kept and gave.
struct HalvingExchange {
  uint16_t phase;
  int32_t peer;
  int32_t kept;
  int32_t given;
  int32_t sent;  // the step that gave
};

// Consecutive slices as one; `base`: number of slices that are not joined.
inline int32_t JoinSlices(Schedule* schedule, int32_t base, int32_t first, int32_t count) {
  if (count == 1) return first;
  schedule->joined.push_back({first, count});
  return base + static_cast<int32_t>(schedule->joined.size()) - 1;
}

// The all-gather: backwards, each exchange gives the partner what the rank has, and gets as much.
// `have`: the step that finished this rank's slice. Returns the steps that wrote the output.
inline After AddDoubling(Schedule* schedule, const std::vector<HalvingExchange>& exchanges,
                         After have) {
  for (auto e = exchanges.rbegin(); e != exchanges.rend(); ++e) {
    const auto phase = static_cast<uint16_t>(e->phase + 1);
    Step send = SendOutput(phase, e->kept, e->peer, have);
    Step copy = CopyFrom(phase, e->given, e->peer, e->sent);
    send.label = copy.label = 0;
    Add(schedule, send);
    have.And(Add(schedule, copy));
  }
  return have;
}

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_HALVING_STEPS_H_
