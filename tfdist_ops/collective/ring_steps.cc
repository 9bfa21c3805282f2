#include "collective/ring_steps.h"

#include <algorithm>
#include <numeric>

namespace tfdist {
namespace {

// One reduction of the ring: what comes from the left has passed `hop` other ranks.
Step ReduceHop(const RingReduce& reduce, const After& ready, int32_t slice, int32_t left, int hop,
               bool finish) {
  if (reduce.own == Place::kInput && hop == 0) {
    return ReduceInputs(reduce.phase, slice, {left}, finish);
  }
  Step step = ReducePartialFrom(reduce.phase, slice, left, finish);
  step.own = reduce.own;
  step.after = ready.steps();
  return step;
}

}  // namespace

Ring RingOf(const ScheduleArgs& args) {
  Ring ring;
  ring.ranks = args.ring;
  if (ring.ranks.empty()) {
    ring.ranks.resize(static_cast<size_t>(args.size));
    std::iota(ring.ranks.begin(), ring.ranks.end(), 0);
  }
  const auto own = std::find(ring.ranks.begin(), ring.ranks.end(), args.rank);
  ring.position = static_cast<int>(own - ring.ranks.begin());
  return ring;
}

std::vector<int32_t> AddRingReduceScatter(Schedule* schedule, const Ring& ring,
                                          const RingReduce& reduce) {
  const int size = ring.size();
  const int p = ring.position;
  const int32_t left = ring.ranks[static_cast<size_t>(Mod(p - 1, size))];
  const int32_t right = ring.ranks[static_cast<size_t>(Mod(p + 1, size))];
  const auto ready = [&](size_t place) -> const After& {
    return reduce.each.empty() ? reduce.ready : reduce.each[place];
  };
  std::vector<int32_t> last(ring.slices.size(), -1);
  for (int hop = 0; hop < size - 1; ++hop) {
    const auto out = static_cast<size_t>(Mod(p - hop, size));
    const auto in = static_cast<size_t>(Mod(p - hop - 1, size));
    const Place from = hop == 0 ? reduce.own : Place::kPartial;
    const After after = hop == 0 ? ready(out) : After(last[out]);
    last[out] = Add(schedule, SendFrom(from, reduce.phase, ring.slices[out], right, after));
    const bool finish = reduce.finish && hop == size - 2;
    last[in] = Add(schedule, ReduceHop(reduce, ready(in), ring.slices[in], left, hop, finish));
  }
  return last;
}

void AddRingAllgather(Schedule* schedule, const Ring& ring, uint16_t phase,
                      std::vector<After>* last) {
  const int size = ring.size();
  const int p = ring.position;
  const int32_t left = ring.ranks[static_cast<size_t>(Mod(p - 1, size))];
  const int32_t right = ring.ranks[static_cast<size_t>(Mod(p + 1, size))];
  for (int hop = 0; hop < size - 1; ++hop) {
    const auto out = static_cast<size_t>(Mod(p + 1 - hop, size));
    const auto in = static_cast<size_t>(Mod(p - hop, size));
    Add(schedule, SendOutput(phase, ring.slices[out], right, (*last)[out]));
    (*last)[in] = Add(schedule, CopyFrom(phase, ring.slices[in], left, (*last)[in]));
  }
}

}  // namespace tfdist
