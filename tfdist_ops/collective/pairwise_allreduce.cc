// allreduce "pairwise": every rank sends slice p straight to its owner, rank p, which adds all
// inputs in rank order, rounds once and sends the result to everybody.
//
//   phase 0 (three ranks, a b c the inputs)         phase 1
//            0        1        2                             0        1        2
//   slice 0  abc <--- b,  <--- c                    slice 0  abc ---> .,  ---> .
//   slice 1  a   ---> abc <--- c                    slice 1  .   <--- abc ---> .
//   slice 2  a,  ---> b   ---> abc                  slice 2  .,  <--- .   <--- abc
//
// Steps: 2, with size - 1 messages in each. On the wire per rank: 2 (size - 1) / size of the data,
// as the ring, in more and smaller messages. Rank r starts with peer r + 1, so that not all ranks
// send to the same one at first.
//
// The sum is x[0] op x[1] op ... for every slice; half types are accumulated in float32 and rounded
// once. It is the algorithm for half types, and the one inside a host, where the owner reads
// inputs in place.
//
// In place (input == output): a rank reads its input of slice p in the send to p, and its input of
// its own slice in the kReduce, which writes the same elements that it reads. Slice p is
// overwritten by the kCopy of phase 1, which is `after` that send. (It could not come earlier in
// any case: the result contains what the send carried.)
//
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), on reduce-scatter (pairwise
// exchange for long messages); the second phase is a direct exchange too.
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kToOwner = 0, kFromOwner = 1 };

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  const int rank = args.rank;
  const int size = args.size;
  Schedule schedule;
  std::vector<int32_t> sent(static_cast<size_t>(size), -1);
  for (int shift = 1; shift < size; ++shift) {
    const int32_t owner = Mod(rank + shift, size);
    sent[static_cast<size_t>(owner)] = Add(&schedule, SendInput(kToOwner, owner, owner));
  }
  const int32_t reduced =
      Add(&schedule, ReduceInputs(kToOwner, rank, Others(rank, size), /*finish=*/true));
  for (int shift = 1; shift < size; ++shift) {
    Add(&schedule, SendOutput(kFromOwner, rank, Mod(rank + shift, size), reduced));
  }
  // Owner rank - 1 sends to this rank first, rank - 2 second, and so on.
  for (int shift = 1; shift < size; ++shift) {
    const int32_t owner = Mod(rank - shift, size);
    Add(&schedule, CopyFrom(kFromOwner, owner, owner, sent[static_cast<size_t>(owner)]));
  }
  return schedule;
}

}  // namespace

AlgorithmEntry PairwiseAllreduce() {
  return {"pairwise", CollectiveKind::kAllreduce, Supports, Make};
}

}  // namespace tfdist
