// One link over several sockets, for networks that do not give one connection all of their rate.
#ifndef TFDIST_OPS_TRANSPORT_STRIPED_LINK_H_
#define TFDIST_OPS_TRANSPORT_STRIPED_LINK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace tfdist {

// What a frame of the data lane is longer on its stripe.
constexpr size_t kStripeTrailerBytes = sizeof(uint64_t);

// `stripes`: links to one peer, at least one, in the same order at both ends, whose data lanes take
// kStripeTrailerBytes more than is sent over all.
std::unique_ptr<Link> MakeStripedLink(std::vector<std::unique_ptr<Link>> stripes);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_STRIPED_LINK_H_
