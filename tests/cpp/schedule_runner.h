// Runs the schedules of all ranks in one thread, over real slices and segments, in a random order
// drawn from a seed. What it finds wrong comes back as a sentence; "" means that all went well.
#ifndef TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_
#define TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
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

namespace tfdist {

// A stream of segments: sender, receiver, phase, slice.
using StreamKey = std::tuple<int, int, int, int>;

inline std::string StreamName(const StreamKey& key) {
  return "rank " + std::to_string(std::get<0>(key)) + " to " + std::to_string(std::get<1>(key)) +
         ", phase " + std::to_string(std::get<2>(key)) + ", slice " +
         std::to_string(std::get<3>(key));
}

// Whether the lists of all ranks fit together, without running them: peers and slices exist,
// `after` points backwards, every stream has one sender and one receiver.
inline std::string CheckSchedules(const std::vector<Schedule>& schedules, int slices) {
  const int size = static_cast<int>(schedules.size());
  std::set<StreamKey> sent;
  std::set<StreamKey> received;
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<Step>& steps = schedules[rank].steps;
    for (int index = 0; index < static_cast<int>(steps.size()); ++index) {
      const Step& step = steps[index];
      const std::string where = "rank " + std::to_string(rank) + " step " + std::to_string(index);
      if (step.slice < 0 || step.slice >= slices) return where + ": no such slice";
      if (step.after >= index) return where + ": after a later step";
      if (step.kind != StepKind::kReduce && step.peers.size() != 1) return where + ": peers";
      if (step.kind == StepKind::kReduce && !step.raw && step.peers.size() != 1) {
        return where + ": a partial result comes from one peer";
      }
      for (size_t p = 0; p < step.peers.size(); ++p) {
        const int peer = step.peers[p];
        if (peer < 0 || peer >= size || peer == rank) return where + ": no such peer";
        if (p > 0 && peer <= step.peers[p - 1]) return where + ": peers do not ascend";
        const bool is_send = step.kind == StepKind::kSend;
        const StreamKey key = is_send ? StreamKey(rank, peer, step.phase, step.slice)
                                      : StreamKey(peer, rank, step.phase, step.slice);
        if (!(is_send ? sent : received).insert(key).second) {
          return (is_send ? "sent twice: " : "received twice: ") + StreamName(key);
        }
      }
    }
  }
  for (const StreamKey& key : sent) {
    if (received.count(key) == 0) return "never received: " + StreamName(key);
  }
  for (const StreamKey& key : received) {
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
        slices_(std::move(slices)),
        options_(options),
        element_bytes_(DTypeSize(options.dtype)),
        segment_elements_(SegmentElements(options.segment_bytes, element_bytes_)),
        random_(options.seed),
        counts_(schedules_.size()) {
    for (const Schedule& schedule : schedules_) next_.emplace_back(schedule.steps.size(), 0);
  }

  std::string Run() {
    std::string error = CheckSchedules(schedules_, static_cast<int>(slices_[0].size()));
    const size_t size = schedules_.size();
    while (error.empty()) {
      const size_t first = random_() % size;
      bool ran = false;
      for (size_t i = 0; i < size && !ran; ++i) ran = RunOneStep((first + i) % size, &error);
      if (!ran) break;
    }
    return error.empty() ? CheckEnd() : error;
  }

  // What a rank sent.
  const SendCount& count(int rank) const { return counts_[static_cast<size_t>(rank)]; }

 private:
  struct Message {
    int64_t segment;
    std::vector<uint8_t> copy;  // filled when sent, or when taken
    size_t sender;
    bool from_input;
  };

  const Slice& SliceOf(size_t rank, const Step& step) const {
    return slices_[rank][static_cast<size_t>(step.slice)];
  }
  int64_t Segments(size_t rank, const Step& step) const {
    return SegmentCount(SliceOf(rank, step).elements, segment_elements_);
  }
  StreamKey Incoming(size_t rank, const Step& step, int peer) const {
    return {peer, static_cast<int>(rank), step.phase, step.slice};
  }

  bool CanRun(size_t rank, size_t index) const {
    const Step& step = schedules_[rank].steps[index];
    const int64_t segment = next_[rank][index];
    if (segment >= Segments(rank, step)) return false;
    if (step.after >= 0 && next_[rank][static_cast<size_t>(step.after)] <= segment) return false;
    if (step.kind == StepKind::kSend) return true;
    for (int peer : step.peers) {
      const auto it = streams_.find(Incoming(rank, step, peer));
      if (it == streams_.end() || it->second.empty()) return false;
    }
    return true;
  }

  bool RunOneStep(size_t rank, std::string* error) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < next_[rank].size(); ++i) {
      if (CanRun(rank, i)) ready.push_back(i);
    }
    if (ready.empty()) return false;
    const size_t index = ready[random_() % ready.size()];
    const Step& step = schedules_[rank].steps[index];
    const int64_t segment = next_[rank][index]++;
    *error = step.kind == StepKind::kSend ? Send(rank, step, segment) : Take(rank, step, segment);
    return true;
  }

  // The elements of a segment, gathered from the input or the output of `rank`.
  std::string Gather(size_t rank, const Slice& slice, int64_t segment, bool from_input,
                     std::vector<uint8_t>* bytes) const {
    const int64_t begin = segment * segment_elements_;
    const int64_t count = std::min(segment_elements_, slice.elements - begin);
    bytes->resize(static_cast<size_t>(count) * element_bytes_);
    std::string error;
    SliceCursor(slice).ForEachRun(
        begin, count, element_bytes_,
        [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
          const uint8_t* source = from_input ? input : output;
          if (source == nullptr) {
            error = "rank " + std::to_string(rank) + " sends what it does not have";
            return;
          }
          std::memcpy(bytes->data() + static_cast<size_t>(offset) * element_bytes_, source,
                      static_cast<size_t>(n) * element_bytes_);
        });
    return error;
  }

  std::string Send(size_t rank, const Step& step, int64_t segment) {
    Message message{segment, {}, rank, step.from_input};
    std::string error;
    error = Gather(rank, SliceOf(rank, step), segment, step.from_input, &message.copy);
    counts_[rank].bytes += message.copy.size();
    ++counts_[rank].frames;
    streams_[StreamKey(static_cast<int>(rank), step.peers[0], step.phase, step.slice)].push_back(
        std::move(message));
    return error;
  }

  // kReduce and kCopy.
  std::string Take(size_t rank, const Step& step, int64_t segment) {
    std::vector<Message> messages;
    for (int peer : step.peers) {
      std::deque<Message>& stream = streams_[Incoming(rank, step, peer)];
      messages.push_back(std::move(stream.front()));
      stream.pop_front();
      Message& m = messages.back();
      if (m.segment != segment) return "segments out of order";
      if (options_.read_late) {
        const std::string error =
            Gather(m.sender, SliceOf(m.sender, step), segment, m.from_input, &m.copy);
        if (!error.empty()) return error;
      }
    }
    const int64_t begin = segment * segment_elements_;
    const Slice& slice = SliceOf(rank, step);
    const int64_t count = std::min(segment_elements_, slice.elements - begin);
    for (const Message& m : messages) {
      if (m.copy.size() != static_cast<size_t>(count) * element_bytes_) return "segment length";
    }
    std::string error;
    SliceCursor(slice).ForEachRun(
        begin, count, element_bytes_,
        [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
          if (step.kind == StepKind::kReduce && input == nullptr) {
            error = "rank " + std::to_string(rank) + " reduces what it does not have";
            return;
          }
          const size_t shift = static_cast<size_t>(offset) * element_bytes_;
          Compute(rank, step, messages, shift, input, output, n);
        });
    return error;
  }

  void Compute(size_t rank, const Step& step, const std::vector<Message>& messages, size_t shift,
               const uint8_t* input, uint8_t* output, int64_t n) const {
    if (step.kind == StepKind::kCopy) {
      return CopyScaled(options_.dtype, messages[0].copy.data() + shift, 1.0, output, n);
    }
    const Finish finish = step.finish ? options_.finish : Finish{};
    if (!step.raw) {
      return ReducePartial(options_.dtype, options_.op, messages[0].copy.data() + shift, input,
                           options_.prescale, finish, output, n);
    }
    std::vector<const uint8_t*> in_rank_order;
    bool own = false;
    for (size_t i = 0; i < messages.size(); ++i) {
      if (!own && step.peers[i] > static_cast<int>(rank)) {
        in_rank_order.push_back(input);
        own = true;
      }
      in_rank_order.push_back(messages[i].copy.data() + shift);
    }
    if (!own) in_rank_order.push_back(input);
    ReduceRaw(options_.dtype, options_.op, in_rank_order, options_.prescale, finish, output, n);
  }

  std::string CheckEnd() const {
    for (size_t rank = 0; rank < schedules_.size(); ++rank) {
      for (size_t i = 0; i < next_[rank].size(); ++i) {
        if (next_[rank][i] < Segments(rank, schedules_[rank].steps[i])) {
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
  const std::vector<std::vector<Slice>> slices_;
  const RunnerOptions options_;
  const size_t element_bytes_;
  const int64_t segment_elements_;
  std::mt19937_64 random_;
  std::vector<SendCount> counts_;
  std::vector<std::vector<int64_t>> next_;  // by rank and step: the segment to run next
  std::map<StreamKey, std::deque<Message>> streams_;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_
