// EngineState: how far an engine is, for its parts to look at. The engine alone changes it.
#ifndef TFDIST_OPS_SCHEDULER_ENGINE_STATE_H_
#define TFDIST_OPS_SCHEDULER_ENGINE_STATE_H_

#include <cstdint>

#include "base/status.h"

namespace tfdist {

struct EngineState {
  bool leaving = false;  // this rank has said goodbye, or is about to
  bool stopped = false;  // from the first evidence on: nothing runs or starts any more
  Status failure;        // once the work has ended: the error of all that is submitted later
  // How often something has moved on this rank: submitted, ended, or heard of as a leader.
  uint64_t moves = 0;
  // The clock of deadlines, stall warnings and the search for deadlocks. Time in which this process
  // did not run, because the whole job was suspended, does not count (OwnTime).
  int64_t own_us = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_ENGINE_STATE_H_
