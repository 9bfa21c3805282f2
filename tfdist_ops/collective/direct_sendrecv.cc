// sendrecv "direct": the root of a set of two sends, the other one receives.
//
//   root ---> other
//
// Steps: 1. On the wire: the data once. A set of one (a rank that sends to itself) copies.
//
// In place (input == output): the sender has no output, the receiver no input; in a set of one the
// bytes are already there.
#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {
namespace {

bool Supports(const ScheduleArgs& args, DType dtype) {
  return args.size <= 2 && DTypeSize(dtype) > 0;
}

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  if (args.size == 1) {
    Add(&schedule, LocalCopy(0));
  } else if (args.rank == args.root) {
    Add(&schedule, SendInput(0, 0, 1 - args.root));
  } else {
    Add(&schedule, CopyFrom(0, 0, args.root, {}));
  }
  return schedule;
}

}  // namespace

AlgorithmEntry DirectSendRecv() { return {"direct", CollectiveKind::kSendRecv, Supports, Make}; }

}  // namespace tfdist
