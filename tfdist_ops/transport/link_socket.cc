#include "transport/link_socket.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace tfdist {
namespace {

// Descriptors that a child closes, each as fd + 1; 0: free. A lock would be wrong here: another
// thread may hold it at the moment of the fork. A socket for which there is no room is kept by
// children, as it would be without this table.
std::array<std::atomic<int>, 4096> child_closes;

void CloseInChild() {
  for (std::atomic<int>& place : child_closes) {
    const int fd = place.exchange(0) - 1;
    if (fd >= 0) ::close(fd);
  }
}

void Remember(int fd) {
  static const int installed = pthread_atfork(nullptr, nullptr, CloseInChild);
  (void)installed;  // out of memory: children keep the sockets
  for (std::atomic<int>& place : child_closes) {
    int empty = 0;
    if (place.load() == 0 && place.compare_exchange_strong(empty, fd + 1)) return;
  }
}

void Forget(int fd) {
  for (std::atomic<int>& place : child_closes) {
    int own = fd + 1;
    if (place.load() == own && place.compare_exchange_strong(own, 0)) return;
  }
}

}  // namespace

LinkSocket::LinkSocket(UniqueFd fd) : fd_(std::move(fd)) {
  if (fd_.get() >= 0) Remember(fd_.get());
}

LinkSocket::~LinkSocket() {
  if (fd_.get() >= 0) Forget(fd_.get());
}

}  // namespace tfdist
