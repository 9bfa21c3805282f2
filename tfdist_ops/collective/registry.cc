// The ordered table of algorithms. To add one: its file, its name in the list below, its row in the
// table. Conformance tests and the benchmark go through the table.
#include <algorithm>

#include "collective/schedule.h"

namespace tfdist {

AlgorithmEntry RingAllreduce();             // ring_allreduce.cc
AlgorithmEntry PairwiseAllreduce();         // pairwise_allreduce.cc
AlgorithmEntry OneShotAllreduce();          // one_shot_allreduce.cc
AlgorithmEntry TwoLevelAllreduce();         // two_level_allreduce.cc
AlgorithmEntry HalvingDoublingAllreduce();  // halving_doubling_allreduce.cc
AlgorithmEntry ButterflyAllreduce();        // butterfly_allreduce.cc
AlgorithmEntry TreeAllreduce();             // tree_allreduce.cc
AlgorithmEntry DoubleTreeAllreduce();       // double_tree_allreduce.cc
AlgorithmEntry TorusAllreduce();            // torus_allreduce.cc
AlgorithmEntry StarAllreduce();             // star_allreduce.cc
AlgorithmEntry RingReduceScatter();         // ring_reduce_scatter.cc
AlgorithmEntry PairwiseReduceScatter();     // pairwise_reduce_scatter.cc
AlgorithmEntry RingAllgather();             // ring_allgather.cc
AlgorithmEntry PairwiseAllgather();         // pairwise_allgather.cc
AlgorithmEntry BinomialBroadcast();         // binomial_broadcast.cc
AlgorithmEntry StarBroadcast();             // star_broadcast.cc
AlgorithmEntry BinomialReduce();            // binomial_reduce.cc
AlgorithmEntry StarReduce();                // star_reduce.cc
AlgorithmEntry StarGather();                // star_gather.cc
AlgorithmEntry BinomialGather();            // binomial_gather.cc
AlgorithmEntry StarScatter();               // star_scatter.cc
AlgorithmEntry BinomialScatter();           // binomial_scatter.cc
AlgorithmEntry PairwiseAlltoall();          // pairwise_alltoall.cc
AlgorithmEntry DirectSendRecv();            // direct_sendrecv.cc

const std::vector<AlgorithmEntry>& Algorithms() {
  static const std::vector<AlgorithmEntry> table = {
      RingAllreduce(),     PairwiseAllreduce(),        OneShotAllreduce(),
      TwoLevelAllreduce(), HalvingDoublingAllreduce(), ButterflyAllreduce(),
      TreeAllreduce(),     DoubleTreeAllreduce(),      TorusAllreduce(),
      StarAllreduce(),     RingReduceScatter(),        PairwiseReduceScatter(),
      RingAllgather(),     PairwiseAllgather(),        BinomialBroadcast(),
      StarBroadcast(),     BinomialReduce(),           StarReduce(),
      StarGather(),        BinomialGather(),           StarScatter(),
      BinomialScatter(),   PairwiseAlltoall(),         DirectSendRecv(),
  };
  return table;
}

namespace {

// Several hosts, each with several ranks.
bool ManyOnEachHost(const ScheduleArgs& args) {
  const std::vector<std::vector<int32_t>> hosts = RanksByHost(args);
  return hosts.size() > 1 && std::all_of(hosts.begin(), hosts.end(),
                                         [](const auto& ranks) { return ranks.size() > 1; });
}

// What "auto" means where it is not the first row that fits. It depends on the kind, the type and
// the topology, never on the length: what a tensor is fused with must not change its bits.
const char* Preferred(CollectiveKind kind, const ScheduleArgs& args, DType dtype) {
  if (args.sparse && kind == CollectiveKind::kGather) return "binomial";
  if (args.sparse && kind == CollectiveKind::kScatter) return "binomial";
  if (kind != CollectiveKind::kAllreduce && kind != CollectiveKind::kReduceScatter) return "auto";
  // Inside a host memory bandwidth is the limit, not messages: the owner of a slice reads all
  // inputs once and adds them in rank order, with one pass over the output instead of size - 1.
  if (AllLocal(args) && !args.sparse) return "pairwise";
  if (kind == CollectiveKind::kAllreduce && ManyOnEachHost(args)) return "two_level";
  // A ring sends partial results, which are float32 for half types: pairwise sends inputs.
  if (!args.sparse) return IsHalf(dtype) ? "pairwise" : "ring";
  // Partners at distances of powers of two, which have links already; and log2(size) steps.
  const bool power_of_two = (args.size & (args.size - 1)) == 0;
  return kind == CollectiveKind::kAllreduce && power_of_two ? "halving_doubling" : "ring";
}

}  // namespace

const AlgorithmEntry* SelectAlgorithm(CollectiveKind kind, const std::string& wanted,
                                      const ScheduleArgs& args, DType dtype) {
  const std::string name = wanted == "auto" ? Preferred(kind, args, dtype) : wanted;
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != kind || !entry.supports(args, dtype)) continue;
    if (name == "auto" || name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace tfdist
