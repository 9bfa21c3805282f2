#include "scheduler/operation_plan.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "collective/adasum.h"
#include "collective/ring_order.h"
#include "scheduler/row_counts.h"

namespace tfdist {
namespace {

int64_t RowElements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (size_t i = 1; i < shape.size(); ++i) elements *= shape[i];
  return elements;
}

StatusOr<ScheduleArgs> ArgsFor(const RequestInfo& info, const SetView& set, const Config& config) {
  ScheduleArgs args;
  args.rank = set.index;
  args.size = set.size();
  args.sparse = set.size() > config.mesh_ranks;
  args.host_of = set.host_of;
  args.ring = RingOrder(config.ring_order, set.ranks, set.host_of);
  if (!HasRoot(info.kind)) return args;
  const auto root = std::find(set.ranks.begin(), set.ranks.end(), info.root);
  if (root == set.ranks.end()) {
    return TFDIST_INTERNAL("root " + std::to_string(info.root) + " of \"" + info.key +
                           "\" is not in its process set");
  }
  args.root = static_cast<int>(root - set.ranks.begin());
  return args;
}

int64_t BytesOf(const std::vector<TensorView>& tensors, DType dtype) {
  int64_t elements = 0;
  for (const TensorView& tensor : tensors) elements += tensor.elements;
  return elements * static_cast<int64_t>(DTypeSize(dtype));
}

StatusOr<const AlgorithmEntry*> AlgorithmFor(const RequestInfo& info, int64_t bytes,
                                             const SetView& set, const ScheduleArgs& args,
                                             const Config& config) {
  if (info.op == ReduceOp::kAdasum && info.kind == CollectiveKind::kAllreduce) {
    if (AdasumAllreduce().supports(args, info.dtype)) return &AdasumAllreduce();
    return TFDIST_INTERNAL("no adasum of " + std::to_string(args.size) + " ranks");
  }
  const std::string& wanted =
      info.algorithm.empty() ? WantedAlgorithm(info.kind, config) : info.algorithm;
  const auto select = [&](const std::string& name) {
    return SelectAlgorithm(info.kind, name, args, info.dtype, bytes, set.rules);
  };
  const AlgorithmEntry* entry = select(wanted);
  // A wanted algorithm that cannot do this case (a torus of a prime number of ranks) gives way to
  // one that can.
  if (entry == nullptr) entry = select("auto");
  if (entry == nullptr) {
    return TFDIST_INTERNAL(std::string("no algorithm for ") + CollectiveKindName(info.kind) +
                           " of " + DTypeName(info.dtype));
  }
  return entry;
}

// For all that is fused.
StatusOr<const AlgorithmEntry*> AlgorithmTogether(const PlanInput& input, const ScheduleArgs& args,
                                                  const Config& config) {
  const int64_t own = DecidingBytes(input.info, input.rows);
  StatusOr<const AlgorithmEntry*> alone = AlgorithmFor(input.info, own, input.set, args, config);
  if (!alone.ok() || input.info.kind != CollectiveKind::kAllreduce) return alone;
  const int64_t all = BytesOf(input.tensors, input.info.dtype);
  if (all <= own) return alone;
  StatusOr<const AlgorithmEntry*> chosen = AlgorithmFor(input.info, all, input.set, args, config);
  TFDIST_RETURN_IF_ERROR(chosen.status());
  return KeepBits(alone.value(), chosen.value(), args, input.info.dtype);
}

std::vector<Slice> CutFor(const PlanInput& input, const AlgorithmEntry& entry,
                          const ScheduleArgs& args) {
  const RequestInfo& info = input.info;
  const size_t element_bytes = DTypeSize(info.dtype);
  std::vector<int64_t> counts;  // elements
  for (int64_t rows : input.rows) counts.push_back(rows * RowElements(info.shapes[0]));
  switch (info.kind) {
    case CollectiveKind::kAllreduce:
      return CutAllreduce(input.tensors, element_bytes, PartCount(entry, args));
    case CollectiveKind::kReduce:
      return CutWhole(input.tensors, /*has_input=*/true);
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kSendRecv:
      return CutWhole(input.tensors, args.rank == args.root);
    case CollectiveKind::kAllgather:
      return CutAllgather(input.tensors[0], element_bytes, counts, args.rank);
    case CollectiveKind::kGather: {
      TensorView tensor = input.tensors[0];
      if (args.rank != args.root) tensor.output = nullptr;
      return CutAllgather(tensor, element_bytes, counts, args.rank);
    }
    case CollectiveKind::kReduceScatter:
      return CutScatter(input.tensors[0], element_bytes, counts, args.rank);
    case CollectiveKind::kScatter: {
      TensorView tensor = input.tensors[0];
      if (args.rank != args.root) tensor.input = nullptr;
      return CutScatter(tensor, element_bytes, counts, args.rank);
    }
    case CollectiveKind::kAlltoall:
      return CutAlltoall(input.tensors[0], element_bytes, counts, args.rank, args.size);
    default:
      return {};  // kinds without data, for which AlgorithmFor has failed
  }
}

// Inside a host, data under way between ranks should stay in their caches: the more ranks there
// are, the shorter the segments. But where ranks share a processor, each segment may cost a context
// switch.
int64_t SegmentBytes(const ScheduleArgs& args, const Config& config) {
  constexpr int64_t kOfAllRanks = 512 << 10;
  constexpr int64_t kMost = 128 << 10;
  constexpr int64_t kLeast = 16 << 10;
  if (!AllLocal(args)) return config.segment_bytes;
  const int64_t share = kOfAllRanks / args.size / 64 * 64;
  return std::min(config.segment_bytes, std::clamp(share, kLeast, kMost));
}

}  // namespace

StatusOr<Plan> PlanOperation(const PlanInput& input, const Config& config) {
  StatusOr<ScheduleArgs> args = ArgsFor(input.info, input.set, config);
  TFDIST_RETURN_IF_ERROR(args.status());
  if (HasRows(input.info.kind) && !RowsFit(input.rows, input.info, input.set)) {
    return TFDIST_INTERNAL("the rows announced for \"" + input.info.key + "\" do not fit");
  }
  StatusOr<const AlgorithmEntry*> entry = AlgorithmTogether(input, args.value(), config);
  TFDIST_RETURN_IF_ERROR(entry.status());
  return Plan{entry.value()->make(args.value()), CutFor(input, *entry.value(), args.value()),
              SegmentBytes(args.value(), config)};
}

int64_t DecidingBytes(const RequestInfo& info, const std::vector<int64_t>& rows) {
  if (!HasRows(info.kind)) return ShapeBytes(info);
  int64_t elements = 0;
  for (int64_t count : rows) elements += count * RowElements(info.shapes[0]);
  return elements * static_cast<int64_t>(DTypeSize(info.dtype));
}

StatusOr<const AlgorithmEntry*> AlgorithmAlone(const RequestInfo& info,
                                               const std::vector<int64_t>& rows, const SetView& set,
                                               const Config& config) {
  StatusOr<ScheduleArgs> args = ArgsFor(info, set, config);
  TFDIST_RETURN_IF_ERROR(args.status());
  return AlgorithmFor(info, DecidingBytes(info, rows), set, args.value(), config);
}

const std::string& WantedAlgorithm(CollectiveKind kind, const Config& config) {
  static const std::string automatic = "auto";
  switch (kind) {
    case CollectiveKind::kAllreduce:
      return config.allreduce_algorithm;
    case CollectiveKind::kReduceScatter:
      return config.reduce_scatter_algorithm;
    case CollectiveKind::kAllgather:
      return config.allgather_algorithm;
    case CollectiveKind::kBroadcast:
      return config.broadcast_algorithm;
    case CollectiveKind::kReduce:
      return config.reduce_algorithm;
    case CollectiveKind::kGather:
      return config.gather_algorithm;
    case CollectiveKind::kScatter:
      return config.scatter_algorithm;
    case CollectiveKind::kAlltoall:
      return config.alltoall_algorithm;
    default:
      return automatic;
  }
}

std::string KnownAlgorithms(CollectiveKind kind) {
  std::string known = "auto";
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind == kind) known += std::string(", ") + entry.name;
  }
  return known;
}

bool IsAlgorithm(CollectiveKind kind, const std::string& name) {
  return name == "auto" ||
         std::any_of(Algorithms().begin(), Algorithms().end(), [&](const AlgorithmEntry& entry) {
           return entry.kind == kind && name == entry.name;
         });
}

Status CheckAlgorithmNames(const Config& config) {
  for (CollectiveKind kind :
       {CollectiveKind::kAllreduce, CollectiveKind::kReduceScatter, CollectiveKind::kAllgather,
        CollectiveKind::kBroadcast, CollectiveKind::kReduce, CollectiveKind::kGather,
        CollectiveKind::kScatter, CollectiveKind::kAlltoall}) {
    const std::string& wanted = WantedAlgorithm(kind, config);
    if (IsAlgorithm(kind, wanted)) continue;
    std::string variable = std::string("TFDIST_") + CollectiveKindName(kind) + "_ALGORITHM";
    std::transform(variable.begin(), variable.end(), variable.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    const std::string message =
        variable + ": expected one of " + KnownAlgorithms(kind) + "; got \"" + wanted + "\"";
    return Status(Code::kInvalidArgument, message,
                  ErrorRecord{"invalid_argument", -1, "", 0, "", message, ""});
  }
  return Status();
}

}  // namespace tfdist
