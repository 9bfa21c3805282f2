#include "scheduler/failure_status.h"

#include <vector>

#include "scheduler/wire.h"

namespace tfdist {
namespace {

constexpr size_t kMostOthers = 3;  // in a message

// A JSON object with one more field.
std::string WithField(const std::string& object, const std::string& name, int64_t value) {
  if (object.empty() || object.back() != '}') return object;
  return object.substr(0, object.size() - 1) + ", \"" + name + "\": " + std::to_string(value) + "}";
}

// The other failures of a verdict, for the end of its message.
std::string Others(const Verdict& verdict) {
  std::string text;
  size_t count = 0;
  for (const Evidence& other : verdict.others) {
    if (other.cause == kHasLeft || ++count > kMostOthers) continue;
    text += "; also: " + other.cause;
  }
  return count > kMostOthers ? text + "; and " + std::to_string(count - kMostOthers) + " more"
                             : text;
}

// The report of the first rank that saw the failure. Depends on the evidence alone.
Status VerdictStatus(const World& world, const Evidence& culprit) {
  Status status;
  if (DecodeStatus(AsBytes(culprit.record), &status) && !status.ok()) return status;
  if (culprit.rank == kNoRank) return Status(Code::kAborted, culprit.cause);
  const ErrorRecord record{"rank_failed",
                           culprit.rank,
                           HostOf(world, culprit.rank),
                           PidOf(world, culprit.rank),
                           "",
                           culprit.cause,
                           ""};
  return Status(Code::kAborted, DescribeRank(world, culprit.rank) + " failed: " + culprit.cause,
                record);
}

}  // namespace

Status RankFailure(const World& world, const std::string& key, int rank, const std::string& cause,
                   const std::string& detail) {
  ErrorRecord record{"rank_failed", rank,  HostOf(world, rank), PidOf(world, rank), key,
                     cause,         detail};
  std::string message = DescribeRank(world, rank) + " failed: " + cause;
  if (!record.tensor.empty()) message += " while \"" + record.tensor + "\" was in progress";
  if (!detail.empty()) message += " (" + detail + ")";
  return Status(Code::kAborted, message, record);
}

Status ProgramFailure(const World& world, const std::string& key, int rank,
                      const std::string& cause, const std::string& detail) {
  ErrorRecord record{"rank_failed", rank,  HostOf(world, rank), PidOf(world, rank), key,
                     cause,         detail};
  std::string message = DescribeRank(world, rank) + " failed";
  if (!record.tensor.empty()) message += " while \"" + record.tensor + "\" was in progress";
  return Status(Code::kAborted, message + ": " + cause, record);
}

Status ShutDownStatus(const World& world, const std::string& key) {
  return Status(Code::kAborted, "tfdist was shut down on this rank",
                ErrorRecord{"shutdown", world.rank, "", 0, key, "shut down", ""});
}

Status OutcomeStatus(const World& world, const Config& config, const std::string& key,
                     const FailureConsensus& consensus) {
  if (consensus.outcome() == Outcome::kDecided) {
    const Verdict& verdict = consensus.verdict();
    Status status = VerdictStatus(world, verdict.culprit);
    status = Status(status.code(), status.message() + Others(verdict), status.payload());
    // With one group, a step that counts is applied by every survivor and no later one by any.
    if (config.atomic_steps == 0 || verdict.commits.size() > 1) return status;
    const int64_t step = verdict.commits.empty() ? 0 : verdict.commits[0].step;
    return Status(status.code(), status.message(),
                  WithField(status.payload(), "committed_step", step));
  }
  const std::vector<Evidence> seen = consensus.Seen();
  const Status first = seen.empty() ? Status(Code::kAborted, "nothing was seen to fail")
                                    : VerdictStatus(world, seen.front());
  ErrorRecord record{"evicted", world.rank, "", 0, key, consensus.own_cause(), ""};
  if (consensus.outcome() == Outcome::kEvicted) {
    record.host = HostOf(world, world.rank);
    record.pid = PidOf(world, world.rank);
    return Status(Code::kAborted,
                  DescribeRank(world, world.rank) +
                      " was taken out of the job by the other ranks, which go on without it: " +
                      consensus.own_cause() +
                      ". It must not use its results any more: end it and start again.",
                  record);
  }
  if (consensus.outcome() == Outcome::kNoMajority) {
    record.kind = "no_majority";
    record.rank = seen.empty() ? -1 : seen.front().rank;
    record.host = HostOf(world, record.rank);
    record.pid = PidOf(world, record.rank);
    record.cause = first.message();
    record.detail = consensus.own_cause();
    return Status(Code::kAborted,
                  first.message() + "; no majority: " + consensus.own_cause() +
                      ", and the other ranks may be alive and go on without this one. This rank "
                      "has to end.",
                  record);
  }
  return Status(first.code(), first.message() + "; " + consensus.own_cause(), first.payload());
}

}  // namespace tfdist
