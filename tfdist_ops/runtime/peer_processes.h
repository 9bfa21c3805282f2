// PeerProcesses: the state of peers' processes, where this process can see it for certain: on this
// host, in its own PID namespace. A pid proves nothing (it can be from another namespace, or be
// reused), so it must belong to the process at the other end of the connection, and the start time
// of that process must stay the same. In doubt a peer is unknown.
#ifndef TFDIST_OPS_RUNTIME_PEER_PROCESSES_H_
#define TFDIST_OPS_RUNTIME_PEER_PROCESSES_H_

#include <cstdint>
#include <map>

#include "scheduler/engine.h"

namespace tfdist {

// The process at the other end of a local socket, as the kernel says; 0: not known.
int64_t SocketPeer(int fd);

class PeerProcesses {
 public:
  PeerProcesses(const World& world, const Links& links);
  ProcessState Look(int peer) const;

 private:
  struct Process {
    int64_t pid = 0;
    uint64_t started = 0;  // clock ticks since the host was started
  };
  std::map<int, Process> by_rank_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_PEER_PROCESSES_H_
