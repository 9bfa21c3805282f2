// broadcast "star": the root sends to every other rank itself.
//
//   root ---> 1,  ---> 2,  ---> 3, ...
//
// Steps: 1, with size - 1 messages. On the wire: the root sends (size - 1) times the data, nobody
// else anything. Rank root + 1 is served first. For few ranks, and as a reference.
//
// In place (input == output): only the root has an input and it receives nothing; the others write
// every element once and read none.
//
// Source: the definition of a broadcast ("flat tree"); R. Thakur et al. 2005
// (binomial_broadcast.cc) compare with it.
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return DTypeSize(dtype) > 0; }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.rank != args.root) {
    Add(&schedule, CopyFrom(0, 0, args.root, {}));
    return schedule;
  }
  for (int shift = 1; shift < args.size; ++shift) {
    Add(&schedule, SendInput(0, 0, (args.root + shift) % args.size));
  }
  Add(&schedule, LocalCopy(0));
  return schedule;
}

}  // namespace

AlgorithmEntry StarBroadcast() { return {"star", CollectiveKind::kBroadcast, Supports, Make}; }

}  // namespace tfdist
