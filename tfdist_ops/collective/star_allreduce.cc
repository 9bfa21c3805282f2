// allreduce "star": rank 0 collects all inputs, adds them in rank order, sends the result back.
//
//   phase 0:  1 ---> 0 <--- 2, <--- 3 ...        phase 1:  1 <--- 0 ---> 2, ---> 3 ...
//
// Steps: 2, with size - 1 messages of rank 0 in each. On the wire: rank 0 sends and receives
// (size - 1) times the data, the others send and receive it once. The reference that the others are
// compared with, and the fewest messages for tiny data on few ranks.
//
// The sum is x[0] op x[1] op ...; half types are accumulated in float32 and rounded once.
//
// In place (input == output): rank 0 writes the elements that its only reduction reads; elsewhere
// the copy of the result comes `after` the send that reads the input.
//
// Source: the definition ("parameter server" with one server, on rank 0).
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kToHub = 0, kFromHub = 1 };

int Parts(const ScheduleArgs& /*args*/) { return 1; }

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.rank != 0) {
    const int32_t sent = Add(&schedule, SendInput(kToHub, 0, 0));
    Add(&schedule, CopyFrom(kFromHub, 0, 0, sent));
    return schedule;
  }
  const std::vector<int32_t> others = Others(0, args.size);
  const int32_t reduced = Add(&schedule, ReduceInputs(kToHub, 0, others, /*finish=*/true));
  for (int32_t peer : others) Add(&schedule, SendOutput(kFromHub, 0, peer, reduced));
  return schedule;
}

}  // namespace

AlgorithmEntry StarAllreduce() {
  return {"star", CollectiveKind::kAllreduce, Supports, Make, Parts, "pairwise"};
}

}  // namespace tfdist
