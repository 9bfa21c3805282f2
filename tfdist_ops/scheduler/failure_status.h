// The errors with which work ends when ranks fail: their texts and records. Pure.
//
// `key`: the operation that was under way; "": none was.
#ifndef TFDIST_OPS_SCHEDULER_FAILURE_STATUS_H_
#define TFDIST_OPS_SCHEDULER_FAILURE_STATUS_H_

#include <string>

#include "base/config.h"
#include "base/status.h"
#include "membership/failure_consensus.h"
#include "scheduler/world.h"

namespace tfdist {

// The cause of evidence that is no failure.
constexpr char kHasLeft[] = "it has shut down";

// A peer is seen to have failed.
Status RankFailure(const World& world, const std::string& key, int rank, const std::string& cause,
                   const std::string& detail);
// The failure of a rank's own program, as the other ranks see it.
Status ProgramFailure(const World& world, const std::string& key, int rank,
                      const std::string& cause, const std::string& detail);
// This rank has shut down before its work was done.
Status ShutDownStatus(const World& world, const std::string& key);
// The outcome that the ranks have agreed on, or why they have not. `consensus` has an outcome.
Status OutcomeStatus(const World& world, const Config& config, const std::string& key,
                     const FailureConsensus& consensus);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_FAILURE_STATUS_H_
