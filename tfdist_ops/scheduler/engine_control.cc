// The engine's control lane and what it is for: messages between ranks, deadlines, failure,
// leaving.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/deadline.h"
#include "base/logging.h"
#include "scheduler/engine.h"

namespace tfdist {
namespace {

constexpr size_t kMaxControlMessage = size_t{64} << 20;
constexpr int kMessagesPerTurn = 256;
constexpr uint32_t kMoreFragments = 1;
// After the leader's deadline the other ranks wait a little longer, so that the error they report
// is the leader's, who knows which ranks are missing.
constexpr int64_t kLeaderGraceUs = 500 * 1000;

}  // namespace

// ---- sending ----

void Engine::Tell(int peer, FrameType type, std::string message) {
  const auto p = static_cast<size_t>(peer);
  if (links_[p] == nullptr) return;
  outbound_[p].messages.emplace_back(type, std::move(message));
}

void Engine::TellAll(FrameType type, const std::string& message) {
  for (size_t p = 0; p < links_.size(); ++p) Tell(static_cast<int>(p), type, message);
}

bool Engine::FlushControl(int peer) {
  const auto p = static_cast<size_t>(peer);
  Outbound& out = outbound_[p];
  bool moved = false;
  while (!out.messages.empty()) {
    const auto& [type, message] = out.messages.front();
    const size_t bytes = std::min(kMaxControlPayload, message.size() - out.offset);
    const MutableByteSpan room = links_[p]->BeginSend(Lane::kControl, bytes);
    if (room.data() == nullptr) break;
    std::memcpy(room.data(), message.data() + out.offset, bytes);
    out.offset += bytes;
    FrameHeader header;
    header.type = static_cast<uint8_t>(type);
    header.generation = world_.generation;
    header.segment = out.offset < message.size() ? kMoreFragments : 0;
    links_[p]->CommitSend(Lane::kControl, header);
    moved = true;
    if (header.segment == 0) {
      out.messages.pop_front();
      out.offset = 0;
    }
  }
  return moved;
}

// ---- receiving ----

bool Engine::ReadControl(int peer, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  bool moved = false;
  InFrame frame;
  for (int n = 0; n < kMessagesPerTurn && links_[p] != nullptr; ++n) {
    if (!links_[p]->Poll(Lane::kControl, &frame)) break;
    moved = true;
    std::string& message = inbound_[p].assembled;
    message.append(reinterpret_cast<const char*>(frame.payload.data()), frame.payload.size());
    const FrameHeader header = frame.header;
    links_[p]->Release(Lane::kControl, frame);
    if (header.generation != world_.generation || message.size() > kMaxControlMessage) {
      message.clear();
      Bug(TFDIST_INTERNAL(Describe(peer) + " sent a control message of another generation, or one "
                                           "too long"),
          now_us);
      continue;
    }
    if (header.segment == kMoreFragments) continue;
    const std::string whole = std::move(message);
    message.clear();
    HandleControl(peer, static_cast<FrameType>(header.type), AsBytes(whole), now_us);
  }
  return moved;
}

void Engine::HandleControl(int peer, FrameType type, ByteSpan message, int64_t now_us) {
  bool parsed = true;
  switch (type) {
    case FrameType::kReady: {
      RequestInfo info;
      parsed = negotiator_ != nullptr && DecodeRequest(message, &info);
      if (!parsed || !failure_.ok()) break;
      const Status status = negotiator_->Add(peer, std::move(info), now_us);
      if (!status.ok()) Bug(status, now_us);
      RefuseMissing(now_us);
      return;
    }
    case FrameType::kResponse: {
      Response response;
      parsed = peer == 0 && DecodeResponse(message, &response);
      if (parsed) HandleResponse(response, now_us);
      break;
    }
    case FrameType::kAbort: {
      Status status;
      parsed = DecodeStatus(message, &status) && !status.ok();
      if (parsed) Abort(status, Status(), now_us);
      break;
    }
    case FrameType::kLeave:
      inbound_[static_cast<size_t>(peer)].left = true;
      inbound_[static_cast<size_t>(peer)].answer_due = true;
      // Only the leader knows whether a key still waits for the peer, or is already announced;
      // after its own goodbye nothing will be.
      if (peer == 0 && !entries_.empty()) HandleLeave(0, now_us);
      RefuseMissing(now_us);
      return;
    case FrameType::kLeaveAck:
      inbound_[static_cast<size_t>(peer)].acknowledged = true;
      return;
    case FrameType::kStall: {
      std::string key;
      std::string text;
      parsed = DecodeStall(message, &key, &text);
      if (parsed) stalls_[key] = text;
      break;
    }
    default:
      parsed = false;
  }
  if (!parsed) {
    Bug(TFDIST_INTERNAL(Describe(peer) + " sent a control message of type " +
                        std::to_string(static_cast<int>(type)) + " that does not parse"),
        now_us);
  }
}

// ---- time ----

void Engine::Tick(int64_t now_us) {
  if (!failure_.ok()) return;
  if (negotiator_ != nullptr) {
    const auto warning_us = static_cast<int64_t>(config_.stall_warning_s * 1e6);
    for (const Negotiator::Stall& stall : negotiator_->TakeStalls(now_us, warning_us)) {
      TFDIST_LOG(kWarning, world_.rank, "STALL",
                 stall.text << ", which has not called it yet. Check that all ranks take the same "
                               "steps, and equally many. The wait ends after its timeout.");
      TellAll(FrameType::kStall, EncodeStall(stall.key, stall.text));
    }
    if (const auto expired = negotiator_->Expired(now_us)) {
      ErrorRecord record{"timeout",    expired->missing[0], "",           0,
                         expired->key, "deadline passed",   expired->text};
      record.host = world_.hosts[static_cast<size_t>(expired->missing[0])];
      const Status status(
          Code::kDeadlineExceeded,
          expired->text +
              ", which is its timeout. What is missing is alive but did not call it: look for a "
              "step that only some ranks take, or raise TFDIST_TIMEOUT_S.",
          record);
      Abort(status, status, now_us);
      return;
    }
  }
  const int64_t limit = now_us - kLeaderGraceUs;
  const Request* late = nullptr;
  for (const auto& [key, queue] : entries_) {
    if (queue.front()->deadline_us < limit) late = queue.front().get();
  }
  for (const auto& [ticket, operation] : active_) {
    if (operation->members()[0]->deadline_us < limit) late = operation->members()[0].get();
  }
  for (const auto& [ticket, request] : allocating_) {
    if (request->deadline_us < limit) late = request.get();
  }
  if (late == nullptr) return;
  const auto told = stalls_.find(late->info.key);
  const std::string text =
      told != stalls_.end() ? told->second
      : late->agreed_us > 0
          ? std::string(CollectiveKindName(late->info.kind)) + " \"" + late->info.key +
                "\" did not finish although every rank had started it"
          : std::string(CollectiveKindName(late->info.kind)) + " \"" + late->info.key +
                "\" got no answer from the leader, " + Describe(0);
  const Status status(Code::kDeadlineExceeded, text + "; its timeout has passed.",
                      ErrorRecord{"timeout", -1, "", 0, late->info.key, "deadline passed", text});
  Abort(status, status, now_us);
}

// ---- failure ----

std::string Engine::Describe(int rank) const {
  const auto r = static_cast<size_t>(rank);
  std::string text = "rank " + std::to_string(rank);
  if (r < world_.hosts.size() && !world_.hosts[r].empty()) {
    text += " (host " + world_.hosts[r];
    if (r < world_.pids.size() && world_.pids[r] > 0) {
      text += ", pid " + std::to_string(world_.pids[r]);
    }
    text += ")";
  }
  return text;
}

std::string Engine::OldestKey() const {
  const Request* oldest = nullptr;
  for (const auto& [key, queue] : entries_) {
    if (oldest == nullptr || queue.front()->submitted_us < oldest->submitted_us) {
      oldest = queue.front().get();
    }
  }
  for (const auto& [ticket, operation] : active_) {
    const Request* member = operation->members()[0].get();
    if (oldest == nullptr || member->submitted_us < oldest->submitted_us) oldest = member;
  }
  for (const auto& [ticket, request] : allocating_) {
    if (oldest == nullptr || request->submitted_us < oldest->submitted_us) oldest = request.get();
  }
  return oldest == nullptr ? "" : oldest->info.key;
}

Status Engine::PeerView(const Status& own) const {
  const auto r = static_cast<size_t>(world_.rank);
  ErrorRecord record{"rank_failed",
                     world_.rank,
                     r < world_.hosts.size() ? world_.hosts[r] : "",
                     r < world_.pids.size() ? world_.pids[r] : 0,
                     OldestKey(),
                     own.message(),
                     ""};
  std::string message = Describe(world_.rank) + " failed";
  if (!record.tensor.empty()) message += " while \"" + record.tensor + "\" was in progress";
  return Status(Code::kAborted, message + ": " + own.message(), record);
}

void Engine::Abort(const Status& mine, const Status& theirs, int64_t now_us) {
  if (!failure_.ok()) return;
  // A cancelled step is over; what is submitted later fails because this rank has left the others.
  failure_ = mine.code() == Code::kCancelled && !theirs.ok() ? theirs : mine;
  TFDIST_LOG(kInfo, world_.rank, "ENGINE", "work ends: " << mine.message());
  if (!theirs.ok()) TellAll(FrameType::kAbort, EncodeStatus(theirs));
  if (hooks_.failed) hooks_.failed(failure_);
  auto entries = std::move(entries_);
  auto active = std::move(active_);
  auto allocating = std::move(allocating_);
  entries_.clear();
  active_.clear();
  allocating_.clear();
  stash_.clear();
  for (auto& [ticket, operation] : active) {
    operation->ReleaseFrames(links_, &held_);
    for (auto& member : operation->members()) {
      if (member != nullptr) Finish(std::move(member), mine, now_us);
    }
  }
  for (auto& [ticket, request] : allocating) Finish(std::move(request), mine, now_us);
  for (auto& [key, queue] : entries) {
    for (auto& request : queue) Finish(std::move(request), mine, now_us);
  }
}

void Engine::AbortWith(const std::string& cause, int64_t now_us) {
  const Status theirs = PeerView(Status(Code::kAborted, cause));
  Abort(theirs, theirs, now_us);
}

void Engine::Cancel(uint64_t id, int64_t now_us) {
  const Request* found = nullptr;
  for (const auto& [key, queue] : entries_) {
    for (const auto& request : queue) {
      if (request->id == id) found = request.get();
    }
  }
  for (const auto& [ticket, operation] : active_) {
    for (const auto& member : operation->members()) {
      if (member != nullptr && member->id == id) found = member.get();
    }
  }
  for (const auto& [ticket, request] : allocating_) {
    if (request->id == id) found = request.get();
  }
  if (found == nullptr) return;
  const std::string key = found->info.key;
  const std::string cause = "its own step failed or was cancelled, and left \"" + key + "\"";
  const Status mine(Code::kCancelled, "\"" + key + "\" was cancelled: this rank's step failed",
                    ErrorRecord{"cancelled", world_.rank, "", 0, key, cause, ""});
  Status theirs = PeerView(Status(Code::kAborted, cause));
  Abort(mine, theirs, now_us);
}

void Engine::LosePeer(int peer, const Status& reason, int64_t now_us) {
  const auto p = static_cast<size_t>(peer);
  // Frames of this peer that are still held point into memory that goes away with the link.
  const bool left = inbound_[p].left;
  if (!left && !leaving_) {
    ErrorRecord record{"rank_failed",
                       peer,
                       p < world_.hosts.size() ? world_.hosts[p] : "",
                       p < world_.pids.size() ? world_.pids[p] : 0,
                       OldestKey(),
                       "its process ended or was killed",
                       reason.message()};
    std::string message = Describe(peer) + " failed: its process ended or was killed";
    if (!record.tensor.empty()) message += " while \"" + record.tensor + "\" was in progress";
    message += " (" + reason.message() + ")";
    const Status status(Code::kAborted, message, record);
    Abort(status, status, now_us);
  } else if (!active_.empty()) {
    // A peer that left had done its part; what it sent has been read before the link's end.
    AdvanceAll(now_us);
    if (held_[p] > 0) {
      Abort(TFDIST_INTERNAL(Describe(peer) + " left with data unread"), Status(), now_us);
    }
  }
  inbound_[p].left = true;
  inbound_[p].acknowledged = true;
  outbound_[p] = Outbound{};
  links_[p].reset();
}

void Engine::HandleLeave(int peer, int64_t now_us) {
  const std::string key = OldestKey();
  ErrorRecord record{"shutdown",
                     peer,
                     world_.hosts[static_cast<size_t>(peer)],
                     world_.pids[static_cast<size_t>(peer)],
                     key,
                     "it has shut down",
                     ""};
  const Status status(Code::kAborted,
                      Describe(peer) + " has shut down (called tfdist.shutdown() or ended)" +
                          (key.empty() ? "" : " and will not take part in \"" + key + "\"") +
                          ". Every rank must make the same calls: check that all have the same "
                          "number of steps.",
                      record);
  Abort(status, status, now_us);
}

void Engine::RefuseMissing(int64_t now_us) {
  if (negotiator_ == nullptr || !failure_.ok()) return;
  for (size_t p = 0; p < inbound_.size(); ++p) {
    if (inbound_[p].left && negotiator_->WaitsFor(static_cast<int>(p))) {
      HandleLeave(static_cast<int>(p), now_us);
      return;
    }
  }
}

// ---- leaving ----

void Engine::AcknowledgeLeaves() {
  if (!active_.empty() || !allocating_.empty()) return;
  for (size_t p = 0; p < inbound_.size(); ++p) {
    if (!inbound_[p].answer_due) continue;
    inbound_[p].answer_due = false;
    Tell(static_cast<int>(p), FrameType::kLeaveAck, "");
  }
}

Status Engine::ShutDown() const {
  return Status(Code::kAborted, "tfdist was shut down on this rank",
                ErrorRecord{"shutdown", world_.rank, "", 0, OldestKey(), "shut down", ""});
}

void Engine::Leave(int64_t now_us) {
  if (leaving_) return;
  if (failure_.ok() && busy()) Abort(ShutDown(), PeerView(ShutDown()), now_us);
  leaving_ = true;
  TellAll(FrameType::kLeave, "");
}

bool Engine::Left() const {
  if (!leaving_) return false;
  for (size_t p = 0; p < links_.size(); ++p) {
    if (links_[p] == nullptr) continue;
    if (!inbound_[p].acknowledged || !outbound_[p].messages.empty() || !links_[p]->Flushed()) {
      return false;
    }
  }
  return true;
}

}  // namespace tfdist
