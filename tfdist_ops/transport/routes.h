// Routes of the overlay: pure functions on rank numbers.
//
// The ranks form a ring of `size`. Rank r has links to r ± 2^k (mod size) for all 2^k < size: at
// most 2 ceil(log2(size)) neighbors, and the relation is symmetric. A message goes to the
// neighbor that is nearest to its destination on the ring: greedy routing as in I. Stoica et al.,
// "Chord: A Scalable Peer-to-peer Lookup Service for Internet Applications", SIGCOMM 2001, section
// 4, with links both ways.
//
// Hops: let d be the distance to the destination and 2^k the power of two nearest to it. One hop
// leaves |d - 2^k| <= d / 3, so log3(size / 2) + 1 hops are enough, which is at most log2(size).
// Every hop makes the distance smaller, whichever ranks each rank considers usable, so no message
// can travel in a circle.
#ifndef TFDIST_OPS_TRANSPORT_ROUTES_H_
#define TFDIST_OPS_TRANSPORT_ROUTES_H_

#include <vector>

namespace tfdist {

// Steps between two ranks, the shorter way round.
int RingDistance(int a, int b, int size);
// Ascending.
std::vector<int> OverlayNeighbours(int rank, int size);
// The rank of `usable` (neighbors of `from`) to which a message for `to` goes: the one nearest to
// `to`, the first of two that are equally near; -1 if none of them is nearer than `from` itself.
int NextHop(int from, int to, int size, const std::vector<int>& usable);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_ROUTES_H_
