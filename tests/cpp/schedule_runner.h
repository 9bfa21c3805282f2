// Runs the schedules of all ranks in one thread, over real slices and segments, in a random order
// drawn from a seed. What it finds wrong comes back as a sentence; "" means that all went well.
#ifndef TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_
#define TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "collective/reduce_kernels.h"
#include "collective/schedule.h"
#include "collective/slicing.h"
#include "collective/step_memory.h"

namespace tfdist {

// A stream of segments: sender, receiver, phase, label.
using StreamKey = std::tuple<int, int, int, int>;

inline std::string StreamName(const StreamKey& key) {
  return "rank " + std::to_string(std::get<0>(key)) + " to " + std::to_string(std::get<1>(key)) +
         ", phase " + std::to_string(std::get<2>(key)) + ", slice " +
         std::to_string(std::get<3>(key));
}

inline StreamKey Stream(int from, int to, const Step& step) {
  return {from, to, step.phase, step.label >= 0 ? step.label : step.slice};
}

// What is wrong with one step by itself, or "".
inline std::string CheckStep(const Schedule& schedule, int index, int rank, int size, int slices) {
  const Step& step = schedule.steps[static_cast<size_t>(index)];
  if (step.slice < 0 || step.slice >= slices) return "no such slice";
  for (int32_t after : step.after) {
    if (after < 0 || after >= index) return "after a later step";
  }
  if (step.kind == StepKind::kSend && step.peers.size() != 1) return "peers";
  if (step.kind == StepKind::kCopy && step.peers.size() > 1) return "peers";
  if (step.kind == StepKind::kSend && step.own == Place::kPartial && !schedule.partials) {
    return "sends a partial result in a schedule without";
  }
  for (size_t p = 0; p < step.peers.size(); ++p) {
    const int peer = step.peers[p];
    if (peer < 0 || peer >= size || peer == rank) return "no such peer";
    if (p > 0 && peer <= step.peers[p - 1]) return "peers do not ascend";
  }
  return "";
}

// Whether the lists of all ranks fit together, without running them: peers and slices exist,
// `after` points backwards, every stream has one sender and one receiver, and both know whether it
// carries inputs or partial results. `slices`: without the joined ones.
inline std::string CheckSchedules(const std::vector<Schedule>& schedules, int slices) {
  const int size = static_cast<int>(schedules.size());
  std::map<StreamKey, bool> sent;  // whether it carries partial results
  std::map<StreamKey, bool> received;
  for (int rank = 0; rank < size; ++rank) {
    const Schedule& schedule = schedules[static_cast<size_t>(rank)];
    const int count = slices + static_cast<int>(schedule.joined.size());
    if (schedule.partials != schedules[0].partials) return "ranks differ in partials";
    for (int index = 0; index < static_cast<int>(schedule.steps.size()); ++index) {
      const Step& step = schedule.steps[static_cast<size_t>(index)];
      const std::string error = CheckStep(schedule, index, rank, size, count);
      if (!error.empty()) {
        return "rank " + std::to_string(rank) + " step " + std::to_string(index) + ": " + error;
      }
      for (int peer : step.peers) {
        const bool is_send = step.kind == StepKind::kSend;
        const bool partial = is_send ? step.own == Place::kPartial
                                     : step.kind == StepKind::kReduce && !step.raw;
        const StreamKey key = is_send ? Stream(rank, peer, step) : Stream(peer, rank, step);
        if (!(is_send ? sent : received).insert({key, partial}).second) {
          return (is_send ? "sent twice: " : "received twice: ") + StreamName(key);
        }
      }
    }
  }
  for (const auto& [key, partial] : sent) {
    const auto it = received.find(key);
    if (it == received.end()) return "never received: " + StreamName(key);
    if (it->second != partial) return "sent as one thing, received as another: " + StreamName(key);
  }
  for (const auto& [key, partial] : received) {
    if (sent.count(key) == 0) return "never sent: " + StreamName(key);
  }
  return "";
}

struct RunnerOptions {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  Finish finish;
  int64_t segment_bytes = 256;
  uint64_t seed = 1;
  // false: a send copies its bytes. true: the receiver reads them from the sender's memory when it
  // takes the segment, as through shared memory: whatever was overwritten by then shows.
  bool read_late = false;
};

class ScheduleRunner {
 public:
  // `slices[rank]` of every rank, cut from its own buffers.
  ScheduleRunner(std::vector<Schedule> schedules, std::vector<std::vector<Slice>> slices,
                 const RunnerOptions& options)
      : schedules_(std::move(schedules)),
        slice_count_(static_cast<int>(slices[0].size())),
        options_(options),
        random_(options.seed),
        counts_(schedules_.size()) {
    error_ = CheckSchedules(schedules_, slice_count_);
    if (!error_.empty()) return;
    const Reduction reduction{options.dtype, options.op, options.prescale, options.finish};
    for (size_t rank = 0; rank < schedules_.size(); ++rank) {
      memories_.push_back(std::make_unique<StepMemory>(schedules_[rank], std::move(slices[rank]),
                                                       reduction, static_cast<int>(rank),
                                                       options.segment_bytes));
      next_.emplace_back(schedules_[rank].steps.size(), 0);
      if (error_.empty()) error_ = memories_.back()->Check();
    }
  }

  std::string Run() {
    const size_t size = schedules_.size();
    while (error_.empty()) {
      const size_t first = random_() % size;
      bool ran = false;
      for (size_t i = 0; i < size && !ran; ++i) ran = RunOneStep((first + i) % size);
      if (!ran) break;
    }
    return error_.empty() ? CheckEnd() : error_;
  }

  // What a rank sent.
  const SendCount& count(int rank) const { return counts_[static_cast<size_t>(rank)]; }
  const StepMemory& memory(int rank) const { return *memories_[static_cast<size_t>(rank)]; }

 private:
  struct Message {
    int64_t segment;
    std::vector<uint8_t> payload;  // filled when sent, and again when taken if that is late
    size_t sender;
    size_t step;
  };

  bool CanRun(size_t rank, size_t index) const {
    const Step& step = schedules_[rank].steps[index];
    const int64_t segment = next_[rank][index];
    if (segment >= memories_[rank]->segments(index)) return false;
    for (int32_t other : step.after) {
      const auto after = static_cast<size_t>(other);
      const bool same = schedules_[rank].steps[after].slice == step.slice;
      const int64_t needed = same ? segment + 1 : memories_[rank]->segments(after);
      if (next_[rank][after] < needed) return false;
    }
    if (step.kind == StepKind::kSend) return true;
    for (int peer : step.peers) {
      const auto it = streams_.find(Stream(peer, static_cast<int>(rank), step));
      if (it == streams_.end() || it->second.empty()) return false;
    }
    return true;
  }

  bool RunOneStep(size_t rank) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < next_[rank].size(); ++i) {
      if (CanRun(rank, i)) ready.push_back(i);
    }
    if (ready.empty()) return false;
    const size_t index = ready[random_() % ready.size()];
    const int64_t segment = next_[rank][index]++;
    if (schedules_[rank].steps[index].kind == StepKind::kSend) {
      Send(rank, index, segment);
    } else {
      Take(rank, index, segment);
    }
    return true;
  }

  void Send(size_t rank, size_t index, int64_t segment) {
    const Step& step = schedules_[rank].steps[index];
    Message message{segment, {}, rank, index};
    message.payload.resize(memories_[rank]->WireBytes(index, segment));
    memories_[rank]->Pack(index, segment, message.payload.data());
    counts_[rank].bytes += message.payload.size();
    ++counts_[rank].frames;
    streams_[Stream(static_cast<int>(rank), step.peers[0], step)].push_back(std::move(message));
  }

  // kReduce and kCopy.
  void Take(size_t rank, size_t index, int64_t segment) {
    const Step& step = schedules_[rank].steps[index];
    std::vector<Message> messages;
    std::vector<const uint8_t*> payloads;
    for (int peer : step.peers) {
      std::deque<Message>& stream = streams_[Stream(peer, static_cast<int>(rank), step)];
      messages.push_back(std::move(stream.front()));
      stream.pop_front();
      Message& m = messages.back();
      if (m.segment != segment) error_ = "segments out of order";
      if (m.payload.size() != memories_[rank]->WireBytes(index, segment)) error_ = "segment length";
      if (options_.read_late) memories_[m.sender]->Pack(m.step, segment, m.payload.data());
    }
    if (!error_.empty()) return;
    for (const Message& m : messages) payloads.push_back(m.payload.data());
    memories_[rank]->Take(index, segment, payloads);
  }

  std::string CheckEnd() const {
    for (size_t rank = 0; rank < schedules_.size(); ++rank) {
      for (size_t i = 0; i < next_[rank].size(); ++i) {
        if (next_[rank][i] < memories_[rank]->segments(i)) {
          return "deadlock: rank " + std::to_string(rank) + " waits in step " + std::to_string(i);
        }
      }
    }
    for (const auto& [key, messages] : streams_) {
      if (!messages.empty()) return "left over: " + StreamName(key);
    }
    return "";
  }

  const std::vector<Schedule> schedules_;
  const int slice_count_;
  const RunnerOptions options_;
  std::mt19937_64 random_;
  std::string error_;
  std::vector<std::unique_ptr<StepMemory>> memories_;
  std::vector<SendCount> counts_;
  std::vector<std::vector<int64_t>> next_;  // by rank and step: the segment to run next
  std::map<StreamKey, std::deque<Message>> streams_;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_
