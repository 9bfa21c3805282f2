// TimelineRecorder: records for which ranks this one waits (always), and, while a timeline is
// written, what happens when, and how this rank's clock differs from rank 0's.
#ifndef TFDIST_OPS_SCHEDULER_TIMELINE_RECORDER_H_
#define TFDIST_OPS_SCHEDULER_TIMELINE_RECORDER_H_

#include <cstdint>
#include <string>

#include "base/status.h"
#include "scheduler/control_lane.h"
#include "scheduler/operation.h"
#include "scheduler/timeline.h"
#include "scheduler/wait_accounting.h"
#include "scheduler/wire.h"

namespace tfdist {

class TimelineRecorder {
 public:
  TimelineRecorder(int rank, ControlLane* control) : rank_(rank), control_(control) {}

  // Null: nothing is recorded from now on.
  void SetTimeline(Timeline* timeline);
  // Sends lines of it to rank 0, unless too many wait to be sent already.
  void SendLines(std::string lines);
  bool records() const { return timeline_ != nullptr; }
  // Of the timeline; null: none is written.
  TraceClock clock() const { return records() ? timeline_->clock() : nullptr; }
  int64_t NowUs(int64_t now_us) const { return records() ? timeline_->NowUs() : now_us; }

  // This rank has waited for another one. Moments that count already are left out.
  void CountWait(int rank, int64_t since_us, int64_t until_us);
  void OnAgreed(const Response& response, Request* request, int64_t now_us);
  // Stores the trace of a complete operation in its requests.
  void KeepTrace(Operation* operation) const;
  // `set`: of the request; null: it has been removed.
  void OnFinished(const Request& request, const Status& status, const ProcessSet* set);

  // Round trips to rank 0 and back, to compare the clocks. AskForTime starts one when it is time;
  // OnClock handles an answer or a question of another rank.
  void AskForTime(int64_t now_us);
  void OnClock(int peer, ClockNote note);

  const WaitAccounting& wait_accounting() const { return wait_accounting_; }

 private:
  const int rank_;
  ControlLane* const control_;
  WaitAccounting wait_accounting_;
  Timeline* timeline_ = nullptr;
  int64_t next_clock_us_ = 0;
  int clocks_asked_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_TIMELINE_RECORDER_H_
