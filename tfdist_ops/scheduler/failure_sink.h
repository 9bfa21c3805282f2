// FailureSink: to whom the parts of an engine report what goes wrong.
#ifndef TFDIST_OPS_SCHEDULER_FAILURE_SINK_H_
#define TFDIST_OPS_SCHEDULER_FAILURE_SINK_H_

#include <cstdint>

#include "base/status.h"

namespace tfdist {

class FailureSink {
 public:
  virtual ~FailureSink() = default;
  // Evidence that the generation must end; kNoRank: without a failed rank. The work stops.
  virtual void Suspect(int rank, bool certain, const Status& status) = 0;
  // A bug, here or on a peer: this rank withdraws, and its work ends.
  virtual void ReportBug(const Status& status, int64_t now_us) = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_FAILURE_SINK_H_
