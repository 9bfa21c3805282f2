// allreduce "two_level_ring": as two_level_allreduce.cc inside hosts; between hosts the owners of a
// part form a ring, instead of each sending to all others. A rank then exchanges data with at most
// two ranks of other hosts, and no network link carries what many ranks send to one.
//
//   hosts {0 1 2} {3 4} {5 6}: S = 2, H = 3; rings 0 → 3 → 5 → 0 of part 0, 1 → 4 → 6 → 1 of part 1
//   phase 0  1, 2 ---> 0 (part 0)    0, 2 ---> 1 (part 1)    likewise on each host
//   phase 1  reduce-scatter along the ring of the part: H - 1 hops
//   phase 2  all-gather along it: H - 1 hops
//   phase 3  owners send their part to the other ranks of their host
//
// Steps: 2 + 2 (H - 1). On the wire: as many bytes as two_level, between other pairs of ranks. The
// additional steps make it slower for short messages; with many hosts it is steadier. Every slice
// goes through the phases on its own.
//
// Order of additions: inside a host in rank order; then slice h of a part begins at host h and is
// added to in the order of the hosts. Partial results (between hosts) of half types travel as
// float32 and the last owner rounds once.
//
// In place (input == output): as two_level_allreduce.cc inside hosts, and as the columns of
// torus_allreduce.cc between them.
//
// Source: as two_level_allreduce.cc; the ring as ring_allreduce.cc.
#include "collective/ring_steps.h"
#include "collective/two_level_steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

// The part that this rank owns.
void AddOwned(Schedule* schedule, const TwoLevels& layout) {
  std::vector<int32_t> locals = layout.ranks[static_cast<size_t>(layout.host)];
  locals.erase(locals.begin() + layout.local);
  const bool one_host = layout.hosts() == 1;
  Ring ring;
  ring.position = layout.host;
  RingReduce reduce;
  reduce.phase = kAcross;
  reduce.own = Place::kPartial;
  for (int h = 0; h < layout.hosts(); ++h) {
    ring.ranks.push_back(layout.OwnerOf(layout.local, h));
    ring.slices.push_back(layout.SliceOf(layout.local, h));
    reduce.each.push_back(
        Add(schedule, ReduceInputs(kInside, ring.slices.back(), locals, /*finish=*/one_host)));
  }
  std::vector<After> last = reduce.each;
  if (!one_host) {
    const std::vector<int32_t> reduced = AddRingReduceScatter(schedule, ring, reduce);
    last.assign(reduced.begin(), reduced.end());
    AddRingAllgather(schedule, ring, kAcrossBack, &last);
  }
  for (size_t s = 0; s < ring.slices.size(); ++s) {
    for (int32_t local : locals) {
      Add(schedule, SendOutput(kInsideBack, ring.slices[s], local, last[s]));
    }
  }
}

Schedule Make(const ScheduleArgs& args) {
  const TwoLevels layout(args);
  Schedule schedule = BeginTwoLevels(layout);
  if (layout.local < layout.parts) AddOwned(&schedule, layout);
  return schedule;
}

}  // namespace

AlgorithmEntry TwoLevelRingAllreduce() {
  return {"two_level_ring", CollectiveKind::kAllreduce, Supports, Make, TwoLevelParts};
}

}  // namespace tfdist
