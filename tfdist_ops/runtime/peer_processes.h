// PeerProcesses: the state of those peers' processes that this process can see for certain: on this
// host, in its namespace of processes. A number proves nothing (it can be one of another namespace,
// or be used again), so it must belong to the process at the other end of the connection, and the
// time at which that process started must stay the same. In doubt a peer is unknown.
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
