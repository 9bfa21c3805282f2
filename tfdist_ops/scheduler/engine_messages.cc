// Handling of messages from other ranks.
#include <utility>

#include "scheduler/engine.h"

namespace tfdist {

void Engine::OnBadControlFrame(int peer, int64_t now_us) {
  failures_.ReportBug(TFDIST_INTERNAL(DescribeRank(world_, peer) +
                                      " sent a control message of another generation, or one "
                                      "too long"),
                      now_us);
}

void Engine::OnControlMessage(int peer, FrameType type, uint32_t set, ByteSpan message,
                              int64_t now_us) {
  bool parsed = true;
  switch (type) {
    case FrameType::kBeat: {
      Heartbeat beat;
      parsed = DecodeBeat(message, &beat);
      if (parsed) monitor_.Receive(peer, beat);
      break;
    }
    case FrameType::kConsensus: {
      ConsensusMessage decoded;
      parsed = DecodeConsensus(message, &decoded);
      if (parsed) failures_.OnMessage(peer, decoded);
      break;
    }
    case FrameType::kLeave: {
      LeaveNote took_part;
      parsed = DecodeLeave(message, &took_part);
      if (parsed) departures_.OnGoodbye(peer, std::move(took_part));
      break;
    }
    case FrameType::kClock: {
      ClockNote note;
      parsed = DecodeClock(message, &note);
      if (parsed) recorder_.OnClock(peer, note);
      break;
    }
    case FrameType::kTimeline:
      if (recorder_.records() && hooks_.timeline_lines) {
        hooks_.timeline_lines(peer, AsText(message));
      }
      return;
    case FrameType::kBlocked: {
      BlockedNote note;
      parsed = world_.rank == 0 && DecodeBlocked(message, &note);
      if (parsed) deadlocks_.OnNote(peer, std::move(note));
      break;
    }
    case FrameType::kBlockedAsk: {
      uint32_t round = 0;
      parsed = peer == 0 && DecodeRound(message, &round);
      if (parsed) deadlocks_.OnProbe(round);
      break;
    }
    case FrameType::kLeaveAck:
      departures_.OnAnswer(peer);
      return;
    default: {
      ProcessSet* target = sets_.FindOrCreate(set);
      parsed = target != nullptr && HandleSetMessage(peer, type, target, message, now_us);
    }
  }
  if (!parsed) {
    failures_.ReportBug(
        TFDIST_INTERNAL(DescribeRank(world_, peer) + " sent a control message of type " +
                        std::to_string(static_cast<int>(type)) + " that does not parse"),
        now_us);
  }
}

// Handles a message about one process set. False: it does not parse, or can't come from that peer.
bool Engine::HandleSetMessage(int peer, FrameType type, ProcessSet* set, ByteSpan message,
                              int64_t now_us) {
  const bool heard_of = !set->ranks.empty();
  // A set is opened and removed by rank 0's answer, which another rank's message can overtake.
  // Announcements go only to ranks that know the set. Messages about waiting can be ignored: this
  // rank has no operation of the set that waits.
  if (!heard_of && type == FrameType::kJoin) {
    set->early_joins.emplace_back(peer, AsText(message));
    return true;
  }
  if (!heard_of && type != FrameType::kReady && type != FrameType::kResponse) return true;
  const bool from_leader = heard_of && set->leader() == peer && set->index > 0;
  const bool to_leader = set->index == 0 && set->IndexOf(peer) > 0;
  switch (type) {
    case FrameType::kReady: {
      RequestInfo info;
      if (!DecodeRequest(message, &info) || (heard_of && !to_leader)) return false;
      if (set->id != kWorldSet &&
          (info.kind == CollectiveKind::kAddSet || info.kind == CollectiveKind::kRemoveSet)) {
        return false;
      }
      if (state_.stopped) return true;
      if (heard_of) {
        AddReady(set, peer, std::move(info), now_us);
      } else {
        set->early.emplace_back(peer, std::move(info));
      }
      return true;
    }
    case FrameType::kResponse: {
      Response response;
      if (!from_leader || !DecodeResponse(message, &response)) return false;
      // Each joined rank is a member and stands here once; at least one member has not joined.
      for (size_t i = 0; i < response.joined.size(); ++i) {
        const int32_t rank = response.joined[i];
        if (set->IndexOf(rank) < 0 || (i > 0 && rank <= response.joined[i - 1])) return false;
      }
      if (response.joined.size() >= set->ranks.size()) return false;
      if (response.last != -1 && set->IndexOf(response.last) < 0) return false;
      HandleResponse(set, response, now_us);
      return true;
    }
    case FrameType::kGate: {
      GateMessage decoded;
      if (set->gate == nullptr || !DecodeGate(message, &decoded)) return false;
      if (state_.stopped || set->IndexOf(peer) < 0) return true;
      gate_.OnMessage(set, peer, decoded, now_us);
      return true;
    }
    case FrameType::kStall: {
      std::string key;
      std::string text;
      if (!from_leader || !DecodeStall(message, &key, &text)) return false;
      set->stalls[key] = text;
      return true;
    }
    case FrameType::kWaiting: {
      WaitNote note;
      if (!to_leader || !DecodeWait(message, &note)) return false;
      if (!state_.stopped) predicted_.OnWait(set, peer, std::move(note));
      return true;
    }
    case FrameType::kProbe: {
      ProbeNote note;
      if (!from_leader || !DecodeProbe(message, &note)) return false;
      if (!state_.stopped) predicted_.OnProbe(set, note.ticket);
      return true;
    }
    case FrameType::kProbeAnswer: {
      ProbeNote note;
      if (!to_leader || !DecodeProbe(message, &note)) return false;
      predicted_.OnAnswer(set, peer, note);
      return true;
    }
    default:
      return joins_.OnMessage(peer, type, set, message, now_us);
  }
}

}  // namespace tfdist
