#include "runtime/progress.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <utility>

#include "base/deadline.h"
#include "base/plain_arithmetic.h"
#include "runtime/peer_processes.h"

namespace tfdist {
namespace {

constexpr int64_t kTickUs = 50 * 1000;
constexpr int64_t kIdleUs = 1000 * 1000;  // at most kTurnUs of scheduler/engine.cc
constexpr int kDoubtMs = 2;
constexpr int kPauses = 8;
constexpr int64_t kYieldAfterUs = 10;
// If a yield takes this long, another thread has had the processor meanwhile.
constexpr int64_t kLostUs = 10;
constexpr int64_t kMostBetweenMovesUs = 5 * 1000;
// Long enough for a thread to leave its processor: woken before that, it stays there.
constexpr int64_t kMoveNs = 10 * 1000;
// How often a helper looks at the data alone before it takes whole turns: about 2 us.
constexpr int kGlances = 64;
constexpr int64_t kLongestGlanceUs = 20;  // including the work that it finds
// How long at most a helper that needs agreement expects idle ranks to come by themselves, since
// they make the same calls. A helper that leaves wakes them.
constexpr int64_t kExpectUs = 20 * 1000;
// How many turns a helper that leaves takes at most while more keeps coming.
constexpr int kLastTurns = 4;

int64_t HeartbeatUs(const Config& config) { return static_cast<int64_t>(config.heartbeat_s * 1e6); }

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The kernel lengthens a sleep by up to the thread's timer slack, 50 us by default. The slack is
// restored afterwards, since the thread may be the caller's.
void SleepForMove() {
  const int slack_ns = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1UL);
  const timespec moment{0, kMoveNs};
  nanosleep(&moment, nullptr);
  if (slack_ns > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_ns));
}

// A std::function must be copyable, a request is not.
Progress::Command Submission(std::unique_ptr<Request> request) {
  return [shared = std::make_shared<std::unique_ptr<Request>>(std::move(request))](
             Engine* engine, int64_t now_us) { engine->Submit(std::move(*shared), now_us); };
}

}  // namespace

Progress::Progress(std::unique_ptr<Engine> engine, int doorbell_fd, const Config& config,
                   bool crowded)
    : engine_(std::move(engine)),
      doorbell_fd_(doorbell_fd),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      spin_us_(config.spin_us),
      tick_us_(std::min(kTickUs, HeartbeatUs(config) / 2)),
      // A rank with peers must show that it lives, and look whether they do.
      idle_us_(engine_->links().size() > 1 ? std::min(kIdleUs, HeartbeatUs(config)) : kIdleUs),
      crowded_(crowded) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = doorbell_fd_;
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, doorbell_fd_, &event);
  WatchProcesses();
  thread_ = std::thread([this] { Run(); });
}

Progress::~Progress() {
  Stop();
  for (const auto& [fd, peer] : processes_) close(fd);
  close(epoll_fd_);
  close(doorbell_fd_);
}

// A connection ends with its process, unless a forked child holds a copy of the socket. The kernel
// says which process is at the other end; its descriptor becomes readable when that one ends.
void Progress::WatchProcesses() {
#ifdef SYS_pidfd_open
  for (const auto& link : engine_->links()) {
    if (link == nullptr || !link->WatchProcess()) continue;
    const auto pid = static_cast<pid_t>(SocketPeer(link->fd()));
    if (pid <= 0 || pid == getpid()) continue;
    const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0) continue;  // an old kernel: the connection's end has to do
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
    processes_[fd] = link->peer();
  }
#endif
}

bool Progress::Push(Command command) {
  if (!Enqueue(std::move(command))) return false;
  Rouse();
  return true;
}

bool Progress::Submit(std::unique_ptr<Request> request) {
  return Push(Submission(std::move(request)));
}

bool Progress::Enqueue(Command command) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!accepting_) return false;
  commands_.push_back(std::move(command));
  pushed_.store(true);
  return true;
}

// No fence: the sleeper says that it sleeps and then looks at `pushed_` once more. All four
// accesses are sequentially consistent, so one of the two threads sees the other's store.
void Progress::Rouse() {
  if (sleeping_.load() && sleeping_.exchange(false)) Wake();
}

void Progress::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!accepting_) return;
    accepting_ = false;
  }
  stopping_.store(true);
  Wake();
  thread_.join();
  engine_.reset();
}

void Progress::Wake() const {
  const uint64_t one = 1;
  // The counter can only be full when nobody read 2^64 wake-ups; the thread is awake then.
  [[maybe_unused]] const ssize_t written = write(doorbell_fd_, &one, sizeof(one));
}

bool Progress::RunPushed(int64_t now_us) {
  if (!pushed_.load()) return false;
  std::vector<Command> commands;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    commands.swap(commands_);
    pushed_.store(false);
  }
  for (Command& command : commands) command(engine_.get(), now_us);
  return !commands.empty();
}

bool Progress::Turn(int64_t now_us) {
  bool moved = RunPushed(now_us);
  moved |= engine_->Poll(now_us);
  if (now_us >= next_tick_us_) {
    // After reading what has come: a peer whose message lies here is not silent.
    engine_->Tick(now_us);
    next_tick_us_ = now_us + tick_us_;
    moved |= engine_->Poll(now_us);  // sends what the clock has caused
  }
  return moved;
}

// The rank that is waited for may need this very processor. A frame in shared memory ends the pause
// early.
void Progress::Idle(int64_t idle_us) {
  if (crowded_) {
    sched_yield();
  } else if (idle_us > kYieldAfterUs) {
    Yield();
  } else {
    for (int i = 0; i < kPauses && !engine_->HasFrame(); ++i) Pause();
  }
}

// Two ranks can hand one processor to and fro for long while another stands idle: the kernel looks
// for a free one when a thread wakes up, but hardly when one yields. So a thread that has lost its
// processor by yielding sleeps for a moment, now and then.
void Progress::Yield() {
  const int64_t before_us = NowUs();
  sched_yield();
  const int64_t now_us = NowUs();
  if (now_us - before_us < kLostUs || now_us < next_move_us_) return;
  if (helpers_.load(std::memory_order_relaxed) > 0) return;  // one waits for the baton held here
  // Where no processor is free the sleep is in vain, so it comes ever more rarely.
  const bool again = now_us - next_move_us_ < kMostBetweenMovesUs;
  between_moves_us_ = again ? std::min(2 * between_moves_us_ + kLostUs, kMostBetweenMovesUs) : 0;
  next_move_us_ = now_us + between_moves_us_;
  SleepForMove();
}

void Progress::SetWakeMode(WakeMode mode) {
  sleeping_.store(mode != WakeMode::kAwake);
  engine_->SetWakeMode(mode);
}

void Progress::Run() {
  pthread_setname_np(pthread_self(), "tfdist-progress");
  const PlainArithmetic plain;
  std::unique_lock<std::mutex> baton(baton_);
  int64_t last_move_us = NowUs();
  while (!stopping_.load()) {
    const int64_t now_us = NowUs();
    const bool moved = Turn(now_us);
    const bool helped = helpers_.load(std::memory_order_relaxed) > 0;
    if (moved) last_move_us = now_us;
    if (moved && !helped) continue;
    if (!helped && engine_->busy() && now_us - last_move_us < spin_us_) {
      Idle(now_us - last_move_us);
    } else {
      Sleep(&baton);
      last_move_us = NowUs();
    }
  }
  // Commands pushed before Stop still run; then nothing is left to wait for.
  Turn(NowUs());
  engine_->Stop(NowUs());
}

bool Progress::DriveOnCaller(std::unique_ptr<Request>* request, const std::atomic<bool>& ended,
                             int64_t patience_us, int64_t most_us) {
  // A thread that waited for the baton would hold back a request that other ranks may wait for.
  if (helping_.exchange(true)) {
    if (!Enqueue(Submission(std::move(*request)))) return false;
    if (!helping_.load()) Rouse();  // the helper may have gone without having seen it
    return true;
  }
  struct Leave {
    Progress* progress;
    ~Leave() {
      progress->helping_.store(false);
      if (progress->pushed_.load()) progress->Rouse();
    }
  } leave{this};
  return Drive(request, ended, patience_us, most_us);
}

bool Progress::Drive(std::unique_ptr<Request>* request, const std::atomic<bool>& ended,
                     int64_t patience_us, int64_t most_us) {
  const PlainArithmetic plain;
  helpers_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock<std::mutex> baton(baton_);
  helpers_.fetch_sub(1, std::memory_order_relaxed);
  if (!accepting_.load()) return false;
  if (asleep_) engine_->SetWakeMode(WakeMode::kIdle);
  int64_t now_us = NowUs();
  const int64_t begin_us = now_us;
  RunPushed(now_us);  // came before, maybe under the same key
  engine_->Submit(std::move(*request), now_us);
  // Agreement takes control frames, each of which would wake an idle rank. Its progress thread
  // would then be in the way of the thread that comes to help there.
  bool agrees = false;
  int64_t expects_until_us = std::numeric_limits<int64_t>::max();
  const auto look_whether_it_agrees = [&] {
    if (agrees || !asleep_ || !engine_->agreeing()) return;
    agrees = true;
    expects_until_us = now_us + kExpectUs;
    engine_->SetWakeMode(WakeMode::kExpecting);
  };
  look_whether_it_agrees();
  engine_->AdvanceAll(now_us);  // the peers may wait for it: before looking what they sent
  if (!crowded_ && !agrees) GlanceAtData(ended, now_us);
  if (!ended) now_us = NowUs();
  int64_t last_move_us = now_us;
  for (; !ended && !stopping_.load(std::memory_order_relaxed); now_us = NowUs()) {
    if (now_us - begin_us >= most_us) break;
    if (now_us >= expects_until_us) {
      expects_until_us = std::numeric_limits<int64_t>::max();
      engine_->SetWakeMode(WakeMode::kAwake);
    }
    if (Turn(now_us)) {
      last_move_us = now_us;
      look_whether_it_agrees();  // for what has been handed over meanwhile
    } else if (now_us - last_move_us < patience_us) {
      Idle(now_us - last_move_us);
    } else {
      break;
    }
  }
  bool moved = false;
  if (agrees) {
    engine_->SetWakeMode(WakeMode::kIdle);
    // Takes what came before the peers could know that this rank is idle.
    for (int i = 0; i < kLastTurns && (i == 0 || moved); ++i) moved = Turn(NowUs());
  }
  engine_->FlushAll();  // there may have been no turn since the operation began
  // The rest, to do or to write, is left to the progress thread. If there is none, it sleeps on:
  // whatever comes for an idle rank wakes it.
  if (asleep_ && (moved || engine_->waiting() || Unwritten())) Wake();
  return true;
}

// A small operation inside a host takes less time than one whole turn.
void Progress::GlanceAtData(const std::atomic<bool>& ended, int64_t now_us) {
  const int64_t begin_us = now_us;
  for (int i = 0; i < kGlances && !ended; ++i) {
    if (!engine_->PollData(now_us)) {
      Pause();
    } else if (!ended) {
      now_us = NowUs();
      if (now_us - begin_us > kLongestGlanceUs) return;
    }
  }
}

bool Progress::Unwritten() const {
  const Links& links = engine_->links();
  return std::any_of(links.begin(), links.end(),
                     [](const auto& link) { return link != nullptr && link->WantsWrite(); });
}

void Progress::Sleep(std::unique_lock<std::mutex>* baton) {
  SetWakeMode(engine_->busy() ? WakeMode::kAsleep : WakeMode::kIdle);
  // No fence: `pushed_` (see Rouse) and the links' words are sequentially consistent (shm_lane.h),
  // or guarded by a lock or the kernel.
  if (!Turn(NowUs()) && !engine_->HasFrame() && !stopping_.load()) {
    Watch();
    const int64_t longest_us = engine_->waiting() ? tick_us_ : idle_us_;
    const int timeout_ms =
        engine_->doubting() ? kDoubtMs : static_cast<int>(std::max<int64_t>(longest_us / 1000, 1));
    epoll_event events[16];
    asleep_ = true;
    baton->unlock();
    const int count = epoll_wait(epoll_fd_, events, 16, timeout_ms);
    baton->lock();
    asleep_ = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      const auto process = processes_.find(fd);
      if (process != processes_.end()) {
        engine_->PeerEnded(process->second);
        epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
      } else if (fd == doorbell_fd_) {
        uint64_t rings = 0;
        [[maybe_unused]] const ssize_t got = read(doorbell_fd_, &rings, sizeof(rings));
      }
    }
  }
  SetWakeMode(WakeMode::kAwake);
}

void Progress::Watch() {
  std::vector<Watched> descriptors;
  for (const auto& link : engine_->links()) {
    if (link != nullptr) link->Watch(&descriptors);
  }
  std::unordered_map<int, uint32_t> wanted;
  for (const Watched& one : descriptors) {
    wanted[one.fd] = EPOLLIN | EPOLLRDHUP | (one.write ? EPOLLOUT : 0u);
  }
  for (auto it = watched_.begin(); it != watched_.end();) {
    if (wanted.count(it->first) == 0) {
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, it->first, nullptr);  // closed ones are gone already
      it = watched_.erase(it);
    } else {
      ++it;
    }
  }
  for (const auto& [fd, events] : wanted) {
    const auto known = watched_.find(fd);
    if (known != watched_.end() && known->second == events) continue;
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (epoll_ctl(epoll_fd_, known == watched_.end() ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) !=
        0) {
      // The number was reused since: the old entry went away with its descriptor, or is still
      // there.
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
      epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &event);
    }
    watched_[fd] = events;
  }
}

}  // namespace tfdist
