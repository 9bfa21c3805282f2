// Schedule: a collective as a pure list of steps of one rank, without sockets, memory or clock.
//
// The data of a collective is cut into slices (slicing.h), a slice into segments of at most
// segment_bytes. Every step runs once for each segment of its slice, in order; a step may run for
// segment k as soon as the step named in `after` has. All ranks make their lists from the same
// arguments, so the lists fit together: a kSend meets exactly one kReduce or kCopy with the same
// (phase, slice) on the receiving rank, and (phase, slice) is unique on a directed pair of ranks.
//
// The engine (scheduler/engine.cc) runs many schedules at once; a test runs the same lists in one
// thread and counts bytes without a network.
#ifndef TFDIST_OPS_COLLECTIVE_SCHEDULE_H_
#define TFDIST_OPS_COLLECTIVE_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace tfdist {

enum class StepKind : uint8_t {
  kSend,    // send the slice to peers[0]
  kReduce,  // receive the slice from all of `peers` and reduce it with the own input into the
            // output
  kCopy,    // receive the slice from peers[0] into the output
};

struct Step {
  StepKind kind = StepKind::kSend;
  int32_t slice = 0;
  uint16_t phase = 0;
  std::vector<int32_t> peers;  // kReduce: ascending; empty = local only (output = finish(input))
  int32_t after = -1;          // index of an earlier step of this list
  bool from_input = false;     // kSend: reads the own input, untouched; otherwise the output
  bool raw = false;            // kReduce: contributions are other ranks' untouched inputs, added in
                               // rank order, the own one included, each times prescale; otherwise
                               // one partial result, added as (received op own * prescale)
  bool finish = false;         // kReduce: the last reduction of the slice: divide, scale, round
};

struct Schedule {
  std::vector<Step> steps;
};

enum class CollectiveKind : int32_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,   // the agreement alone
  kRegister = 4,  // a group of gradients; the agreement alone
  kReduceScatter = 5,
  kReduce = 6,
  kGather = 7,
  kScatter = 8,
  kAlltoall = 9,
  kSendRecv = 10,
  kAddSet = 11,     // a process set; the agreement alone
  kRemoveSet = 12,  // the same
};
const char* CollectiveKindName(CollectiveKind kind);  // "allreduce", ...
bool HasRoot(CollectiveKind kind);
bool Reduces(CollectiveKind kind);  // computes; the others carry any type as bytes

// What a schedule depends on. Ranks are indices within the process set of the collective.
struct ScheduleArgs {
  int rank = 0;
  int size = 1;
  int root = 0;                  // kinds with a root
  std::vector<int32_t> host_of;  // host by rank, any numbers; empty: all on one host
  // Too many ranks for links between all of them (TFDIST_MESH_RANKS): "auto" prefers algorithms
  // whose partners are at distances of powers of two (transport/routes.h).
  bool sparse = false;
};
// Whether all ranks are on one host.
bool AllLocal(const ScheduleArgs& args);

// One row of the table in registry.cc. Slices: allreduce has `size` of them (slicing.h), allgather
// one a rank (its rows), broadcast one.
struct AlgorithmEntry {
  const char* name;
  CollectiveKind kind;
  bool (*supports)(const ScheduleArgs& args, DType dtype);
  Schedule (*make)(const ScheduleArgs& args);
};

// The table; its order is priority.
const std::vector<AlgorithmEntry>& Algorithms();

// The algorithm for a collective: `wanted` by name, or "auto": the first row of the kind that
// supports the case. Null: there is none of that name, or it does not support the case.
const AlgorithmEntry* SelectAlgorithm(CollectiveKind kind, const std::string& wanted,
                                      const ScheduleArgs& args, DType dtype);

// What `schedule` of one rank sends, for slices of `slice_bytes`: bytes, and frames when a frame
// carries at most segment_bytes (rounded down to 64 bytes, as SegmentElements does).
struct SendCount {
  uint64_t bytes = 0;
  uint64_t frames = 0;
};
SendCount CountSends(const Schedule& schedule, const std::vector<uint64_t>& slice_bytes,
                     uint64_t segment_bytes);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_SCHEDULE_H_
