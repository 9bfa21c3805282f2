#include "scheduler/process_set.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace tfdist {
namespace {

Status Refuse(Code code, const std::string& kind, const std::string& text) {
  return Status(code, text, ErrorRecord{kind, -1, "", 0, "process set", text, ""});
}

}  // namespace

// Row by row in the triangle of all a < b, so that any two of 2^16 ranks have a number of 31 bits.
uint32_t PairSetId(int a, int b) {
  const auto larger = static_cast<uint32_t>(b);
  return kPairFlag | (larger * (larger - 1) / 2 + static_cast<uint32_t>(a));
}

std::vector<int32_t> PairSetRanks(uint32_t id, int size) {
  if ((id & kPairFlag) == 0) return {};
  const uint32_t number = id & ~kPairFlag;
  const auto b = static_cast<uint32_t>((1 + std::sqrt(1 + 8.0 * number)) / 2);
  if (b >= static_cast<uint32_t>(size)) return {};
  return {static_cast<int32_t>(number - b * (b - 1) / 2), static_cast<int32_t>(b)};
}

std::string SetRanksText(const std::vector<int32_t>& ranks) {
  std::string text;
  for (int32_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

std::vector<int32_t> ParseSetRanks(const std::string& text) {
  std::vector<int32_t> ranks;
  const char* at = text.c_str();
  while (*at != '\0') {
    char* end = nullptr;
    ranks.push_back(static_cast<int32_t>(std::strtol(at, &end, 10)));
    if (end == at) return {};
    at = *end == ',' ? end + 1 : end;
  }
  return SetRanksText(ranks) == text ? ranks : std::vector<int32_t>();
}

std::vector<int32_t> SetHosts(const std::vector<int32_t>& ranks,
                              const std::vector<int32_t>& host_of) {
  std::vector<int32_t> hosts;
  if (host_of.empty()) return hosts;
  for (int32_t rank : ranks) hosts.push_back(host_of[static_cast<size_t>(rank)]);
  return hosts;
}

Status SetTable::Add(const std::string& text, uint64_t* id) {
  const std::vector<int32_t> ranks = ParseSetRanks(text);
  bool valid = !ranks.empty();
  for (size_t i = 0; valid && i < ranks.size(); ++i) {
    valid = ranks[i] >= 0 && ranks[i] < size_ && (i == 0 || ranks[i] > ranks[i - 1]);
  }
  if (!valid) {
    return Refuse(Code::kInvalidArgument, "invalid_argument",
                  "a process set is a list of ranks in [0, " + std::to_string(size_) +
                      "), ascending, each once, at least one; got [" + text + "] on all ranks");
  }
  const auto known = ids_.find(text);
  if (known != ids_.end()) {
    *id = known->second;
    return Status();
  }
  if ((next_id_ & 0xffff) == 0) {
    return Refuse(Code::kFailedPrecondition, "mismatch",
                  "65535 process sets have been added since tfdist.init(); that is all there can "
                  "be");
  }
  *id = ids_[text] = next_id_++;
  return Status();
}

Status SetTable::Remove(const std::string& id) {
  const auto it = std::find_if(ids_.begin(), ids_.end(),
                               [&](const auto& item) { return std::to_string(item.second) == id; });
  if (it == ids_.end()) {
    return Refuse(Code::kInvalidArgument, "invalid_argument",
                  "process set " + id +
                      (id == "0" ? ", all ranks, can't be removed"
                                 : " can't be removed: there is none of that number (it was "
                                   "removed before, or belongs to an earlier tfdist.init())"));
  }
  ids_.erase(it);
  return Status();
}

bool ProcessSet::holding() const {
  return std::any_of(gated.begin(), gated.end(), [](const auto& item) {
    return !item.second.held.empty() || !item.second.later.empty();
  });
}

int ProcessSet::IndexOf(int rank) const {
  const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return it != ranks.end() && *it == rank ? static_cast<int>(it - ranks.begin()) : -1;
}

void ProcessSet::CountSubmission(Request* request) {
  if (request->info.kind != CollectiveKind::kAllreduce) return;
  if (!IsBucket(*request)) {
    request->info.predicted = book.CountRepeated(request->info.key);
    return;
  }
  request->info.bucket = true;
  const auto group = groups.find(request->group);
  const uint32_t number = group != groups.end() ? group->second : 0;
  request->info.predicted = book.Count(number, request->bucket_index);
}

void ProcessSet::NoteOutcome(const Request& request, bool agreed, uint32_t number) {
  const uint64_t ticket =
      number != 0 ? book.NumberKey(request.info.key, number) : request.info.predicted;
  if (agreed) {
    book.Agree(ticket, request.info);
  } else {
    book.Forget(ticket);
  }
}

std::string ProcessSet::Text() const {
  if (id == kWorldSet) return "";
  return " of process set " + std::to_string(id) + " (ranks " + SetRanksText(ranks) + ")";
}

}  // namespace tfdist
