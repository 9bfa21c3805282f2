// Allreduces that end well although the world has failed: tfdist_hide_failures of c_api.h. The
// switch and the counter belong to the process, not to one world.
#ifndef TFDIST_OPS_RUNTIME_HIDDEN_FAILURES_H_
#define TFDIST_OPS_RUNTIME_HIDDEN_FAILURES_H_

#include <cstdint>

#include "base/status.h"
#include "scheduler/operation.h"

namespace tfdist {

// Off at the start.
void HideFailures(bool on);

// Whether `request` hides `failure`, the failure of its world, at this moment.
bool IsHidden(const Request& request, const Status& failure);

// If `request` hides `failure`: copies its inputs to its outputs, counts it, and returns true.
bool EndHidden(const Request& request, const Status& failure);

// How many requests have ended so since the last call.
int64_t TakeHidden();

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_HIDDEN_FAILURES_H_
