// Runtime: one rank, complete: engine, progress thread, completion thread, observations. A process
// has one (process_state.h); a test has one for each of its ranks.
#ifndef TFDIST_OPS_RUNTIME_RUNTIME_H_
#define TFDIST_OPS_RUNTIME_RUNTIME_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "runtime/blocked_time.h"
#include "runtime/completion.h"
#include "runtime/finished_records.h"
#include "runtime/peer_processes.h"
#include "runtime/progress.h"
#include "runtime/timeline_writer.h"
#include "runtime/wanted_links.h"
#include "scheduler/engine.h"
#include "transport/overlay.h"

namespace tfdist {

class Runtime {
 public:
  // `doorbell_fd`: this rank's eventfd (owned); `links`: by rank, null for this one. `overlay`:
  // what made the links, in a world that is not a full mesh; `wanted`: where its hook puts the
  // links that it wants.
  Runtime(World world, Links links, const Config& config, int doorbell_fd,
          std::shared_ptr<Overlay> overlay = nullptr,
          std::shared_ptr<WantedLinks> wanted = nullptr);
  ~Runtime();

  // An empty request (Request::Clear), as the calls below take it.
  std::unique_ptr<Request> NewRequest();
  // Checks what can be checked on this rank alone, fills in defaults (timeout) and the id, hands
  // the request over. An error: `done` will not come.
  Status Submit(std::unique_ptr<Request> request, uint64_t* id);
  // As Submit, and drives the operation on the calling thread while it makes progress, and for at
  // most `patience_us` without any. If it ends meanwhile, `done` runs here, before this returns;
  // else `done` comes as after Submit. While another thread does this, that thread drives it.
  Status SubmitAndDrive(std::unique_ptr<Request> request, uint64_t* id, int64_t patience_us);
  // As SubmitAndDrive, but blocks until `done` has run, on this thread.
  Status Run(std::unique_ptr<Request> request);
  void Cancel(uint64_t id);
  void Abort(const AbortReason& reason);
  // Blocks until all ranks have registered the same description, or an error.
  Status RegisterGroup(uint32_t set, const std::string& description, std::vector<uint8_t>* present,
                       double timeout_s, std::string* id);
  // Whether this description was registered, with as many gradients; if so, fills in `present` and
  // `id`.
  bool FindGroup(uint32_t set, const std::string& description, std::vector<uint8_t>* present,
                 std::string* id) const;
  // Agree with all ranks of the world on a process set; block likewise.
  Status AddProcessSet(const std::vector<int32_t>& ranks, double timeout_s, uint32_t* id);
  Status RemoveProcessSet(uint32_t id, double timeout_s);
  // This rank has no more data: blocks until all ranks of the set have joined. `*complete`: how
  // many ranks have called every collective themselves, `*latest`: the lowest of them.
  Status Join(uint32_t set, double timeout_s, int32_t* latest, int32_t* complete);
  // For how long nothing has moved while operations of this rank wait; 0: none does. `*moves`: how
  // often something had moved before.
  int64_t StillUs(uint64_t* moves) const;
  // Engine::ReportBlocked, soon.
  void ReportBlocked(uint64_t moves, BlockedNote::How how, const std::string& place);
  // A link that the overlay wanted is there. False: there is no overlay, or no engine any more.
  bool Adopt(int peer, std::unique_ptr<Link> link);
  // Ranks to which the overlay wants links, each once.
  std::vector<int32_t> TakeWanted(size_t capacity);
  // Says goodbye, waits at most `timeout_s` until the peers have heard it, ends the threads. A
  // negative timeout: without a word, which is what a crash looks like from outside.
  void Shutdown(double timeout_s);

  // Writes what happens from now on into `folder` (timeline_writer.h), until Shutdown; `head` is
  // the first line. An error: it can't be written, or a timeline is written already.
  Status StartTimeline(const std::string& folder, const std::string& head,
                       TraceClock clock = NowNs);
  // Sends all of it to rank 0 too, which writes it into its own folder.
  void ForwardTimeline();
  // Something of the user's program, for the timeline. No effect without one.
  void AddSpan(const std::string& name, int64_t begin_us, int64_t end_us);

  const World& world() const { return world_; }
  const Config& config() const { return config_; }
  Status failure() const;
  int64_t good_steps() const { return good_steps_; }
  // From now on runtimes of this process keep records. Not before: a lock and a copy cost
  // a part of the time of a small operation.
  static void WantRecords();
  std::vector<FinishedRecord> TakeRecords(size_t capacity);
  std::string CountersJson();
  // The algorithm of an operation of all ranks on `bytes`, fused with nothing; `wanted` by name, ""
  // for the configured one. Null: there is none, or `wanted` does not support the case.
  const AlgorithmEntry* AlgorithmFor(CollectiveKind kind, DType dtype, int64_t bytes,
                                     const std::string& wanted) const;

 private:
  // Checks, counts bytes, gives it an id.
  Status Admit(Request* request, uint64_t* id);
  void EndTimeline(double timeout_s);
  // Submits an agreement without data, and waits for its end.
  Status Agree(std::unique_ptr<Request> request, Response* response);

  const World world_;
  const Config config_;
  const std::shared_ptr<Overlay> overlay_;  // used by the progress thread
  const std::shared_ptr<WantedLinks> wanted_;
  const PeerProcesses processes_;
  const bool is_crowded_;
  const int64_t patience_us_;  // how long Run drives an operation that does not move
  std::atomic<uint64_t> next_id_{1};
  std::atomic<int64_t> good_steps_{0};
  std::atomic<uint64_t> moves_{0};
  std::atomic<int64_t> still_us_{0};
  std::atomic<bool> ended_{false};                // by a failure, or shut down
  std::atomic<Request*> spare_request_{nullptr};  // owned
  mutable std::mutex mutex_;                      // guards the six below
  Status failure_;
  bool shut_down_ = false;
  FinishedRecords records_;
  // Set and description → present.
  std::map<std::pair<uint32_t, std::string>, std::vector<uint8_t>> groups_;
  std::shared_ptr<Timeline> timeline_;  // null: none is written; outlives the engine
  std::unique_ptr<TimelineWriter> writer_;
  BlockedTime blocked_;  // used on the engine's thread only
  std::unique_ptr<Progress> progress_;
  CompletionThread completions_;  // last: what is queued at the end still uses progress_
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_RUNTIME_H_
