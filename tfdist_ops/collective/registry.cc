// The ordered table of algorithms. To add one, write its file, declare its function in the list
// below, and add its row to the table. Conformance tests and the benchmark go through the table.
#include "collective/schedule.h"

namespace tfdist {

AlgorithmEntry RingAllreduce();             // ring_allreduce.cc
AlgorithmEntry PairwiseAllreduce();         // pairwise_allreduce.cc
AlgorithmEntry OneShotAllreduce();          // one_shot_allreduce.cc
AlgorithmEntry TwoLevelAllreduce();         // two_level_allreduce.cc
AlgorithmEntry TwoLevelRingAllreduce();     // two_level_ring_allreduce.cc
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
      RingAllreduce(),
      PairwiseAllreduce(),
      OneShotAllreduce(),
      TwoLevelAllreduce(),
      TwoLevelRingAllreduce(),
      HalvingDoublingAllreduce(),
      ButterflyAllreduce(),
      TreeAllreduce(),
      DoubleTreeAllreduce(),
      TorusAllreduce(),
      StarAllreduce(),
      RingReduceScatter(),
      PairwiseReduceScatter(),
      RingAllgather(),
      PairwiseAllgather(),
      BinomialBroadcast(),
      StarBroadcast(),
      BinomialReduce(),
      StarReduce(),
      StarGather(),
      BinomialGather(),
      StarScatter(),
      BinomialScatter(),
      PairwiseAlltoall(),
      DirectSendRecv(),
  };
  return table;
}

const AlgorithmEntry* FindAlgorithm(CollectiveKind kind, const std::string& name,
                                    const ScheduleArgs& args, DType dtype) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != kind || !entry.supports(args, dtype)) continue;
    if (name == "auto" || name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace tfdist
