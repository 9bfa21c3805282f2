#include "scheduler/request_check.h"

#include <cmath>

#include "base/reducible.h"
#include "scheduler/operation_plan.h"
#include "scheduler/row_counts.h"

namespace tfdist {
namespace {

Status CheckAdasum(const RequestInfo& info) {
  if (info.kind != CollectiveKind::kAllreduce) {
    return InvalidRequest(info.key, std::string("adasum is supported only by allreduce, not by ") +
                                        CollectiveKindName(info.kind));
  }
  if (!info.algorithm.empty()) {
    return InvalidRequest(info.key, "adasum has one algorithm; got \"" + info.algorithm +
                                        "\". Do not name an algorithm");
  }
  return Status();
}

Status CheckReduction(const RequestInfo& info) {
  const Status reducible = CheckReducible(info.dtype, info.op);
  if (!reducible.ok()) return InvalidRequest(info.key, reducible.message());
  if (!TakesScale(info.dtype) && (info.prescale != 1.0 || info.postscale != 1.0)) {
    return InvalidRequest(
        info.key, std::string("prescale and postscale need a floating or complex dtype, got ") +
                      DTypeName(info.dtype) + "; cast, or scale yourself");
  }
  if (!std::isfinite(info.prescale) || !std::isfinite(info.postscale)) {
    return InvalidRequest(info.key, "prescale and postscale must be finite");
  }
  return info.op == ReduceOp::kAdasum ? CheckAdasum(info) : Status();
}

// Without two ranks there is nobody to agree with.
Status CheckPair(const RequestInfo& info, int size) {
  const auto is_rank = [size](int32_t rank) { return rank >= 0 && rank < size; };
  if (is_rank(info.root) && is_rank(info.peer) && info.root != info.peer) return Status();
  return InvalidRequest(info.key, "expected a sender and a receiver, two different ranks in [0, " +
                                      std::to_string(size) + "), got " + std::to_string(info.root) +
                                      " and " + std::to_string(info.peer));
}

}  // namespace

Status InvalidRequest(const std::string& name, const std::string& message) {
  return Status(Code::kInvalidArgument, "\"" + name + "\": " + message,
                ErrorRecord{"invalid_argument", -1, "", 0, name, message, ""});
}

Status CheckSetSize(const RequestInfo& info, int size) {
  if (info.op != ReduceOp::kAdasum || (size & (size - 1)) == 0) return Status();
  return InvalidRequest(info.key,
                        "adasum needs 1, 2, 4, 8, ... ranks, got " + std::to_string(size) +
                            ". Use a process set of such a size, or a different operation");
}

Status CheckRequest(const Request& request, int size) {
  const RequestInfo& info = request.info;
  const std::string& name = info.key;
  if (name.empty()) return InvalidRequest(name, "an operation needs a name");
  if (!(info.timeout_s > 0) || info.timeout_s > 1e9) {
    return InvalidRequest(name, "the timeout must be more than 0 and at most 1e9 seconds, got " +
                                    std::to_string(info.timeout_s));
  }
  if (!request.group.empty() && info.kind != CollectiveKind::kRegister &&
      (info.kind != CollectiveKind::kAllreduce || request.bucket_index < 0 ||
       request.bucket_index >= request.bucket_count)) {
    return InvalidRequest(name,
                          "a bucket of a group is an allreduce with 0 <= bucket < bucket_count");
  }
  if (info.repeats && (info.kind != CollectiveKind::kAllreduce || !request.group.empty())) {
    return InvalidRequest(name, "only an allreduce that is no bucket of a group can repeat");
  }
  const char* kind = CollectiveKindName(info.kind);
  if (!info.splits.empty() && !TakesSplits(info.kind)) {
    return InvalidRequest(name, std::string(kind) + " takes no splits");
  }
  switch (info.kind) {
    case CollectiveKind::kBarrier:
    case CollectiveKind::kRegister:
    case CollectiveKind::kAddSet:
    case CollectiveKind::kRemoveSet:
    case CollectiveKind::kJoin:
      return Status();
    default:
      break;
  }
  if (DTypeSize(info.dtype) == 0) {
    return InvalidRequest(name, "dtype number " + std::to_string(static_cast<int>(info.dtype)) +
                                    " is not supported; cast to a number or bool");
  }
  if (!info.algorithm.empty() && !IsAlgorithm(info.kind, info.algorithm)) {
    return InvalidRequest(name, std::string("the algorithm of ") + kind + " must be one of " +
                                    KnownAlgorithms(info.kind) + "; got \"" + info.algorithm +
                                    "\"");
  }
  const bool is_pair = info.kind == CollectiveKind::kSendRecv;
  if ((HasRows(info.kind) || is_pair) && request.tensors.size() != 1) {
    return InvalidRequest(name, std::string(kind) + " takes one tensor");
  }
  if (HasRows(info.kind) && !request.allocate) {
    return InvalidRequest(name, std::string(kind) + " needs a callback that allocates its output");
  }
  if (is_pair) return CheckPair(info, size);
  return Reduces(info.kind) ? CheckReduction(info) : Status();
}

}  // namespace tfdist
