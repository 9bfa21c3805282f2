// allreduce "one_shot": every rank sends its whole input to everybody, and everybody adds all
// inputs in rank order.
//
//   phase 0 (three ranks, a b c the inputs)     afterwards
//      0 ---> 1, ---> 2   a                        0    1    2
//      1 ---> 2, ---> 0   b                       abc  abc  abc
//      2 ---> 0, ---> 1   c
//
// Steps: 1, with size - 1 messages. On the wire per rank: (size - 1) times the data. Half the
// latency of pairwise, and where memory is shared the input is copied once, for all to read. Meant
// for short messages inside a host, and for two ranks at any length: each reads no more of the
// other than with pairwise.
//
// The sum is x[0] op x[1] op ... on every rank; half types are accumulated in float32 and rounded
// once. These are the bits of pairwise: choosing between the two by length changes none.
//
// In place (input == output): the reduction writes the elements that it reads, and comes `after`
// the sends of the same segment.
//
// Source: the definition, an all-gather of the inputs with a reduction on every rank.
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

int Parts(const ScheduleArgs& /*args*/) { return 1; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  After sent;
  for (int shift = 1; shift < args.size; ++shift) {
    sent.And(Add(&schedule, SendInput(0, 0, Mod(args.rank + shift, args.size))));
  }
  Step reduce = ReduceInputs(0, 0, Others(args.rank, args.size), /*finish=*/true);
  reduce.after = sent.steps();
  Add(&schedule, reduce);
  return schedule;
}

}  // namespace

AlgorithmEntry OneShotAllreduce() {
  return {"one_shot", CollectiveKind::kAllreduce, Supports, Make, Parts, "pairwise"};
}

}  // namespace tfdist
