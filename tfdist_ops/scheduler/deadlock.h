// Deadlock: ranks that wait for each other. Pure: no network, no clock of its own.
//
// A rank on which nothing moves any more, and whose program waits inside of collectives, says so to
// rank 0 (BlockedNote): what it waits for, what it has taken part in, and, of the sets that it
// leads, which ranks each operation misses. A deadlock is a set of such ranks in which every
// operation that a rank waits for misses a rank of the set. None of them can go on: see
// docs/design/0011-ranks-that-wait-for-each-other.md for the proof and for what it takes for
// granted.
//
// Source: K. M. Chandy, J. Misra, L. M. Haas, "Distributed Deadlock Detection", ACM Trans. Computer
// Systems 1 (1983), the communication model, decided by rank 0 instead of by probes; knots in a
// graph of waits: R. C. Holt, "Some Deadlock Properties of Computer Systems", ACM Computing Surveys
// 4 (1972).
#ifndef TFDIST_OPS_SCHEDULER_DEADLOCK_H_
#define TFDIST_OPS_SCHEDULER_DEADLOCK_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "scheduler/wire.h"

namespace tfdist {

// By rank: the ranks that it waits for.
using Deadlock = std::map<int, std::set<int>>;

// The largest deadlock among the ranks of `notes`; empty: there is none. `led`: what rank 0 knows
// of the sets that it leads, also when it is not blocked itself. The led sets of another rank count
// only when it is among the blocked ones.
Deadlock FindDeadlock(const std::map<int, BlockedNote>& notes, const std::vector<LedWait>& led);

// "ranks 0,2 wait in tfdist.allreduce (a.py:3) for rank 1 ("loss"); rank 1 waits in ..."
std::string DeadlockText(const Deadlock& deadlock, const std::map<int, BlockedNote>& notes);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_DEADLOCK_H_
