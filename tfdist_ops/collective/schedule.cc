#include "collective/schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "collective/adasum.h"
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
    case CollectiveKind::kJoin:
      return "join";
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

std::vector<std::vector<int32_t>> RanksByHost(const ScheduleArgs& args) {
  std::vector<int32_t> hosts;
  std::vector<std::vector<int32_t>> ranks;
  for (int32_t rank = 0; rank < args.size; ++rank) {
    const int32_t host = args.host_of.empty() ? 0 : args.host_of[static_cast<size_t>(rank)];
    const auto at = std::find(hosts.begin(), hosts.end(), host) - hosts.begin();
    if (at == static_cast<std::ptrdiff_t>(hosts.size())) {
      hosts.push_back(host);
      ranks.emplace_back();
    }
    ranks[static_cast<size_t>(at)].push_back(rank);
  }
  return ranks;
}

int PartCount(const AlgorithmEntry& entry, const ScheduleArgs& args) {
  return entry.parts != nullptr ? entry.parts(args) : args.size;
}

bool CarriesPartials(const Step& step) {
  if (step.kind == StepKind::kSend) return step.own == Place::kPartial;
  if (step.kind == StepKind::kCopy) return step.to == Place::kBeside;
  return step.kind == StepKind::kReduce && !step.raw && !step.peers.empty();
}

bool IsWhole(const Step& step) {
  return step.kind == StepKind::kDots || step.kind == StepKind::kCombine;
}

bool MovesDots(const Step& step) { return step.own == Place::kDots; }

bool BySegment(const Step& earlier, const Step& step) {
  return earlier.slice == step.slice && !IsWhole(earlier) && !IsWhole(step) &&
         MovesDots(earlier) == MovesDots(step);
}

int64_t DotsOfSegment(int64_t segment_bytes) {
  return std::max<int64_t>(1, segment_bytes / static_cast<int64_t>(sizeof(Dots)));
}

int64_t ScheduleSegment(const Schedule& schedule, DType dtype, int64_t segment_bytes) {
  const DType widest = schedule.partials ? AccumulationType(dtype) : dtype;
  return SegmentElements(segment_bytes, DTypeSize(widest));
}

SendCount CountSends(const Schedule& schedule, const std::vector<int64_t>& slice_elements,
                     DType dtype, int64_t segment_bytes, int tensors) {
  std::vector<int64_t> elements = slice_elements;
  for (const JoinedSlice& joined : schedule.joined) {
    const auto first = slice_elements.begin() + joined.first;
    elements.push_back(std::accumulate(first, first + joined.count, int64_t{0}));
  }
  const int64_t segment = ScheduleSegment(schedule, dtype, segment_bytes);
  SendCount count;
  for (const Step& step : schedule.steps) {
    if (step.kind != StepKind::kSend) continue;
    if (MovesDots(step)) {
      count.bytes += static_cast<uint64_t>(tensors) * sizeof(Dots);
      count.frames += static_cast<uint64_t>(SegmentCount(tensors, DotsOfSegment(segment_bytes)));
      continue;
    }
    const int64_t n = elements[static_cast<size_t>(step.slice)];
    const size_t bytes = DTypeSize(CarriesPartials(step) ? AccumulationType(dtype) : dtype);
    count.bytes += static_cast<uint64_t>(n) * bytes;
    count.frames += static_cast<uint64_t>(SegmentCount(n, segment));
  }
  return count;
}

}  // namespace tfdist
