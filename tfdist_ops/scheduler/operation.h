// Operation: one agreed collective while it runs: its schedule, its slices, and how far each step
// has come. Driven by the engine on the progress thread; owns no thread, no clock.
#ifndef TFDIST_OPS_SCHEDULER_OPERATION_H_
#define TFDIST_OPS_SCHEDULER_OPERATION_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "collective/schedule.h"
#include "collective/slicing.h"
#include "collective/step_memory.h"
#include "scheduler/operation_plan.h"
#include "scheduler/operation_trace.h"
#include "scheduler/request_info.h"
#include "transport/link.h"

namespace tfdist {

// One submitted operation of this rank.
struct Request {
  uint64_t id = 0;
  RequestInfo info;
  std::vector<TensorView> tensors;
  std::string group;  // of a bucket, else empty; kRegister: its id
  int32_t bucket_index = 0;
  int32_t bucket_count = 0;
  std::vector<int64_t> rows;  // once agreed: AgreedRows of scheduler/row_counts.h
  int64_t bytes = 0;
  int64_t submitted_us = 0;
  int64_t agreed_us = 0;
  int64_t deadline_us = 0;  // by EngineState::own_us
  int contributors = 0;     // ranks of the set that have not joined: an average divides by it
  int32_t last_ready = -1;  // the rank that was ready last (Response::last); -1: none
  uint64_t ticket = 0;      // what it ran under; set, like `trace`, only with a timeline
  std::shared_ptr<const OperationTrace> trace;
  std::function<void(const Status&)> done;
  // `done` is quick: called on the thread that drives the engine, unless an `allocate` may still
  // be queued.
  bool direct = false;
  // If HasRows(kind): allocates the output. The arguments: SourceRows and OutputRows of
  // scheduler/row_counts.h.
  std::function<void*(const std::vector<int64_t>& rows, int64_t output_rows)> allocate;
  std::function<void(const Response&)> agreed;  // kRegister, kAddSet: the answer

  // Resets to the defaults, but keeps the memory of its members; `info.shapes` keeps its length,
  // with empty shapes.
  void Clear();
};

// Of a group of gradients.
inline bool IsBucket(const Request& request) {
  return !request.group.empty() && request.info.kind == CollectiveKind::kAllreduce;
}

using Links = std::vector<std::unique_ptr<Link>>;  // by rank; null: this rank, or gone

// A data frame that has arrived and waits for its step: held in the transport's memory, or copied.
struct Arrived {
  InFrame frame;
  std::vector<uint8_t> copy;  // the payload when `held` is false
  bool held = false;
  const uint8_t* data() const { return held ? frame.payload.data() : copy.data(); }
  // Copies the payload, and gives the transport its memory back. False: it was not held. `count`:
  // how many frames of the link are held.
  bool CopyOut(Link* link, size_t* count) {
    if (!held) return false;
    copy.assign(frame.payload.begin(), frame.payload.end());
    held = false;
    link->Release(Lane::kData, frame);
    --*count;
    return true;
  }
};

class Operation {
 public:
  // `step_bytes`: the bytes that its whole training step reduces, as far as they are known (of
  // the group's buckets that have been agreed on); 0: not known at all.
  Operation(uint32_t set_id, uint64_t ticket, std::vector<std::unique_ptr<Request>> members,
            Plan plan, const SetView& set, TraceClock clock = nullptr, int64_t step_bytes = 0);

  // Reuses a complete operation under another ticket, for an allreduce of the same request
  // (SameRequest) on other memory.
  void Restart(uint64_t ticket, std::unique_ptr<Request> request, TraceClock clock = nullptr);
  // Whether Restart saves enough to be worth the memory of keeping the operation.
  bool IsWorthKeeping() const;
  // A data frame of this operation's ticket from (global) rank `peer`. An error: no step expects it
  // (a bug on the peer). `*wait`: the wait that the frame has ended, if there was one.
  Status Deliver(int peer, Arrived arrived, int64_t now_us, OperationTrace::Wait* wait);
  // Runs what can run now. True when something did.
  bool Advance(const Links& links, uint32_t generation, std::vector<size_t>* held);
  bool complete() const { return open_steps_ == 0; }
  // Call it when a rank turns out to have joined, before the contribution of that rank comes.
  void SetContributors(int count);
  // Whether more is to come from (global) rank `peer`.
  bool Awaits(int peer) const;
  // Copies out the frames of a peer that are held, so that others can follow. False: none is.
  bool CopyHeld(int peer, Link* link, size_t* held);
  // Hands back every frame that is still held (after a failure).
  void ReleaseFrames(const Links& links, std::vector<size_t>* held);

  uint64_t ticket() const { return ticket_; }
  int64_t bytes() const { return bytes_; }  // of all slices
  std::vector<std::unique_ptr<Request>>& members() { return members_; }
  OperationTrace& trace() { return trace_; }

 private:
  struct Running {
    int64_t done = 0;  // segments
    int64_t total = 0;
    std::vector<std::deque<Arrived>> inbox;  // by index in Step::peers
    // kSend: other steps that send the same segments out of the same memory, to other peers.
    std::vector<size_t> twins;
    // kReduce: the first step that sends what it writes; 0: none (step 0 is never such a send).
    size_t sender = 0;
  };
  void FindTwins(const Links& links);
  void CountSegment(size_t step);
  void FindSenders();
  MutableByteSpan BeginSend(size_t step, const Links& links);
  void CommitSend(size_t step, const Links& links, const FrameHeader& header);
  // Saves a look at the clock: what is sent was written just now, and that time is known.
  void NoteSent(size_t bytes) {
    if (clock_ == nullptr) return;
    const int64_t now_ns = std::max(trace_.pack.last_ns, trace_.reduce.last_ns);
    trace_.Sent(static_cast<int64_t>(bytes), now_ns / 1000);
  }
  FrameHeader Header(size_t step, uint32_t generation) const;
  Link* LinkOf(size_t step, const Links& links) const {  // of a send
    return links[Global(memory_.steps()[step].peers[0])].get();
  }
  bool Ready(size_t step) const;
  bool LeavesRoom(size_t step, const Link* link) const;
  bool RunSend(size_t step, const Links& links, uint32_t generation);
  bool RunReceive(size_t step, const Links& links, uint32_t generation, std::vector<size_t>* held);
  size_t Global(int32_t index) const {
    return static_cast<size_t>(ranks_[static_cast<size_t>(index)]);
  }
  static uint32_t Label(const Step& step) {
    return static_cast<uint32_t>(step.label >= 0 ? step.label : step.slice);
  }
  static uint64_t Tag(size_t peer, uint16_t phase, uint32_t label) {
    return (static_cast<uint64_t>(peer) << 48) | (static_cast<uint64_t>(phase) << 32) | label;
  }

  void Begin();

  const uint32_t set_id_;
  uint64_t ticket_;
  std::vector<std::unique_ptr<Request>> members_;
  const std::vector<int32_t> ranks_;  // of the process set, by index
  StepMemory memory_;
  const int64_t bytes_;
  std::vector<Running> running_;  // one a step
  size_t open_steps_ = 0;
  int first_reduction_ = -1;  // a step that reduces inputs alone, into what is sent; -1: none
  bool knows_twins_ = false;
  std::unordered_map<uint64_t, std::pair<size_t, size_t>> receivers_;  // Tag → step, index of peer
  std::vector<const uint8_t*> payloads_;                               // of the segment in hand
  std::vector<ByteSpan> pieces_;                                       // likewise
  TraceClock clock_;  // null: no timeline is written
  OperationTrace trace_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_OPERATION_H_
