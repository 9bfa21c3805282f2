// reduce_scatter "pairwise": every rank sends each slice straight to the rank that it is for, which
// adds all inputs in rank order and rounds once.
//
//            0        1        2
//   slice 0  abc <--- b,  <--- c
//   slice 1  a   ---> abc <--- c
//   slice 2  a,  ---> b   ---> abc
//
// Steps: 1, with size - 1 messages. On the wire per rank: all slices but its own, as the ring, and
// half types as they are. Slices may have any length, including zero. Rank r starts with peer
// r + 1.
//
// In place (the output is the place of this rank's slice in the input): only that slice is
// written, by the reduction that reads it.
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on reduce-scatter (pairwise
// exchange).
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  for (int shift = 1; shift < args.size; ++shift) {
    const int32_t peer = Mod(args.rank + shift, args.size);
    Add(&schedule, SendInput(0, peer, peer));
  }
  Add(&schedule, ReduceInputs(0, args.rank, Others(args.rank, args.size), /*finish=*/true));
  return schedule;
}

}  // namespace

AlgorithmEntry PairwiseReduceScatter() {
  return {"pairwise", CollectiveKind::kReduceScatter, Supports, Make};
}

}  // namespace tfdist
