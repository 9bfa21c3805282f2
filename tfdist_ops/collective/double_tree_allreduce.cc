// allreduce "double_tree": two binary trees, half of the data up and down each. A rank that is an
// inner node of one tree is a leaf of the other, so that all ranks send and receive about the same.
//
// Tree 1 has its nodes in order, numbered from 1: odd numbers are leaves; i with lowest set bit b
// has the left child i - b/2 and the right child i + b/2, or, where that is > size, the next one
// that is not (i + b/4, ...); the root is the highest power of two <= size. Node i is rank i - 1.
// Tree 2 is the same with other ranks: size even, mirrored (node i is rank size - i); size odd,
// shifted by one (node i is rank i mod size). Either way its even nodes are tree 1's odd ones.
//
//   six ranks   tree 1: 3 <--- 1 <--- 0, 2         tree 2: 2 <--- 4 <--- 5, 3
//                       3 <--- 5 <--- 4                    2 <--- 0 <--- 1
//
// Steps: 4 floor(log2 size) or fewer. On the wire per rank: at most twice the data (an inner rank:
// half of it to its parent and to each of two children, and as a leaf half of it to its parent).
// Segments follow each other through all levels: the bandwidth of a ring at the latency of a tree.
//
// Order of additions: (left subtree op own) op right subtree, the operands of an addition in the
// order of their ranks, but partial results before inputs. Partial results of half types travel as
// float32 and the roots round once.
//
// In place (input == output): as tree_allreduce.cc, in each half.
//
// Source: P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast,
// reduction and scan", Parallel Computing 35 (2009), the in-order trees and their mirror and shift.
#include "collective/schedule.h"
#include "collective/steps.h"
#include "collective/tree_steps.h"

namespace tfdist {
namespace {

enum Phase : uint16_t { kUp = 0, kDown = 1 };

int Parts(const ScheduleArgs& /*args*/) { return 2; }

bool Supports(const ScheduleArgs& /*args*/, DType dtype) { return IsReducible(dtype); }

int LowestBit(int i) { return i & -i; }

// The parent of node i; 0: it is the root.
int ParentOf(int i, int size) {
  const int bit = LowestBit(i);
  const int parent = (i - bit) | (bit << 1);
  return parent <= size ? parent : i - bit;
}

// The right child of node i; 0: none.
int RightOf(int i, int size) {
  int step = LowestBit(i) / 2;
  while (step > 0 && i + step > size) step /= 2;
  return step > 0 ? i + step : 0;
}

// Nodes and ranks of one of the two trees.
struct Numbering {
  int size;
  bool second;
  int RankOf(int node) const {
    if (!second) return node - 1;
    return size % 2 == 0 ? size - node : node % size;
  }
  int NodeOf(int rank) const {
    if (!second) return rank + 1;
    if (size % 2 == 0) return size - rank;
    return rank == 0 ? size : rank;
  }
};

TreeNode NodeFor(int rank, const Numbering& numbering) {
  const int i = numbering.NodeOf(rank);
  TreeNode node;
  const int parent = ParentOf(i, numbering.size);
  if (parent > 0) node.parent = numbering.RankOf(parent);
  if (i % 2 == 1) return node;
  for (int child : {i - LowestBit(i) / 2, RightOf(i, numbering.size)}) {
    if (child > 0) node.children.push_back({numbering.RankOf(child), child % 2 == 1});
  }
  return node;
}

Schedule Make(const ScheduleArgs& args) {
  Schedule schedule;
  schedule.partials = args.size > 2;
  for (int32_t half = 0; half < 2; ++half) {
    if (args.size == 1) {
      Add(&schedule, Local(half));
      continue;
    }
    const TreeNode node = NodeFor(args.rank, {args.size, half == 1});
    const int32_t last = AddTreeReduce(&schedule, node, kUp, half);
    AddTreeBroadcast(&schedule, node, kDown, half, Place::kOutput, last);
  }
  return schedule;
}

}  // namespace

AlgorithmEntry DoubleTreeAllreduce() {
  return {"double_tree", CollectiveKind::kAllreduce, Supports, Make, Parts};
}

}  // namespace tfdist
