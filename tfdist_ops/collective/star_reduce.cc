// reduce "star": everybody sends its input to the root, which adds in rank order and rounds once;
// the others keep their inputs.
//
//   root <--- 1,  <--- 2,  <--- 3, ...
//
// Steps: 1, with size - 1 messages into the root. On the wire: every rank but the root sends the
// data once, half types as they are. No memory but the output.
//
// In place (input == output): the root writes the elements that its only reduction reads; the
// others' input is their output already.
//
// Source: the definition of a reduction ("flat tree").
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.rank == args.root) {
    Add(&schedule, ReduceInputs(0, 0, Others(args.rank, args.size), /*finish=*/true));
    return schedule;
  }
  Add(&schedule, SendInput(0, 0, args.root));
  Add(&schedule, LocalCopy(0));
  return schedule;
}

}  // namespace

AlgorithmEntry StarReduce() { return {"star", CollectiveKind::kReduce, Supports, Make}; }

}  // namespace tfdist
