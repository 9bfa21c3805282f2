// RequestFlow: where the parts of an engine hand on requests that they have taken over.
#ifndef TFDIST_OPS_SCHEDULER_REQUEST_FLOW_H_
#define TFDIST_OPS_SCHEDULER_REQUEST_FLOW_H_

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "scheduler/operation.h"
#include "scheduler/process_set.h"

namespace tfdist {

class RequestFlow {
 public:
  virtual ~RequestFlow() = default;
  // Lets a request run: by itself, or once the ranks have agreed on it.
  virtual void Enqueue(ProcessSet* set, std::unique_ptr<Request> request, int64_t now_us) = 0;
  // Starts a request that needs no agreement.
  virtual void StartPredicted(ProcessSet* set, std::unique_ptr<Request> request,
                              int64_t now_us) = 0;
  // A request is over.
  virtual void Finish(std::unique_ptr<Request> request, const Status& status) = 0;
  // A request was on its way when the work stopped: it waits for the outcome.
  virtual void EndStopped(std::unique_ptr<Request> request) = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_REQUEST_FLOW_H_
