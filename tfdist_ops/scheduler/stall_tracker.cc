#include "scheduler/stall_tracker.h"

#include <algorithm>
#include <utility>

#include "scheduler/request_match.h"

namespace tfdist {
namespace {

// A rank that has not even answered counts as missing this long after the deadline: a little before
// the others would end the operation without the leader (kLeaderGraceUs, deadline_watch.cc).
constexpr int64_t kAnswerUs = 400 * 1000;

int64_t RegistrationPatienceUs(double timeout_s) {
  return static_cast<int64_t>(std::clamp(timeout_s / 20, 1.0, 15.0) * 1e6);
}

}  // namespace

bool StallTracker::Add(int rank, uint64_t ticket, RequestInfo info, int64_t since_us) {
  const auto [it, is_new] = waits_.try_emplace(TurnOf(ticket));
  it->second.first = ticket;
  Wait& wait = it->second.second;
  if (is_new) {
    for (int32_t member : ranks_) wait.by_rank[member] = Place{};
    wait.since_us = wait.reported_us = since_us;
    wait.timeout_s = info.timeout_s;
  }
  wait.since_us = std::min(wait.since_us, since_us);
  wait.timeout_s = std::min(wait.timeout_s, info.timeout_s);
  Place& place = wait.by_rank[rank];
  place.answer = Answer::kRunning;
  place.info = std::move(info);
  return is_new;
}

void StallTracker::OnAnswer(int rank, uint64_t ticket, Answer answer) {
  const auto it = waits_.find(TurnOf(ticket));
  if (it == waits_.end()) return;
  Wait& wait = it->second.second;
  wait.by_rank[rank].answer = answer;
  // An operation that has ended on some rank had the data of all. If all have started it, nobody is
  // missing, whatever else is wrong; a rank that starts to wait later brings the entry back.
  const bool nobody_missing =
      answer == Answer::kDone ||
      std::all_of(wait.by_rank.begin(), wait.by_rank.end(), [](const auto& item) {
        return item.second.answer.has_value() && *item.second.answer != Answer::kNotSubmitted;
      });
  if (nobody_missing) waits_.erase(it);
}

std::vector<int> StallTracker::Missing(const Wait& wait) {
  std::vector<int> missing;
  for (const auto& [rank, place] : wait.by_rank) {
    if (place.answer.value_or(Answer::kNotSubmitted) == Answer::kNotSubmitted) {
      missing.push_back(rank);
    }
  }
  return missing;
}

Status StallTracker::FindMismatch(const Negotiator& negotiator, int64_t own_us) {
  for (auto& [turn, item] : waits_) {
    TFDIST_RETURN_IF_ERROR(MismatchOf(item.first, &item.second, negotiator, own_us));
  }
  return Status();
}

namespace {

// The request that a rank makes instead of `ticket`; null when it is a later step of the same
// bucket: then it has taken part in this one.
const RequestInfo* Instead(const RequestInfo* announced, uint64_t ticket) {
  if (announced == nullptr || BucketKey(announced->predicted) != BucketKey(ticket)) {
    return announced;
  }
  return TicketSequence(announced->predicted) > TicketSequence(ticket) ? nullptr : announced;
}

}  // namespace

Status StallTracker::MismatchOf(uint64_t ticket, Wait* wait, const Negotiator& negotiator,
                                int64_t own_us) {
  std::vector<RequestInfo> infos;
  std::vector<RequestInfo> lists;
  std::vector<int32_t> ranks;
  bool other_request = false;
  bool other_list = false;
  const std::string* key = nullptr;
  for (const auto& [rank, place] : wait->by_rank) {
    if (place.info.has_value()) key = &place.info->key;
  }
  for (auto& [rank, place] : wait->by_rank) {
    const RequestInfo* announced = Instead(negotiator.Announced(rank, *key), ticket);
    const bool repeats = TicketGroup(ticket) == kRepeatedGroup;
    const RequestInfo* registers = repeats ? nullptr : negotiator.Registration(rank);
    // Another kind of operation under the key: it may come after this one.
    const bool may_be_later = repeats && announced != nullptr && announced->predicted == 0;
    if (may_be_later && place.answer != Answer::kNotSubmitted) announced = nullptr;
    if (place.info.has_value()) {
      RequestInfo list;
      list.key = "gradients";
      list.kind = CollectiveKind::kRegister;
      list.description = negotiator.GroupDescription(TicketGroup(ticket));
      ranks.push_back(rank);
      infos.push_back(*place.info);
      lists.push_back(std::move(list));
    } else if (announced != nullptr) {
      ranks.push_back(rank);
      infos.push_back(*announced);
      lists.emplace_back();
      other_request = true;
    } else if (registers != nullptr && place.answer == Answer::kNotSubmitted) {
      if (place.registers_since_us < 0) place.registers_since_us = own_us;
      if (own_us - place.registers_since_us < RegistrationPatienceUs(wait->timeout_s)) continue;
      ranks.push_back(rank);
      infos.emplace_back();
      lists.push_back(*registers);
      other_list = true;
    } else {
      place.registers_since_us = -1;
    }
  }
  if (other_request) {
    std::vector<RequestInfo> known;
    std::vector<int32_t> of;
    for (size_t i = 0; i < infos.size(); ++i) {
      if (infos[i].key.empty()) continue;
      known.push_back(infos[i]);
      of.push_back(ranks[i]);
    }
    const Status status = CheckRequestsMatch(known, of);
    if (!status.ok()) return status;
    return TFDIST_INTERNAL("\"" + *key + "\": some ranks asked for agreement on " +
                           TicketText(ticket) + ", which others did not find necessary");
  }
  if (other_list) return CheckRequestsMatch(lists, ranks);
  return Status();
}

Stall StallTracker::Describe(const Wait& wait, const std::vector<int>& missing, int64_t own_us) {
  const RequestInfo* info = nullptr;
  for (const auto& [rank, place] : wait.by_rank) {
    if (place.info.has_value()) info = &*place.info;
  }
  return MakeStall(*info, own_us - wait.since_us, missing);
}

std::vector<Stall> StallTracker::TakeStalls(int64_t own_us, int64_t warning_us) {
  std::vector<Stall> stalls;
  for (auto& [turn, item] : waits_) {
    Wait& wait = item.second;
    const std::vector<int> missing = Missing(wait);
    if (missing.empty() || own_us - wait.reported_us < warning_us) continue;
    wait.reported_us = own_us;
    stalls.push_back(Describe(wait, missing, own_us));
  }
  return stalls;
}

std::optional<Stall> StallTracker::Expired(int64_t own_us) const {
  for (const auto& [turn, item] : waits_) {
    const Wait& wait = item.second;
    const int64_t late_us = own_us - wait.since_us - static_cast<int64_t>(wait.timeout_s * 1e6);
    if (late_us <= 0) continue;
    // An answer that is still under way may name one rank more: better a moment later and complete.
    const bool all_answered =
        std::all_of(wait.by_rank.begin(), wait.by_rank.end(),
                    [](const auto& item) { return item.second.answer.has_value(); });
    if (!all_answered && late_us <= kAnswerUs) continue;
    const std::vector<int> missing = Missing(wait);
    if (!missing.empty()) return Describe(wait, missing, own_us);
  }
  return std::nullopt;
}

}  // namespace tfdist
