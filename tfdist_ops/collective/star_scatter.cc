// scatter "star": the root sends every rank its slice.
//
//   root ---> slice 1,  ---> slice 2,  ---> slice 3, ...
//
// Steps: 1, with size - 1 messages of the root. On the wire: the root sends all slices but its own,
// nobody else anything, the least there is. Slices may have any length, including zero.
//
// In place (the root's output is its slice's place in its input): the root writes that slice alone,
// with the bytes that are there.
//
// Source: the definition of a scatter ("flat tree").
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.rank != args.root) {
    Add(&schedule, CopyFrom(0, args.rank, args.root, {}));
    return schedule;
  }
  for (int shift = 1; shift < args.size; ++shift) {
    const int32_t peer = (args.root + shift) % args.size;
    Add(&schedule, SendInput(0, peer, peer));
  }
  Add(&schedule, LocalCopy(args.rank));
  return schedule;
}

}  // namespace

AlgorithmEntry StarScatter() { return {"star", CollectiveKind::kScatter, Supports, Make}; }

}  // namespace tfdist
