#include "scheduler/wire.h"

#include <algorithm>

#include "scheduler/order.h"
#include "scheduler/rows.h"

namespace tfdist {
namespace {

// Of a tensor; more than any memory holds, and still a number of bytes that fits.
constexpr int64_t kMostElements = int64_t{1} << 58;

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
  w.Number(static_cast<uint32_t>(info.shapes.size()));
  for (const std::vector<int64_t>& shape : info.shapes) w.Numbers(shape);
  w.Numbers(info.splits);
  w.Text(info.description);
  w.Numbers(info.present);
  w.Number(info.predicted);
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
  const auto count = r.Number<uint32_t>();
  info->shapes.clear();
  for (uint32_t i = 0; i < count && r.ok(); ++i) info->shapes.push_back(r.Numbers<int64_t>());
  info->splits = r.Numbers<int64_t>();
  info->description = r.Text();
  info->present = r.Numbers<uint8_t>();
  info->predicted = r.Number<uint64_t>();
  if (kind < 0 || kind > static_cast<int32_t>(CollectiveKind::kRemoveSet)) return false;
  if (op < 0 || op > static_cast<int32_t>(kLastReduceOp)) return false;
  info->kind = static_cast<CollectiveKind>(kind);
  info->op = static_cast<ReduceOp>(op);
  if (HasRows(info->kind) && info->shapes.size() != 1) return false;
  for (const std::vector<int64_t>& shape : info->shapes) {
    int64_t elements = 1;  // zeros apart, so that no order of the factors can overflow
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
  return r.Done() && !response->keys.empty();
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

std::string EncodeLeave(const LeaveNote& note) {
  WireWriter w;
  w.Number(static_cast<uint32_t>(note.size()));
  for (const auto& [set, tickets] : note) {
    w.Number(set);
    w.Numbers(tickets);
  }
  return w.Take();
}

bool DecodeLeave(ByteSpan bytes, LeaveNote* note) {
  WireReader r(bytes);
  const auto count = r.Number<uint32_t>();
  note->clear();
  for (uint32_t i = 0; i < count && r.ok(); ++i) {
    const auto set = r.Number<uint32_t>();
    (*note)[set] = r.Numbers<uint64_t>();
  }
  return r.Done();
}

}  // namespace tfdist
