// Descriptions of operations that ranks send each other: values, without behavior.
#ifndef TFDIST_OPS_SCHEDULER_REQUEST_INFO_H_
#define TFDIST_OPS_SCHEDULER_REQUEST_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "collective/schedule.h"

namespace tfdist {

// "I am ready for this": a rank to the leader of its process set.
struct RequestInfo {
  std::string key;   // the name of the operation, the same on all ranks
  uint32_t set = 0;  // process set; travels in the header of the frame
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kInvalid;
  ReduceOp op = ReduceOp::kSum;
  int32_t root = 0;   // broadcast, reduce, gather, scatter; kSendRecv: the sender
  int32_t peer = -1;  // kSendRecv: the receiver
  double prescale = 1.0;
  double postscale = 1.0;
  double timeout_s = 0;
  // The name of an algorithm (collective/selection.h); "": the configured one.
  std::string algorithm;
  // A bucket of a registered group: `shapes` is one total, because its shapes are already agreed.
  bool bucket = false;
  // allreduce outside of any group: the same will come again under this key (ticket_order.h)
  bool repeats = false;
  std::vector<std::vector<int64_t>> shapes;
  // reduce_scatter, scatter, alltoall: rows by rank; empty = even
  std::vector<int64_t> splits;
  // kRegister: one line a variable, the options last; kAddSet: the ranks, "0,2,5"; kRemoveSet: the
  // set's id in decimal.
  std::string description;
  // kRegister: which variables have a gradient here; kRemoveSet: {1} when this rank still has
  // operations of the set in flight.
  std::vector<uint8_t> present;
  // The ticket that it has if it is predicted (ticket_order.h); 0: it can't be.
  uint64_t predicted = 0;
  // Needed by a rank that has joined, to take part (join.h). Of allreduce, reduce, broadcast: the
  // elements and the hint (slicing.h) of each tensor; of a bucket and kRegister: the group's id.
  std::vector<int64_t> sizes;
  std::vector<uint64_t> hints;
  std::string group;
  int32_t bucket_index = 0;
  int32_t bucket_count = 0;

  // Resets to the defaults, but keeps the memory of lists and texts; `shapes` keeps its length,
  // with empty shapes.
  void Clear();
};

// "All run this now", or why not: the leader to all ranks. Several keys = fused into one
// collective.
struct Response {
  uint64_t ticket = 0;  // place in the order of its set's collectives; the tag of its data frames
  std::vector<std::string> keys;
  Status error;
  std::vector<int64_t> rows;     // see AgreedRows in scheduler/row_counts.h
  std::vector<uint8_t> present;  // kRegister: which variables have a gradient on any rank
  uint64_t number = 0;           // kRegister: of the group (0: none is left); kAddSet: of the set
  // For each key, the number by which it is predicted from now on; 0 or past the end: none.
  std::vector<uint32_t> numbers;
  // Ranks that take part only because they have joined. If there are any, `infos` says in what,
  // one for each key.
  std::vector<int32_t> joined;
  std::vector<RequestInfo> infos;
  int32_t last = -1;       // the rank that was ready last; -1: not known
  bool ends_work = false;  // an error that ends all work; stays on the leader
};

// Whether two requests, of two ranks or of one, are the same in everything but `timeout_s`,
// `repeats`, `set` and `predicted`.
bool SameRequest(const RequestInfo& a, const RequestInfo& b);

int64_t ElementCount(const std::vector<int64_t>& shape);
int64_t ShapeBytes(const RequestInfo& info);               // of all its shapes
std::string ShapeText(const std::vector<int64_t>& shape);  // "[2,3]"

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_REQUEST_INFO_H_
