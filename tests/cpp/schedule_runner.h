// Runs the schedules of all ranks in one thread, over real slices and segments, in a random order
// drawn from a seed. What it finds wrong comes back as a sentence; "" means that all went well.
#ifndef TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_
#define TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "collective/reduce_kernels.h"
#include "collective/schedule.h"
#include "collective/slicing.h"
#include "collective/step_memory.h"

namespace tfdist {

// A stream of segments: sender, receiver, phase, label.
using StreamKey = std::tuple<int, int, int, int>;

// Whether the lists of all ranks fit together, without running them: peers and slices exist,
// `after` points backwards, every stream has one sender and one receiver, and both know whether it
// carries inputs or partial results. `slices`: without the joined ones.
std::string CheckSchedules(const std::vector<Schedule>& schedules, int slices);

constexpr size_t kNeverStreamed = std::numeric_limits<size_t>::max();

struct RunnerOptions {
  Reduction reduction;  // of the whole collective
  int64_t segment_bytes = 256;
  uint64_t seed = 1;
  // false: a send copies its bytes. true: the receiver reads them from the sender's memory when it
  // takes the segment, as through shared memory: whatever was overwritten by then shows. (Dots are
  // overwritten right after they were sent; no transport reads late what is not part of a tensor.)
  bool read_late = false;
  size_t streamed_bytes = kNeverStreamed;
};

class ScheduleRunner {
 public:
  // `slices[rank]` of every rank, cut from its own buffers.
  ScheduleRunner(std::vector<Schedule> schedules, std::vector<std::vector<Slice>> slices,
                 const RunnerOptions& options);

  std::string Run();

  // Payload bytes and frames that a rank sent.
  const SendCount& count(int rank) const { return counts_[static_cast<size_t>(rank)]; }
  const StepMemory& memory(int rank) const { return *memories_[static_cast<size_t>(rank)]; }
  // Segments that were written past the caches, unless they lay in place.
  int64_t streamed() const { return streamed_; }

 private:
  struct Message {
    int64_t segment;
    std::vector<uint8_t> payload;  // filled when sent, and again when taken if that is late
    size_t sender;
    size_t step;
  };
  struct Running {
    int64_t done = 0;  // segments
    int64_t total = 0;
    std::vector<size_t> streams;  // by peer
    size_t sender = 0;            // of a kReduce: the step that sends its result; 0: none
  };

  // As in Operation: only these results can go out while they are computed.
  void FindSenders(size_t rank);
  bool CanRun(size_t rank, size_t index) const;
  // Looks from a random rank and step on for one that can run. False: there is none.
  bool RunOneStep();
  void Send(size_t rank, size_t index, int64_t segment);
  void Commit(Message message);
  // kReduce and kCopy. Half of the results that can go out while they are computed do.
  void Take(size_t rank, size_t index, int64_t segment);
  std::string CheckEnd() const;

  const std::vector<Schedule> schedules_;
  const int slice_count_;
  const RunnerOptions options_;
  std::mt19937_64 random_;
  std::string error_;
  std::vector<std::unique_ptr<StepMemory>> memories_;
  std::vector<SendCount> counts_;
  int64_t streamed_ = 0;
  std::vector<std::vector<Running>> running_;  // by rank and step
  std::vector<std::deque<Message>> streams_;
  std::vector<StreamKey> keys_;  // of the streams
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_SCHEDULE_RUNNER_H_
