#include "scheduler/engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/deadline.h"
#include "base/logging.h"
#include "transport/transport.h"

namespace tfdist {
namespace {

constexpr int kFramesPerTurn = 64;  // of one link, so that no peer starves the others

SetView AllRanks(const World& world) {
  SetView set;
  set.ranks.resize(static_cast<size_t>(world.size));
  std::iota(set.ranks.begin(), set.ranks.end(), 0);
  if (world.local_size != world.size) set.host_of = set.ranks;
  set.index = world.rank;
  return set;
}

}  // namespace

Engine::Engine(World world, Links links, const Config& config, Hooks hooks)
    : world_(std::move(world)),
      links_(std::move(links)),
      config_(config),
      hooks_(std::move(hooks)),
      held_(links_.size(), 0),
      inbound_(links_.size()),
      outbound_(links_.size()),
      everyone_(AllRanks(world_)) {
  if (world_.rank == 0) {
    negotiator_ = std::make_unique<Negotiator>(world_.size, config_.fusion_bytes);
  }
}

Engine::~Engine() = default;

// ---- requests ----

void Engine::Submit(std::unique_ptr<Request> request, int64_t now_us) {
  request->submitted_us = now_us;
  if (!failure_.ok()) {
    Finish(std::move(request), failure_, now_us);
    return;
  }
  if (leaving_) {
    Finish(std::move(request), ShutDown(), now_us);
    return;
  }
  request->deadline_us = now_us + static_cast<int64_t>(request->info.timeout_s * 1e6);
  auto& queue = entries_[request->info.key];
  queue.push_back(std::move(request));
  if (queue.size() == 1) Announce(RequestInfo(queue.front()->info), now_us);
  if (world_.rank != 0 && inbound_[0].left) HandleLeave(0, now_us);
}

void Engine::Announce(const RequestInfo& info, int64_t now_us) {
  if (world_.rank != 0) {
    Tell(0, FrameType::kReady, EncodeRequest(info));
    return;
  }
  const Status status = negotiator_->Add(0, info, now_us);
  if (!status.ok()) Bug(status, now_us);
  RefuseMissing(now_us);
}

bool Engine::SendResponses(int64_t now_us) {
  if (negotiator_ == nullptr || !failure_.ok()) return false;
  const std::vector<Response> responses = negotiator_->TakeResponses();
  for (const Response& response : responses) {
    TellAll(FrameType::kResponse, EncodeResponse(response));
  }
  for (const Response& response : responses) HandleResponse(response, now_us);
  return !responses.empty();
}

std::unique_ptr<Request> Engine::TakeEntry(const std::string& key, int64_t now_us) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return nullptr;
  std::unique_ptr<Request> request = std::move(it->second.front());
  it->second.pop_front();
  stalls_.erase(key);
  if (it->second.empty()) {
    entries_.erase(it);
  } else {
    Announce(RequestInfo(it->second.front()->info), now_us);
  }
  request->agreed_us = now_us;
  return request;
}

void Engine::HandleResponse(const Response& response, int64_t now_us) {
  if (!failure_.ok()) return;
  std::vector<std::unique_ptr<Request>> members;
  for (const std::string& key : response.keys) {
    std::unique_ptr<Request> request = TakeEntry(key, now_us);
    if (request == nullptr && !response.error.ok()) continue;  // refused before it came here
    if (request == nullptr) {
      Bug(TFDIST_INTERNAL("rank 0 announced \"" + key + "\", which was not submitted here"),
          now_us);
      break;
    }
    if (!response.error.ok()) {
      Finish(std::move(request), response.error, now_us);
    } else {
      members.push_back(std::move(request));
    }
  }
  if (!failure_.ok()) {
    for (auto& member : members) Finish(std::move(member), failure_, now_us);
    return;
  }
  if (members.empty()) return;
  last_ticket_ = response.ticket;
  Request& first = *members[0];
  switch (first.info.kind) {
    case CollectiveKind::kBarrier:
      Finish(std::move(members[0]), Status(), now_us);
      return;
    case CollectiveKind::kRegister:
      first.agreed(response);
      Finish(std::move(members[0]), Status(), now_us);
      return;
    case CollectiveKind::kAllgather: {
      if (!RowsFit(response.rows, first.info, everyone_)) {
        Bug(TFDIST_INTERNAL("rank 0 announced rows for \"" + first.info.key + "\" that do not fit"),
            now_us);
        Finish(std::move(members[0]), failure_, now_us);
        return;
      }
      const std::vector<int64_t> rows = response.rows;
      const uint64_t ticket = response.ticket;
      first.rows = rows;
      auto allocate = first.allocate;
      auto allocated = hooks_.allocated;
      allocating_[ticket] = std::move(members[0]);
      hooks_.completions->Post(
          [allocate, allocated, rows, ticket] { allocated(ticket, allocate(rows)); });
      return;
    }
    case CollectiveKind::kAllreduce:
    case CollectiveKind::kBroadcast:
      Start(response.ticket, std::move(members), now_us);
      return;
  }
}

// ---- execution ----

void Engine::Start(uint64_t ticket, std::vector<std::unique_ptr<Request>> members, int64_t now_us) {
  std::vector<TensorView> tensors;
  for (const auto& member : members) {
    tensors.insert(tensors.end(), member->tensors.begin(), member->tensors.end());
  }
  StatusOr<Plan> plan =
      PlanOperation({members[0]->info, tensors, members[0]->rows, everyone_}, config_);
  if (!plan.ok()) {
    for (auto& member : members) Finish(std::move(member), plan.status(), now_us);
    Bug(plan.status(), now_us);
    return;
  }
  Activate(std::make_unique<Operation>(ticket, std::move(members), std::move(plan.value()),
                                       everyone_, config_.segment_bytes),
           now_us);
}

void Engine::Activate(std::unique_ptr<Operation> operation, int64_t now_us) {
  const auto stashed = stash_.find(operation->ticket());
  if (stashed != stash_.end()) {
    for (auto& [peer, arrived] : stashed->second) {
      const Status status = operation->Deliver(peer, std::move(arrived));
      if (!status.ok()) {
        Bug(status, now_us);
        break;
      }
    }
    stash_.erase(stashed);
  }
  if (!failure_.ok()) {
    for (auto& member : operation->members()) Finish(std::move(member), failure_, now_us);
    return;
  }
  const uint64_t ticket = operation->ticket();
  active_[ticket] = std::move(operation);
}

void Engine::Allocated(uint64_t ticket, void* memory, int64_t now_us) {
  const auto it = allocating_.find(ticket);
  if (it == allocating_.end()) return;  // failed meanwhile
  std::unique_ptr<Request> request = std::move(it->second);
  allocating_.erase(it);
  if (memory == nullptr) {
    const Status status(Code::kInternal, "allgather \"" + request->info.key +
                                             "\": no memory for the rows of all ranks");
    Finish(std::move(request), status, now_us);
    Bug(status, now_us);
    return;
  }
  request->tensors[0].output = static_cast<uint8_t*>(memory);
  std::vector<std::unique_ptr<Request>> members;
  members.push_back(std::move(request));
  Start(ticket, std::move(members), now_us);
}

bool Engine::AdvanceAll(int64_t now_us) {
  bool moved = false;
  int64_t running = 0;
  for (auto it = active_.begin(); it != active_.end() && running < config_.max_active;) {
    Operation& operation = *it->second;
    moved |= operation.Advance(links_, world_.generation, &held_);
    if (!operation.complete()) {
      ++running;
      ++it;
      continue;
    }
    moved = true;
    for (auto& member : operation.members()) Finish(std::move(member), Status(), now_us);
    it = active_.erase(it);
  }
  return moved;
}

void Engine::Finish(std::unique_ptr<Request> request, const Status& status, int64_t now_us) {
  ++finished_;
  if (status.ok()) CountStep(*request);
  if (hooks_.finished) {
    hooks_.finished({request->info.key, request->info.kind, request->bytes, request->submitted_us,
                     request->agreed_us, now_us, status.code()});
  }
  std::shared_ptr<Request> shared = std::move(request);
  hooks_.completions->Post([shared, status] { shared->done(status); });
}

void Engine::CountStep(const Request& request) {
  if (request.group.empty()) return;
  std::vector<int64_t>& done = steps_[request.group];
  done.resize(std::max(done.size(), static_cast<size_t>(request.bucket_count)), 0);
  ++done[static_cast<size_t>(request.bucket_index)];
  const int64_t complete = *std::min_element(done.begin(), done.end());
  if (complete <= good_steps_) return;
  good_steps_ = complete;
  if (hooks_.stepped) hooks_.stepped(complete);
}

// ---- one turn ----

bool Engine::Poll(int64_t now_us) {
  bool moved = false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr) continue;
    const int peer = static_cast<int>(p);
    moved |= FlushControl(peer);
    Status lost = links_[p]->Pump(&moved);
    if (lost.ok() && inbound_[p].ended) lost = Status(Code::kAborted, "its process has ended");
    bool read = ReadControl(peer, now_us);
    read |= ReadData(peer, now_us);
    moved |= read;
    // What a peer sent before it went away still counts.
    if (!lost.ok() && !read) {
      moved = true;
      LosePeer(peer, lost, now_us);
    }
  }
  moved |= SendResponses(now_us);
  moved |= AdvanceAll(now_us);
  AcknowledgeLeaves();
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] != nullptr) moved |= FlushControl(static_cast<int>(p));
  }
  return moved;
}

bool Engine::ReadData(int peer, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  bool moved = false;
  InFrame frame;
  for (int n = 0; n < kFramesPerTurn && links_[p] != nullptr; ++n) {
    if (!links_[p]->Poll(Lane::kData, &frame)) break;
    moved = true;
    if (!failure_.ok()) {
      links_[p]->Release(Lane::kData, frame);
      continue;
    }
    if (frame.header.generation != world_.generation) {
      Bug(TFDIST_INTERNAL(Describe(peer) + " sent data of generation " +
                          std::to_string(frame.header.generation)),
          now_us);
      links_[p]->Release(Lane::kData, frame);
      continue;
    }
    Arrived arrived{frame, {}, true};
    const auto it = active_.find(frame.header.ticket);
    if (it == active_.end() || held_[p] + 1 >= links_[p]->MaxHeld()) {
      arrived.held = false;
      arrived.copy.assign(frame.payload.begin(), frame.payload.end());
      links_[p]->Release(Lane::kData, frame);
    } else {
      ++held_[p];
    }
    if (it == active_.end()) {
      Stash(frame.header.ticket, peer, std::move(arrived));
      continue;
    }
    const bool held = arrived.held;
    const Status status = it->second->Deliver(peer, std::move(arrived));
    if (!status.ok()) {
      if (held) {
        links_[p]->Release(Lane::kData, frame);
        --held_[p];
      }
      Bug(status, now_us);
      break;
    }
    // Use it while it is in the cache, and give the room back to the peer early.
    it->second->Advance(links_, world_.generation, &held_);
  }
  return moved;
}

void Engine::Stash(uint64_t ticket, int peer, Arrived arrived) {
  stash_[ticket].emplace_back(peer, std::move(arrived));
}

void Engine::SetSleeping(bool sleeping) {
  for (const auto& link : links_) {
    if (link != nullptr) link->SetSleeping(sleeping);
  }
}

std::string Engine::CountersJson() const {
  std::ostringstream out;
  out << "{\"tickets\": " << last_ticket_ << ", \"finished\": " << finished_
      << ", \"good_steps\": " << good_steps_ << ", \"links\": [";
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
