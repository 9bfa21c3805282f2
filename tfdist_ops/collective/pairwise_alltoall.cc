// alltoall "pairwise": in turn k every rank sends to the rank k to its right and receives from the
// one k to its left.
//
//   four ranks   turn 1: 0 -> 1 -> 2 -> 3 -> 0     turn 2: 0 <-> 2, 1 <-> 3
//                turn 3: 0 <- 1 <- 2 <- 3 <- 0
//
// Steps: size - 1. On the wire per rank: all that it does not keep, once. What goes from one rank
// to another may have any length, including zero. No turn waits for another: the order only keeps
// ranks from all sending to the same one at first.
//
// Slice r < size is what goes to rank r, slice size + s what comes from rank s, so the two ends
// have different numbers for the same elements: on the wire all are labeled 0 (a pair of ranks has
// only one slice in each direction).
//
// Not in place: what comes from a rank has another length and place than what goes to it.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on all-to-all (pairwise
// exchange for long messages).
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  for (int shift = 1; shift < args.size; ++shift) {
    const int32_t to = Mod(args.rank + shift, args.size);
    const int32_t from = Mod(args.rank - shift, args.size);
    Step send = SendInput(0, to, to);
    Step copy = CopyFrom(0, args.size + from, from, {});
    send.label = 0;
    copy.label = 0;
    Add(&schedule, send);
    Add(&schedule, copy);
  }
  Add(&schedule, LocalCopy(args.rank));
  return schedule;
}

}  // namespace

AlgorithmEntry PairwiseAlltoall() {
  return {"pairwise", CollectiveKind::kAlltoall, Supports, Make};
}

}  // namespace tfdist
