// The messages of membership/: heartbeats, the agreement about a failure, the commit gate.
#include <utility>

#include "scheduler/wire.h"

namespace tfdist {

std::string EncodeBeat(const Heartbeat& beat) {
  WireWriter w;
  w.Number(beat.sequence);
  w.Number(beat.acknowledged);
  return w.Take();
}

bool DecodeBeat(ByteSpan bytes, Heartbeat* beat) {
  WireReader r(bytes);
  beat->sequence = r.Number<uint32_t>();
  beat->acknowledged = r.Number<uint32_t>();
  return r.Done();
}

namespace {

void WriteEvidence(WireWriter* w, const Evidence& evidence) {
  w->Number(static_cast<int32_t>(evidence.rank));
  w->Number(static_cast<uint8_t>(evidence.certain));
  w->Text(evidence.cause);
  w->Text(evidence.record);
}

bool ReadEvidence(WireReader* r, Evidence* evidence) {
  evidence->rank = r->Number<int32_t>();
  const auto certain = r->Number<uint8_t>();
  evidence->certain = certain != 0;
  evidence->cause = r->Text();
  evidence->record = r->Text();
  return r->ok() && evidence->rank >= kNoRank && certain <= 1 &&
         evidence->cause.size() <= kMaxCause && evidence->record.size() <= kMaxRecord;
}

void WriteCommits(WireWriter* w, const std::vector<CommitPoint>& commits) {
  w->Number(static_cast<uint32_t>(commits.size()));
  for (const CommitPoint& point : commits) {
    w->Number(point.group);
    w->Number(point.step);
  }
}

bool ReadCommits(WireReader* r, std::vector<CommitPoint>* commits) {
  const auto count = r->Number<uint32_t>();
  commits->clear();
  for (uint32_t i = 0; i < count && r->ok(); ++i) {
    const auto group = r->Number<uint64_t>();
    const auto step = r->Number<int64_t>();
    if (step < 0) return false;
    commits->push_back({group, step});
  }
  return r->ok();
}

void WriteAllEvidence(WireWriter* w, const std::vector<Evidence>& all) {
  w->Number(static_cast<uint32_t>(all.size()));
  for (const Evidence& evidence : all) WriteEvidence(w, evidence);
}

// In ascending order of the ranks.
bool ReadAllEvidence(WireReader* r, std::vector<Evidence>* all) {
  const auto count = r->Number<uint32_t>();
  all->clear();
  for (uint32_t i = 0; i < count && r->ok(); ++i) {
    Evidence evidence;
    if (!ReadEvidence(r, &evidence)) return false;
    if (i > 0 && evidence.rank <= all->back().rank) return false;
    all->push_back(std::move(evidence));
  }
  return r->ok();
}

// Ranks as they stand in a verdict: ascending.
bool ReadRanks(WireReader* r, std::vector<int>* ranks) {
  *ranks = r->Numbers<int>();
  for (size_t i = 0; i < ranks->size(); ++i) {
    if ((*ranks)[i] < kNoRank || (i > 0 && (*ranks)[i] <= (*ranks)[i - 1])) return false;
  }
  return r->ok();
}

}  // namespace

std::string EncodeConsensus(const ConsensusMessage& message) {
  WireWriter w;
  w.Number(static_cast<uint8_t>(message.kind));
  w.Number(message.generation);
  WriteAllEvidence(&w, message.evidence);
  WriteCommits(&w, message.commits);
  w.Number(static_cast<uint8_t>(message.verdict != nullptr));
  if (message.verdict != nullptr) {
    const Verdict& verdict = *message.verdict;
    w.Number(verdict.generation);
    w.Number(verdict.next_generation);
    WriteEvidence(&w, verdict.culprit);
    WriteAllEvidence(&w, verdict.others);
    w.Numbers(verdict.failed);
    w.Numbers(verdict.survivors);
    WriteCommits(&w, verdict.commits);
  }
  return w.Take();
}

bool DecodeConsensus(ByteSpan bytes, ConsensusMessage* message) {
  WireReader r(bytes);
  const auto kind = r.Number<uint8_t>();
  message->kind = static_cast<ConsensusMessage::Kind>(kind);
  message->generation = r.Number<uint32_t>();
  if (!ReadAllEvidence(&r, &message->evidence) || !ReadCommits(&r, &message->commits)) return false;
  const auto has_verdict = r.Number<uint8_t>();
  message->verdict.reset();
  if (has_verdict == 1) {
    auto verdict = std::make_shared<Verdict>();
    verdict->generation = r.Number<uint32_t>();
    verdict->next_generation = r.Number<uint32_t>();
    if (!ReadEvidence(&r, &verdict->culprit) || !ReadAllEvidence(&r, &verdict->others) ||
        !ReadRanks(&r, &verdict->failed) || !ReadRanks(&r, &verdict->survivors) ||
        !ReadCommits(&r, &verdict->commits)) {
      return false;
    }
    message->verdict = std::move(verdict);
  }
  const bool carries = kind == static_cast<uint8_t>(ConsensusMessage::Kind::kPropose) ||
                       kind == static_cast<uint8_t>(ConsensusMessage::Kind::kDecide);
  return r.Done() && kind >= 1 && kind <= 4 && has_verdict <= 1 &&
         carries == (message->verdict != nullptr);
}

std::string EncodeGate(const GateMessage& message) {
  WireWriter w;
  w.Number(static_cast<uint8_t>(message.kind));
  w.Number(message.group);
  w.Number(message.step);
  return w.Take();
}

bool DecodeGate(ByteSpan bytes, GateMessage* message) {
  WireReader r(bytes);
  const auto kind = r.Number<uint8_t>();
  message->kind = static_cast<GateMessage::Kind>(kind);
  message->group = r.Number<uint64_t>();
  message->step = r.Number<int64_t>();
  return r.Done() && (kind == 1 || kind == 2) && message->step > 0;
}

}  // namespace tfdist
