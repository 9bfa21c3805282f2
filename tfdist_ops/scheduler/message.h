// What ranks tell each other about operations: values, without behaviour.
#ifndef TFDIST_OPS_SCHEDULER_MESSAGE_H_
#define TFDIST_OPS_SCHEDULER_MESSAGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "collective/schedule.h"

namespace tfdist {

// "I am ready for this": a rank to the leader.
struct RequestInfo {
  std::string key;  // the name of the operation, the same on all ranks
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kInvalid;
  ReduceOp op = ReduceOp::kSum;
  int32_t root = 0;   // broadcast, reduce, gather, scatter; kSendRecv: the sender
  int32_t peer = -1;  // kSendRecv: the receiver
  double prescale = 1.0;
  double postscale = 1.0;
  double timeout_s = 0;
  bool bucket = false;  // of a registered group: its shapes are agreed on, one total stands here
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> splits;   // reduce_scatter, scatter, alltoall: rows by rank; empty = even
  std::string description;       // kRegister: one line a variable, the options last
  std::vector<uint8_t> present;  // kRegister: which variables have a gradient here
};

// "All run this now", or why not: the leader to all ranks. Several keys = fused into one
// collective.
struct Response {
  uint64_t ticket = 0;  // place in the order of all collectives; the tag of its data frames
  std::vector<std::string> keys;
  Status error;
  std::vector<int64_t> rows;     // see AgreedRows in scheduler/rows.h
  std::vector<uint8_t> present;  // kRegister: which variables have a gradient on any rank
};

int64_t ElementCount(const std::vector<int64_t>& shape);
std::string ShapeText(const std::vector<int64_t>& shape);  // "[2,3]"

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_MESSAGE_H_
