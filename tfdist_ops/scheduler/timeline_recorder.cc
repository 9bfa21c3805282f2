#include "scheduler/timeline_recorder.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tfdist {
namespace {

// Round trips for the clock: a few at once, so that a short job has one that nothing disturbed,
// then one now and then, because clocks drift.
constexpr int kFirstClocks = 10;
constexpr int64_t kClockUs = 1000 * 1000;
// The most messages with lines of the timeline that may wait to be sent.
constexpr int64_t kMostWaiting = 64;

}  // namespace

void TimelineRecorder::SetTimeline(Timeline* timeline) {
  timeline_ = timeline;
  next_clock_us_ = 0;
  clocks_asked_ = 0;
}

void TimelineRecorder::SendLines(std::string lines) {
  if (timeline_ == nullptr || !control_->IsConnected(0)) return;
  if (control_->CountQueued(0, FrameType::kTimeline) < kMostWaiting) {
    control_->Send(0, FrameType::kTimeline, kWorldSet, std::move(lines));
  } else {
    timeline_->Drop(std::count(lines.begin(), lines.end(), '\n'));
  }
}

// ---- waiting ----

void TimelineRecorder::CountWait(int rank, int64_t since_us, int64_t until_us) {
  const int64_t counted_us = wait_accounting_.Add(rank, since_us, until_us);
  TimelineRecord* record = timeline_ != nullptr && counted_us > 0 ? timeline_->Begin() : nullptr;
  if (record == nullptr) return;
  record->type = TimelineRecord::Type::kWait;
  record->waited_for = rank;
  record->waited_since_us = until_us - counted_us;
  record->waited_until_us = until_us;
  timeline_->Commit();
}

void TimelineRecorder::OnAgreed(const Response& response, Request* request, int64_t now_us) {
  request->last_ready = response.last;
  if (response.last < 0 || response.last == rank_) return;
  CountWait(response.last, request->submitted_us, now_us);
}

// ---- the timeline ----

void TimelineRecorder::KeepTrace(Operation* operation) const {
  operation->trace().ended_us = timeline_->NowUs();
  auto trace = std::make_shared<const OperationTrace>(std::move(operation->trace()));
  for (auto& member : operation->members()) {
    member->ticket = operation->ticket();
    member->trace = trace;
  }
}

void TimelineRecorder::OnFinished(const Request& request, const Status& status,
                                  const ProcessSet* set) {
  TimelineRecord* record = records() ? timeline_->Begin() : nullptr;
  if (record == nullptr) return;
  std::strncpy(record->name, request.info.key.c_str(), sizeof(record->name) - 1);
  record->kind = CollectiveKindName(request.info.kind);
  record->set = request.info.set;
  record->ticket = request.ticket;
  record->code = static_cast<int32_t>(status.code());
  record->last_ready = request.last_ready;
  record->bytes = request.bytes;
  record->submitted_us = request.submitted_us;
  record->agreed_us = request.agreed_us;
  record->done_us = timeline_->NowUs();
  if (request.trace != nullptr && set != nullptr) {
    const OperationTrace& trace = *request.trace;
    record->started_us = trace.started_us;
    record->ended_us = trace.ended_us;
    record->first_sent_us = trace.first_sent_us;
    record->last_sent_us = trace.last_sent_us;
    record->sent_bytes = trace.sent_bytes;
    record->pack = trace.pack;
    record->reduce = trace.reduce;
    TracePeers(trace, set->ranks, record);
  }
  timeline_->Commit();
}

// ---- the clock: Cristian's round trip, computed where the timelines are put together ----

void TimelineRecorder::AskForTime(int64_t now_us) {
  if (timeline_ == nullptr || rank_ == 0 || now_us < next_clock_us_) return;
  ++clocks_asked_;
  next_clock_us_ = now_us + (clocks_asked_ < kFirstClocks ? 0 : kClockUs);
  control_->Send(0, FrameType::kClock, kWorldSet, EncodeClock({timeline_->NowUs(), 0, 0}));
}

void TimelineRecorder::OnClock(int peer, ClockNote note) {
  if (timeline_ == nullptr) return;  // it has ended here, or not yet begun
  const int64_t now_us = timeline_->NowUs();
  if (rank_ == 0) {
    note.heard_us = now_us;
    note.answered_us = timeline_->NowUs();
    control_->Send(peer, FrameType::kClock, kWorldSet, EncodeClock(note));
    return;
  }
  if (peer != 0) return;
  TimelineRecord* record = timeline_->Begin();
  if (record == nullptr) return;
  record->type = TimelineRecord::Type::kClock;
  record->asked_us = note.asked_us;
  record->heard_us = note.heard_us;
  record->answered_us = note.answered_us;
  record->back_us = now_us;
  timeline_->Commit();
}

}  // namespace tfdist
