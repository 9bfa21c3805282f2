#include "scheduler/operation.h"

#include <algorithm>
#include <utility>

#include "base/deadline.h"
#include "base/last_level_cache.h"
#include "transport/write_policy.h"

namespace tfdist {

namespace {

// Above this, planning anew takes hardly any time compared with moving the data.
constexpr size_t kMostKeptBytes = 1 << 20;
// Segments of inputs that a rank sends before it reduces the first of its own slice.
constexpr int64_t kAhead = 2;

Reduction ReductionOf(const RequestInfo& info, int contributors) {
  Reduction reduction;
  reduction.dtype = info.dtype;
  // The steps of Adasum that reduce have one contribution, which they scale or round.
  reduction.op = info.op == ReduceOp::kAdasum ? ReduceOp::kSum : info.op;
  reduction.prescale = info.prescale;
  reduction.finish.divide = info.op == ReduceOp::kAverage ? contributors : 1;
  reduction.finish.multiply = info.postscale;
  return reduction;
}

int RanksOfThisHost(const SetView& set) {
  if (set.host_of.empty()) return set.size();
  const int32_t host = set.host_of[static_cast<size_t>(set.index)];
  return static_cast<int>(std::count(set.host_of.begin(), set.host_of.end(), host));
}

}  // namespace

void Request::Clear() {
  info.Clear();
  id = 0;
  tensors.clear();
  group.clear();
  bucket_index = bucket_count = 0;
  rows.clear();
  bytes = submitted_us = agreed_us = deadline_us = 0;
  contributors = 0;
  last_ready = -1;
  ticket = 0;
  trace.reset();
  done = nullptr;
  direct = false;
  allocate = nullptr;
  agreed = nullptr;
}

Operation::Operation(uint32_t set_id, uint64_t ticket,
                     std::vector<std::unique_ptr<Request>> members, Plan plan, const SetView& set,
                     TraceClock clock, int64_t step_bytes)
    : set_id_(set_id),
      ticket_(ticket),
      members_(std::move(members)),
      ranks_(set.ranks),
      memory_(std::move(plan.schedule), std::move(plan.slices),
              ReductionOf(members_[0]->info, members_[0]->contributors), set.index,
              plan.segment_bytes, StreamedBytes(LastLevelCacheBytes(), RanksOfThisHost(set)),
              step_bytes),
      bytes_(static_cast<int64_t>(memory_.bytes())),
      clock_(clock) {
  const std::vector<Step>& steps = memory_.steps();
  running_.reserve(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    Running run;
    run.total = memory_.segments(i);
    if (step.kind != StepKind::kSend) {
      run.inbox.resize(step.peers.size());
      for (size_t p = 0; p < step.peers.size(); ++p) {
        receivers_[Tag(Global(step.peers[p]), step.phase, Label(step))] = {i, p};
      }
    }
    running_.push_back(std::move(run));
  }
  FindSenders();
  Begin();
}

void Operation::Begin() {
  open_steps_ = 0;
  for (Running& run : running_) {
    run.done = 0;
    if (run.total > 0) ++open_steps_;
  }
  std::vector<OperationTrace::Peer> peers = std::move(trace_.peers);
  peers.assign(ranks_.size(), {});
  trace_ = OperationTrace();
  trace_.peers = std::move(peers);
}

void Operation::Restart(uint64_t ticket, std::unique_ptr<Request> request, TraceClock clock) {
  ticket_ = ticket;
  clock_ = clock;
  memory_.MoveTo(request->tensors);
  members_[0] = std::move(request);
  SetContributors(members_[0]->contributors);
  Begin();
}

bool Operation::IsWorthKeeping() const {
  return members_.size() == 1 && memory_.scratch_bytes() == 0 && memory_.bytes() <= kMostKeptBytes;
}

void Operation::FindSenders() {
  const std::vector<Step>& steps = memory_.steps();
  for (size_t i = steps.size(); i-- > 1;) {
    if (steps[i].kind != StepKind::kSend || steps[i].own != Place::kOutput) continue;
    for (int32_t after : steps[i].after) {
      const Step& step = steps[static_cast<size_t>(after)];
      if (step.kind == StepKind::kReduce && step.finish && step.slice == steps[i].slice &&
          steps[i].after.size() == 1) {
        running_[static_cast<size_t>(after)].sender = i;
        if (step.raw && step.after.empty()) first_reduction_ = after;
      }
    }
  }
}

void Operation::SetContributors(int count) {
  if (members_[0]->info.op == ReduceOp::kAverage) memory_.SetDivide(count);
}

Status Operation::Deliver(int peer, Arrived arrived, int64_t now_us, OperationTrace::Wait* wait) {
  const FrameHeader& header = arrived.frame.header;
  const auto it = receivers_.find(Tag(static_cast<size_t>(peer), header.phase, header.slice));
  if (it == receivers_.end()) {
    return TFDIST_INTERNAL("rank " + std::to_string(peer) + " sent slice " +
                           std::to_string(header.slice) + " of phase " +
                           std::to_string(header.phase) + ", which no step expects");
  }
  Running& run = running_[it->second.first];
  std::deque<Arrived>& inbox = run.inbox[it->second.second];
  const int64_t segment = run.done + static_cast<int64_t>(inbox.size());
  if (header.segment != segment || segment >= run.total ||
      header.payload_bytes != memory_.WireBytes(it->second.first, segment)) {
    return TFDIST_INTERNAL("rank " + std::to_string(peer) + " sent segment " +
                           std::to_string(header.segment) + " with " +
                           std::to_string(header.payload_bytes) + " bytes; expected segment " +
                           std::to_string(segment));
  }
  const auto index =
      static_cast<size_t>(memory_.steps()[it->second.first].peers[it->second.second]);
  *wait = trace_.Heard(index, header.payload_bytes, now_us);
  inbox.push_back(std::move(arrived));
  return Status();
}

bool Operation::Ready(size_t index) const {
  const Running& run = running_[index];
  if (run.done >= run.total) return false;
  const Step& step = memory_.steps()[index];
  return std::all_of(step.after.begin(), step.after.end(), [&](int32_t after) {
    const Running& other = running_[static_cast<size_t>(after)];
    const Step& earlier = memory_.steps()[static_cast<size_t>(after)];
    return BySegment(earlier, step) ? other.done > run.done : other.done == other.total;
  });
}

// Sends of one slice to several peers whose links share their memory: the payload is written once.
// A twin may still lag behind, where its lane is full; it then goes its own way.
void Operation::FindTwins(const Links& links) {
  knows_twins_ = true;
  const std::vector<Step>& steps = memory_.steps();
  const auto memory = [&](const Step& step) -> const void* {
    if (step.kind != StepKind::kSend || MovesDots(step)) return nullptr;
    const Link* link = links[Global(step.peers[0])].get();
    return link != nullptr ? link->SendMemory() : nullptr;
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    const void* own = memory(steps[i]);
    if (own == nullptr) continue;
    for (size_t j = i + 1; j < steps.size(); ++j) {
      if (memory(steps[j]) == own && steps[j].slice == steps[i].slice &&
          steps[j].own == steps[i].own) {
        running_[i].twins.push_back(j);
      }
    }
  }
}

// A rank that sends all its inputs at once fills the memory that it shares with its peers, and
// leaves none to reduce its own slice into: the result would have to be copied once more. So its
// sends stay close to its own reduction. This can't deadlock: a send that waits here waits for the
// reduction of an earlier segment, which needs inputs alone.
bool Operation::LeavesRoom(size_t index, const Link* link) const {
  const Step& step = memory_.steps()[index];
  if (first_reduction_ < 0 || step.own != Place::kInput || link->SendMemory() == nullptr) {
    return true;
  }
  const Running& reduction = running_[static_cast<size_t>(first_reduction_)];
  return reduction.done == reduction.total || running_[index].done < reduction.done + kAhead;
}

bool Operation::Advance(const Links& links, uint32_t generation, std::vector<size_t>* held) {
  if (!knows_twins_) FindTwins(links);
  bool moved = false;
  for (size_t i = 0; i < memory_.steps().size(); ++i) {
    while (Ready(i)) {
      const bool ran = memory_.steps()[i].kind == StepKind::kSend
                           ? RunSend(i, links, generation)
                           : RunReceive(i, links, generation, held);
      if (!ran) break;
      moved = true;
    }
  }
  return moved;
}

void Operation::CountSegment(size_t index) {
  if (++running_[index].done == running_[index].total) --open_steps_;
}

FrameHeader Operation::Header(size_t index, uint32_t generation) const {
  const Step& step = memory_.steps()[index];
  FrameHeader header;
  header.set = set_id_;
  header.ticket = ticket_;
  header.phase = step.phase;
  header.slice = Label(step);
  header.segment = static_cast<uint32_t>(running_[index].done);
  header.generation = generation;
  return header;
}

MutableByteSpan Operation::BeginSend(size_t index, const Links& links) {
  Link* link = LinkOf(index, links);
  if (link == nullptr) return {};
  return link->BeginSend(Lane::kData, memory_.WireBytes(index, running_[index].done));
}

// Sends the segment that lies in the room of BeginSend, to the peers of twins too. `header` is its
// Header, made before the segment was written (Link::CommitSend says why).
void Operation::CommitSend(size_t index, const Links& links, const FrameHeader& header) {
  Running& run = running_[index];
  LinkOf(index, links)->CommitSend(Lane::kData, header);
  const size_t bytes = memory_.WireBytes(index, run.done);
  NoteSent(bytes);
  for (size_t twin : run.twins) {
    Link* other = LinkOf(twin, links);
    if (running_[twin].done != run.done || other == nullptr || !Ready(twin)) continue;
    if (!other->ShareSend(Header(twin, header.generation), bytes)) continue;
    CountSegment(twin);
    NoteSent(bytes);
  }
  CountSegment(index);
}

bool Operation::RunSend(size_t index, const Links& links, uint32_t generation) {
  Link* link = LinkOf(index, links);
  if (link != nullptr && !LeavesRoom(index, link)) return false;
  const FrameHeader header = Header(index, generation);
  if (link != nullptr && link->MostPieces() > 0) {
    memory_.Locate(index, running_[index].done, &pieces_);
    if (pieces_.size() <= link->MostPieces()) {
      if (!link->SendPieces(header, {pieces_.data(), pieces_.size()})) return false;
      NoteSent(memory_.WireBytes(index, running_[index].done));
      CountSegment(index);
      return true;
    }
  }
  const MutableByteSpan room = BeginSend(index, links);
  if (room.data() == nullptr) return false;
  {
    TraceScope packing(clock_, &trace_.pack);
    memory_.Pack(index, running_[index].done, room.data(), link->StreamsSend());
  }
  CommitSend(index, links, header);
  return true;
}

bool Operation::RunReceive(size_t index, const Links& links, uint32_t generation,
                           std::vector<size_t>* held) {
  const Step& step = memory_.steps()[index];
  Running& run = running_[index];
  payloads_.clear();
  bool streamed = false;
  for (const std::deque<Arrived>& inbox : run.inbox) {
    if (inbox.empty()) return false;
    payloads_.push_back(inbox.front().data());
    streamed |= inbox.front().held && inbox.front().frame.streamed;
  }
  // A result that others wait for goes out while it is computed, if there is room for it.
  // (A link that takes pieces sends data from where it lies, so there is no room to fill.)
  const Link* link = run.sender != 0 ? LinkOf(run.sender, links) : nullptr;
  const bool sends =
      link != nullptr && link->MostPieces() == 0 && running_[run.sender].done == run.done;
  const FrameHeader header = sends ? Header(run.sender, generation) : FrameHeader();
  const MutableByteSpan room = sends ? BeginSend(run.sender, links) : MutableByteSpan();
  const bool timed = memory_.WireBytes(index, run.done) >= kTimedBytes;
  const int64_t begin_ns = timed ? NowNs() : 0;
  {
    TraceScope reducing(clock_, &trace_.reduce);
    memory_.Take(index, run.done, payloads_, streamed, room.data(),
                 room.data() != nullptr && link->StreamsSend());
  }
  const int64_t ns = timed ? NowNs() - begin_ns : 0;
  for (size_t p = 0; p < run.inbox.size(); ++p) {
    Arrived& arrived = run.inbox[p].front();
    const size_t peer = Global(step.peers[p]);
    if (arrived.held && links[peer] != nullptr) {
      if (timed) links[peer]->NoteRead(arrived.frame, ns);
      links[peer]->Release(Lane::kData, arrived.frame);
      --(*held)[peer];
    }
    run.inbox[p].pop_front();
  }
  CountSegment(index);
  if (room.data() != nullptr) CommitSend(run.sender, links, header);
  return true;
}

bool Operation::Awaits(int peer) const {
  for (size_t i = 0; i < running_.size(); ++i) {
    const Running& run = running_[i];
    for (size_t p = 0; p < run.inbox.size(); ++p) {
      if (Global(memory_.steps()[i].peers[p]) != static_cast<size_t>(peer)) continue;
      if (run.done + static_cast<int64_t>(run.inbox[p].size()) < run.total) return true;
    }
  }
  return false;
}

bool Operation::CopyHeld(int peer, Link* link, size_t* held) {
  bool copied = false;
  for (size_t i = 0; i < running_.size(); ++i) {
    for (size_t p = 0; p < running_[i].inbox.size(); ++p) {
      if (Global(memory_.steps()[i].peers[p]) != static_cast<size_t>(peer)) continue;
      for (Arrived& arrived : running_[i].inbox[p]) copied |= arrived.CopyOut(link, held);
    }
  }
  return copied;
}

void Operation::ReleaseFrames(const Links& links, std::vector<size_t>* held) {
  for (size_t i = 0; i < running_.size(); ++i) {
    for (size_t p = 0; p < running_[i].inbox.size(); ++p) {
      const size_t peer = Global(memory_.steps()[i].peers[p]);
      for (Arrived& arrived : running_[i].inbox[p]) {
        if (!arrived.held || links[peer] == nullptr) continue;
        links[peer]->Release(Lane::kData, arrived.frame);
        --(*held)[peer];
      }
      running_[i].inbox[p].clear();
    }
  }
}

}  // namespace tfdist
