// Threads as ranks: N complete runtimes in one process, joined by one of the transports, and calls
// that submit on one rank and wait for the end.
#ifndef TFDIST_TESTS_CPP_RANKS_H_
#define TFDIST_TESTS_CPP_RANKS_H_

#include <sys/eventfd.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/runtime.h"
#include "scheduler/plan.h"
#include "transport/transport.h"

namespace tfdist {

#ifdef __SANITIZE_THREAD__
constexpr int kSlowness = 10;  // instrumented code, four ranks of it on two processors
#else
constexpr int kSlowness = 1;
#endif
constexpr int kWaitSeconds = 20 * kSlowness;  // no test waits longer for anything

inline Config TestConfig() {
  Config config;
  config.timeout_s = 15 * kSlowness;
  config.segment_bytes = 4096;
  config.shm_slots = 4;
  return config;
}

// Makes a row of the table the one that its collective uses. sendrecv has no choice.
inline void SetAlgorithm(Config* config, const AlgorithmEntry& entry) {
  const std::string& wanted = WantedAlgorithm(entry.kind, *config);
  if (entry.kind != CollectiveKind::kSendRecv) const_cast<std::string&>(wanted) = entry.name;
}

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
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        const auto i = static_cast<size_t>(a);
        const auto j = static_cast<size_t>(b);
        LinkEnds end_a;
        LinkEnds end_b;
        CHECK_OK(entry->make_pair(a, b, doorbells[i], doorbells[j], config, &end_a, &end_b));
        auto link_a = entry->make(end_a, config);
        auto link_b = entry->make(end_b, config);
        CHECK_OK(link_a.status());
        CHECK_OK(link_b.status());
        links[i][j] = std::move(link_a.value());
        links[j][i] = std::move(link_b.value());
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
      runtimes_.push_back(std::make_unique<Runtime>(world, std::move(links[static_cast<size_t>(r)]),
                                                    config, doorbells[static_cast<size_t>(r)]));
    }
  }
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
    runtimes_[static_cast<size_t>(rank)].reset();
  }

  // Runs `body(rank)` on a thread for every rank that is alive; rethrows the first failure.
  void Each(const std::function<void(int)>& body) {
    std::vector<std::future<void>> futures;
    for (int r = 0; r < size(); ++r) {
      if (runtimes_[static_cast<size_t>(r)] == nullptr) continue;
      futures.push_back(std::async(std::launch::async, body, r));
    }
    for (auto& future : futures) {
      if (future.wait_for(std::chrono::seconds(kWaitSeconds)) != std::future_status::ready) {
        std::fprintf(stderr, "FAILED: a rank still waits after %d s\n", kWaitSeconds);
        std::_Exit(1);
      }
    }
    for (auto& future : futures) future.get();
  }

 private:
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
