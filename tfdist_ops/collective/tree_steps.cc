#include "collective/tree_steps.h"

#include <algorithm>

namespace tfdist {
namespace {

// The lowest set bit of v; for v == 0 the lowest power of two >= size.
int LowestBit(int v, int size) {
  int bit = 1;
  while (bit < size && (v & bit) == 0) bit <<= 1;
  return bit;
}

}  // namespace

TreeNode BinomialNode(int rank, int size, int root) {
  const int v = Mod(rank - root, size);
  const int lowest = LowestBit(v, size);
  TreeNode node;
  if (v != 0) node.parent = (v - lowest + root) % size;
  for (int bit = 1; bit < lowest && v + bit < size; bit <<= 1) {
    // The child v + 1 is odd, so a leaf; any other child v + bit has the child v + bit + 1, if that
    // is < size.
    const bool leaf = bit == 1 || v + bit + 1 >= size;
    node.children.push_back({(v + bit + root) % size, leaf});
  }
  return node;
}

std::vector<int32_t> BinomialSubtree(int32_t child, int size, int root) {
  const int v = Mod(child - root, size);
  std::vector<int32_t> ranks;
  for (int u = v; u < std::min(size, v + LowestBit(v, size)); ++u) {
    ranks.push_back((u + root) % size);
  }
  return ranks;
}

int32_t AddTreeReduce(Schedule* schedule, const TreeNode& node, uint16_t phase, int32_t slice) {
  int32_t last = -1;
  for (size_t c = 0; c < node.children.size(); ++c) {
    const bool finish = node.parent < 0 && c + 1 == node.children.size();
    Step step = ReduceInputs(phase, slice, {node.children[c].rank}, finish);
    step.raw = node.children[c].leaf;
    if (c > 0) {
      step.own = Place::kPartial;
      step.after = {last};
    }
    last = Add(schedule, step);
  }
  if (node.parent < 0) return last;
  const Place own = node.children.empty() ? Place::kInput : Place::kPartial;
  return Add(schedule, SendFrom(own, phase, slice, node.parent, last));
}

void AddTreeBroadcast(Schedule* schedule, const TreeNode& node, uint16_t phase, int32_t slice,
                      Place own, const After& ready) {
  After have = own == Place::kInput ? After() : ready;
  Place from = own;
  if (node.parent >= 0) {
    have = Add(schedule, CopyFrom(phase, slice, node.parent, ready));
    from = Place::kOutput;
  }
  for (auto child = node.children.rbegin(); child != node.children.rend(); ++child) {
    Add(schedule, SendFrom(from, phase, slice, child->rank, have));
  }
}

}  // namespace tfdist
