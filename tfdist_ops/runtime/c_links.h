// Links as they come through the C interface.
#ifndef TFDIST_OPS_RUNTIME_C_LINKS_H_
#define TFDIST_OPS_RUNTIME_C_LINKS_H_

#include <memory>
#include <string>

#include "base/config.h"
#include "base/status.h"
#include "runtime/c_api.h"
#include "runtime/runtime.h"
#include "transport/shm_window.h"

namespace tfdist {

// INVALID_ARGUMENT of a call of the C interface.
Status BadArgument(const std::string& text);

// Closes the descriptors of `count` links that nobody has taken.
void CloseLinks(const tfdist_link* links, int32_t count);
// State that all links of a rank share; not owned.
struct OwnEnd {
  int doorbell_fd = -1;
  std::shared_ptr<ShmWindow> window;
};
// From now on, messages carry the data of all links that would use TCP alone. Once in a process.
Status UseMessages(const tfdist_messages* messages);
// Owns the descriptors, also when it fails.
StatusOr<std::unique_ptr<Link>> MakeLink(const tfdist_link& link, const World& world,
                                         const OwnEnd& own, const Config& config);
// The links of tfdist_init, by rank: a full mesh, or the neighbors of the overlay. Owns all their
// descriptors, also when it fails.
StatusOr<Links> MakeLinks(const tfdist_world& in, const World& world,
                          const std::shared_ptr<ShmWindow>& window, const Config& config);
// Whether a world of `size` ranks has an overlay in place of a full mesh.
inline bool HasOverlay(int size, const Config& config) { return size > config.mesh_ranks; }

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_C_LINKS_H_
