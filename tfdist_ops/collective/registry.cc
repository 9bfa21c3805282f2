// The ordered table of algorithms. To add one: its file, its name in the list below, its row in the
// table. Conformance tests and the benchmark go through the table.
#include "collective/schedule.h"

namespace tfdist {

AlgorithmEntry RingAllreduce();      // ring_allreduce.cc
AlgorithmEntry PairwiseAllreduce();  // pairwise_allreduce.cc
AlgorithmEntry RingAllgather();      // ring_allgather.cc
AlgorithmEntry BinomialBroadcast();  // binomial_broadcast.cc

const std::vector<AlgorithmEntry>& Algorithms() {
  static const std::vector<AlgorithmEntry> table = {
      RingAllreduce(),
      PairwiseAllreduce(),
      RingAllgather(),
      BinomialBroadcast(),
  };
  return table;
}

const AlgorithmEntry* SelectAlgorithm(CollectiveKind kind, const std::string& wanted,
                                      const ScheduleArgs& args, DType dtype) {
  // Inside a host memory bandwidth is the limit, not messages: the owner of a slice reads all
  // inputs once and adds them in rank order, with one pass over the output instead of size - 1.
  const bool prefer_pairwise =
      wanted == "auto" && kind == CollectiveKind::kAllreduce && AllLocal(args) && !args.sparse;
  const std::string name = prefer_pairwise ? "pairwise" : wanted;
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != kind || !entry.supports(args, dtype)) continue;
    if (name == "auto" || name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace tfdist
