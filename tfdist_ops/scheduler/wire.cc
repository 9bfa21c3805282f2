#include "scheduler/wire.h"

#include <algorithm>

#include "scheduler/row_counts.h"
#include "scheduler/ticket_order.h"

namespace tfdist {
namespace {

// Elements of a tensor: more than any memory holds, but their bytes still fit in int64_t.
constexpr int64_t kMostElements = int64_t{1} << 58;
// The longest timeout, as in CheckRequest.
constexpr double kMostSeconds = 1e9;
constexpr int32_t kMostBuckets = 1 << 20;  // of a group

bool IsSizes(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_add_overflow(total, size, &total) || total > kMostElements) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string EncodeRequest(const RequestInfo& info) {
  WireWriter w;
  w.Text(info.key);
  w.Number(static_cast<int32_t>(info.kind));
  w.Number(static_cast<int32_t>(info.dtype));
  w.Number(static_cast<int32_t>(info.op));
  w.Number(info.root);
  w.Number(info.peer);
  w.Number(info.prescale);
  w.Number(info.postscale);
  w.Number(info.timeout_s);
  w.Number(static_cast<uint8_t>(info.bucket));
  w.Number(static_cast<uint8_t>(info.repeats));
  w.Number(static_cast<uint32_t>(info.shapes.size()));
  for (const std::vector<int64_t>& shape : info.shapes) w.Numbers(shape);
  w.Numbers(info.splits);
  w.Text(info.description);
  w.Numbers(info.present);
  w.Number(info.predicted);
  w.Numbers(info.sizes);
  w.Numbers(info.hints);
  w.Text(info.group);
  w.Number(info.bucket_index);
  w.Number(info.bucket_count);
  w.Text(info.algorithm);
  return w.Take();
}

bool DecodeRequest(ByteSpan bytes, RequestInfo* info) {
  WireReader r(bytes);
  info->key = r.Text();
  const auto kind = r.Number<int32_t>();
  info->dtype = static_cast<DType>(r.Number<int32_t>());
  const auto op = r.Number<int32_t>();
  info->root = r.Number<int32_t>();
  info->peer = r.Number<int32_t>();
  info->prescale = r.Number<double>();
  info->postscale = r.Number<double>();
  info->timeout_s = r.Number<double>();
  info->bucket = r.Number<uint8_t>() != 0;
  info->repeats = r.Number<uint8_t>() != 0;
  const auto count = r.Number<uint32_t>();
  info->shapes.clear();
  for (uint32_t i = 0; i < count && r.ok(); ++i) info->shapes.push_back(r.Numbers<int64_t>());
  info->splits = r.Numbers<int64_t>();
  info->description = r.Text();
  info->present = r.Numbers<uint8_t>();
  info->predicted = r.Number<uint64_t>();
  info->sizes = r.Numbers<int64_t>();
  info->hints = r.Numbers<uint64_t>();
  info->group = r.Text();
  info->bucket_index = r.Number<int32_t>();
  info->bucket_count = r.Number<int32_t>();
  info->algorithm = r.Text();
  if (kind < 0 || kind > static_cast<int32_t>(CollectiveKind::kRemoveSet)) return false;
  if (op < 0 || op > static_cast<int32_t>(kLastReduceOp)) return false;
  info->kind = static_cast<CollectiveKind>(kind);
  info->op = static_cast<ReduceOp>(op);
  if (info->repeats && (info->kind != CollectiveKind::kAllreduce || info->bucket)) return false;
  if (HasRows(info->kind) && info->shapes.size() != 1) return false;
  if (info->sizes.size() != info->hints.size() || !IsSizes(info->sizes)) return false;
  const bool has_place = info->bucket_index == 0 || info->bucket_index < info->bucket_count;
  if (info->bucket_index < 0 || info->bucket_count < 0 || !has_place) return false;
  if (info->bucket_count > kMostBuckets) return false;
  if (!(info->timeout_s >= 0 && info->timeout_s <= kMostSeconds)) return false;
  for (const std::vector<int64_t>& shape : info->shapes) {
    int64_t elements = 1;  // a zero counts as 1, so that the order of the dims does not matter
    for (int64_t dim : shape) {
      if (dim < 0 || __builtin_mul_overflow(elements, std::max<int64_t>(dim, 1), &elements) ||
          elements > kMostElements) {
        return false;
      }
    }
  }
  return r.Done();
}

namespace {

void WriteStatus(WireWriter* w, const Status& status) {
  w->Number(static_cast<int32_t>(status.code()));
  w->Text(status.message());
  w->Text(status.payload());
}

bool ReadStatus(WireReader* r, Status* status) {
  const auto code = r->Number<int32_t>();
  std::string message = r->Text();
  std::string payload = r->Text();
  *status = Status();
  switch (static_cast<Code>(code)) {
    case Code::kOk:
      return r->ok();
    case Code::kCancelled:
    case Code::kInvalidArgument:
    case Code::kDeadlineExceeded:
    case Code::kFailedPrecondition:
    case Code::kAborted:
    case Code::kInternal:
      *status = Status(static_cast<Code>(code), std::move(message), std::move(payload));
      return r->ok();
  }
  return false;
}

}  // namespace

std::string EncodeResponse(const Response& response) {
  WireWriter w;
  w.Number(response.ticket);
  w.Number(static_cast<uint32_t>(response.keys.size()));
  for (const std::string& key : response.keys) w.Text(key);
  WriteStatus(&w, response.error);
  w.Numbers(response.rows);
  w.Numbers(response.present);
  w.Number(response.number);
  w.Numbers(response.numbers);
  w.Numbers(response.joined);
  w.Number(static_cast<uint32_t>(response.infos.size()));
  for (const RequestInfo& info : response.infos) w.Text(EncodeRequest(info));
  w.Number(response.last);
  return w.Take();
}

bool DecodeResponse(ByteSpan bytes, Response* response) {
  WireReader r(bytes);
  response->ticket = r.Number<uint64_t>();
  const auto count = r.Number<uint32_t>();
  response->keys.clear();
  for (uint32_t i = 0; i < count && r.ok(); ++i) response->keys.push_back(r.Text());
  if (!ReadStatus(&r, &response->error)) return false;
  response->rows = r.Numbers<int64_t>();
  response->present = r.Numbers<uint8_t>();
  response->number = r.Number<uint64_t>();
  response->numbers = r.Numbers<uint32_t>();
  response->joined = r.Numbers<int32_t>();
  const auto infos = r.Number<uint32_t>();
  response->infos.clear();
  for (uint32_t i = 0; i < infos && r.ok(); ++i) {
    const std::string info = r.Text();
    if (!DecodeRequest(AsBytes(info), &response->infos.emplace_back())) return false;
  }
  response->last = r.Number<int32_t>();
  const size_t count_of_keys = response->keys.size();
  const size_t expected = response->joined.empty() ? 0 : count_of_keys;
  const std::vector<uint32_t>& numbers = response->numbers;
  const bool are_numbers = numbers.size() <= count_of_keys &&
                           std::all_of(numbers.begin(), numbers.end(),
                                       [](uint32_t number) { return number <= kMaxRepeated; });
  return r.Done() && count_of_keys > 0 && are_numbers && response->infos.size() == expected;
}

std::string EncodeClock(const ClockNote& note) {
  WireWriter w;
  w.Number(note.asked_us);
  w.Number(note.heard_us);
  w.Number(note.answered_us);
  return w.Take();
}

bool DecodeClock(ByteSpan bytes, ClockNote* note) {
  WireReader r(bytes);
  note->asked_us = r.Number<int64_t>();
  note->heard_us = r.Number<int64_t>();
  note->answered_us = r.Number<int64_t>();
  return r.Done();
}

std::string EncodeJoin(const JoinNote& note) {
  WireWriter w;
  w.Number(note.rank);
  w.Number(note.timeout_s);
  w.Numbers(note.last);
  w.Number(note.complete);
  w.Number(note.round);
  return w.Take();
}

bool DecodeJoin(ByteSpan bytes, JoinNote* note) {
  WireReader r(bytes);
  note->rank = r.Number<int32_t>();
  note->timeout_s = r.Number<double>();
  note->last = r.Numbers<uint64_t>();
  note->complete = r.Number<int32_t>();
  note->round = r.Number<uint32_t>();
  return r.Done() && note->timeout_s >= 0 && note->timeout_s <= kMostSeconds;
}

std::string EncodeStatus(const Status& status) {
  WireWriter w;
  WriteStatus(&w, status);
  return w.Take();
}

bool DecodeStatus(ByteSpan bytes, Status* status) {
  WireReader r(bytes);
  return ReadStatus(&r, status) && r.Done();
}

std::string EncodeStall(const std::string& key, const std::string& text) {
  WireWriter w;
  w.Text(key);
  w.Text(text);
  return w.Take();
}

bool DecodeStall(ByteSpan bytes, std::string* key, std::string* text) {
  WireReader r(bytes);
  *key = r.Text();
  *text = r.Text();
  return r.Done();
}

std::string EncodeWait(const WaitNote& note) {
  WireWriter w;
  w.Number(note.ticket);
  w.Number(note.waited_us);
  w.Text(EncodeRequest(note.info));
  return w.Take();
}

bool DecodeWait(ByteSpan bytes, WaitNote* note) {
  WireReader r(bytes);
  note->ticket = r.Number<uint64_t>();
  note->waited_us = r.Number<int64_t>();
  const std::string info = r.Text();
  return r.Done() && note->waited_us >= 0 && IsPredicted(note->ticket) &&
         DecodeRequest(AsBytes(info), &note->info);
}

std::string EncodeProbe(const ProbeNote& note) {
  WireWriter w;
  w.Number(note.ticket);
  w.Number(note.answer);
  return w.Take();
}

bool DecodeProbe(ByteSpan bytes, ProbeNote* note) {
  WireReader r(bytes);
  note->ticket = r.Number<uint64_t>();
  note->answer = r.Number<uint8_t>();
  return r.Done() && IsPredicted(note->ticket) && note->answer <= 2;
}

namespace {

void WriteTickets(WireWriter* w, const LeaveNote& note) {
  w->Number(static_cast<uint32_t>(note.size()));
  for (const auto& [set, tickets] : note) {
    w->Number(set);
    w->Numbers(tickets);
  }
}

void ReadTickets(WireReader* r, LeaveNote* note) {
  const auto count = r->Number<uint32_t>();
  note->clear();
  for (uint32_t i = 0; i < count && r->ok(); ++i) {
    const auto set = r->Number<uint32_t>();
    (*note)[set] = r->Numbers<uint64_t>();
  }
}

}  // namespace

std::string EncodeLeave(const LeaveNote& note) {
  WireWriter w;
  WriteTickets(&w, note);
  return w.Take();
}

bool DecodeLeave(ByteSpan bytes, LeaveNote* note) {
  WireReader r(bytes);
  ReadTickets(&r, note);
  return r.Done();
}

std::string EncodeBlocked(const BlockedNote& note) {
  WireWriter w;
  w.Number(note.round);
  w.Number(note.moves);
  w.Number(static_cast<uint8_t>(note.how));
  w.Text(note.place);
  w.Number(static_cast<uint32_t>(note.waits.size()));
  for (const BlockedWait& wait : note.waits) {
    w.Number(wait.set);
    w.Numbers(wait.ranks);
    w.Number(wait.ticket);
    w.Text(wait.key);
  }
  WriteTickets(&w, note.took_part);
  w.Number(static_cast<uint32_t>(note.led.size()));
  for (const LedWait& led : note.led) {
    w.Number(led.set);
    w.Text(led.key);
    w.Numbers(led.missing);
  }
  return w.Take();
}

bool DecodeBlocked(ByteSpan bytes, BlockedNote* note) {
  WireReader r(bytes);
  *note = BlockedNote();
  note->round = r.Number<uint32_t>();
  note->moves = r.Number<uint64_t>();
  const auto how = r.Number<uint8_t>();
  note->how = static_cast<BlockedNote::How>(how);
  note->place = r.Text();
  const auto waits = r.Number<uint32_t>();
  for (uint32_t i = 0; i < waits && r.ok(); ++i) {
    BlockedWait& wait = note->waits.emplace_back();
    wait.set = r.Number<uint32_t>();
    wait.ranks = r.Numbers<int32_t>();
    wait.ticket = r.Number<uint64_t>();
    wait.key = r.Text();
    if (wait.ranks.empty() || (wait.ticket != 0 && !IsPredicted(wait.ticket))) return false;
  }
  ReadTickets(&r, &note->took_part);
  const auto led = r.Number<uint32_t>();
  for (uint32_t i = 0; i < led && r.ok(); ++i) {
    LedWait& one = note->led.emplace_back();
    one.set = r.Number<uint32_t>();
    one.key = r.Text();
    one.missing = r.Numbers<int32_t>();
  }
  return r.Done() && how <= static_cast<uint8_t>(BlockedNote::How::kPatient);
}

std::string EncodeRound(uint32_t round) {
  WireWriter w;
  w.Number(round);
  return w.Take();
}

bool DecodeRound(ByteSpan bytes, uint32_t* round) {
  WireReader r(bytes);
  *round = r.Number<uint32_t>();
  return r.Done() && *round > 0;
}

std::string EncodeRecord(const Status& status) {
  const std::string record = EncodeStatus(status);
  if (record.size() <= kMaxRecord) return record;
  const std::string start = "{\"kind\": \"";
  std::string kind = "internal";
  if (status.payload().compare(0, start.size(), start) == 0) {
    const size_t end = status.payload().find('"', start.size());
    kind = status.payload().substr(start.size(), end - start.size());
  }
  if (kind == "rank_failed") return "";
  return EncodeStatus(Status(status.code(), Shortened(status.message(), kMaxRecord / 2) + " ...",
                             ErrorRecord{kind, -1, "", 0, "", "see the message", ""}));
}

}  // namespace tfdist
