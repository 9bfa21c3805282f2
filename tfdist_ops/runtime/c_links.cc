#include "runtime/c_links.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "transport/message_link.h"
#include "transport/routes.h"
#include "transport/transport.h"

namespace tfdist {
namespace {

std::atomic<const tfdist_messages*> used_messages{nullptr};

// The ranks to which a rank has links from the start.
std::vector<int> FirstPeers(const World& world, const Config& config) {
  if (HasOverlay(world.size, config)) return OverlayNeighbours(world.rank, world.size);
  std::vector<int> peers;
  for (int rank = 0; rank < world.size; ++rank) {
    if (rank != world.rank) peers.push_back(rank);
  }
  return peers;
}

Status CheckPeers(const tfdist_world& in, const World& world, const Config& config) {
  std::vector<int> found;
  for (int32_t i = 0; i < in.link_count; ++i) found.push_back(in.links[i].peer);
  std::sort(found.begin(), found.end());
  const std::vector<int> expected = FirstPeers(world, config);
  if (found == expected) return Status();
  return BadArgument("tfdist_init: rank " + std::to_string(world.rank) + " of " +
                     std::to_string(world.size) + " got " + std::to_string(found.size()) +
                     " links; expected " + std::to_string(expected.size()) +
                     ", one to each rank that it is connected with from the start "
                     "(TFDIST_MESH_RANKS=" +
                     std::to_string(config.mesh_ranks) + ")");
}

}  // namespace

Status BadArgument(const std::string& text) {
  return Status(Code::kInvalidArgument, text,
                ErrorRecord{"invalid_argument", -1, "", 0, "", text, ""});
}

void CloseLinks(const tfdist_link* links, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    for (int fd :
         {links[i].socket_fd, links[i].memory_fd, links[i].peer_doorbell_fd, links[i].window_fd}) {
      if (fd >= 0) close(fd);
    }
    for (int32_t k = 0; k < links[i].more_sockets; ++k) close(links[i].more_socket_fds[k]);
  }
}

Status UseMessages(const tfdist_messages* messages) {
  if (messages == nullptr || messages->version != TFDIST_MESSAGES_VERSION) {
    return BadArgument("tfdist_use_messages: not a table of version " +
                       std::to_string(TFDIST_MESSAGES_VERSION) + "; run `make mpi` again");
  }
  used_messages.store(messages);
  return Status();
}

StatusOr<std::unique_ptr<Link>> MakeLink(const tfdist_link& link, const World& world,
                                         const OwnEnd& own, const Config& config) {
  const TransportEntry* entry = FindTransport(link.transport);
  if (entry == nullptr || link.peer < 0 || link.peer >= world.size || link.peer == world.rank) {
    CloseLinks(&link, 1);
    return BadArgument("the link of rank " + std::to_string(world.rank) + " to rank " +
                       std::to_string(link.peer) + " by \"" + link.transport + "\" is not valid");
  }
  LinkEnds ends;
  ends.self = world.rank;
  ends.peer = link.peer;
  ends.socket_fd = link.socket_fd;
  ends.more_sockets.assign(link.more_socket_fds, link.more_socket_fds + link.more_sockets);
  ends.memory_fd = link.memory_fd;
  ends.own_doorbell_fd = own.doorbell_fd;
  ends.window_fd = link.window_fd;
  ends.window = own.window;
  ends.peer_doorbell_fd = link.peer_doorbell_fd;
  ends.initiator = link.initiator != 0;
  if (link.key != nullptr && link.key_bytes > 0) {
    ends.key.assign(link.key, link.key + link.key_bytes);
  }
  StatusOr<std::unique_ptr<Link>> made = entry->make(ends, config);
  const tfdist_messages* const messages = used_messages.load();
  if (!made.ok() || messages == nullptr || link.transport != std::string("tcp")) return made;
  return MakeMessageLink(std::move(made.value()), *messages, config);
}

StatusOr<Links> MakeLinks(const tfdist_world& in, const World& world,
                          const std::shared_ptr<ShmWindow>& window, const Config& config) {
  const Status status = CheckPeers(in, world, config);
  if (!status.ok()) {
    CloseLinks(in.links, in.link_count);
    return status;
  }
  Links links(static_cast<size_t>(in.size));
  for (int32_t i = 0; i < in.link_count; ++i) {
    auto made = MakeLink(in.links[i], world, {in.own_doorbell_fd, window}, config);
    if (!made.ok()) {
      CloseLinks(in.links + i + 1, in.link_count - i - 1);
      return made.status();
    }
    links[static_cast<size_t>(in.links[i].peer)] = std::move(made.value());
  }
  return links;
}

}  // namespace tfdist
