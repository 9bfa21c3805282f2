#include "scheduler/operation.h"

#include <algorithm>
#include <utility>

namespace tfdist {

Operation::Operation(uint32_t set_id, uint64_t ticket,
                     std::vector<std::unique_ptr<Request>> members, Plan plan, const SetView& set,
                     int64_t segment_bytes)
    : set_id_(set_id),
      ticket_(ticket),
      members_(std::move(members)),
      schedule_(std::move(plan.schedule)),
      slices_(std::move(plan.slices)),
      ranks_(set.ranks),
      index_(set.index) {
  const RequestInfo& info = members_[0]->info;
  dtype_ = info.dtype;
  op_ = info.op;
  prescale_ = info.prescale;
  finish_.divide = info.op == ReduceOp::kAverage ? set.size() : 1;
  finish_.multiply = info.postscale;
  reduces_ = info.kind == CollectiveKind::kAllreduce;
  element_bytes_ = DTypeSize(dtype_);
  segment_elements_ = SegmentElements(segment_bytes, element_bytes_);
  running_.reserve(schedule_.steps.size());
  for (size_t i = 0; i < schedule_.steps.size(); ++i) {
    const Step& step = schedule_.steps[i];
    const Slice& slice = slices_[static_cast<size_t>(step.slice)];
    Running run{0, SegmentCount(slice.elements, segment_elements_), {}, SliceCursor(slice)};
    if (step.kind != StepKind::kSend) {
      run.inbox.resize(step.peers.size());
      for (size_t p = 0; p < step.peers.size(); ++p) {
        receivers_[Tag(ranks_[static_cast<size_t>(step.peers[p])], step.phase,
                       static_cast<uint32_t>(step.slice))] = {i, p};
      }
    }
    if (run.total > 0) ++open_steps_;
    running_.push_back(std::move(run));
  }
}

Status Operation::Deliver(int peer, Arrived arrived) {
  const FrameHeader& header = arrived.frame.header;
  const auto it = receivers_.find(Tag(peer, header.phase, header.slice));
  if (it == receivers_.end()) {
    return TFDIST_INTERNAL("rank " + std::to_string(peer) + " sent slice " +
                           std::to_string(header.slice) + " of phase " +
                           std::to_string(header.phase) + ", which no step expects");
  }
  Running& run = running_[it->second.first];
  std::deque<Arrived>& inbox = run.inbox[it->second.second];
  const int64_t segment = run.done + static_cast<int64_t>(inbox.size());
  const Slice& slice = slices_[header.slice];
  const int64_t elements =
      std::min(segment_elements_, slice.elements - segment * segment_elements_);
  if (header.segment != segment || elements <= 0 ||
      header.payload_bytes != static_cast<uint64_t>(elements) * element_bytes_) {
    return TFDIST_INTERNAL("rank " + std::to_string(peer) + " sent segment " +
                           std::to_string(header.segment) + " with " +
                           std::to_string(header.payload_bytes) + " bytes; expected segment " +
                           std::to_string(segment));
  }
  inbox.push_back(std::move(arrived));
  return Status();
}

bool Operation::Ready(size_t step) const {
  const Running& run = running_[step];
  const int32_t after = schedule_.steps[step].after;
  return run.done < run.total &&
         (after < 0 || running_[static_cast<size_t>(after)].done > run.done);
}

bool Operation::Advance(const Links& links, uint32_t generation, std::vector<size_t>* held) {
  bool moved = false;
  for (size_t i = 0; i < schedule_.steps.size(); ++i) {
    bool stepped = false;
    while (Ready(i)) {
      const bool ran = schedule_.steps[i].kind == StepKind::kSend ? RunSend(i, links, generation)
                                                                  : RunReceive(i, links, held);
      if (!ran) break;
      stepped = true;
    }
    if (stepped && running_[i].done == running_[i].total) --open_steps_;
    moved |= stepped;
  }
  return moved;
}

bool Operation::RunSend(size_t index, const Links& links, uint32_t generation) {
  const Step& step = schedule_.steps[index];
  Running& run = running_[index];
  Link* link = links[Global(step.peers[0])].get();
  if (link == nullptr) return false;
  const Slice& slice = slices_[static_cast<size_t>(step.slice)];
  const int64_t begin = run.done * segment_elements_;
  const int64_t count = std::min(segment_elements_, slice.elements - begin);
  const MutableByteSpan room =
      link->BeginSend(Lane::kData, static_cast<size_t>(count) * element_bytes_);
  if (room.data() == nullptr) return false;
  // Inputs travel as they are: whoever reduces them scales, in its accumulation type.
  run.cursor.ForEachRun(
      begin, count, element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t elements, int64_t offset) {
        CopyScaled(dtype_, step.from_input ? input : output, 1.0,
                   room.data() + static_cast<size_t>(offset) * element_bytes_, elements);
      });
  FrameHeader header;
  header.set = set_id_;
  header.ticket = ticket_;
  header.phase = step.phase;
  header.slice = static_cast<uint32_t>(step.slice);
  header.segment = static_cast<uint32_t>(run.done);
  header.generation = generation;
  link->CommitSend(Lane::kData, header);
  ++run.done;
  return true;
}

bool Operation::RunReceive(size_t index, const Links& links, std::vector<size_t>* held) {
  const Step& step = schedule_.steps[index];
  Running& run = running_[index];
  for (const std::deque<Arrived>& inbox : run.inbox) {
    if (inbox.empty()) return false;
  }
  const Slice& slice = slices_[static_cast<size_t>(step.slice)];
  const int64_t begin = run.done * segment_elements_;
  const int64_t count = std::min(segment_elements_, slice.elements - begin);
  if (step.kind == StepKind::kReduce) {
    Reduce(step, &run, begin, count);
  } else {
    CopyIn(&run, begin, count);
  }
  for (size_t p = 0; p < run.inbox.size(); ++p) {
    Arrived& arrived = run.inbox[p].front();
    const size_t peer = Global(step.peers[p]);
    if (arrived.held && links[peer] != nullptr) {
      links[peer]->Release(Lane::kData, arrived.frame);
      --(*held)[peer];
    }
    run.inbox[p].pop_front();
  }
  ++run.done;
  return true;
}

void Operation::Reduce(const Step& step, Running* run, int64_t begin, int64_t count) {
  const Finish finish = step.finish ? finish_ : Finish{};
  std::vector<const uint8_t*> contributions(step.peers.size() + 1);
  run->cursor.ForEachRun(
      begin, count, element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t elements, int64_t offset) {
        const size_t shift = static_cast<size_t>(offset) * element_bytes_;
        if (!reduces_) {  // the own part of an allgather or broadcast, of any type
          if (input != output) CopyScaled(dtype_, input, 1.0, output, elements);
          return;
        }
        if (!step.raw && step.peers.size() == 1) {
          ReducePartial(dtype_, op_, run->inbox[0].front().data() + shift, input, prescale_, finish,
                        output, elements);
          return;
        }
        size_t n = 0;
        bool own = false;
        for (size_t p = 0; p < step.peers.size(); ++p) {
          if (!own && step.peers[p] > index_) {
            contributions[n++] = input;
            own = true;
          }
          contributions[n++] = run->inbox[p].front().data() + shift;
        }
        if (!own) contributions[n++] = input;
        ReduceRaw(dtype_, op_, contributions, prescale_, finish, output, elements);
      });
}

void Operation::CopyIn(Running* run, int64_t begin, int64_t count) {
  run->cursor.ForEachRun(
      begin, count, element_bytes_,
      [&](const uint8_t*, uint8_t* output, int64_t elements, int64_t offset) {
        CopyScaled(dtype_,
                   run->inbox[0].front().data() + static_cast<size_t>(offset) * element_bytes_, 1.0,
                   output, elements);
      });
}

void Operation::ReleaseFrames(const Links& links, std::vector<size_t>* held) {
  for (size_t i = 0; i < running_.size(); ++i) {
    for (size_t p = 0; p < running_[i].inbox.size(); ++p) {
      const size_t peer = Global(schedule_.steps[i].peers[p]);
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
