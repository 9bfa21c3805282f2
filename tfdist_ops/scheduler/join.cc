#include "scheduler/join.h"

#include <algorithm>
#include <new>
#include <string>

#include "collective/identity_element.h"
#include "scheduler/request_match.h"
#include "scheduler/row_counts.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

// Memory of an operation of a rank that has joined; lives as long as its request's `done`.
struct Buffers {
  std::unique_ptr<uint8_t[]> input;
  std::unique_ptr<uint8_t[]> output;
};

std::unique_ptr<uint8_t[]> Bytes(int64_t elements, DType dtype) {
  const size_t bytes = static_cast<size_t>(elements) * DTypeSize(dtype);
  return std::unique_ptr<uint8_t[]>(new (std::nothrow) uint8_t[std::max<size_t>(bytes, 1)]);
}

int64_t RowElements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (size_t i = 1; i < shape.size(); ++i) elements *= shape[i];
  return elements;
}

// The elements of the tensors that it brings along.
std::vector<int64_t> InputSizes(const RequestInfo& info) {
  return HasRows(info.kind) ? std::vector<int64_t>{ElementCount(info.shapes[0])} : info.sizes;
}

void Remember(std::vector<uint64_t>* last, uint64_t ticket) {
  const auto same = std::find_if(last->begin(), last->end(), [ticket](uint64_t own) {
    return TicketGroup(own) == TicketGroup(ticket) && TicketBucket(own) == TicketBucket(ticket);
  });
  if (same != last->end()) {
    *same = ticket;
  } else {
    last->push_back(ticket);
  }
}

bool IsNext(const std::vector<uint64_t>& last, uint64_t ticket) {
  const bool took_part_before = TicketSequence(ticket) == 1 || TookPart(last, ticket - 1);
  return took_part_before && !TookPart(last, ticket);
}

}  // namespace

RequestInfo JoinedInfo(const RequestInfo& info, int set_size) {
  RequestInfo own = info;
  switch (info.kind) {
    case CollectiveKind::kAllgather:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAlltoall:
      // A scalar counts as one row, so a tensor without rows must not be a scalar.
      if (own.shapes[0].empty()) own.shapes[0] = {0};
      own.shapes[0][0] = 0;
      if (info.kind == CollectiveKind::kAlltoall) {
        own.splits.assign(static_cast<size_t>(set_size), 0);
      }
      return own;
    case CollectiveKind::kRegister:
      own.present.assign(info.present.size(), 0);
      return own;
    default:
      return own;
  }
}

Status CheckJoined(const RequestInfo& info, const std::vector<int32_t>& joined) {
  const std::string who = RankList(std::vector<int>(joined.begin(), joined.end())) +
                          (joined.size() == 1 ? " has joined" : " have joined");
  const bool changes_sets =
      info.kind == CollectiveKind::kAddSet || info.kind == CollectiveKind::kRemoveSet;
  const bool gives =
      info.kind == CollectiveKind::kBroadcast || info.kind == CollectiveKind::kScatter;
  const bool is_root = std::find(joined.begin(), joined.end(), info.root) != joined.end();
  if (!changes_sets && !(gives && is_root)) return Status();
  const std::string cause = changes_sets ? "process sets can't change while " + who
                                         : "its root, rank " + std::to_string(info.root) +
                                               ", has joined and has nothing to " +
                                               CollectiveKindName(info.kind);
  const std::string remedy =
      changes_sets ? ". Add and remove them before tfdist.join(), or after it."
                   : ". Name a root that still has data, or call it after tfdist.join().";
  return Status(
      Code::kFailedPrecondition, "\"" + info.key + "\": " + cause + remedy,
      ErrorRecord{"mismatch", changes_sets ? joined[0] : info.root, "", 0, info.key, cause, ""});
}

std::unique_ptr<Request> MakeJoinedRequest(const RequestInfo& info) {
  auto request = std::make_unique<Request>();
  auto buffers = std::make_shared<Buffers>();
  request->info = info;
  request->group = info.group;
  request->bucket_index = info.bucket_index;
  request->bucket_count = info.bucket_count;
  const std::vector<int64_t> sizes = InputSizes(info);
  int64_t elements = 0;
  for (int64_t size : sizes) elements += size;
  buffers->input = Bytes(elements, info.dtype);
  if (buffers->input == nullptr) return nullptr;
  if (Reduces(info.kind)) {
    FillIdentity(info.dtype, info.op, info.prescale, buffers->input.get(), elements);
  }
  uint8_t* at = buffers->input.get();
  for (size_t i = 0; i < sizes.size(); ++i) {
    const uint64_t hint = i < info.hints.size() ? info.hints[i] : 0;
    request->tensors.push_back({at, HasRows(info.kind) ? nullptr : at, sizes[i], hint});
    at += static_cast<size_t>(sizes[i]) * DTypeSize(info.dtype);
  }
  request->bytes = elements * static_cast<int64_t>(DTypeSize(info.dtype));
  if (HasRows(info.kind)) {
    request->allocate = [buffers, dtype = info.dtype, row = RowElements(info.shapes[0])](
                            const std::vector<int64_t>&, int64_t rows) -> void* {
      buffers->output = Bytes(rows * row, dtype);
      return buffers->output.get();
    };
  }
  request->done = [buffers](const Status&) {};
  return request;
}

int Contributors(const JoinedRanks& joined, int size, uint64_t ticket) {
  const auto left_out = std::count_if(joined.begin(), joined.end(), [&](const auto& item) {
    return !TookPart(item.second, ticket);
  });
  return std::max(size - static_cast<int>(left_out), 1);  // some rank has asked for it
}

Status Joins::Add(const JoinNote& note, int64_t own_us) {
  if (Has(note.rank)) {
    return TFDIST_INTERNAL("rank " + std::to_string(note.rank) + " has joined twice");
  }
  timeout_s_ = joined_.empty() ? note.timeout_s : std::min(timeout_s_, note.timeout_s);
  joined_[note.rank].last = note.last;
  if (took_part_) latest_.clear();
  took_part_ = false;
  latest_.insert(note.rank);
  moved_us_ = reported_us_ = own_us;
  return Status();
}

void Joins::Acknowledge(int rank, int by, uint32_t round) {
  const auto it = joined_.find(rank);
  if (it != joined_.end() && round == round_) it->second.acknowledged_by.insert(by);
}

void Joins::Started(const WaitNote& note, int64_t own_us) {
  for (auto& [rank, joined] : joined_) {
    if (!IsNext(joined.last, note.ticket)) continue;
    Remember(&joined.last, note.ticket);
    joined.orders.push_back(note);
    NoteCollective(own_us);
  }
}

void Joins::Announced(const Response& response, int64_t own_us) {
  for (int32_t rank : response.joined) {
    for (const RequestInfo& info : response.infos) {
      if (info.predicted != 0) Remember(&joined_[rank].last, info.predicted);
    }
    NoteCollective(own_us);
  }
}

void Joins::NoteCollective(int64_t own_us) {
  took_part_ = true;
  moved_us_ = reported_us_ = own_us;
}

std::vector<std::pair<int32_t, WaitNote>> Joins::TakeOrders() {
  std::vector<std::pair<int32_t, WaitNote>> orders;
  for (auto& [rank, joined] : joined_) {
    if (!IsAcknowledged(joined)) continue;
    for (WaitNote& note : joined.orders) orders.emplace_back(rank, std::move(note));
    joined.orders.clear();
  }
  return orders;
}

std::vector<int32_t> Joins::TakeAcknowledged() {
  std::vector<int32_t> heard;
  for (auto& [rank, joined] : joined_) {
    if (!IsAcknowledged(joined) || std::exchange(joined.is_told, true)) continue;
    heard.push_back(rank);
  }
  return heard;
}

std::vector<int32_t> Joins::End() {
  std::vector<int32_t> latest(latest_.begin(), latest_.end());
  joined_.clear();
  latest_.clear();
  took_part_ = false;
  ++round_;
  return latest;
}

Stall Joins::Describe(int64_t own_us) const {
  RequestInfo info;
  info.key = kJoinKey;
  info.kind = CollectiveKind::kJoin;
  info.set = set_;
  std::vector<int> missing;
  for (int32_t rank : ranks_) {
    if (!Has(rank)) missing.push_back(rank);
  }
  return MakeStall(info, own_us - moved_us_, std::move(missing));
}

std::vector<Stall> Joins::TakeStalls(int64_t own_us, int64_t warning_us) {
  if (empty() || own_us - reported_us_ < warning_us) return {};
  reported_us_ = own_us;
  return {Describe(own_us)};
}

std::optional<Stall> Joins::Expired(int64_t own_us) const {
  if (empty() || static_cast<double>(own_us - moved_us_) <= timeout_s_ * 1e6) return std::nullopt;
  return Describe(own_us);
}

}  // namespace tfdist
