#include "schedule_runner.h"

#include <map>
#include <utility>

namespace tfdist {
namespace {

std::string StreamName(const StreamKey& key) {
  return "rank " + std::to_string(std::get<0>(key)) + " to " + std::to_string(std::get<1>(key)) +
         ", phase " + std::to_string(std::get<2>(key)) + ", slice " +
         std::to_string(std::get<3>(key));
}

StreamKey Stream(int from, int to, const Step& step) {
  return {from, to, step.phase, step.label >= 0 ? step.label : step.slice};
}

// Checks one step by itself: returns what is wrong with it, or "".
std::string CheckStep(const Schedule& schedule, int index, int rank, int size, int slices) {
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

}  // namespace

std::string CheckSchedules(const std::vector<Schedule>& schedules, int slices) {
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
        const bool partial = CarriesPartials(step);
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

ScheduleRunner::ScheduleRunner(std::vector<Schedule> schedules,
                               std::vector<std::vector<Slice>> slices, const RunnerOptions& options)
    : schedules_(std::move(schedules)),
      slice_count_(static_cast<int>(slices[0].size())),
      options_(options),
      random_(options.seed),
      counts_(schedules_.size()) {
  error_ = CheckSchedules(schedules_, slice_count_);
  if (!error_.empty()) return;
  std::map<StreamKey, size_t> numbers;
  const auto number = [&numbers](const StreamKey& key) {
    return numbers.insert({key, numbers.size()}).first->second;
  };
  for (size_t rank = 0; rank < schedules_.size(); ++rank) {
    memories_.push_back(std::make_unique<StepMemory>(
        schedules_[rank], std::move(slices[rank]), options.reduction, static_cast<int>(rank),
        options.segment_bytes, options.streamed_bytes));
    if (error_.empty()) error_ = memories_.back()->Check();
    std::vector<Running>& running = running_.emplace_back();
    for (size_t i = 0; i < schedules_[rank].steps.size(); ++i) {
      const Step& step = schedules_[rank].steps[i];
      const bool is_send = step.kind == StepKind::kSend;
      Running run;
      run.total = memories_[rank]->segments(i);
      for (int peer : step.peers) {
        const int own = static_cast<int>(rank);
        run.streams.push_back(number(is_send ? Stream(own, peer, step) : Stream(peer, own, step)));
      }
      running.push_back(std::move(run));
    }
    FindSenders(rank);
  }
  streams_.resize(numbers.size());
  keys_.resize(numbers.size());
  for (const auto& [key, stream] : numbers) keys_[stream] = key;
}

std::string ScheduleRunner::Run() {
  while (error_.empty() && RunOneStep()) {
  }
  return error_.empty() ? CheckEnd() : error_;
}

void ScheduleRunner::FindSenders(size_t rank) {
  const std::vector<Step>& steps = schedules_[rank].steps;
  for (size_t i = steps.size(); i-- > 1;) {
    const Step& send = steps[i];
    if (send.kind != StepKind::kSend || send.own != Place::kOutput || send.after.size() != 1) {
      continue;
    }
    const auto after = static_cast<size_t>(send.after[0]);
    const Step& step = steps[after];
    if (step.kind == StepKind::kReduce && step.finish && step.slice == send.slice) {
      running_[rank][after].sender = i;
    }
  }
}

bool ScheduleRunner::CanRun(size_t rank, size_t index) const {
  const Step& step = schedules_[rank].steps[index];
  const Running& run = running_[rank][index];
  if (run.done >= run.total) return false;
  for (int32_t other : step.after) {
    const auto after = static_cast<size_t>(other);
    const Step& earlier = schedules_[rank].steps[after];
    if (running_[rank][after].done <
        (BySegment(earlier, step) ? run.done + 1 : running_[rank][after].total)) {
      return false;
    }
  }
  if (step.kind == StepKind::kSend) return true;
  for (size_t stream : run.streams) {
    if (streams_[stream].empty()) return false;
  }
  return true;
}

bool ScheduleRunner::RunOneStep() {
  const size_t size = schedules_.size();
  const size_t first_rank = random_() % size;
  const size_t first_step = random_();
  for (size_t i = 0; i < size; ++i) {
    const size_t rank = (first_rank + i) % size;
    const size_t steps = running_[rank].size();
    for (size_t j = 0; j < steps; ++j) {
      const size_t index = (first_step % steps + j) % steps;
      if (!CanRun(rank, index)) continue;
      const int64_t segment = running_[rank][index].done++;
      if (schedules_[rank].steps[index].kind == StepKind::kSend) {
        Send(rank, index, segment);
      } else {
        Take(rank, index, segment);
      }
      return true;
    }
  }
  return false;
}

void ScheduleRunner::Send(size_t rank, size_t index, int64_t segment) {
  Message message{segment, {}, rank, index};
  message.payload.resize(memories_[rank]->WireBytes(index, segment));
  memories_[rank]->Pack(index, segment, message.payload.data());
  Commit(std::move(message));
}

void ScheduleRunner::Commit(Message message) {
  // A link refuses it.
  const auto most = std::max<size_t>(64, static_cast<size_t>(options_.segment_bytes));
  if (message.payload.size() > most) error_ = "a payload that is longer than a segment";
  counts_[message.sender].bytes += message.payload.size();
  ++counts_[message.sender].frames;
  streams_[running_[message.sender][message.step].streams[0]].push_back(std::move(message));
}

void ScheduleRunner::Take(size_t rank, size_t index, int64_t segment) {
  std::vector<Message> messages;
  std::vector<const uint8_t*> payloads;
  for (size_t stream : running_[rank][index].streams) {
    messages.push_back(std::move(streams_[stream].front()));
    streams_[stream].pop_front();
    Message& m = messages.back();
    if (m.segment != segment) error_ = "segments out of order";
    if (m.payload.size() != memories_[rank]->WireBytes(index, segment)) error_ = "segment length";
    const bool is_late = options_.read_late && !MovesDots(schedules_[m.sender].steps[m.step]);
    if (is_late) memories_[m.sender]->Pack(m.step, segment, m.payload.data());
  }
  if (!error_.empty()) return;
  for (const Message& m : messages) payloads.push_back(m.payload.data());
  const size_t sender = running_[rank][index].sender;
  Message result{segment, {}, rank, sender};
  if (sender != 0 && running_[rank][sender].done == segment && random_() % 2 == 0) {
    result.payload.resize(memories_[rank]->WireBytes(sender, segment));
  }
  const bool sends = !result.payload.empty();
  if (memories_[rank]->Streams(index, sends)) ++streamed_;
  memories_[rank]->Take(index, segment, payloads, /*streamed=*/random_() % 2 == 0,
                        sends ? result.payload.data() : nullptr);
  if (!sends) return;
  ++running_[rank][sender].done;
  Commit(std::move(result));
}

std::string ScheduleRunner::CheckEnd() const {
  for (size_t rank = 0; rank < schedules_.size(); ++rank) {
    for (size_t i = 0; i < running_[rank].size(); ++i) {
      if (running_[rank][i].done < running_[rank][i].total) {
        return "deadlock: rank " + std::to_string(rank) + " waits in step " + std::to_string(i);
      }
    }
  }
  for (size_t stream = 0; stream < streams_.size(); ++stream) {
    if (!streams_[stream].empty()) return "left over: " + StreamName(keys_[stream]);
  }
  return "";
}

}  // namespace tfdist
