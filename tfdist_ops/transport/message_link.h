// A link whose data lane is carried by messages of another library (messages.h), such as MPI.
#ifndef TFDIST_OPS_TRANSPORT_MESSAGE_LINK_H_
#define TFDIST_OPS_TRANSPORT_MESSAGE_LINK_H_

#include <memory>

#include "base/config.h"
#include "base/status.h"
#include "transport/link.h"
#include "transport/messages.h"

namespace tfdist {

// `control`: a link to the same peer, which carries the control lane and tells when the peer is
// gone. The functions of `messages` must stay callable as long as the process lives: they may still
// use the memory of messages that are in flight when the link ends, which is never freed.
StatusOr<std::unique_ptr<Link>> MakeMessageLink(std::unique_ptr<Link> control,
                                                const tfdist_messages& messages,
                                                const Config& config);

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_MESSAGE_LINK_H_
