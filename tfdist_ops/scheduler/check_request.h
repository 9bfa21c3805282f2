// CheckRequest: what can be checked of a request on its own rank. Pure.
#ifndef TFDIST_OPS_SCHEDULER_CHECK_REQUEST_H_
#define TFDIST_OPS_SCHEDULER_CHECK_REQUEST_H_

#include "base/status.h"
#include "scheduler/operation.h"

namespace tfdist {

// INVALID_ARGUMENT when no engine could run `request`, whatever the other ranks ask for. Arguments
// in which ranks may differ (a root, splits) are checked where all have come together, in
// scheduler/agreement.h: the others wait for this rank, and learn of the mistake only so.
// `size`: ranks of the world.
Status CheckRequest(const Request& request, int size);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_CHECK_REQUEST_H_
