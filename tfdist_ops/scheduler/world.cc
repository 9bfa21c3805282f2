#include "scheduler/world.h"

namespace tfdist {

std::vector<int32_t> WorldHosts(const World& world) {
  std::vector<int32_t> hosts = world.host_of;
  if (hosts.empty() && world.local_size != world.size) {
    for (int32_t rank = 0; rank < world.size; ++rank) hosts.push_back(rank);
  }
  return hosts;
}

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

std::string DescribeRank(const World& world, int rank) {
  std::string text = "rank " + std::to_string(rank);
  const std::string host = HostOf(world, rank);
  if (host.empty()) return text;
  const int64_t pid = PidOf(world, rank);
  return text + " (host " + host + (pid > 0 ? ", pid " + std::to_string(pid) : "") + ")";
}

std::string HostOf(const World& world, int rank) {
  const auto r = static_cast<size_t>(rank);
  return r < world.hosts.size() ? world.hosts[r] : "";
}

int64_t PidOf(const World& world, int rank) {
  const auto r = static_cast<size_t>(rank);
  return r < world.pids.size() ? world.pids[r] : 0;
}

}  // namespace tfdist
