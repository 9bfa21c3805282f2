#include "collective/two_level_steps.h"

namespace tfdist {

int TwoLevelParts(const ScheduleArgs& args) {
  const TwoLevels layout(args);
  return layout.parts * layout.hosts();
}

namespace {

// A part that another rank of this host owns. Its slices are sent one after the other, in an order
// that all ranks of the host share. Otherwise, two ranks could fill their lanes to the owner with
// segments of different slices, of which it can add none without those of the other rank. The slice
// of the next host comes first, and that of this host last: it needs no time on the network.
void AddOther(Schedule* schedule, const TwoLevels& layout, int part) {
  const int32_t owner = layout.OwnerOf(part, layout.host);
  int32_t earlier = -1;
  for (int shift = 1; shift <= layout.hosts(); ++shift) {
    const int32_t slice = layout.SliceOf(part, (layout.host + shift) % layout.hosts());
    Step send = SendInput(kInside, slice, owner);
    if (earlier >= 0) send.after = {earlier};
    earlier = Add(schedule, send);
    Add(schedule, CopyFrom(kInsideBack, slice, owner, earlier));
  }
}

}  // namespace

Schedule BeginTwoLevels(const TwoLevels& layout) {
  Schedule schedule;
  schedule.partials = layout.hosts() > 1;
  // Each rank begins after its own place, so that not all ranks of a host send to the same one at
  // first.
  for (int shift = 1; shift <= layout.parts; ++shift) {
    const int part = (layout.local + shift) % layout.parts;
    if (part != layout.local) AddOther(&schedule, layout, part);
  }
  return schedule;
}

}  // namespace tfdist
