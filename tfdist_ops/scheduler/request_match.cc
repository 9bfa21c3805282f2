#include "scheduler/request_match.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <sstream>
#include <utility>

#include "scheduler/row_counts.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

using Requests = std::vector<RequestInfo>;
using Members = std::vector<int32_t>;
using Text = std::function<std::string(const RequestInfo&)>;

int RankAt(size_t index, const Members& members) {
  return members.empty() ? static_cast<int>(index) : members[index];
}

// Values of the ranks, each with those that have it, in order of appearance; "" is left out.
using Values = std::vector<std::pair<std::string, std::vector<int>>>;

Values Collect(const Requests& by_index, const Members& members, const Text& value) {
  Values values;
  for (size_t index = 0; index < by_index.size(); ++index) {
    const std::string text = value(by_index[index]);
    if (text.empty()) continue;
    auto it = std::find_if(values.begin(), values.end(),
                           [&](const auto& group) { return group.first == text; });
    if (it == values.end()) it = values.insert(values.end(), {text, {}});
    it->second.push_back(RankAt(index, members));
  }
  return values;
}

// "rank 0: a; ranks 1,2: b"
std::string ToText(const Values& values) {
  std::string out;
  for (const auto& [text, ranks] : values) {
    if (!out.empty()) out += "; ";
    out += RankList(ranks) + ": " + text;
  }
  return out;
}

// ToText when the ranks' values differ, else "".
std::string Differences(const Requests& by_index, const Members& members, const Text& value) {
  const Values values = Collect(by_index, members, value);
  return values.size() < 2 ? "" : ToText(values);
}

// Whether all are the same allreduce, which is nearly always so. Composing the texts to compare
// takes a third of the time of an agreement.
bool AreAlike(const Requests& by_index) {
  const RequestInfo& first = by_index[0];
  return first.kind == CollectiveKind::kAllreduce &&
         std::all_of(by_index.begin() + 1, by_index.end(), [&first](const RequestInfo& info) {
           return info.predicted == first.predicted && SameRequest(first, info);
         });
}

std::string NumberText(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.17g", value);
  return buffer;
}

std::string ShapesText(const RequestInfo& info) {
  if (info.shapes.size() == 1) return ShapeText(info.shapes[0]);
  std::string text = std::to_string(info.shapes.size()) + " tensors";
  for (const auto& shape : info.shapes) text += " " + ShapeText(shape);
  return text;
}

// The tensors of a bucket as text: how many, and in which order, as a number.
std::string TensorsText(const RequestInfo& info) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, by words
  const auto add = [&hash](uint64_t word) { hash = (hash ^ word) * uint64_t{0x100000001b3}; };
  for (int64_t size : info.sizes) add(static_cast<uint64_t>(size));
  for (uint64_t hint : info.hints) add(hint);
  char text[64];
  std::snprintf(text, sizeof(text), "%zu tensors in order %016llx", info.sizes.size(),
                static_cast<unsigned long long>(hash));
  return text;
}

// The places of the tensors of a grouped allreduce in the list of its caller, which may have other
// tensors between them. The slice of a small tensor depends on its place.
std::string PlacesText(const RequestInfo& info) {
  return "elements " + ShapeText(std::vector<int64_t>(info.hints.begin(), info.hints.end())) +
         " of the list";
}

// The part of a shape that must agree where the number of rows need not.
std::string RowShapeText(const RequestInfo& info) {
  if (info.shapes.empty() || info.shapes[0].empty()) return "[] (a scalar)";
  std::vector<int64_t> shape = info.shapes[0];
  shape.erase(shape.begin());
  return "rows of shape " + ShapeText(shape);
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The first place where the ranks' gradient lists part.
std::string DescriptionDifference(const Requests& by_index, const Members& members) {
  std::vector<std::vector<std::string>> lists;
  size_t longest = 0;
  for (const RequestInfo& info : by_index) {
    lists.push_back(Lines(info.description));
    longest = std::max(longest, lists.back().size());
  }
  for (size_t i = 0; i < longest; ++i) {
    size_t at = 0;
    const std::string text = Differences(by_index, members, [&](const RequestInfo&) {
      const std::vector<std::string>& list = lists[at++];
      return i < list.size() ? "\"" + list[i] + "\"" : std::string("nothing (its list is shorter)");
    });
    if (!text.empty()) return "entry " + std::to_string(i) + ": " + text;
  }
  return "";
}

Status Mismatch(const std::string& key, const std::string& what, const std::string& values,
                const std::string& remedy) {
  const std::string cause = "the ranks do not agree on " + what;
  return Status(Code::kFailedPrecondition,
                "\"" + key + "\": " + cause + ": " + values + ". " + remedy,
                ErrorRecord{"mismatch", -1, "", 0, key, cause, values});
}

// `faults`: what is wrong with the request of which ranks.
Status Invalid(const std::string& key, const std::string& what, const Values& faults,
               const std::string& remedy) {
  const bool is_one = faults.size() == 1 && faults[0].second.size() == 1;
  const std::string values = ToText(faults);
  return Status(Code::kInvalidArgument,
                "\"" + key + "\": " + what + " not valid: " + values + ". " + remedy,
                ErrorRecord{"invalid_argument", is_one ? faults[0].second[0] : -1, "", 0, key,
                            what + " not valid", values});
}

// The first dimension may differ.
bool IsRagged(CollectiveKind kind) {
  return HasRows(kind) && kind != CollectiveKind::kReduceScatter;
}

Status CheckRoot(const Requests& by_index, const Members& members) {
  const std::string& key = by_index[0].key;
  const bool is_pair = by_index[0].kind == CollectiveKind::kSendRecv;
  const std::string text = Differences(by_index, members, [is_pair](const RequestInfo& i) {
    if (!is_pair) return std::to_string(i.root);
    return "from " + std::to_string(i.root) + " to " + std::to_string(i.peer);
  });
  if (!text.empty()) {
    return is_pair ? Mismatch(key, "who sends", text,
                              "One rank calls send(..., dst), rank dst recv(..., src).")
                   : Mismatch(key, "the root", text, "Name one root on every rank.");
  }
  const int size = static_cast<int>(by_index.size());
  std::string expected = "[0, " + std::to_string(size) + ")";
  if (!members.empty()) expected = RankList(std::vector<int>(members.begin(), members.end()));
  const Values faults = Collect(by_index, members, [&](const RequestInfo& i) {
    if (IndexOf(i.root, members, size) >= 0) return std::string();
    return "root must be in " + expected + ", got " + std::to_string(i.root);
  });
  if (faults.empty()) return Status();
  return Invalid(key, "the root is", faults, "Name a rank that takes part.");
}

// The error in the splits of one rank; "": none.
std::string SplitsFault(const RequestInfo& info, size_t size) {
  const int64_t rows = FirstDimension(info.shapes[0]);
  const std::string has = "its tensor has " + std::to_string(rows) + " rows";
  if (info.splits.empty()) {
    const bool fits =
        info.kind != CollectiveKind::kAlltoall || rows % static_cast<int64_t>(size) == 0;
    if (fits) return "";
    return has + ", which can't be cut into " + std::to_string(size) + " equal parts";
  }
  const std::string text = "splits " + ShapeText(info.splits);
  if (info.splits.size() != size) {
    return text + " have length " + std::to_string(info.splits.size()) + ", expected " +
           std::to_string(size) + ", one for each rank";
  }
  int64_t left = rows;
  for (int64_t split : info.splits) {
    if (split < 0) return text + " have a negative number";
    if (split > left) return text + " sum to more than its rows: " + has;
    left -= split;
  }
  if (left == 0) return "";
  return text + " sum to " + std::to_string(rows - left) + ", " + has;
}

Status CheckSplits(const Requests& by_index, const Members& members) {
  const CollectiveKind kind = by_index[0].kind;
  const std::string& key = by_index[0].key;
  const size_t size = by_index.size();
  if (!TakesSplits(kind)) return Status();
  const RequestInfo* root = nullptr;  // of a scatter: only its splits count
  if (kind == CollectiveKind::kScatter) {
    root =
        &by_index[static_cast<size_t>(IndexOf(by_index[0].root, members, static_cast<int>(size)))];
  }
  const Values faults = Collect(by_index, members, [&](const RequestInfo& info) {
    return root == nullptr || root == &info ? SplitsFault(info, size) : "";
  });
  if (!faults.empty()) {
    return Invalid(key, "the splits are", faults,
                   "Pass one number of rows for each rank, which sum to the rows of the tensor.");
  }
  if (kind != CollectiveKind::kReduceScatter) return Status();
  const std::string text = Differences(by_index, members, [size](const RequestInfo& i) {
    return ShapeText(SplitsOf(i, static_cast<int>(size)));
  });
  if (text.empty()) return Status();
  return Mismatch(key, "the splits", text, "Pass the same splits on every rank.");
}

// Only tensors without a byte can have so many rows.
Status CheckTotal(const Requests& by_index, const Members& members) {
  const CollectiveKind kind = by_index[0].kind;
  if (!IsRagged(kind) || kind == CollectiveKind::kScatter) return Status();
  int64_t total = 0;
  for (const RequestInfo& info : by_index) {
    if (!__builtin_add_overflow(total, FirstDimension(info.shapes[0]), &total)) continue;
    const Values rows = Collect(by_index, members, [](const RequestInfo& i) {
      return std::to_string(FirstDimension(i.shapes[0]));
    });
    return Invalid(by_index[0].key, "the numbers of rows are", rows,
                   "Together they must be less than 2^63.");
  }
  return Status();
}

Status CheckReduction(const Requests& by_index, const Members& members) {
  const std::string& key = by_index[0].key;
  std::string text = Differences(
      by_index, members, [](const RequestInfo& i) { return std::string(ReduceOpName(i.op)); });
  if (!text.empty()) return Mismatch(key, "the reduction", text, "Use one `op` on every rank.");
  text = Differences(by_index, members, [](const RequestInfo& i) {
    return "prescale " + NumberText(i.prescale) + ", postscale " + NumberText(i.postscale);
  });
  if (!text.empty()) return Mismatch(key, "the factors", text, "Use one factor on every rank.");
  return Status();
}

// Checks that ranks change the process sets by the same call, and that a set to remove is idle.
Status CheckSetChange(const Requests& by_index, const Members& members) {
  const bool adds = by_index[0].kind == CollectiveKind::kAddSet;
  const std::string text = Differences(by_index, members, [&](const RequestInfo& i) {
    return adds ? "[" + i.description + "]" : i.description;
  });
  if (!text.empty()) {
    return Mismatch("process set", adds ? "the list of ranks" : "the process set to remove", text,
                    "Every rank must make the same call, including ranks outside of the set.");
  }
  std::vector<int> busy;
  for (size_t i = 0; i < by_index.size(); ++i) {
    if (by_index[i].present.empty() || by_index[i].present[0] == 0) continue;
    busy.push_back(RankAt(i, members));
  }
  if (busy.empty()) return Status();
  const std::string cause = "process set " + by_index[0].description +
                            " can't be removed: " + RankList(busy) + " still " +
                            (busy.size() == 1 ? "has" : "have") + " operations of it in flight";
  return Status(Code::kFailedPrecondition, cause + ". Wait for their results first.",
                ErrorRecord{"mismatch", busy[0], "", 0, "process set", cause, ""});
}

}  // namespace

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(ranks[i]);
  }
  return text;
}

int IndexOf(int32_t rank, const std::vector<int32_t>& members, int size) {
  if (members.empty()) return rank >= 0 && rank < size ? rank : -1;
  const auto it = std::find(members.begin(), members.end(), rank);
  return it == members.end() ? -1 : static_cast<int>(it - members.begin());
}

Status CheckRequestsMatch(const Requests& by_index, const Members& members) {
  if (AreAlike(by_index)) return Status();
  const std::string& key = by_index[0].key;
  std::string text = Differences(by_index, members, [](const RequestInfo& i) {
    return std::string(CollectiveKindName(i.kind));
  });
  if (!text.empty()) {
    return Mismatch(key, "the operation", text,
                    "Call the same operation under one name everywhere.");
  }
  const CollectiveKind kind = by_index[0].kind;
  if (kind == CollectiveKind::kBarrier) return Status();
  if (kind == CollectiveKind::kAddSet || kind == CollectiveKind::kRemoveSet) {
    return CheckSetChange(by_index, members);
  }
  if (kind == CollectiveKind::kRegister) {
    text = DescriptionDifference(by_index, members);
    if (text.empty()) return Status();
    return Mismatch("gradients", "the list of gradients", text,
                    "Build the same model, with the same variables, on every rank.");
  }
  text = Differences(by_index, members,
                     [](const RequestInfo& i) { return std::string(DTypeName(i.dtype)); });
  if (!text.empty()) return Mismatch(key, "the dtype", text, "Cast to one dtype on every rank.");
  text = Differences(by_index, members, IsRagged(kind) ? &RowShapeText : &ShapesText);
  if (!text.empty()) {
    return Mismatch(key, "the shape", text,
                    IsRagged(kind) ? "All dimensions but the first must be equal."
                                   : "Give it the same shape on every rank.");
  }
  if (HasRoot(kind)) TFDIST_RETURN_IF_ERROR(CheckRoot(by_index, members));
  if (Reduces(kind)) TFDIST_RETURN_IF_ERROR(CheckReduction(by_index, members));
  text = Differences(by_index, members, [](const RequestInfo& i) {
    return i.algorithm.empty() ? std::string("the configured one") : i.algorithm;
  });
  if (!text.empty()) {
    return Mismatch(key, "the algorithm", text, "Ask for one algorithm on every rank.");
  }
  TFDIST_RETURN_IF_ERROR(CheckSplits(by_index, members));
  TFDIST_RETURN_IF_ERROR(CheckTotal(by_index, members));
  text = Differences(by_index, members, [](const RequestInfo& i) {
    if (!i.bucket) return std::string();
    return TensorsText(i);
  });
  if (!text.empty()) {
    return Mismatch(key, "the tensors of the bucket", text,
                    "Cut the gradients into the same buckets on every rank.");
  }
  text = Differences(by_index, members, [](const RequestInfo& i) {
    if (i.bucket || i.kind != CollectiveKind::kAllreduce) return std::string();
    return PlacesText(i);
  });
  if (!text.empty()) {
    return Mismatch(key, "the order of the tensors", text,
                    "Pass the tensors in the same order on every rank.");
  }
  text = Differences(by_index, members, [](const RequestInfo& i) {
    if (i.predicted != 0) return TicketText(i.predicted);
    return std::string(i.bucket ? "a bucket" : "outside of any group of gradients");
  });
  if (text.empty()) return Status();
  return Mismatch(key, "which step of which group it belongs to", text,
                  "Every rank takes the same steps, with the same lists of gradients.");
}

}  // namespace tfdist
