// Threads as ranks: N complete runtimes in one process, joined by one of the transports (a full
// mesh up to config.mesh_ranks, else an overlay whose later links open at once), and calls that
// submit on one rank and wait for the end.
#ifndef TFDIST_TESTS_CPP_RANKS_H_
#define TFDIST_TESTS_CPP_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "check.h"
#include "runtime/runtime.h"
#include "transport/link_support.h"
#include "transport/transport.h"

namespace tfdist {

#ifdef __SANITIZE_THREAD__
constexpr int kSlowness = 10;  // instrumented code, four ranks of it on two processors
#else
constexpr int kSlowness = 1;
#endif
// For anything, unless a test says more. Some waits take over 20 s on a busy machine.
constexpr int kWaitSeconds = 60 * kSlowness;

Config TestConfig();

// Makes a row of the table the one that its collective uses. sendrecv has no choice.
void SetAlgorithm(Config* config, const AlgorithmEntry& entry);

// The window that the shared-memory links of one rank share, and its file.
struct RankWindow {
  RankWindow(const Config& config, int peers);
  UniqueFd file;
  std::shared_ptr<ShmWindow> window;
};

class Ranks {
 public:
  // `host_of`: World::host_of; empty: one host, or as many as ranks over tcp.
  Ranks(int size, const std::string& transport, const Config& config = TestConfig(),
        const std::vector<int32_t>& host_of = {});
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  ~Ranks();

  int size() const { return static_cast<int>(runtimes_.size()); }
  Runtime& operator[](int rank) { return *runtimes_[static_cast<size_t>(rank)]; }
  // The rank vanishes, as after SIGKILL: no goodbye.
  void Kill(int rank);
  // Links that were opened because data needed them.
  size_t opened();

  // Runs `body(rank)` on a thread for every rank that is alive; rethrows the first failure.
  void Each(const std::function<void(int)>& body, int wait_s = kWaitSeconds);

 private:
  // Makes both ends of a link.
  using Connect = std::function<std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>>(int, int)>;

  // Opens a link, as the rendezvous does for processes: called by each side of a wanted link.
  void Open(int rank, int peer, const Connect& connect);

  std::mutex mutex_;  // guards what Open uses while ranks run
  std::set<std::pair<size_t, size_t>> opened_;
  std::vector<std::unique_ptr<Runtime>> runtimes_;
};

// A request under way on one rank.
struct Pending {
  struct State;
  std::shared_ptr<State> state;
  uint64_t id = 0;
  Status Wait();  // once
};

Pending Start(Runtime& runtime, std::unique_ptr<Request> request);

std::unique_ptr<Request> MakeRequest(CollectiveKind kind, const std::string& name,
                                     DType dtype = DType::kInvalid);

void AddTensor(Request* request, const void* input, void* output, const std::vector<int64_t>& shape,
               uint64_t hint = 0);

Pending StartAllreduce(Runtime& runtime, const std::string& name, const float* in, float* out,
                       int64_t elements, ReduceOp op = ReduceOp::kSum);

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_RANKS_H_
