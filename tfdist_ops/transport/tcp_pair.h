// Two ends of a tcp link within this process.
#ifndef TFDIST_OPS_TRANSPORT_TCP_PAIR_H_
#define TFDIST_OPS_TRANSPORT_TCP_PAIR_H_

#include "transport/link_support.h"

namespace tfdist {

// Over the loopback, with a key of their own; see TransportEntry::make_pair.
Status MakeTcpPair(int a, int b, int doorbell_a, int doorbell_b, const Config& config,
                   LinkEnds* end_a, LinkEnds* end_b);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_TCP_PAIR_H_
