// LinkSocket: the socket of a link, which a forked child does not keep.
//
// A process that forks (data loaders do) leaves a copy of every descriptor to its child. With a
// copy of a link's socket the child would hide the death of its parent from the peers, and keep the
// parent's epoll set watching a connection that the parent has closed. So the child closes the
// sockets of all links, first thing after the fork.
#ifndef TFDIST_OPS_TRANSPORT_LINK_SOCKET_H_
#define TFDIST_OPS_TRANSPORT_LINK_SOCKET_H_

#include <utility>

#include "transport/link_support.h"

namespace tfdist {

class LinkSocket {
 public:
  explicit LinkSocket(UniqueFd fd);
  ~LinkSocket();
  LinkSocket(const LinkSocket&) = delete;
  LinkSocket& operator=(const LinkSocket&) = delete;

  int get() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_LINK_SOCKET_H_
