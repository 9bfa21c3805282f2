// Progress: the thread that drives one engine. It sleeps on one epoll set: the rank's doorbell
// (rung by peers that share memory, and by threads of this process that submit) and the sockets.
//
// Sleeping and waking, without a wake-up that nobody needs and without one that gets lost: the
// thread first says that it sleeps (a word each peer can read, `sleeping_` for this process), then
// looks once more for work, then sleeps. Whoever brings work publishes it first and then looks at
// that word. One of the two sees the other.
//
// Helping: a thread that waits for an operation may drive the engine itself (DriveOnCaller), so
// that a short one needs no switch of threads. The thread that drives holds `baton_`; the progress
// thread lets go of it while it sleeps, and goes to sleep while another thread helps. The helper
// marks the rank as idle (WakeMode::kIdle), which it stays when the helper has gone, and rings the
// doorbell if work is left. While operations of the rank wait for agreement, the helper marks the
// rank as awake until it leaves, and for at most kExpectUs rings no idle peer
// (WakeMode::kExpecting).
#ifndef TFDIST_OPS_RUNTIME_PROGRESS_H_
#define TFDIST_OPS_RUNTIME_PROGRESS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "scheduler/engine.h"

namespace tfdist {

class Progress {
 public:
  using Command = std::function<void(Engine*, int64_t now_us)>;

  // `doorbell_fd`: a non-blocking eventfd; owned, closed at the end.
  // `crowded`: more ranks share this rank's processors than there are of them.
  Progress(std::unique_ptr<Engine> engine, int doorbell_fd, const Config& config, bool crowded);
  ~Progress();

  // Runs `command` on the engine's thread, soon. Any thread. False: stopped, it will not run.
  bool Push(Command command);
  bool Submit(std::unique_ptr<Request> request);
  // Submits `*request` and drives the engine on the calling thread until `done` sets `ended`, until
  // nothing has moved for `patience_us`, or for `most_us` in all, since what moves may be other
  // operations that come before this one. While another thread helps, hands the request to that
  // thread and returns. False: stopped, it was not submitted. Any thread that may wait a little.
  bool DriveOnCaller(std::unique_ptr<Request>* request, const std::atomic<bool>& ended,
                     int64_t patience_us, int64_t most_us);
  // For commands: there is a new link, whose descriptors may have the numbers of earlier ones.
  void ForgetWatched() { watched_.clear(); }
  // Runs what was pushed, ends the thread; the engine and its links go with it.
  void Stop();

 private:
  void Run();
  bool Enqueue(Command command);
  void Rouse();
  bool RunPushed(int64_t now_us);
  bool Turn(int64_t now_us);
  bool Drive(std::unique_ptr<Request>* request, const std::atomic<bool>& ended, int64_t patience_us,
             int64_t most_us);
  void Sleep(std::unique_lock<std::mutex>* baton);
  void SetWakeMode(WakeMode mode);
  void Idle(int64_t idle_us);
  void Yield();
  void GlanceAtData(const std::atomic<bool>& ended, int64_t now_us);
  bool Unwritten() const;
  void Watch();
  void WatchProcesses();
  void Wake() const;

  std::unique_ptr<Engine> engine_;
  const int doorbell_fd_;
  const int epoll_fd_;
  const int64_t spin_us_;
  const int64_t tick_us_;
  const int64_t idle_us_;                      // longest sleep without work
  std::unordered_map<int, uint32_t> watched_;  // descriptor → events asked for
  std::unordered_map<int, int> processes_;     // pidfd of a peer on this host → its rank
  const bool crowded_;                         // ranks wait for a processor: let others run
  std::mutex baton_;                           // held while driving engine_; guards asleep_
  bool asleep_ = false;                        // the progress thread is at the doorbell
  std::atomic<int> helpers_{0};
  std::atomic<bool> helping_{false};  // a helper looks at what is pushed until it goes
  std::mutex mutex_;                  // guards commands_, and changes of accepting_
  std::vector<Command> commands_;
  std::atomic<bool> accepting_{true};
  std::atomic<bool> pushed_{false};  // there may be commands
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stopping_{false};
  int64_t next_tick_us_ = 0;
  int64_t next_move_us_ = 0;  // to another processor, at the earliest
  int64_t between_moves_us_ = 0;
  std::thread thread_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_PROGRESS_H_
