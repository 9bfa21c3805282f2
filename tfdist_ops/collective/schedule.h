// Schedule: a collective as a pure list of steps of one rank, without sockets, memory or clock.
//
// The data of a collective is cut into slices (slicing.h), a slice into segments of at most
// segment_bytes. Every step runs once for each segment of its slice, in order; a step may run for
// segment k once each step named in `after` has run: for its segment k, if it has the same slice,
// else for all of its segments (exact rule: BySegment). All ranks make their lists from the same
// arguments, so the lists fit together: a kSend meets exactly one kReduce or kCopy with
// the same (phase, label) on the receiving rank, and (phase, label) is unique on a directed pair of
// ranks.
//
// The engine (scheduler/engine.cc) runs many schedules at once; a test runs the same lists in one
// thread and counts bytes without a network. What a step does to memory is in step_memory.h.
#ifndef TFDIST_OPS_COLLECTIVE_SCHEDULE_H_
#define TFDIST_OPS_COLLECTIVE_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace tfdist {

enum class StepKind : uint8_t {
  kSend,    // send the slice, read from `own`, to peers[0]
  kReduce,  // receive the slice from all of `peers` and reduce it with `own` into `to`: partial
            // results first, then inputs, each in the order of ranks
  kCopy,    // receive the slice from peers[0] into `to`; without peers: from `own`
  // Adasum (adasum.h); of a whole slice at once, without peers:
  kDots,     // of each tensor's part of the slice, `own` and kBeside, into kDots
  kCombine,  // `own` and kBeside, by the factors that follow from kDots, into `to`, which is `own`
};

// Where the elements of a slice lie on this rank.
enum class Place : uint8_t {
  kInput,    // never written, unless it is the output too
  kOutput,   // the result
  kPartial,  // a reduction under way. Half types are float32 here and travel as such: they are
             // rounded once, by the step that finishes. Lies in the output, unless that is too
             // narrow (half types) or wanted for something else (Schedule::private_partials).
  kHeld,     // on its way to another rank, bit for bit
  kBeside,   // another rank's partial result, to be combined with this rank's
  kDots,     // Dots of adasum.h, one for each tensor, in place of the elements of the slice
};

struct Step {
  StepKind kind = StepKind::kSend;
  int32_t slice = 0;
  uint16_t phase = 0;
  int32_t label = -1;          // the slice's number on the wire; -1: `slice`
  std::vector<int32_t> peers;  // kReduce: ascending; empty = local only
  std::vector<int32_t> after;  // indices of earlier steps of this list
  Place own = Place::kInput;   // kReduce: kInput (multiplied by prescale), kPartial or kDots
  Place to = Place::kOutput;   // kReduce: kOutput, kPartial, kDots; kCopy: kOutput, kHeld, kBeside
  bool raw = false;            // kReduce: peers sent untouched inputs, each to be multiplied by
                               // prescale; otherwise partial results
  bool finish = false;         // kReduce: the last reduction of the slice: divide, scale, round
  bool second = false;         // kDots, kCombine: `own` is the second of the two vectors
};

// `count` slices of slicing.h, from `first` on, joined for steps that move them as one.
struct JoinedSlice {
  int32_t first = 0;
  int32_t count = 0;
};

struct Schedule {
  std::vector<Step> steps;
  std::vector<JoinedSlice> joined;  // numbered after the slices of slicing.h
  bool partials = false;  // some rank of the collective sends partial results: then all ranks size
                          // segments of half types as float32
  bool private_partials = false;  // partial results of this rank may not lie in the output
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
  kSendRecv = 10,   // within a set of two; the root sends
  kAddSet = 11,     // a process set; the agreement alone
  kRemoveSet = 12,  // the same
  kJoin = 13,       // this rank has no more data (scheduler/join.h)
};
const char* CollectiveKindName(CollectiveKind kind);  // "allreduce", "reduce_scatter", ...
bool HasRoot(CollectiveKind kind);
bool Reduces(CollectiveKind kind);  // computes; the others carry any type as bytes

// Parameters of a schedule. Ranks are indices within the process set of the collective.
struct ScheduleArgs {
  int rank = 0;
  int size = 1;
  int root = 0;                  // kinds with a root
  std::vector<int32_t> host_of;  // host by rank, any numbers; empty: all on one host
  // Too many ranks for links between all of them (TFDIST_MESH_RANKS): "auto" prefers algorithms
  // whose partners are at distances of powers of two (transport/routes.h).
  bool sparse = false;
  // All ranks, each sends to the next (ring_order.h); empty: ascending.
  std::vector<int32_t> ring = {};
};
// Whether all ranks are on one host.
bool AllLocal(const ScheduleArgs& args);
// The ranks of each host, ascending; hosts in the order of their first ranks.
std::vector<std::vector<int32_t>> RanksByHost(const ScheduleArgs& args);

// One row of the table in registry.cc. Slices (slicing.h): allreduce has parts(args) of them,
// broadcast, reduce and sendrecv one; allgather, gather, scatter and reduce_scatter one per rank
// (its rows), alltoall one for each destination, then one for each source.
struct AlgorithmEntry {
  const char* name;
  CollectiveKind kind;
  bool (*supports)(const ScheduleArgs& args, DType dtype);
  Schedule (*make)(const ScheduleArgs& args);
  int (*parts)(const ScheduleArgs& args) = nullptr;  // allreduce; null: `size`
  // The row of the same kind and order of additions, so of the same bits, that is made for large
  // data; null: itself. What a tensor is fused with may decide only between such rows.
  const char* bits_of = nullptr;
};
int PartCount(const AlgorithmEntry& entry, const ScheduleArgs& args);

// The table; its order is priority.
const std::vector<AlgorithmEntry>& Algorithms();

// The first row of that name, or of any for "auto", that supports the case; null: there is none.
// The choice of "auto" by size and topology: selection.h.
const AlgorithmEntry* FindAlgorithm(CollectiveKind kind, const std::string& name,
                                    const ScheduleArgs& args, DType dtype);

// Whether what the step sends or receives are partial results, of AccumulationType(dtype).
bool CarriesPartials(const Step& step);
// Whether the step works on all of its slice at once: kDots and kCombine. It has one segment.
bool IsWhole(const Step& step);
// Whether the step sends or adds up the dots of a slice instead of its elements.
bool MovesDots(const Step& step);
// Whether `step` may run for segment k as soon as `earlier`, named in its `after`, has.
bool BySegment(const Step& earlier, const Step& step);
// Dots in a segment.
int64_t DotsOfSegment(int64_t segment_bytes);
// Elements of a segment: the same for all steps, on all ranks.
int64_t ScheduleSegment(const Schedule& schedule, DType dtype, int64_t segment_bytes);

// Payload bytes and frames that one rank sends, for slices of `slice_elements` elements.
// `tensors`: how many tensors are not empty.
struct SendCount {
  uint64_t bytes = 0;
  uint64_t frames = 0;
};
SendCount CountSends(const Schedule& schedule, const std::vector<int64_t>& slice_elements,
                     DType dtype, int64_t segment_bytes, int tensors = 1);

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_SCHEDULE_H_
