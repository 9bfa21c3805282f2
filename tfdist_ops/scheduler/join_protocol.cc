#include "scheduler/join_protocol.h"

#include <algorithm>
#include <utility>

#include "scheduler/request_check.h"

namespace tfdist {

// Goes on with this rank's own join. All that it called before must be complete first: no other
// rank could tell that apart from what it takes part in later. And all that it takes part in must
// be complete before the caller of join goes on, who may then leave.
void JoinProtocol::Advance(ProcessSet* set, int64_t now_us) {
  if (set->joining == nullptr || access_.state.stopped || !set->idle() || set->HasJoined()) return;
  if (set->join_answer.has_value()) {
    Finish(set);
    return;
  }
  const JoinNote note{access_.world.rank, set->joining->info.timeout_s, set->book.LastTickets(), 0,
                      0};
  set->joined[access_.world.rank] = note.last;
  Prolong(set);
  if (set->joins != nullptr) {
    Add(set, note, now_us);
    if (set->join_answer.has_value()) Finish(set);
    return;
  }
  access_.control->Send(set->leader(), FrameType::kJoin, set->id, EncodeJoin(note));
  if (access_.departures->HasLeft(set->leader())) access_.departures->ReportMissed(set->leader());
}

// False: it does not parse, or can't come from that peer.
bool JoinProtocol::OnMessage(int peer, FrameType type, ProcessSet* set, ByteSpan message,
                             int64_t now_us) {
  const bool from_leader = set->leader() == peer && set->index > 0;
  const bool to_leader = set->index == 0 && set->IndexOf(peer) > 0;
  if (type == FrameType::kStarted || type == FrameType::kTakePart) {
    WaitNote note;
    if (!DecodeWait(message, &note)) return false;
    if (access_.state.stopped) return true;
    if (type == FrameType::kTakePart) {
      if (from_leader) TakePartInPredicted(set, note, now_us);
      return from_leader;
    }
    if (!to_leader) return false;
    set->joins->Started(note, access_.state.own_us);
    SendOrders(set, now_us);
    return true;
  }
  JoinNote note;
  if (!DecodeJoin(message, &note) || set->IndexOf(note.rank) < 0) return false;
  if (access_.state.stopped) return from_leader || to_leader;
  switch (type) {
    case FrameType::kJoin:
      if (from_leader) {
        if (note.rank == access_.world.rank) return false;
        OnJoin(set, note, now_us);
        return true;
      }
      if (!to_leader || note.rank != peer) return false;
      Add(set, note, now_us);
      return true;
    case FrameType::kJoinAck:
      if (!to_leader) return false;
      set->joins->Acknowledge(note.rank, peer, note.round);
      SendOrders(set, now_us);
      return true;
    case FrameType::kJoinEnd:
      if (!from_leader || !set->HasJoined() || note.complete < 1 || note.complete > set->size()) {
        return false;
      }
      End(set, note);
      return true;
    default:
      return false;
  }
}

// On the leader.
void JoinProtocol::Add(ProcessSet* set, JoinNote note, int64_t now_us) {
  note.round = set->joins->round();
  const Status status = set->joins->Add(note, access_.state.own_us);
  if (!status.ok()) {
    access_.failures->ReportBug(status, now_us);
    return;
  }
  if (set->joins->complete()) {
    const std::vector<int32_t> latest = set->joins->End();
    set->negotiator->EndJoin();
    JoinNote end;
    end.rank = latest[0];
    end.complete = static_cast<int32_t>(latest.size());
    access_.control->SendToMembers(*set, FrameType::kJoinEnd, EncodeJoin(end));
    End(set, end);
    return;
  }
  for (int32_t rank : set->ranks) {
    if (rank == access_.world.rank || rank == note.rank) continue;
    access_.control->Send(rank, FrameType::kJoin, set->id, EncodeJoin(note));
  }
  if (note.rank != access_.world.rank) OnJoin(set, note, now_us);
  SendOrders(set, now_us);
  access_.departures->CheckAnnounced();
}

// On the leader: what can go on, now that something about joining has changed.
void JoinProtocol::SendOrders(ProcessSet* set, int64_t now_us) {
  for (const auto& [rank, order] : set->joins->TakeOrders()) {
    if (rank == access_.world.rank) {
      TakePartInPredicted(set, order, now_us);
    } else {
      access_.control->Send(rank, FrameType::kTakePart, set->id, EncodeWait(order));
    }
  }
  for (int32_t rank : set->joins->TakeAcknowledged()) set->negotiator->Join(rank);
}

// Another rank has joined: operations that run already divide by one less, and the leader must be
// told of them, so that it orders that rank to take part.
void JoinProtocol::OnJoin(ProcessSet* set, const JoinNote& note, int64_t now_us) {
  set->joined[note.rank] = note.last;
  Prolong(set);
  std::vector<std::pair<uint64_t, RequestInfo>> started;
  for (const auto& [turn, active] : set->active) {
    const uint64_t ticket = active.operation->ticket();
    if (!IsPredicted(ticket) || TookPart(note.last, ticket)) continue;
    active.operation->SetContributors(Contributors(set->joined, set->size(), ticket));
    started.emplace_back(ticket, active.operation->members()[0]->info);
  }
  for (const auto& [ticket, info] : started) OnStarted(set, ticket, info, now_us);
  if (set->joins == nullptr) {
    access_.control->Send(set->leader(), FrameType::kJoinAck, set->id,
                          EncodeJoin({note.rank, 0, {}, 0, note.round}));
  } else {
    set->joins->Acknowledge(note.rank, access_.world.rank, note.round);
  }
}

// The leader ends the wait (Joins::Expired); this deadline is for a leader that no longer answers.
void JoinProtocol::Prolong(ProcessSet* set) const {
  if (!set->HasJoined() || set->joining == nullptr) return;
  const double timeout_s = set->joining->info.timeout_s;
  set->joining->deadline_us = access_.state.own_us + static_cast<int64_t>(timeout_s * 1e6);
}

void JoinProtocol::End(ProcessSet* set, const JoinNote& note) {
  Prolong(set);
  set->joined.clear();
  Response& response = set->join_answer.emplace();
  response.number = static_cast<uint64_t>(note.rank);
  response.rows = {note.complete};
}

void JoinProtocol::Finish(ProcessSet* set) {
  std::unique_ptr<Request> request = std::move(set->joining);
  request->agreed(*set->join_answer);
  set->join_answer.reset();
  access_.requests->Finish(std::move(request), Status());
}

// A predicted operation has started here, in which a rank that has joined is to take part. If this
// rank has joined itself, the leader has told it of the operation.
void JoinProtocol::OnStarted(ProcessSet* set, uint64_t ticket, const RequestInfo& info,
                             int64_t now_us) {
  if (set->HasJoined()) return;
  const WaitNote note{ticket, 0, info};
  if (set->joins == nullptr) {
    access_.control->Send(set->leader(), FrameType::kStarted, set->id, EncodeWait(note));
    return;
  }
  set->joins->Started(note, access_.state.own_us);
  SendOrders(set, now_us);
}

// As a rank that has joined, in a predicted operation.
void JoinProtocol::TakePartInPredicted(ProcessSet* set, const WaitNote& order, int64_t now_us) {
  std::unique_ptr<Request> request;
  if (set->HasJoined()) request = MakeRequest(set, order.info, now_us);
  if (request == nullptr || request->info.predicted != order.ticket ||
      !set->book.Predictable(order.ticket, request->info)) {
    if (!access_.state.stopped) {
      access_.failures->ReportBug(
          TFDIST_INTERNAL(DescribeRank(access_.world, set->leader()) + " asked for " +
                          TicketText(order.ticket) + " of \"" + order.info.key +
                          "\", which can't be next here"),
          now_us);
    }
    return;
  }
  access_.requests->StartPredicted(set, std::move(request), now_us);
}

bool JoinProtocol::IsAsked(const ProcessSet& set, const Response& response) const {
  const std::vector<int32_t>& joined = response.joined;
  return set.HasJoined() &&
         std::find(joined.begin(), joined.end(), access_.world.rank) != joined.end();
}

// As a rank that has joined, in an announced operation. Null: the work has ended.
std::unique_ptr<Request> JoinProtocol::TakePartInAnnounced(ProcessSet* set, const RequestInfo& info,
                                                           uint32_t number,
                                                           const Response& response,
                                                           int64_t now_us) {
  std::unique_ptr<Request> request = MakeRequest(set, info, now_us);
  if (request == nullptr) return nullptr;
  if (info.kind == CollectiveKind::kRegister) {
    request->agreed = [this, info = request->info](const Response& agreed) {
      if (access_.registered) access_.registered(info, agreed);
    };
  }
  set->NoteOutcome(*request, response.error.ok(), number);
  return request;
}

std::unique_ptr<Request> JoinProtocol::MakeRequest(ProcessSet* set, const RequestInfo& info,
                                                   int64_t now_us) {
  Prolong(set);
  std::unique_ptr<Request> request = MakeJoinedRequest(info);
  if (request == nullptr) {
    access_.failures->ReportBug(
        Status(Code::kInternal, "\"" + info.key +
                                    "\": this rank has joined, and has no memory to "
                                    "take part in it"),
        now_us);
    return nullptr;
  }
  request->info.set = set->id;
  // This rank takes no part in operations that the others cannot have called.
  Status wrong = CheckRequest(*request, access_.world.size);
  request->submitted_us = request->agreed_us = now_us;
  request->deadline_us = access_.state.own_us + static_cast<int64_t>(info.timeout_s * 1e6);
  if (wrong.ok()) {
    request->info.predicted = 0;
    set->CountSubmission(request.get());
    wrong = access_.gate->Check(*request);
  }
  if (!wrong.ok()) {
    access_.failures->ReportBug(TFDIST_INTERNAL(DescribeRank(access_.world, set->leader()) +
                                                " made an invalid request: " + wrong.message()),
                                now_us);
    return nullptr;
  }
  // The leader reports the previous step as complete before it orders this rank to take part in
  // this one.
  if (access_.gate->Admit(set, *request)) return request;
  access_.failures->ReportBug(
      TFDIST_INTERNAL(DescribeRank(access_.world, set->leader()) + " asked for \"" + info.key +
                      "\" before its last step was complete"),
      now_us);
  return nullptr;
}

}  // namespace tfdist
