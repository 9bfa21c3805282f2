// allreduce "two_level": inside every host first, then between hosts, then inside again, so that
// each byte crosses between two hosts as rarely as it can. Hosts need not have the same number of
// ranks.
//
// The data is cut into S parts, S = the smallest number of ranks on a host, and each part into H
// slices, H = the number of hosts. On every host part s belongs to local rank s: its owner there.
//
//   hosts {0 1 2} {3 4}: S = 2, H = 2; owners of part 0 are 0 and 3, of part 1 are 1 and 4
//   phase 0  1, 2 ---> 0 (part 0)    0, 2 ---> 1 (part 1)    4 ---> 3 (part 0)    3 ---> 4 (part 1)
//   phase 1  slice h of a part goes to its owner on host h:  0 <---> 3    1 <---> 4
//   phase 2  host h's owner sends the finished slice to the other hosts' owners
//   phase 3  owners send their part to the other ranks of their host
//
// Steps: 4. On the wire, with parts of n / S: an owner sends its part to the other ranks of its
// host and all other parts to their owners there; between hosts it sends 2 (H - 1) / H of its part,
// the least there is. Ranks beyond S on a host own nothing. Every slice goes through the phases on
// its own, so that work inside hosts and between them overlaps.
//
// Order of additions: inside a host in rank order, then the hosts' results in the order of the
// owners' ranks. Partial results (between hosts) of half types travel as float32 and the last owner
// rounds once.
//
// In place (input == output): a rank reads its input of a slice in the send to the slice's owner;
// the owner reads its own in the reduction that writes the same elements. The partial of a slice
// that another host finishes is read by the send of phase 1, and the copy of the result comes
// `after` that send. Likewise the copy of phase 3 comes `after` the send of phase 0.
//
// Source: M. Cho, U. Finkler, D. Kung, H. Hunter, "BlueConnect: Decomposing All-Reduce for Deep
// Learning on Heterogeneous Network Hierarchy", MLSys 2019: a reduce-scatter and an all-gather at
// each level, so that all local ranks take part. The mapping for unequal hosts is our own; between
// owners as pairwise_allreduce.cc.
#include "collective/two_level_steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

// Between hosts: this host's partial result of a slice of the part that this rank owns, written by
// step `reduced`, becomes the result. Returns the step that writes the result.
int32_t AddAcross(Schedule* schedule, const TwoLevels& layout, int h, int32_t reduced) {
  const int part = layout.local;
  const int32_t slice = layout.SliceOf(part, h);
  if (h != layout.host) {
    const int32_t finisher = layout.OwnerOf(part, h);
    const int32_t sent = Add(schedule, SendPartial(kAcross, slice, finisher, reduced));
    return Add(schedule, CopyFrom(kAcrossBack, slice, finisher, sent));
  }
  const std::vector<int32_t> owners = layout.OtherOwners(part);
  Step step = ReduceInputs(kAcross, slice, owners, /*finish=*/true);
  step.raw = false;
  step.own = Place::kPartial;
  step.after = {reduced};
  const int32_t finished = Add(schedule, step);
  for (int32_t owner : owners) Add(schedule, SendOutput(kAcrossBack, slice, owner, finished));
  return finished;
}

// The part that this rank owns.
void AddOwned(Schedule* schedule, const TwoLevels& layout) {
  std::vector<int32_t> locals = layout.ranks[static_cast<size_t>(layout.host)];
  locals.erase(locals.begin() + layout.local);
  const bool one_host = layout.hosts() == 1;
  for (int h = 0; h < layout.hosts(); ++h) {
    const int32_t slice = layout.SliceOf(layout.local, h);
    int32_t last = Add(schedule, ReduceInputs(kInside, slice, locals, /*finish=*/one_host));
    if (!one_host) last = AddAcross(schedule, layout, h, last);
    for (int32_t local : locals) Add(schedule, SendOutput(kInsideBack, slice, local, last));
  }
}

Schedule Make(const ScheduleArgs& args) {
  const TwoLevels layout(args);
  Schedule schedule = BeginTwoLevels(layout);
  if (layout.local < layout.parts) AddOwned(&schedule, layout);
  return schedule;
}

}  // namespace

AlgorithmEntry TwoLevelAllreduce() {
  return {"two_level", CollectiveKind::kAllreduce, Supports, Make, TwoLevelParts};
}

}  // namespace tfdist
