// Ranks that have joined: finding out that one has, and taking part when this one has (join.h).
#include <algorithm>
#include <utility>

#include "scheduler/check_request.h"
#include "scheduler/engine.h"

namespace tfdist {

// Goes on with this rank's own join. What it called before comes first: nobody else could tell it
// apart from what it takes part in later. And what it takes part in is over before its caller goes
// on, who may leave.
void Engine::TurnJoin(ProcessSet* set, int64_t now_us) {
  if (set->joining == nullptr || state_.stopped || !set->idle() || set->HasJoined()) return;
  if (set->join_answer.has_value()) {
    FinishJoin(set);
    return;
  }
  const JoinNote note{world_.rank, set->joining->info.timeout_s, set->book.LastTickets(), 0, 0};
  set->joined[world_.rank] = note.last;
  ProlongJoin(set, now_us);
  if (set->joins != nullptr) {
    AddJoin(set, note, now_us);
    if (set->join_answer.has_value()) FinishJoin(set);
    return;
  }
  control_.Send(set->leader(), FrameType::kJoin, set->id, EncodeJoin(note));
  if (departures_.HasLeft(set->leader())) departures_.ReportMissed(set->leader());
}

// False: it does not parse, or can't come from that peer.
bool Engine::HandleJoinMessage(int peer, FrameType type, ProcessSet* set, ByteSpan message,
                               int64_t now_us) {
  const bool from_leader = set->leader() == peer && set->index > 0;
  const bool to_leader = set->index == 0 && set->IndexOf(peer) > 0;
  if (type == FrameType::kStarted || type == FrameType::kTakePart) {
    WaitNote note;
    if (!DecodeWait(message, &note)) return false;
    if (state_.stopped) return true;
    if (type == FrameType::kTakePart) {
      if (from_leader) TakePart(set, note, now_us);
      return from_leader;
    }
    if (!to_leader) return false;
    set->joins->Started(note, now_us);
    TurnJoins(set, now_us);
    return true;
  }
  JoinNote note;
  if (!DecodeJoin(message, &note) || set->IndexOf(note.rank) < 0) return false;
  if (state_.stopped) return from_leader || to_leader;
  switch (type) {
    case FrameType::kJoin:
      if (from_leader) {
        if (note.rank == world_.rank) return false;
        OnJoin(set, note, now_us);
        return true;
      }
      if (!to_leader || note.rank != peer) return false;
      AddJoin(set, note, now_us);
      return true;
    case FrameType::kJoinHeard:
      if (!to_leader) return false;
      set->joins->Heard(note.rank, peer, note.round);
      TurnJoins(set, now_us);
      return true;
    case FrameType::kJoinEnd:
      if (!from_leader || !set->HasJoined() || note.complete < 1 || note.complete > set->size()) {
        return false;
      }
      EndJoin(set, note, now_us);
      return true;
    default:
      return false;
  }
}

// On the leader.
void Engine::AddJoin(ProcessSet* set, JoinNote note, int64_t now_us) {
  note.round = set->joins->round();
  const Status status = set->joins->Add(note, now_us);
  if (!status.ok()) {
    failures_.ReportBug(status, now_us);
    return;
  }
  if (set->joins->complete()) {
    const std::vector<int32_t> latest = set->joins->End();
    set->negotiator->EndJoin();
    JoinNote end;
    end.rank = latest[0];
    end.complete = static_cast<int32_t>(latest.size());
    control_.SendToMembers(*set, FrameType::kJoinEnd, EncodeJoin(end));
    EndJoin(set, end, now_us);
    return;
  }
  for (int32_t rank : set->ranks) {
    if (rank == world_.rank || rank == note.rank) continue;
    control_.Send(rank, FrameType::kJoin, set->id, EncodeJoin(note));
  }
  if (note.rank != world_.rank) OnJoin(set, note, now_us);
  TurnJoins(set, now_us);
  departures_.CheckAnnounced();
}

// On the leader: what can go on, now that something about joining has changed.
void Engine::TurnJoins(ProcessSet* set, int64_t now_us) {
  for (const auto& [rank, order] : set->joins->TakeOrders()) {
    if (rank == world_.rank) {
      TakePart(set, order, now_us);
    } else {
      control_.Send(rank, FrameType::kTakePart, set->id, EncodeWait(order));
    }
  }
  for (int32_t rank : set->joins->TakeHeard()) set->negotiator->Join(rank);
}

// Another rank has joined: what runs already divides by one less, and has to wait for an order.
void Engine::OnJoin(ProcessSet* set, const JoinNote& note, int64_t now_us) {
  set->joined[note.rank] = note.last;
  ProlongJoin(set, now_us);
  std::vector<std::pair<uint64_t, RequestInfo>> started;
  for (const auto& [turn, active] : set->active) {
    const uint64_t ticket = active.operation->ticket();
    if (!IsPredicted(ticket) || TookPart(note.last, ticket)) continue;
    active.operation->SetContributors(Contributors(set->joined, set->size(), ticket));
    started.emplace_back(ticket, active.operation->members()[0]->info);
  }
  for (const auto& [ticket, info] : started) TellStarted(set, ticket, info, now_us);
  if (set->joins == nullptr) {
    control_.Send(set->leader(), FrameType::kJoinHeard, set->id,
                  EncodeJoin({note.rank, 0, {}, 0, note.round}));
  } else {
    set->joins->Heard(note.rank, world_.rank, note.round);
  }
}

// The leader ends the waiting (Joins::Expired); this is for one that says nothing at all any more.
void Engine::ProlongJoin(ProcessSet* set, int64_t now_us) {
  if (!set->HasJoined() || set->joining == nullptr) return;
  const double timeout_s = set->joining->info.timeout_s;
  set->joining->deadline_us = now_us + static_cast<int64_t>(timeout_s * 1e6);
}

void Engine::EndJoin(ProcessSet* set, const JoinNote& note, int64_t now_us) {
  ProlongJoin(set, now_us);
  set->joined.clear();
  Response& response = set->join_answer.emplace();
  response.number = static_cast<uint64_t>(note.rank);
  response.rows = {note.complete};
}

void Engine::FinishJoin(ProcessSet* set) {
  std::unique_ptr<Request> request = std::move(set->joining);
  request->agreed(*set->join_answer);
  set->join_answer.reset();
  Finish(std::move(request), Status());
}

// A predicted operation has started here, in which a rank that has joined is to take part. A rank
// that has joined itself was told of it by the leader.
void Engine::TellStarted(ProcessSet* set, uint64_t ticket, const RequestInfo& info,
                         int64_t now_us) {
  if (set->HasJoined()) return;
  const WaitNote note{ticket, 0, info};
  if (set->joins == nullptr) {
    control_.Send(set->leader(), FrameType::kStarted, set->id, EncodeWait(note));
    return;
  }
  set->joins->Started(note, now_us);
  TurnJoins(set, now_us);
}

// As a rank that has joined, in a predicted operation.
void Engine::TakePart(ProcessSet* set, const WaitNote& order, int64_t now_us) {
  std::unique_ptr<Request> request;
  if (set->HasJoined()) request = MakeJoined(set, order.info, now_us);
  if (request == nullptr || request->info.predicted != order.ticket ||
      !set->book.Predictable(order.ticket, request->info)) {
    if (!state_.stopped) {
      failures_.ReportBug(TFDIST_INTERNAL(DescribeRank(world_, set->leader()) + " asked for " +
                                          TicketText(order.ticket) + " of \"" + order.info.key +
                                          "\", which can't be next here"),
                          now_us);
    }
    return;
  }
  StartPredicted(set, std::move(request), now_us);
}

bool Engine::IsAsked(const ProcessSet& set, const Response& response) const {
  const std::vector<int32_t>& joined = response.joined;
  return set.HasJoined() && std::find(joined.begin(), joined.end(), world_.rank) != joined.end();
}

// As a rank that has joined, in an announced operation. Null: the work has ended.
std::unique_ptr<Request> Engine::JoinIn(ProcessSet* set, const RequestInfo& info, uint32_t number,
                                        const Response& response, int64_t now_us) {
  std::unique_ptr<Request> request = MakeJoined(set, info, now_us);
  if (request == nullptr) return nullptr;
  if (info.kind == CollectiveKind::kRegister) {
    request->agreed = [this, info](const Response& agreed) {
      if (hooks_.registered) hooks_.registered(info, agreed);
    };
  }
  NoteOutcome(set, *request, response.error.ok(), number);
  return request;
}

std::unique_ptr<Request> Engine::MakeJoined(ProcessSet* set, const RequestInfo& info,
                                            int64_t now_us) {
  ProlongJoin(set, now_us);
  std::unique_ptr<Request> request = MakeJoinedRequest(info);
  if (request == nullptr) {
    failures_.ReportBug(
        Status(Code::kInternal, "\"" + info.key +
                                    "\": this rank has joined, and has no memory to "
                                    "take part in it"),
        now_us);
    return nullptr;
  }
  request->info.set = set->id;
  // What others can't have called is not taken part in.
  Status wrong = CheckRequest(*request, world_.size);
  request->submitted_us = request->agreed_us = now_us;
  request->deadline_us = now_us + static_cast<int64_t>(info.timeout_s * 1e6);
  if (wrong.ok()) {
    request->info.predicted = 0;
    CountSubmission(set, request.get());
    wrong = gate_.Check(*request);
  }
  if (!wrong.ok()) {
    failures_.ReportBug(TFDIST_INTERNAL(DescribeRank(world_, set->leader()) +
                                        " asked for what can't be: " + wrong.message()),
                        now_us);
    return nullptr;
  }
  // The leader's word that the step before is complete came before the one to take part in this.
  if (gate_.Admit(set, *request)) return request;
  failures_.ReportBug(TFDIST_INTERNAL(DescribeRank(world_, set->leader()) + " asked for \"" +
                                      info.key + "\" before its last step was complete"),
                      now_us);
  return nullptr;
}

}  // namespace tfdist
