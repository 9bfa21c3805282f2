// allgather "pairwise": every rank sends its slice straight to every other one.
//
//   slice 0:  0 ---> 1,  ---> 2
//   slice 1:  1 ---> 2,  ---> 0
//   slice 2:  2 ---> 0,  ---> 1
//
// Steps: 1, with size - 1 messages. On the wire per rank: size - 1 times its slice; all of the
// messages can be under way at once, where the ring's wait for each other. Slices may have any
// length, including zero. Rank r starts with peer r + 1.
//
// In place (the input lies at its place in the output): a rank's own slice is never received;
// every other one is written once and not read.
//
// Source: the definition; the last phase of pairwise_allreduce.cc.
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  for (int shift = 1; shift < args.size; ++shift) {
    Add(&schedule, SendInput(0, args.rank, Mod(args.rank + shift, args.size)));
  }
  for (int shift = 1; shift < args.size; ++shift) {
    const int32_t peer = Mod(args.rank - shift, args.size);
    Add(&schedule, CopyFrom(0, peer, peer, {}));
  }
  Add(&schedule, LocalCopy(args.rank));
  return schedule;
}

}  // namespace

AlgorithmEntry PairwiseAllgather() {
  return {"pairwise", CollectiveKind::kAllgather, Supports, Make};
}

}  // namespace tfdist
