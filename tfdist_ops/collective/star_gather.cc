// gather "star": every rank sends its slice straight to the root.
//
//   root <--- slice 1,  <--- slice 2,  <--- slice 3, ...
//
// Steps: 1, with size - 1 messages into the root. On the wire: every rank but the root sends its
// own slice once, the least there is. Slices may have any length, including zero.
//
// In place (the root's input lies at its place in its output): that slice is never received; every
// other one is written once. Other ranks write nothing.
//
// Source: the definition of a gather ("flat tree").
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.rank != args.root) {
    Add(&schedule, SendInput(0, args.rank, args.root));
    return schedule;
  }
  for (int32_t peer : Others(args.rank, args.size)) Add(&schedule, CopyFrom(0, peer, peer, {}));
  Add(&schedule, LocalCopy(args.rank));
  return schedule;
}

}  // namespace

AlgorithmEntry StarGather() { return {"star", CollectiveKind::kGather, Supports, Make}; }

}  // namespace tfdist
