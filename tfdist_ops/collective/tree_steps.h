// Reducing up a tree and broadcasting down it, for the algorithms that are made of trees.
#ifndef TFDIST_OPS_COLLECTIVE_TREE_STEPS_H_
#define TFDIST_OPS_COLLECTIVE_TREE_STEPS_H_

#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "collective/steps.h"

namespace tfdist {

// A rank's place in a tree.
struct TreeNode {
  struct Child {
    int32_t rank = 0;
    bool leaf = false;
  };
  int32_t parent = -1;  // -1: the root
  std::vector<Child> children;
};

// The binomial tree rooted at `root`. With v = (rank - root) mod size: the parent of v is v without
// its lowest set bit; the children of v are v + 2^k for the 2^k below that bit (all of them for the
// root), as far as they are < size; nearest first. The subtree of v is [v, v + lowest set bit).
TreeNode BinomialNode(int rank, int size, int root);
// The ranks below and including `child` of that tree.
std::vector<int32_t> BinomialSubtree(int32_t child, int size, int root);

// Leaves send their inputs up, inner ranks what they have reduced; the root finishes into its
// output. A child is reduced when those before it in the list have been. Returns the step that
// reads or writes the slice last; -1: a root alone, which has reduced nothing.
int32_t AddTreeReduce(Schedule* schedule, const TreeNode& node, uint16_t phase, int32_t slice);

// The root's output (own == kOutput, once `ready` has written it) or input travels down; the others
// receive into their outputs, after `ready`. Farthest children, which have most ranks below them,
// first.
void AddTreeBroadcast(Schedule* schedule, const TreeNode& node, uint16_t phase, int32_t slice,
                      Place own, const After& ready);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_TREE_STEPS_H_
