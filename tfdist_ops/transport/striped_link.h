// One link over several sockets, for networks that limit the rate of a single connection.
#ifndef TFDIST_OPS_TRANSPORT_STRIPED_LINK_H_
#define TFDIST_OPS_TRANSPORT_STRIPED_LINK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace tfdist {

// Bytes by which a frame of the data lane is longer on its stripe (one of the sockets).
constexpr size_t kStripeTrailerBytes = sizeof(uint64_t);

// `stripes`: at least one link, all to the same peer and in the same order at both ends. Their data
// lanes take payloads that are kStripeTrailerBytes longer than those of the link returned.
std::unique_ptr<Link> MakeStripedLink(std::vector<std::unique_ptr<Link>> stripes);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_STRIPED_LINK_H_
