#include "scheduler/plan.h"

#include <algorithm>
#include <string>
#include <utility>

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
  if (!HasRoot(info.kind)) return args;
  const auto root = std::find(set.ranks.begin(), set.ranks.end(), info.root);
  if (root == set.ranks.end()) {
    return TFDIST_INTERNAL("root " + std::to_string(info.root) + " of \"" + info.key +
                           "\" is not in its process set");
  }
  args.root = static_cast<int>(root - set.ranks.begin());
  return args;
}

StatusOr<const AlgorithmEntry*> AlgorithmFor(const RequestInfo& info, const ScheduleArgs& args,
                                             const Config& config) {
  const bool tunable = info.kind == CollectiveKind::kAllreduce;
  const std::string wanted = tunable ? config.allreduce_algorithm : "auto";
  const AlgorithmEntry* entry = SelectAlgorithm(info.kind, wanted, args, info.dtype);
  // A wanted algorithm that cannot do this case gives way to one that can.
  if (entry == nullptr) entry = SelectAlgorithm(info.kind, "auto", args, info.dtype);
  if (entry == nullptr) {
    return TFDIST_INTERNAL(std::string("no algorithm for ") + CollectiveKindName(info.kind) +
                           " of " + DTypeName(info.dtype));
  }
  return entry;
}

}  // namespace

StatusOr<Plan> PlanOperation(const PlanInput& input, const Config& config) {
  const RequestInfo& info = input.info;
  StatusOr<ScheduleArgs> args = ArgsFor(info, input.set, config);
  TFDIST_RETURN_IF_ERROR(args.status());
  StatusOr<const AlgorithmEntry*> entry = AlgorithmFor(info, args.value(), config);
  TFDIST_RETURN_IF_ERROR(entry.status());
  const size_t element_bytes = DTypeSize(info.dtype);
  Plan plan;
  plan.schedule = entry.value()->make(args.value());
  if (info.kind == CollectiveKind::kAllreduce) {
    plan.slices = CutAllreduce(input.tensors, element_bytes, input.set.size());
  } else if (info.kind == CollectiveKind::kBroadcast) {
    plan.slices = CutBroadcast(input.tensors, args.value().root == input.set.index);
  } else {
    const int64_t row_elements = RowElements(info.shapes[0]);
    std::vector<int64_t> counts;
    for (int64_t count : input.rows) counts.push_back(count * row_elements);
    plan.slices = CutAllgather(input.tensors[0], element_bytes, counts, input.set.index);
  }
  return plan;
}

}  // namespace tfdist
