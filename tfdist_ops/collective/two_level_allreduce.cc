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
// In place (input == output): a rank reads its input of a slice in the send to its owner, or, the
// owner, in the reduction that writes the same elements. The partial of a slice that another host
// finishes is read by the send of phase 1, which the copy of the result comes `after`; so does the
// copy of phase 3 after the send of phase 0.
//
// Source: the hierarchical pattern of X. Jia et al., "Highly Scalable Deep Learning Training System
// with Mixed-Precision", 2018, with all local ranks at work as in scatter-reduce-gather forms; the
// mapping for unequal hosts is our own; between owners as pairwise_allreduce.cc.
#include <algorithm>

#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kInside = 0, kAcross = 1, kAcrossBack = 2, kInsideBack = 3 };

// Where the slices lie: part s, host h is slice s * hosts + h.
struct Layout {
  explicit Layout(const ScheduleArgs& args) : ranks(RanksByHost(args)) {
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

int Parts(const ScheduleArgs& args) {
  const Layout layout(args);
  return layout.parts * layout.hosts();
}

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

// A part that another rank of this host owns.
void AddOther(Schedule* schedule, const Layout& layout, int part) {
  const int32_t owner = layout.OwnerOf(part, layout.host);
  for (int h = 0; h < layout.hosts(); ++h) {
    const int32_t slice = layout.SliceOf(part, h);
    const int32_t sent = Add(schedule, SendInput(kInside, slice, owner));
    Add(schedule, CopyFrom(kInsideBack, slice, owner, sent));
  }
}

// Between hosts: what this host has of a slice of the own part, which step `reduced` has written,
// becomes the result. Returns the step that writes it.
int32_t AddAcross(Schedule* schedule, const Layout& layout, int h, int32_t reduced) {
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
void AddOwned(Schedule* schedule, const Layout& layout) {
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
  Schedule schedule;
  const Layout layout(args);
  schedule.partials = layout.hosts() > 1;
  // Beginning behind its own place, so that not all ranks of a host send to the same one at first.
  for (int shift = 1; shift <= layout.parts; ++shift) {
    const int part = (layout.local + shift) % layout.parts;
    if (part != layout.local) AddOther(&schedule, layout, part);
  }
  if (layout.local < layout.parts) AddOwned(&schedule, layout);
  return schedule;
}

}  // namespace

AlgorithmEntry TwoLevelAllreduce() {
  return {"two_level", CollectiveKind::kAllreduce, Supports, Make, Parts};
}

}  // namespace tfdist
