// CheckRequest: what can be checked of a request on its own rank. Pure.
#ifndef TFDIST_OPS_SCHEDULER_REQUEST_CHECK_H_
#define TFDIST_OPS_SCHEDULER_REQUEST_CHECK_H_

#include <string>

#include "base/status.h"
#include "scheduler/operation.h"

namespace tfdist {

// INVALID_ARGUMENT when no engine could run `request`, whatever the other ranks ask for. Arguments
// in which ranks may differ (a root, splits) are checked where all have come together, in
// scheduler/request_match.h: otherwise the other ranks, which wait for this one, would not learn of
// the mistake.
// `size`: ranks of the world.
Status CheckRequest(const Request& request, int size);

// INVALID_ARGUMENT when the operation does not work on a process set of so many ranks.
Status CheckSetSize(const RequestInfo& info, int size);

// INVALID_ARGUMENT: what is wrong with the operation called `name`.
Status InvalidRequest(const std::string& name, const std::string& message);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_REQUEST_CHECK_H_
