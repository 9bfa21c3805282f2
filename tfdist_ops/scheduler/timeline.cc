#include "scheduler/timeline.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "base/status.h"

namespace tfdist {
namespace {

void AppendNumber(const char* name, int64_t value, std::string* out) {
  char text[64];
  std::snprintf(text, sizeof(text), ",\"%s\":%" PRId64, name, value);
  *out += text;
}

// [begin, end, total]
void AppendBusy(const char* name, const OperationTrace::Busy& busy, std::string* out) {
  char text[128];
  std::snprintf(text, sizeof(text), ",\"%s\":[%" PRId64 ",%" PRId64 ",%" PRId64 "]", name,
                busy.first_ns / 1000, busy.last_ns / 1000, busy.total_ns / 1000);
  *out += text;
}

}  // namespace

void TracePeers(const OperationTrace& trace, const std::vector<int32_t>& ranks,
                TimelineRecord* record) {
  std::vector<size_t> heard;
  for (size_t p = 0; p < trace.peers.size(); ++p) {
    if (trace.peers[p].heard) heard.push_back(p);
  }
  const auto most = std::min(heard.size(), static_cast<size_t>(TimelineRecord::kMostPeers));
  const auto later = [&](size_t a, size_t b) {
    return trace.peers[a].first_us > trace.peers[b].first_us;
  };
  std::partial_sort(heard.begin(), heard.begin() + static_cast<std::ptrdiff_t>(most), heard.end(),
                    later);
  for (size_t i = 0; i < most; ++i) {
    const OperationTrace::Peer& peer = trace.peers[heard[i]];
    record->peers[i] = {ranks[heard[i]], peer.first_us, peer.last_us, peer.bytes};
  }
  record->peer_count = static_cast<int>(most);
  if (trace.longest.peer < 0) return;
  record->waited_for = ranks[static_cast<size_t>(trace.longest.peer)];
  record->waited_since_us = trace.longest.since_us;
  record->waited_until_us = trace.longest.until_us;
}

std::string TimelineLine(const TimelineRecord& record) {
  std::string out;
  if (record.type == TimelineRecord::Type::kClock) {
    out = "{\"type\":\"clock\"";
    AppendNumber("asked", record.asked_us, &out);
    AppendNumber("heard", record.heard_us, &out);
    AppendNumber("answered", record.answered_us, &out);
    AppendNumber("back", record.back_us, &out);
    return out + "}\n";
  }
  if (record.type == TimelineRecord::Type::kWait) {
    out = "{\"type\":\"wait\"";
    AppendNumber("rank", record.waited_for, &out);
    AppendNumber("since", record.waited_since_us, &out);
    AppendNumber("until", record.waited_until_us, &out);
    return out + "}\n";
  }
  out =
      "{\"type\":\"op\",\"name\":" + JsonQuote(record.name) + ",\"kind\":" + JsonQuote(record.kind);
  AppendNumber("set", record.set, &out);
  // As text: tickets use all 64 bits, more than numbers of JSON hold.
  out += ",\"ticket\":\"" + std::to_string(record.ticket) + "\"";
  AppendNumber("code", record.code, &out);
  AppendNumber("last_ready", record.last_ready, &out);
  AppendNumber("bytes", record.bytes, &out);
  AppendNumber("submitted", record.submitted_us, &out);
  AppendNumber("agreed", record.agreed_us, &out);
  AppendNumber("started", record.started_us, &out);
  AppendNumber("ended", record.ended_us, &out);
  AppendNumber("done", record.done_us, &out);
  AppendBusy("pack", record.pack, &out);
  AppendBusy("reduce", record.reduce, &out);
  AppendNumber("first_sent", record.first_sent_us, &out);
  AppendNumber("last_sent", record.last_sent_us, &out);
  AppendNumber("sent_bytes", record.sent_bytes, &out);
  AppendNumber("waited_for", record.waited_for, &out);
  AppendNumber("waited_since", record.waited_since_us, &out);
  AppendNumber("waited_until", record.waited_until_us, &out);
  out += ",\"peers\":[";  // rank, first, last, bytes
  for (int i = 0; i < record.peer_count; ++i) {
    const TimelineRecord::Peer& peer = record.peers[i];
    char text[128];
    std::snprintf(text, sizeof(text), "%s[%d,%" PRId64 ",%" PRId64 ",%" PRId64 "]",
                  i > 0 ? "," : "", peer.rank, peer.first_us, peer.last_us, peer.bytes);
    out += text;
  }
  return out + "]}\n";
}

std::string TimelineLine(const TimelineSpan& span) {
  std::string out = "{\"type\":\"span\",\"name\":" + JsonQuote(span.name);
  AppendNumber("begin", span.begin_us, &out);
  AppendNumber("end", span.end_us, &out);
  return out + "}\n";
}

Timeline::Timeline(TraceClock clock, size_t records) : clock_(clock), ring_(records) {}

TimelineRecord* Timeline::Begin() {
  const uint64_t written = written_.load(std::memory_order_relaxed);
  if (written - read_.load(std::memory_order_acquire) == ring_.size()) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  TimelineRecord* record = &ring_[written % ring_.size()];
  *record = TimelineRecord();
  return record;
}

void Timeline::Commit() {
  written_.store(written_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void Timeline::AddSpan(TimelineSpan span) {
  span.name.resize(std::min(span.name.size(), sizeof(TimelineRecord::name)));
  std::lock_guard<std::mutex> lock(mutex_);
  if (spans_.size() == kMostSpans) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  spans_.push_back(std::move(span));
}

size_t Timeline::TakeLines(std::string* out) {
  size_t count = 0;
  const uint64_t written = written_.load(std::memory_order_acquire);
  for (uint64_t read = read_.load(std::memory_order_relaxed); read < written; ++count) {
    *out += TimelineLine(ring_[read % ring_.size()]);
    read_.store(++read, std::memory_order_release);
  }
  std::vector<TimelineSpan> spans;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    spans.swap(spans_);
  }
  for (const TimelineSpan& span : spans) *out += TimelineLine(span);
  return count + spans.size();
}

}  // namespace tfdist
