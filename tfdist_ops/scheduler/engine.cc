#include "scheduler/engine.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "scheduler/failure_status.h"

namespace tfdist {
namespace {

// Turns are at most this far apart (kIdleUs in runtime/progress.cc). If a gap is more than twice as
// long, the process was suspended.
constexpr int64_t kTurnUs = 1000 * 1000;

}  // namespace

Engine::Engine(World world, Links links, const Config& config, Hooks hooks)
    : world_(std::move(world)),
      links_(std::move(links)),
      config_(config),
      hooks_(std::move(hooks)),
      sets_(world_, config_),
      pending_(sets_),
      own_time_(kTurnUs),
      monitor_(MakeHeartbeatMonitor(world_, config_, hooks_.process_state)),
      control_(world_, links_, &monitor_, this),
      recorder_(world_.rank, &control_),
      failures_({world_, config_, links_, state_, pending_, hooks_.process_state, &monitor_,
                 &control_, &gate_, &departures_, this}),
      data_lane_({world_, links_, state_, &sets_, &monitor_, &recorder_, &failures_}),
      deadlocks_({world_.rank, state_, sets_, &control_, &failures_, hooks_.still}),
      gate_({world_, config_, state_, sets_, &control_, &failures_, this}),
      departures_({world_, links_, state_, sets_, pending_, &monitor_, &control_, &failures_}),
      runner_({world_, config_, links_, state_, sets_, hooks_, &recorder_, &data_lane_, &failures_,
               this}),
      joins_(
          {world_, state_, &control_, &departures_, &gate_, &failures_, this, hooks_.registered}),
      predicted_({world_.rank, state_, &control_, &departures_, &joins_, &runner_, &failures_}),
      deadlines_({world_, config_, state_, sets_, pending_, gate_, &control_, &failures_}) {}

Engine::~Engine() = default;

// ---- requests ----

namespace {

// Adds to the request what ranks that have joined must know of its tensors.
void DescribeTensors(Request* request) {
  RequestInfo& info = request->info;
  info.group = request->group;
  info.bucket_index = request->bucket_index;
  info.bucket_count = request->bucket_count;
  const bool has_list = info.kind == CollectiveKind::kAllreduce ||
                        info.kind == CollectiveKind::kReduce ||
                        info.kind == CollectiveKind::kBroadcast;
  if (!has_list) return;
  info.sizes.clear();
  info.hints.clear();
  for (const TensorView& tensor : request->tensors) {
    info.sizes.push_back(tensor.elements);
    info.hints.push_back(tensor.hint);
  }
}

}  // namespace

void Engine::Submit(std::unique_ptr<Request> request, int64_t now_us) {
  AdvanceOwnTime(now_us);
  ++state_.moves;
  request->submitted_us = now_us;
  Status refused = state_.failure;
  if (refused.ok() && state_.leaving) refused = ShutDownStatus(world_, pending_.OldestKey());
  RequestInfo& info = request->info;
  if (info.kind == CollectiveKind::kSendRecv) {
    info.set = PairSetId(std::min(info.root, info.peer), std::max(info.root, info.peer));
  }
  if (refused.ok()) refused = sets_.Check(*request);
  if (!refused.ok()) {
    Finish(std::move(request), refused);
    return;
  }
  request->deadline_us = state_.own_us + static_cast<int64_t>(info.timeout_s * 1e6);
  DescribeTensors(request.get());
  ProcessSet* set = sets_.FindOrCreate(info.set);
  if (state_.stopped) {
    pending_.Stop(std::move(request));
    return;
  }
  if (info.kind == CollectiveKind::kJoin) {
    // JoinProtocol sets its deadline when it is sent, and prolongs it with every collective.
    request->deadline_us = std::numeric_limits<int64_t>::max();
    set->joining = std::move(request);
    return;
  }
  sets_.BeginChange(request.get());
  set->CountSubmission(request.get());
  refused = gate_.Check(*request);
  if (!refused.ok()) {
    Finish(std::move(request), refused);
    return;
  }
  if (!gate_.Admit(set, *request)) {
    gate_.Postpone(set, std::move(request));
    return;
  }
  Enqueue(set, std::move(request), now_us);
}

void Engine::Enqueue(ProcessSet* set, std::unique_ptr<Request> request, int64_t now_us) {
  const RequestInfo& info = request->info;
  const bool predictable = set->book.Predictable(info.predicted, info);
  // A later submission of a key never overtakes one that is still being agreed on.
  if (predictable && set->entries.count(info.key) == 0) {
    predicted_.Start(set, std::move(request), now_us);
    return;
  }
  const bool is_known =
      (IsBucket(*request) && info.predicted == 0) || set->book.Known(info.predicted);
  if (is_known && !predictable) ++deviations_;
  auto& queue = set->entries[info.key];
  queue.push_back(std::move(request));
  if (queue.size() == 1) Announce(set, RequestInfo(queue.front()->info), now_us);
  const int leader = set->leader();
  if (leader != world_.rank && departures_.HasLeft(leader)) {
    departures_.ReportMissed(leader);
  }
}

void Engine::Announce(ProcessSet* set, const RequestInfo& info, int64_t now_us) {
  if (set->negotiator == nullptr) {
    control_.Send(set->leader(), FrameType::kReady, set->id, EncodeRequest(info));
  } else {
    AddReady(set, world_.rank, info, now_us);
  }
}

void Engine::AddReady(ProcessSet* set, int rank, RequestInfo info, int64_t now_us) {
  ++state_.moves;
  info.set = set->id;
  const Status status = set->negotiator->Add(rank, std::move(info), state_.own_us);
  if (!status.ok()) failures_.ReportBug(status, now_us);
  predicted_.CheckMismatch(set);
  departures_.CheckAnnounced();
}

bool Engine::SendResponses(int64_t now_us) {
  bool sent = false;
  for (auto& [id, set] : sets_) {
    if (set->negotiator == nullptr || state_.stopped) continue;
    const std::vector<Response> responses = set->negotiator->TakeResponses();
    for (const Response& response : responses) {
      if (response.ends_work) {
        failures_.Suspect(kNoRank, true, response.error);
        return true;
      }
      set->joins->Announced(response, state_.own_us);
      control_.SendToMembers(*set, FrameType::kResponse, EncodeResponse(response));
    }
    for (const Response& response : responses) HandleResponse(set.get(), response, now_us);
    sent |= !responses.empty();
  }
  return sent;
}

// Ends adding or removing a set. Handles what came for a new set before this rank heard of it.
void Engine::EndSetChange(const Request& request, const Response& response, int64_t now_us) {
  ProcessSet* set = sets_.EndChange(request, response);
  if (set == nullptr) return;
  auto early = std::move(set->early);
  auto early_joins = std::move(set->early_joins);
  for (auto& [rank, ready] : early) {
    if (!state_.stopped && set->negotiator != nullptr) {
      AddReady(set, rank, std::move(ready), now_us);
    }
  }
  for (const auto& [rank, message] : early_joins) {
    OnControlMessage(rank, FrameType::kJoin, set->id, AsBytes(message), now_us);
  }
}

std::unique_ptr<Request> Engine::TakeEntry(ProcessSet* set, const std::string& key, bool agreed,
                                           uint32_t number, int64_t now_us) {
  const auto it = set->entries.find(key);
  if (it == set->entries.end()) return nullptr;
  std::deque<std::unique_ptr<Request>>& queue = it->second;
  std::unique_ptr<Request> request = std::move(queue.front());
  queue.pop_front();
  set->stalls.erase(key);
  request->agreed_us = now_us;
  set->NoteOutcome(*request, agreed, number);
  if (number != 0) {
    for (const auto& later : queue) {
      if (!IsBucket(*later)) set->CountSubmission(later.get());
    }
  }
  // Requests queued behind it may need no agreement any more.
  while (!queue.empty() &&
         set->book.Predictable(queue.front()->info.predicted, queue.front()->info)) {
    std::unique_ptr<Request> next = std::move(queue.front());
    queue.pop_front();
    predicted_.Start(set, std::move(next), now_us);
    if (state_.stopped) return request;  // the queue is gone
  }
  if (queue.empty()) {
    set->entries.erase(it);
  } else {
    Announce(set, RequestInfo(queue.front()->info), now_us);
  }
  return request;
}

void Engine::HandleResponse(ProcessSet* set, const Response& response, int64_t now_us) {
  if (state_.stopped) return;
  ++state_.moves;
  std::vector<std::unique_ptr<Request>> members;
  for (size_t i = 0; i < response.keys.size(); ++i) {
    const std::string& key = response.keys[i];
    const bool agreed = response.error.ok();
    const uint32_t number = i < response.numbers.size() ? response.numbers[i] : 0;
    std::unique_ptr<Request> request = TakeEntry(set, key, agreed, number, now_us);
    if (request == nullptr && joins_.IsAsked(*set, response)) {
      request = joins_.TakePartInAnnounced(set, response.infos[i], number, response, now_us);
      if (request == nullptr) return;  // the work has ended
    }
    if (request == nullptr && !response.error.ok()) continue;  // refused before it came here
    if (request == nullptr) {
      failures_.ReportBug(TFDIST_INTERNAL(DescribeRank(world_, set->leader()) + " announced \"" +
                                          key + "\", which was not submitted here"),
                          now_us);
      break;
    }
    if (!response.error.ok()) {
      EndSetChange(*request, response, now_us);
      gate_.End(set, std::move(request), response.error, now_us);
    } else {
      request->contributors = set->size() - static_cast<int>(response.joined.size());
      recorder_.OnAgreed(response, request.get(), now_us);
      members.push_back(std::move(request));
      const auto algorithm_of = [this, set](const RequestInfo& info) {
        return sets_.AlgorithmAloneOf(*set, info);
      };
      if (members.size() == 1) continue;
      if (Fuses(members[0]->info, members.back()->info, algorithm_of)) continue;
      failures_.ReportBug(
          TFDIST_INTERNAL(DescribeRank(world_, set->leader()) + " announced \"" + key +
                          "\" together with another operation that it can't be fused with"),
          now_us);
      break;
    }
  }
  if (state_.stopped) {
    for (auto& member : members) EndStopped(std::move(member));
    return;
  }
  if (members.empty()) return;
  if (set->id == kWorldSet) last_ticket_ = response.ticket;
  Request& first = *members[0];
  switch (first.info.kind) {
    case CollectiveKind::kBarrier:
      Finish(std::move(members[0]), Status());
      return;
    case CollectiveKind::kRegister:
      set->groups[first.group] = static_cast<uint32_t>(response.number);
      first.agreed(response);
      Finish(std::move(members[0]), Status());
      return;
    case CollectiveKind::kAddSet:
    case CollectiveKind::kRemoveSet:
      EndSetChange(first, response, now_us);
      first.agreed(response);
      Finish(std::move(members[0]), Status());
      return;
    case CollectiveKind::kAllgather:
    case CollectiveKind::kGather:
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAlltoall:
      runner_.Allocate(set, std::move(members[0]), response, now_us);
      return;
    case CollectiveKind::kAllreduce:
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kReduce:
    case CollectiveKind::kSendRecv:
      runner_.Start(set, response.ticket, std::move(members), now_us);
      return;
    case CollectiveKind::kJoin:
      return;  // not announced
  }
}

void Engine::Finish(std::unique_ptr<Request> request, const Status& outcome) {
  ++finished_;
  ++state_.moves;
  if (outcome.ok()) CountStep(*request);
  if (hooks_.finished) hooks_.finished(*request, outcome.code());
  if (recorder_.records()) recorder_.OnFinished(*request, outcome, sets_.Find(request->info.set));
  const Status well;
  const Status& status = !outcome.ok() && HidesFailure(*request, outcome) ? well : outcome;
  // The output of a request that fails may be about to be allocated. That memory goes with `done`,
  // which therefore has to come after the allocation.
  if (request->direct && (status.ok() || !request->allocate)) {
    request->done(status);
    if (hooks_.spent) hooks_.spent(std::move(request));
    return;
  }
  std::shared_ptr<Request> shared = std::move(request);
  hooks_.completions->Post([shared, status] { shared->done(status); });
}

void Engine::CountStep(const Request& request) {
  if (request.group.empty() || request.bucket_count == 0) return;
  std::vector<int64_t>& done = steps_[request.info.set][request.group];
  done.resize(std::max(done.size(), static_cast<size_t>(request.bucket_count)), 0);
  ++done[static_cast<size_t>(request.bucket_index)];
  const int64_t complete = *std::min_element(done.begin(), done.end());
  if (complete <= good_steps_) return;
  good_steps_ = complete;
  if (hooks_.stepped) hooks_.stepped(complete);
}

// ---- one turn ----

bool Engine::Poll(int64_t now_us) {
  AdvanceOwnTime(now_us);
  bool moved = false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr) continue;
    const int peer = static_cast<int>(p);
    if (control_.HasQueued(peer)) moved |= control_.Flush(peer);
    Status lost = links_[p]->Pump(&moved);
    if (lost.ok() && failures_.HasProcessEnded(peer)) {
      lost = Status(Code::kAborted, "its process has ended");
    }
    bool read = control_.Read(peer, now_us);
    read |= data_lane_.Read(peer, now_us);
    moved |= read;
    // Frames that a peer sent before it went away still count.
    if (!lost.ok() && !read) {
      moved = true;
      LosePeer(peer, lost, now_us);
    }
  }
  moved |= SendResponses(now_us);
  // Before the data: a rank that waits for an answer must not also wait behind a lot of data.
  moved |= control_.FlushAll();
  moved |= AdvanceAll(now_us);
  moved |= data_lane_.EmptyFullLinks(now_us);
  for (auto& [id, set] : sets_) joins_.Advance(set.get(), now_us);
  failures_.Advance(now_us);
  departures_.AnswerGoodbyes();
  moved |= control_.FlushAll();
  return moved;
}

bool Engine::AdvanceAll(int64_t now_us) {
  bool moved = false;
  for (auto& [id, set] : sets_) {
    OperationRunner::Completed completed = std::move(completed_);
    moved |= runner_.Advance(set.get(), now_us, &completed);
    for (auto& request : completed.requests) {
      gate_.End(set.get(), std::move(request), Status(), now_us);
    }
    for (uint64_t ticket : completed.tickets) predicted_.OnEnd(set.get(), ticket);
    completed.tickets.clear();
    completed.requests.clear();
    completed_ = std::move(completed);
  }
  return moved;
}

bool Engine::PollData(int64_t now_us) {
  bool moved = false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr || !links_[p]->HasFrame()) continue;
    moved |= data_lane_.Read(static_cast<int>(p), now_us);
  }
  if (moved) AdvanceAll(now_us);
  return moved;
}

void Engine::Tick(int64_t now_us) {
  AdvanceOwnTime(now_us);
  deadlines_.Prolong(now_us);
  for (auto& [id, set] : sets_) {
    if (state_.stopped) break;
    predicted_.Tick(set.get());
    if (state_.stopped || set->negotiator == nullptr) continue;
    deadlines_.WarnOfStalls(set.get());
    predicted_.CheckMismatch(set.get());
    if (!state_.stopped) deadlines_.EndExpired(*set, now_us);
  }
  departures_.CheckArrived();
  if (!state_.stopped) deadlines_.EndLate(now_us);
  deadlocks_.Tick(state_.own_us);
  failures_.Tick(now_us);
  if (!state_.leaving) recorder_.AskForTime(now_us);
}

bool Engine::busy() const { return pending_.has_stopped() || sets_.busy(); }

bool Engine::waiting() const {
  return busy() || failures_.undecided() || doubting() || sets_.deciding();
}

void Engine::SetWakeMode(WakeMode mode) {
  data_lane_.SetAsleep(mode == WakeMode::kAsleep);
  for (const auto& link : links_) {
    if (link != nullptr) link->SetWakeMode(mode);
  }
}

std::string Engine::CountersJson() const {
  std::ostringstream out;
  out << "{\"tickets\": " << last_ticket_ << ", \"finished\": " << finished_
      << ", \"good_steps\": " << good_steps_
      << ", \"negotiation_messages\": " << control_.negotiation_messages()
      << ", \"predicted\": " << predicted_.started() << ", \"deviations\": " << deviations_
      << ", \"probes\": " << predicted_.probes_sent()
      << ", \"gate_messages\": " << gate_.messages_sent()
      << ", \"tuning\": " << JsonQuote(world_.tuning_hash) << ", "
      << recorder_.wait_accounting().Json() << ", \"links\": [";
  bool first = true;
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    out << (first ? "" : ", ") << "{\"peer\": " << link->peer()
        << ", \"transport\": " << JsonQuote(link->transport())
        << ", \"data_bytes_sent\": " << link->data_bytes_sent()
        << ", \"data_frames_sent\": " << link->data_frames_sent() << "}";
    first = false;
  }
  out << "]}";
  return out.str();
}

}  // namespace tfdist
