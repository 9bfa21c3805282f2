// The order of ranks around a ring, by TFDIST_RING_ORDER. Pure.
//
//   ranks 0 2 on host A, 1 3 on host B
//   "rank"      0 → 1 → 2 → 3 → 0   every hop crosses between the hosts
//   "topology"  0 → 2 → 1 → 3 → 0   two do: host by host, in the order of their first ranks
//   "2,0,3,1"   exactly this order
//
// With "topology" a link between two hosts carries the data of one hop, not of one for each rank
// there. In a world that is numbered host by host the first two orders are the same. A different
// ring adds in a different order, so it is part of the configuration and the same on all ranks.
#ifndef TFDIST_OPS_COLLECTIVE_RING_ORDER_H_
#define TFDIST_OPS_COLLECTIVE_RING_ORDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "collective/schedule.h"

namespace tfdist {

// An error that says what is expected, when `wanted` is no order of the `size` ranks of a world.
Status CheckRingOrder(const std::string& wanted, int size);

// The members of a process set in the order of the ring, as indices into `ranks`, which are ranks
// of the world, ascending; empty where that is 0, 1, 2 and so on. `host_of`: by index; empty: all
// on one host. The members keep the world's order ("2,0,3,1" with only ranks 0 and 3: 0, 3).
// `wanted` has passed CheckRingOrder.
std::vector<int32_t> RingOrder(const std::string& wanted, const std::vector<int32_t>& ranks,
                               const std::vector<int32_t>& host_of);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_RING_ORDER_H_
