#include "collective/schedule.h"

#include <algorithm>
#include <functional>

#include "collective/slicing.h"

namespace tfdist {

const char* CollectiveKindName(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllreduce:
      return "allreduce";
    case CollectiveKind::kAllgather:
      return "allgather";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
    case CollectiveKind::kRegister:
      return "register";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kReduce:
      return "reduce";
    case CollectiveKind::kGather:
      return "gather";
    case CollectiveKind::kScatter:
      return "scatter";
    case CollectiveKind::kAlltoall:
      return "alltoall";
    case CollectiveKind::kSendRecv:
      return "sendrecv";
    case CollectiveKind::kAddSet:
      return "add_process_set";
    case CollectiveKind::kRemoveSet:
      return "remove_process_set";
  }
  return "invalid";
}

bool HasRoot(CollectiveKind kind) {
  return kind == CollectiveKind::kBroadcast || kind == CollectiveKind::kReduce ||
         kind == CollectiveKind::kGather || kind == CollectiveKind::kScatter ||
         kind == CollectiveKind::kSendRecv;
}

bool Reduces(CollectiveKind kind) {
  return kind == CollectiveKind::kAllreduce || kind == CollectiveKind::kReduceScatter ||
         kind == CollectiveKind::kReduce;
}

bool AllLocal(const ScheduleArgs& args) {
  return std::adjacent_find(args.host_of.begin(), args.host_of.end(), std::not_equal_to<>()) ==
         args.host_of.end();
}

SendCount CountSends(const Schedule& schedule, const std::vector<uint64_t>& slice_bytes,
                     uint64_t segment_bytes) {
  // Segments are whole multiples of 64 bytes, for every element size alike.
  const int64_t frame_bytes =
      SegmentElements(static_cast<int64_t>(segment_bytes), /*element_bytes=*/1);
  SendCount count;
  for (const Step& step : schedule.steps) {
    if (step.kind != StepKind::kSend) continue;
    const uint64_t bytes = slice_bytes[static_cast<size_t>(step.slice)];
    count.bytes += bytes;
    count.frames += static_cast<uint64_t>(SegmentCount(static_cast<int64_t>(bytes), frame_bytes));
  }
  return count;
}

}  // namespace tfdist
