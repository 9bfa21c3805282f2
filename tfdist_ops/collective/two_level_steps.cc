#include "collective/two_level_steps.h"

namespace tfdist {

int TwoLevelParts(const ScheduleArgs& args) {
  const TwoLevels layout(args);
  return layout.parts * layout.hosts();
}

namespace {

// A part that another rank of this host owns.
void AddOther(Schedule* schedule, const TwoLevels& layout, int part) {
  const int32_t owner = layout.OwnerOf(part, layout.host);
  for (int h = 0; h < layout.hosts(); ++h) {
    const int32_t slice = layout.SliceOf(part, h);
    const int32_t sent = Add(schedule, SendInput(kInside, slice, owner));
    Add(schedule, CopyFrom(kInsideBack, slice, owner, sent));
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
