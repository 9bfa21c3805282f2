// World: all ranks of a job, and where this one stands among them.
#ifndef TFDIST_OPS_SCHEDULER_WORLD_H_
#define TFDIST_OPS_SCHEDULER_WORLD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "collective/selection.h"

namespace tfdist {

// Where this rank stands; hosts and pids by rank are for messages.
struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;
  int cross_size = 1;
  // Ranks of this host, this one included, that may run on a processor of this rank; 0: not known.
  int sharing = 0;
  uint32_t generation = 0;
  std::vector<std::string> hosts;
  std::vector<int64_t> pids;
  // Index of each rank's host. Hosts are numbered by their lowest rank, so that all ranks, which
  // agreed on it in the rendezvous, derive the same schedules from it. Empty: all on one host if
  // local_size == size, else not known.
  std::vector<int32_t> host_of;
  // Of the tuning file, equal on all ranks, and the hash by which they know that; "": none.
  std::vector<TuningRule> tuning;
  std::string tuning_hash;
};

// The host of each rank, as schedules see it: where it is not known, each on its own.
std::vector<int32_t> WorldHosts(const World& world);

// 0, 1, ..., size - 1.
std::vector<int> AllRanks(int size);

// "rank 2 (host n1, pid 4242)"
std::string DescribeRank(const World& world, int rank);

// The host of a rank and the number of its process, for errors; "" and 0: not known.
std::string HostOf(const World& world, int rank);
int64_t PidOf(const World& world, int rank);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_WORLD_H_
