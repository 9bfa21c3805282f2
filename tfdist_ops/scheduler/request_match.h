// CheckRequestsMatch: whether the requests that the ranks made under one key fit together. Pure.
#ifndef TFDIST_OPS_SCHEDULER_REQUEST_MATCH_H_
#define TFDIST_OPS_SCHEDULER_REQUEST_MATCH_H_

#include <string>
#include <vector>

#include "base/status.h"
#include "scheduler/request_info.h"

namespace tfdist {

// `by_index`: the requests of the members of the collective; `members`: their ranks, empty for
// 0, 1, 2, ... Errors are for every rank:
//   FAILED_PRECONDITION, "mismatch": what the ranks disagree on, the values, and who had which
//   INVALID_ARGUMENT: a root that is no member, or splits that do not fit a rank's tensor; who
//     passed it, what it was, what was expected. Checked here and not where it was passed, because
//     the other ranks wait for that rank.
Status CheckRequestsMatch(const std::vector<RequestInfo>& by_index,
                          const std::vector<int32_t>& members = {});

// The place of `rank` among `members`, -1 when it is none of them.
int IndexOf(int32_t rank, const std::vector<int32_t>& members, int size);

// "rank 3", "ranks 1,2".
std::string RankList(const std::vector<int>& ranks);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_REQUEST_MATCH_H_
