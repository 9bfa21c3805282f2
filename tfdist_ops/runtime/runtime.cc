#include "runtime/runtime.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <future>
#include <limits>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/wait_until.h"
#include "runtime/hidden_failures.h"
#include "scheduler/join.h"
#include "scheduler/request_check.h"

namespace tfdist {
namespace {

std::atomic<bool> records_wanted{false};

constexpr size_t kRecordCapacity = 4096;
// One key for adding and removing, so that ranks that call different things find out.
constexpr char kSetKey[] = "process set";

Status ShutDownError() {
  return Status(Code::kFailedPrecondition, "tfdist was shut down; call tfdist.init() again",
                ErrorRecord{"not_initialized", -1, "", 0, "", "shut down", ""});
}

// How long a blocking call drives an operation that does not move.
constexpr int64_t kPatienceUs = 200;
constexpr int64_t kCrowdedPatienceUs = 20000;
// A kernel's thread helps for at most this many times its patience while other operations move.
constexpr int64_t kMostPatiences = 5;

// An operation that the thread which submitted it drives for a while. Either that thread runs
// `done`, or it has left by then.
struct Helped {
  explicit Helped(std::function<void(const Status&)> callback) : done(std::move(callback)) {}
  // The operation has ended. False: nobody helps any more.
  bool End(const Status& result) {
    status = result;
    const bool helping = stage.exchange(kEnded) == kHelping;
    ended = true;
    return helping;
  }
  // The helping thread leaves. True: the operation has ended, and `done` must be run here.
  bool Leave() { return stage.exchange(kLeft) == kEnded; }

  enum Stage { kHelping, kEnded, kLeft };
  const std::function<void(const Status&)> done;
  Status status;
  std::atomic<bool> ended{false};  // for the thread that drives the engine
  std::atomic<Stage> stage{kHelping};
};

// The end of an operation for which a thread waits, driving it or not. It lies on that thread's
// stack: nothing touches it after Wait.
struct Awaited {
  void End(const Status& result) {
    ended = true;
    status = result;
    if (stage.exchange(kEnded) != kWaiting) return;
    // The thread that waits goes on when it can have the lock, not before.
    std::lock_guard<std::mutex> lock(mutex);
    is_known = true;
    known.notify_one();
  }
  const Status& Wait() {
    if (stage.exchange(kWaiting) != kEnded) {
      std::unique_lock<std::mutex> lock(mutex);
      WaitUntil(&known, &lock, [this] { return is_known; });
    }
    return status;
  }

  enum Stage { kRunning, kWaiting, kEnded };
  std::atomic<bool> ended{false};  // for the thread that drives the engine
  std::atomic<Stage> stage{kRunning};
  Status status;
  std::mutex mutex;  // guards is_known
  std::condition_variable known;
  bool is_known = false;
};

std::string Line(const std::string& text, size_t index) {
  size_t begin = 0;
  for (; index > 0 && begin != std::string::npos; --index) begin = text.find('\n', begin) + 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

// FNV-1a, twice with different seeds: 128 bits name a group.
std::string HashText(const std::string& text) {
  std::string out;
  for (uint64_t hash : {uint64_t{0xcbf29ce484222325}, uint64_t{0x9ae16a3b2f90404f}}) {
    for (unsigned char c : text) hash = (hash ^ c) * uint64_t{0x100000001b3};
    char buffer[20];
    std::snprintf(buffer, sizeof(buffer), "%016llx", static_cast<unsigned long long>(hash));
    out += buffer;
  }
  return out;
}

std::string GroupId(uint32_t set, const std::string& description) {
  return HashText(std::to_string(set) + "\n" + description);
}

// Whether more ranks share this rank's processors than there are of them: then a rank that waits
// yields its processor, so that the others have their turns.
bool IsCrowded(const World& world) {
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof(own), &own) != 0) return false;
  return (world.sharing > 0 ? world.sharing : world.local_size) > CPU_COUNT(&own);
}

}  // namespace

Runtime::Runtime(World world, Links links, const Config& config, int doorbell_fd,
                 std::shared_ptr<Overlay> overlay, std::shared_ptr<WantedLinks> wanted)
    : world_(std::move(world)),
      config_(config),
      overlay_(std::move(overlay)),
      wanted_(std::move(wanted)),
      processes_(world_, links),
      // Where ranks share a processor each waits for the others to have their turns.
      is_crowded_(IsCrowded(world_)),
      patience_us_(is_crowded_ ? kCrowdedPatienceUs : kPatienceUs),
      records_(kRecordCapacity) {
  Engine::Hooks hooks;
  hooks.process_state = [this](int peer) { return processes_.Look(peer); };
  hooks.completions = &completions_;
  hooks.allocated = [this](uint32_t set, uint64_t ticket, void* memory) {
    progress_->Push([set, ticket, memory](Engine* engine, int64_t now_us) {
      engine->Allocated(set, ticket, memory, now_us);
    });
  };
  hooks.failed = [this](const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = status;
    ended_ = true;
  };
  hooks.finished = [this](const Request& request, Code code) {
    still_us_.store(0, std::memory_order_relaxed);
    // Not the time at which the turn began: other operations may have been reduced since.
    const int64_t done_us = NowUs();
    blocked_.Add(request, done_us);
    if (!records_wanted.load(std::memory_order_relaxed)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    records_.Add(request, code, done_us);
  };
  hooks.hide_failure = EndHidden;
  hooks.spent = [this](std::unique_ptr<Request> request) {
    request->Clear();
    delete spare_request_.exchange(request.release());
  };
  hooks.registered = [this](const RequestInfo& info, const Response& response) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_[{info.set, info.description}] = response.present;
  };
  hooks.timeline_lines = [this](int peer, std::string lines) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (writer_ != nullptr) writer_->Receive(peer, std::move(lines));
  };
  hooks.still = [this](uint64_t moves, int64_t still_us) {
    moves_.store(moves, std::memory_order_relaxed);
    still_us_.store(still_us, std::memory_order_relaxed);
  };
  hooks.stepped = [this](int64_t count) { good_steps_ = count; };
  auto engine = std::make_unique<Engine>(world_, std::move(links), config_, std::move(hooks));
  progress_ = std::make_unique<Progress>(std::move(engine), doorbell_fd, config_, is_crowded_);
}

Runtime::~Runtime() {
  Shutdown(0);
  delete spare_request_.load();
}

std::unique_ptr<Request> Runtime::NewRequest() {
  std::unique_ptr<Request> spare(spare_request_.exchange(nullptr));
  return spare != nullptr ? std::move(spare) : std::make_unique<Request>();
}

Status Runtime::Admit(Request* request, uint64_t* id) {
  if (request->info.timeout_s <= 0) request->info.timeout_s = config_.timeout_s;
  TFDIST_RETURN_IF_ERROR(CheckRequest(*request, world_.size));
  if (ended_) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.ok()) return ShutDownError();
    // The engine ends a request that hides the failure, as it ends those that were under way.
    if (shut_down_ || !IsHidden(*request, failure_)) return failure_;
  }
  for (const TensorView& tensor : request->tensors) {
    request->bytes += tensor.elements * static_cast<int64_t>(DTypeSize(request->info.dtype));
  }
  request->id = next_id_.fetch_add(1);
  if (id != nullptr) *id = request->id;
  return Status();
}

Status Runtime::Submit(std::unique_ptr<Request> request, uint64_t* id) {
  TFDIST_RETURN_IF_ERROR(Admit(request.get(), id));
  return progress_->Submit(std::move(request)) ? Status() : ShutDownError();
}

Status Runtime::SubmitAndDrive(std::unique_ptr<Request> request, uint64_t* id,
                               int64_t patience_us) {
  if (patience_us <= 0) return Submit(std::move(request), id);
  TFDIST_RETURN_IF_ERROR(Admit(request.get(), id));
  const auto helped = std::make_shared<Helped>(std::move(request->done));
  request->direct = true;
  request->done = [this, helped](const Status& status) {
    if (!helped->End(status)) {
      completions_.Post([helped, status] { helped->done(status); });
    }
  };
  if (!progress_->DriveOnCaller(&request, helped->ended, patience_us,
                                kMostPatiences * patience_us)) {
    return ShutDownError();
  }
  if (helped->Leave()) helped->done(helped->status);
  return Status();
}

Status Runtime::Run(std::unique_ptr<Request> request) {
  TFDIST_RETURN_IF_ERROR(Admit(request.get(), nullptr));
  const auto done = std::move(request->done);
  Awaited awaited;
  request->direct = true;
  request->done = [&awaited](const Status& status) { awaited.End(status); };
  if (!progress_->DriveOnCaller(&request, awaited.ended, patience_us_,
                                std::numeric_limits<int64_t>::max())) {
    return ShutDownError();
  }
  done(awaited.Wait());  // bounded: the engine ends every request by its deadline
  return Status();
}

void Runtime::Cancel(uint64_t id) {
  progress_->Push([id](Engine* engine, int64_t now_us) { engine->Cancel(id, now_us); });
}

void Runtime::Abort(const AbortReason& reason) {
  progress_->Push([reason](Engine* engine, int64_t now_us) { engine->AbortWith(reason, now_us); });
}

Status Runtime::Agree(std::unique_ptr<Request> request, Response* response) {
  auto answer = std::make_shared<Response>();
  auto promise = std::make_shared<std::promise<Status>>();
  std::future<Status> future = promise->get_future();
  request->agreed = [answer](const Response& agreed) { *answer = agreed; };
  request->done = [promise](const Status& status) { promise->set_value(status); };
  TFDIST_RETURN_IF_ERROR(Submit(std::move(request), nullptr));
  TFDIST_RETURN_IF_ERROR(future.get());  // bounded: the engine ends every request by its deadline
  *response = *answer;
  return Status();
}

Status Runtime::RegisterGroup(uint32_t set, const std::string& description,
                              std::vector<uint8_t>* present, double timeout_s, std::string* id) {
  *id = GroupId(set, description);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = groups_.find({set, description});
    if (known != groups_.end()) {
      if (present->size() != known->second.size()) {
        const std::string text = "expected " + std::to_string(known->second.size()) +
                                 " gradients, as when this list was first registered, got " +
                                 std::to_string(present->size());
        return Status(Code::kInvalidArgument, text,
                      ErrorRecord{"invalid_argument", -1, "", 0, "gradients", text, ""});
      }
      for (size_t i = 0; i < present->size(); ++i) {
        if ((*present)[i] == 0 || known->second[i] != 0) continue;
        const std::string text = Line(description, i) +
                                 " has a gradient now, but had none on any rank when the list of "
                                 "gradients was first seen";
        return Status(Code::kFailedPrecondition,
                      text + "; pass the same variables with gradients from the first step on",
                      ErrorRecord{"mismatch", world_.rank, "", 0, "gradients", text, ""});
      }
      *present = known->second;
      return Status();
    }
  }
  auto request = std::make_unique<Request>();
  request->info.key = "gradients " + id->substr(0, 12);
  request->info.kind = CollectiveKind::kRegister;
  request->info.description = description;
  request->info.present = *present;
  request->info.timeout_s = timeout_s;
  request->info.set = set;
  request->group = *id;
  Response response;
  TFDIST_RETURN_IF_ERROR(Agree(std::move(request), &response));
  if (response.present.size() != present->size()) {
    return TFDIST_INTERNAL("the leader's answer for \"" + *id + "\" is of another group");
  }
  *present = response.present;
  std::lock_guard<std::mutex> lock(mutex_);
  groups_[{set, description}] = *present;
  return Status();
}

bool Runtime::FindGroup(uint32_t set, const std::string& description, std::vector<uint8_t>* present,
                        std::string* id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = groups_.find({set, description});
  if (known == groups_.end() || known->second.size() != present->size()) return false;
  *id = GroupId(set, description);
  *present = known->second;
  return true;
}

Status Runtime::AddProcessSet(const std::vector<int32_t>& ranks, double timeout_s, uint32_t* id) {
  auto request = std::make_unique<Request>();
  request->info.key = kSetKey;
  request->info.kind = CollectiveKind::kAddSet;
  request->info.description = SetRanksText(ranks);
  request->info.timeout_s = timeout_s;
  Response response;
  TFDIST_RETURN_IF_ERROR(Agree(std::move(request), &response));
  *id = static_cast<uint32_t>(response.number);
  return Status();
}

Status Runtime::RemoveProcessSet(uint32_t id, double timeout_s) {
  auto request = std::make_unique<Request>();
  request->info.key = kSetKey;
  request->info.kind = CollectiveKind::kRemoveSet;
  request->info.description = std::to_string(id);
  request->info.timeout_s = timeout_s;
  Response response;
  TFDIST_RETURN_IF_ERROR(Agree(std::move(request), &response));
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.erase(groups_.lower_bound({id, ""}), groups_.lower_bound({id + 1, ""}));
  return Status();
}

Status Runtime::Join(uint32_t set, double timeout_s, int32_t* latest, int32_t* complete) {
  auto request = std::make_unique<Request>();
  request->info.key = kJoinKey;
  request->info.kind = CollectiveKind::kJoin;
  request->info.timeout_s = timeout_s;
  request->info.set = set;
  Response response;
  TFDIST_RETURN_IF_ERROR(Agree(std::move(request), &response));
  *latest = static_cast<int32_t>(response.number);
  *complete = static_cast<int32_t>(response.rows[0]);
  return Status();
}

int64_t Runtime::StillUs(uint64_t* moves) const {
  *moves = moves_.load(std::memory_order_relaxed);
  return still_us_.load(std::memory_order_relaxed);
}

void Runtime::ReportBlocked(uint64_t moves, BlockedNote::How how, const std::string& place) {
  progress_->Push(
      [moves, how, place](Engine* engine, int64_t) { engine->ReportBlocked(moves, how, place); });
}

bool Runtime::Adopt(int peer, std::unique_ptr<Link> link) {
  if (overlay_ == nullptr) return false;
  // A std::function must be copyable, a link is not.
  auto shared = std::make_shared<std::unique_ptr<Link>>(std::move(link));
  return progress_->Push([this, peer, shared](Engine*, int64_t) {
    overlay_->Adopt(peer, std::move(*shared));
    progress_->ForgetWatched();
  });
}

std::vector<int32_t> Runtime::TakeWanted(size_t capacity) {
  return wanted_ != nullptr ? wanted_->Take(capacity) : std::vector<int32_t>();
}

void Runtime::Shutdown(double timeout_s) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shut_down_) return;
    shut_down_ = ended_ = true;
  }
  if (timeout_s >= 0) {
    EndTimeline(timeout_s / 2);
    progress_->Push([](Engine* engine, int64_t now_us) { engine->Leave(now_us); });
  }
  const int64_t deadline_us = NowUs() + static_cast<int64_t>(timeout_s * 1e6);
  bool left = false;
  while (!left && NowUs() < deadline_us) {
    auto promise = std::make_shared<std::promise<bool>>();
    std::future<bool> future = promise->get_future();
    progress_->Push([promise](Engine* engine, int64_t) { promise->set_value(engine->Left()); });
    left = future.get();
    if (!left) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  progress_->Stop();
  if (writer_ != nullptr) writer_->Close();
}

Status Runtime::StartTimeline(const std::string& folder, const std::string& head,
                              TraceClock clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (shut_down_) return ShutDownError();
  if (writer_ != nullptr) {
    const std::string text = "a timeline is already being written, until tfdist.shutdown()";
    return Status(Code::kFailedPrecondition, text,
                  ErrorRecord{"invalid_argument", -1, "", 0, "", text, ""});
  }
  auto timeline = std::make_shared<Timeline>(clock);
  auto writer = TimelineWriter::Open(timeline, folder, world_.rank, head, config_.timeline_bytes);
  if (!writer.ok()) return writer.status();
  writer_ = std::move(writer.value());
  timeline_ = timeline;
  progress_->Push([raw = timeline.get()](Engine* engine, int64_t) { engine->SetTimeline(raw); });
  return Status();
}

void Runtime::ForwardTimeline() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (writer_ == nullptr) return;
  writer_->Forward([this](std::string lines) {
    progress_->Push(
        [lines = std::move(lines)](Engine* engine, int64_t) { engine->SendTimeline(lines); });
  });
}

// Forwards the last lines while the engine can still send; rank 0 waits for those of the others.
void Runtime::EndTimeline(double timeout_s) {
  if (writer_ == nullptr) return;
  writer_->EndForward();
  const int64_t deadline_us = NowUs() + static_cast<int64_t>(timeout_s * 1e6);
  // After a failure not all of them will come.
  while (failure().ok() && !writer_->ReceivedAll() && NowUs() < deadline_us) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Runtime::AddSpan(const std::string& name, int64_t begin_us, int64_t end_us) {
  std::shared_ptr<Timeline> timeline;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    timeline = timeline_;
  }
  if (timeline != nullptr) timeline->AddSpan({name, begin_us, end_us});
}

Status Runtime::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Runtime::WantRecords() { records_wanted.store(true, std::memory_order_relaxed); }

std::vector<FinishedRecord> Runtime::TakeRecords(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_.Take(capacity);
}

const AlgorithmEntry* Runtime::AlgorithmFor(CollectiveKind kind, DType dtype, int64_t bytes,
                                            const std::string& wanted) const {
  ScheduleArgs args{world_.rank, world_.size, 0, WorldHosts(world_)};
  args.sparse = world_.size > config_.mesh_ranks;
  const SizeRules rules = RulesFor(world_.tuning, args);
  if (!wanted.empty()) return SelectAlgorithm(kind, wanted, args, dtype, bytes, rules);
  const AlgorithmEntry* entry =
      SelectAlgorithm(kind, WantedAlgorithm(kind, config_), args, dtype, bytes, rules);
  return entry != nullptr ? entry : SelectAlgorithm(kind, "auto", args, dtype, bytes, rules);
}

std::string Runtime::CountersJson() {
  auto promise = std::make_shared<std::promise<std::string>>();
  std::future<std::string> future = promise->get_future();
  if (!progress_->Push([this, promise, overlay = overlay_](Engine* engine, int64_t) {
        std::string text = engine->CountersJson();
        text.back() = ',';
        text += " \"blocked_us\": " + std::to_string(blocked_.total_us()) + ",";
        text += " \"crowded\": " + std::string(is_crowded_ ? "true" : "false") + "}";
        if (overlay != nullptr) {
          text.back() = ',';
          text += " \"overlay\": " + overlay->CountersJson() + "}";
        }
        promise->set_value(std::move(text));
      })) {
    return "{}";
  }
  return future.get();
}

}  // namespace tfdist
