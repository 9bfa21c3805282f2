#include "runtime/peer_processes.h"

#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

namespace tfdist {
namespace {

struct Stat {
  char state = '?';
  uint64_t started = 0;
};

// /proc/PID/stat, proc(5): the name, field 2, may hold anything; field 3 is the state, 22 the
// start.
std::optional<Stat> ReadStat(int64_t pid, bool* gone) {
  *gone = false;
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  errno = 0;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  char text[1024] = {};
  const size_t size = file != nullptr ? std::fread(text, 1, sizeof(text) - 1, file.get()) : 0;
  if (size == 0) {
    *gone = errno == ENOENT || errno == ESRCH;
    return std::nullopt;
  }
  const char* rest = std::strrchr(text, ')');
  if (rest == nullptr) return std::nullopt;
  std::istringstream fields(rest + 1);
  Stat stat;
  std::string field;
  fields >> stat.state;
  for (int number = 4; number < 22; ++number) fields >> field;
  if (!(fields >> stat.started)) return std::nullopt;
  return stat;
}

std::string TcpAddress(const sockaddr_in& address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%08X:%04X", address.sin_addr.s_addr, ntohs(address.sin_port));
  return text;
}

// The number of the socket at the other end of a connection within this network namespace.
std::string PeerSocket(int fd) {
  sockaddr_in own{};
  sockaddr_in peer{};
  socklen_t size = sizeof(own);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return "";
  size = sizeof(peer);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "";
  if (own.sin_family != AF_INET || peer.sin_family != AF_INET) return "";
  std::ifstream table("/proc/net/tcp");
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    // sl local remote state queues timer retransmits uid timeout inode
    std::istringstream fields(line);
    std::string field[10];
    for (std::string& text : field) fields >> text;
    if (field[1] == TcpAddress(peer) && field[2] == TcpAddress(own)) return field[9];
  }
  return "";
}

bool HasSocket(int64_t pid, const std::string& number) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), &closedir);
  if (open == nullptr || number.empty() || number == "0") return false;
  const std::string wanted = "socket:[" + number + "]";
  while (const dirent* entry = readdir(open.get())) {
    char target[64] = {};
    const std::string path = folder + "/" + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) > 0 && wanted == target) return true;
  }
  return false;
}

// The process at the other end of a link; 0 where that is not certain.
int64_t ProcessOf(const World& world, const Link& link) {
  if (std::strcmp(link.transport(), "shm") == 0) return SocketPeer(link.fd());
  const auto own = static_cast<size_t>(world.rank);
  const auto p = static_cast<size_t>(link.peer());
  const bool has_socket =
      std::strcmp(link.transport(), "tcp") == 0 || std::strcmp(link.transport(), "mpi") == 0;
  if (!has_socket || p >= world.pids.size()) return 0;
  const bool same_host = world.host_of.empty() ? world.local_size == world.size
                                               : world.host_of[p] == world.host_of[own];
  const int64_t pid = world.pids[p];
  return same_host && pid > 0 && HasSocket(pid, PeerSocket(link.fd())) ? pid : 0;
}

}  // namespace

int64_t SocketPeer(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return 0;
  return peer.pid;
}

PeerProcesses::PeerProcesses(const World& world, const Links& links) {
  for (const auto& link : links) {
    if (link == nullptr) continue;
    const int64_t pid = ProcessOf(world, *link);
    if (pid <= 0 || pid == getpid()) continue;  // threads as ranks, in tests: unknown
    bool gone = false;
    if (const auto stat = ReadStat(pid, &gone)) by_rank_[link->peer()] = {pid, stat->started};
  }
}

ProcessState PeerProcesses::Look(int peer) const {
  const auto known = by_rank_.find(peer);
  if (known == by_rank_.end()) return ProcessState::kUnknown;
  bool gone = false;
  const auto stat = ReadStat(known->second.pid, &gone);
  if (gone || (stat && stat->started != known->second.started)) return ProcessState::kGone;
  if (!stat) return ProcessState::kUnknown;
  switch (stat->state) {
    case 'Z':
    case 'X':
      return ProcessState::kGone;
    case 'T':
    case 't':
      return ProcessState::kStopped;
    default:
      return ProcessState::kRunning;
  }
}

}  // namespace tfdist
