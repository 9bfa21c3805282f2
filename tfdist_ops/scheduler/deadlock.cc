#include "scheduler/deadlock.h"

#include <algorithm>
#include <utility>

#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

constexpr size_t kMostPlaces = 8;  // in a message

// Whether `waiting` may rely on `missing` not to submit what it waits for. Only a rank inside of a
// graph may still submit something, after other computations, but never what a program calls
// eagerly.
bool StaysOut(const BlockedNote& waiting, const BlockedNote& missing) {
  return missing.how != BlockedNote::How::kGraph || waiting.how == BlockedNote::How::kEager;
}

bool HasTakenPart(const BlockedNote& note, const BlockedWait& wait) {
  const auto last = note.took_part.find(wait.set);
  return last != note.took_part.end() && TookPart(last->second, wait.ticket);
}

// The blocked ranks that have not submitted what `rank` waits for.
std::set<int> Missing(int rank, const BlockedWait& wait, const std::map<int, BlockedNote>& notes,
                      const std::vector<LedWait>& led) {
  std::set<int> missing;
  if (wait.ticket != 0) {
    for (int32_t member : wait.ranks) {
      const auto note = notes.find(member);
      if (member == rank || note == notes.end()) continue;
      if (!HasTakenPart(note->second, wait)) missing.insert(member);
    }
    return missing;
  }
  const std::vector<LedWait>* known = nullptr;
  if (wait.ranks[0] == 0) {
    known = &led;
  } else if (const auto leader = notes.find(wait.ranks[0]); leader != notes.end()) {
    known = &leader->second.led;
  }
  if (known == nullptr) return missing;
  for (const LedWait& one : *known) {
    if (one.set != wait.set || one.key != wait.key) continue;
    for (int32_t member : one.missing) {
      if (member != rank && notes.count(member) > 0) missing.insert(member);
    }
  }
  return missing;
}

// Whether the name of an operation says more than the place: a bucket's does not, nor a default.
bool IsTelling(const BlockedWait& wait) {
  const std::string kind = ".eager";
  const std::string& key = wait.key;
  const bool is_default =
      key.size() >= kind.size() && key.compare(key.size() - kind.size(), kind.size(), kind) == 0;
  return wait.ticket == 0 && !is_default;
}

std::string RanksText(const std::set<int>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (int rank : ranks) {
    if (text.back() != ' ') text += ",";
    text += std::to_string(rank);
  }
  return text;
}

}  // namespace

Deadlock FindDeadlock(const std::map<int, BlockedNote>& notes, const std::vector<LedWait>& led) {
  std::map<int, std::vector<std::set<int>>> missing;  // of every wait
  for (const auto& [rank, note] : notes) {
    for (const BlockedWait& wait : note.waits) {
      std::set<int> ranks = Missing(rank, wait, notes, led);
      for (auto it = ranks.begin(); it != ranks.end();) {
        it = StaysOut(note, notes.at(*it)) ? std::next(it) : ranks.erase(it);
      }
      missing[rank].push_back(std::move(ranks));
    }
  }
  const auto can_go_on = [&missing](const std::vector<std::set<int>>& waits) {
    return std::any_of(waits.begin(), waits.end(), [&missing](const std::set<int>& ranks) {
      return std::none_of(ranks.begin(), ranks.end(),
                          [&missing](int rank) { return missing.count(rank) > 0; });
    });
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = missing.begin(); it != missing.end();) {
      const bool goes = can_go_on(it->second);
      it = goes ? missing.erase(it) : std::next(it);
      changed |= goes;
    }
  }
  Deadlock deadlock;
  for (const auto& [rank, waits] : missing) {
    for (const std::set<int>& ranks : waits) {
      for (int other : ranks) {
        if (missing.count(other) > 0) deadlock[rank].insert(other);
      }
    }
  }
  return deadlock;
}

std::string DeadlockText(const Deadlock& deadlock, const std::map<int, BlockedNote>& notes) {
  // Ranks at one place that wait for the same ones are told together.
  std::map<std::string, std::set<int>> together;
  for (const auto& [rank, others] : deadlock) {
    const BlockedNote& note = notes.at(rank);
    const std::string name = "\"" + note.waits[0].key + "\"";
    std::string where = (note.place.empty() ? name : note.place) + " for " + RanksText(others);
    if (!note.place.empty() && IsTelling(note.waits[0])) where += " (" + name + ")";
    together[where].insert(rank);
  }
  std::vector<std::pair<std::set<int>, std::string>> parts;
  for (const auto& [where, ranks] : together) {
    parts.emplace_back(ranks,
                       RanksText(ranks) + (ranks.size() > 1 ? " wait" : " waits") + " in " + where);
  }
  std::sort(parts.begin(), parts.end());
  std::string text;
  for (size_t i = 0; i < parts.size() && i < kMostPlaces; ++i) {
    text += (i > 0 ? "; " : "") + parts[i].second;
  }
  return parts.size() > kMostPlaces ? text + "; ..." : text;
}

}  // namespace tfdist
