// Threads as ranks: N complete runtimes in one process, joined by one of the transports (a full
// mesh up to config.mesh_ranks, else an overlay whose later links open at once), and calls that
// submit on one rank and wait for the end.
#ifndef TFDIST_TESTS_CPP_RANKS_H_
#define TFDIST_TESTS_CPP_RANKS_H_

#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "check.h"
#include "runtime/runtime.h"
#include "scheduler/plan.h"
#include "transport/link_support.h"
#include "transport/routes.h"
#include "transport/shm_window.h"
#include "transport/transport.h"

namespace tfdist {

#ifdef __SANITIZE_THREAD__
constexpr int kSlowness = 10;  // instrumented code, four ranks of it on two processors
#else
constexpr int kSlowness = 1;
#endif
constexpr int kWaitSeconds = 20 * kSlowness;  // for anything, unless a test says more

inline Config TestConfig() {
  Config config;
  config.timeout_s = 15 * kSlowness;
  config.suspect_s = 2 * kSlowness;
  config.segment_bytes = 4096;
  config.shm_slots = 4;
  return config;
}

// Makes a row of the table the one that its collective uses. sendrecv has no choice.
inline void SetAlgorithm(Config* config, const AlgorithmEntry& entry) {
  const std::string& wanted = WantedAlgorithm(entry.kind, *config);
  if (entry.kind != CollectiveKind::kSendRecv) const_cast<std::string&>(wanted) = entry.name;
}

// What the shared-memory links of one rank have in common.
struct RankWindow {
  RankWindow(const Config& config, int peers) {
    StatusOr<int> made = MakeWindowFile(config, peers);
    CHECK_OK(made.status());
    file.reset(made.value());
    auto mapped = ShmWindow::Make(file.get(), config);
    CHECK_OK(mapped.status());
    window = mapped.value();
  }
  UniqueFd file;
  std::shared_ptr<ShmWindow> window;
};

class Ranks {
 public:
  // `host_of`: World::host_of; empty: one host, or as many as ranks over tcp.
  Ranks(int size, const std::string& transport, const Config& config = TestConfig(),
        const std::vector<int32_t>& host_of = {}) {
    const TransportEntry* entry = FindTransport(transport);
    CHECK(entry != nullptr);
    const auto n = static_cast<size_t>(size);
    std::vector<int> doorbells(n);
    std::vector<Links> links(n);
    for (size_t r = 0; r < n; ++r) {
      doorbells[r] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
      links[r].resize(n);
    }
    std::vector<std::shared_ptr<RankWindow>> windows(n);
    if (transport == "shm" && size > 1) {
      for (auto& window : windows) window = std::make_shared<RankWindow>(config, size - 1);
    }
    const auto connect = [entry, doorbells, config, windows](int a, int b) {
      const auto at = static_cast<size_t>(a);
      const auto bt = static_cast<size_t>(b);
      LinkEnds end_a;
      LinkEnds end_b;
      CHECK_OK(entry->make_pair(a, b, doorbells[at], doorbells[bt], config, &end_a, &end_b));
      if (windows[at] != nullptr) {
        CHECK_OK(UseWindow(windows[at]->file.get(), windows[at]->window, &end_a, &end_b));
        CHECK_OK(UseWindow(windows[bt]->file.get(), windows[bt]->window, &end_b, &end_a));
      }
      auto link_a = entry->make(end_a, config);
      auto link_b = entry->make(end_b, config);
      CHECK_OK(link_a.status());
      CHECK_OK(link_b.status());
      return std::make_pair(std::move(link_a.value()), std::move(link_b.value()));
    };
    const bool overlay = size > config.mesh_ranks;
    for (int a = 0; a < size; ++a) {
      const std::vector<int> neighbours = OverlayNeighbours(a, size);
      for (int b = a + 1; b < size; ++b) {
        if (overlay && !std::binary_search(neighbours.begin(), neighbours.end(), b)) continue;
        auto [one, two] = connect(a, b);
        links[static_cast<size_t>(a)][static_cast<size_t>(b)] = std::move(one);
        links[static_cast<size_t>(b)][static_cast<size_t>(a)] = std::move(two);
      }
    }
    for (int r = 0; r < size; ++r) {
      World world;
      world.rank = r;
      world.size = size;
      world.local_rank = r;
      world.local_size = transport == "tcp" ? 1 : size;
      world.generation = 7;
      world.hosts.assign(n, "testhost");
      world.pids.assign(n, 4242);
      world.host_of = host_of;
      Links own = std::move(links[static_cast<size_t>(r)]);
      std::shared_ptr<Overlay> router;
      if (overlay) {
        Overlay::Hooks hooks{[this, r, connect](int peer) { Open(r, peer, connect); }, NowUs};
        router = std::make_shared<Overlay>(r, size, world.generation, hooks);
        own = router->MakeLinks(std::move(own));
      }
      runtimes_.push_back(std::make_unique<Runtime>(world, std::move(own), config,
                                                    doorbells[static_cast<size_t>(r)], router));
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  ~Ranks() {
    std::vector<std::thread> threads;
    for (auto& runtime : runtimes_) {
      if (runtime != nullptr) threads.emplace_back([&runtime] { runtime->Shutdown(2); });
    }
    for (auto& thread : threads) thread.join();
  }

  int size() const { return static_cast<int>(runtimes_.size()); }
  Runtime& operator[](int rank) { return *runtimes_[static_cast<size_t>(rank)]; }
  // The rank vanishes, as after SIGKILL: no goodbye.
  void Kill(int rank) {
    runtimes_[static_cast<size_t>(rank)]->Shutdown(-1);
    std::lock_guard<std::mutex> lock(mutex_);
    runtimes_[static_cast<size_t>(rank)].reset();
  }
  // Links that were opened because data needed them.
  size_t opened() {
    std::lock_guard<std::mutex> lock(mutex_);
    return opened_.size();
  }

  // Runs `body(rank)` on a thread for every rank that is alive; rethrows the first failure.
  void Each(const std::function<void(int)>& body, int wait_s = kWaitSeconds) {
    std::vector<std::future<void>> futures;
    for (int r = 0; r < size(); ++r) {
      if (runtimes_[static_cast<size_t>(r)] == nullptr) continue;
      futures.push_back(std::async(std::launch::async, body, r));
    }
    for (auto& future : futures) {
      if (future.wait_for(std::chrono::seconds(wait_s)) != std::future_status::ready) {
        std::fprintf(stderr, "FAILED: a rank still waits after %d s\n", wait_s);
        std::_Exit(1);
      }
    }
    for (auto& future : futures) future.get();
  }

 private:
  // What the rendezvous does for ranks that are processes: called by each side of a wanted link.
  template <typename Connect>
  void Open(int rank, int peer, const Connect& connect) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto a = static_cast<size_t>(std::min(rank, peer));
    const auto b = static_cast<size_t>(std::max(rank, peer));
    if (runtimes_[a] == nullptr || runtimes_[b] == nullptr || !opened_.emplace(a, b).second) return;
    auto [one, two] = connect(static_cast<int>(a), static_cast<int>(b));
    runtimes_[a]->Adopt(static_cast<int>(b), std::move(one));
    runtimes_[b]->Adopt(static_cast<int>(a), std::move(two));
  }

  std::mutex mutex_;  // guards what Open uses while ranks run
  std::set<std::pair<size_t, size_t>> opened_;
  std::vector<std::unique_ptr<Runtime>> runtimes_;
};

// A request under way on one rank.
struct Pending {
  std::future<Status> future;
  uint64_t id = 0;
  Status Wait() {
    if (future.wait_for(std::chrono::seconds(kWaitSeconds)) != std::future_status::ready) {
      std::fprintf(stderr, "FAILED: an operation still waits after %d s\n", kWaitSeconds);
      std::_Exit(1);
    }
    return future.get();
  }
};

inline Pending Start(Runtime& runtime, std::unique_ptr<Request> request) {
  Pending pending;
  auto promise = std::make_shared<std::promise<Status>>();
  pending.future = promise->get_future();
  request->done = [promise](const Status& status) { promise->set_value(status); };
  const Status status = runtime.Submit(std::move(request), &pending.id);
  if (!status.ok()) promise->set_value(status);
  return pending;
}

inline std::unique_ptr<Request> MakeRequest(CollectiveKind kind, const std::string& name,
                                            DType dtype = DType::kInvalid) {
  auto request = std::make_unique<Request>();
  request->info.key = name;
  request->info.kind = kind;
  request->info.dtype = dtype;
  return request;
}

inline void AddTensor(Request* request, const void* input, void* output,
                      const std::vector<int64_t>& shape, uint64_t hint = 0) {
  request->tensors.push_back({static_cast<const uint8_t*>(input), static_cast<uint8_t*>(output),
                              ElementCount(shape), hint});
  request->info.shapes.push_back(shape);
}

inline Pending StartAllreduce(Runtime& runtime, const std::string& name, const float* in,
                              float* out, int64_t elements, ReduceOp op = ReduceOp::kSum) {
  auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
  request->info.op = op;
  AddTensor(request.get(), in, out, {elements});
  return Start(runtime, std::move(request));
}

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_RANKS_H_
