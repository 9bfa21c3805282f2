#include "ranks.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include "scheduler/operation_plan.h"
#include "transport/routes.h"
#include "transport/shm_window.h"

namespace tfdist {
namespace {

// Ends the process when it takes longer than that.
template <typename T>
void WaitFor(const std::future<T>& future, int seconds, const char* who) {
  if (future.wait_for(std::chrono::seconds(seconds)) == std::future_status::ready) return;
  std::fprintf(stderr, "FAILED: %s still waits after %d s\n", who, seconds);
  std::_Exit(1);
}

}  // namespace

Config TestConfig() {
  Config config;
  config.timeout_s = 15 * kSlowness;
  config.peer_timeout_s = 2 * kSlowness;
  config.segment_bytes = 4096;
  config.shm_slots = 4;
  return config;
}

void SetAlgorithm(Config* config, const AlgorithmEntry& entry) {
  const std::string& wanted = WantedAlgorithm(entry.kind, *config);
  if (entry.kind != CollectiveKind::kSendRecv) const_cast<std::string&>(wanted) = entry.name;
}

RankWindow::RankWindow(const Config& config, int peers) {
  StatusOr<int> made = MakeWindowFile(config, peers);
  CHECK_OK(made.status());
  file.reset(made.value());
  auto mapped = ShmWindow::Make(file.get(), config);
  CHECK_OK(mapped.status());
  window = mapped.value();
}

Ranks::Ranks(int size, const std::string& transport, const Config& config,
             const std::vector<int32_t>& host_of) {
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
  const Connect connect = [entry, doorbells, config, windows](int a, int b) {
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

Ranks::~Ranks() {
  std::vector<std::thread> threads;
  for (auto& runtime : runtimes_) {
    if (runtime != nullptr) threads.emplace_back([&runtime] { runtime->Shutdown(2); });
  }
  for (auto& thread : threads) thread.join();
}

void Ranks::Kill(int rank) {
  runtimes_[static_cast<size_t>(rank)]->Shutdown(-1);
  std::lock_guard<std::mutex> lock(mutex_);
  runtimes_[static_cast<size_t>(rank)].reset();
}

size_t Ranks::opened() {
  std::lock_guard<std::mutex> lock(mutex_);
  return opened_.size();
}

void Ranks::Each(const std::function<void(int)>& body, int wait_s) {
  std::vector<std::future<void>> futures;
  for (int r = 0; r < size(); ++r) {
    if (runtimes_[static_cast<size_t>(r)] == nullptr) continue;
    futures.push_back(std::async(std::launch::async, body, r));
  }
  for (auto& future : futures) WaitFor(future, wait_s, "a rank");
  for (auto& future : futures) future.get();
}

void Ranks::Open(int rank, int peer, const Connect& connect) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto a = static_cast<size_t>(std::min(rank, peer));
  const auto b = static_cast<size_t>(std::max(rank, peer));
  if (runtimes_[a] == nullptr || runtimes_[b] == nullptr || !opened_.emplace(a, b).second) return;
  auto [one, two] = connect(static_cast<int>(a), static_cast<int>(b));
  runtimes_[a]->Adopt(static_cast<int>(b), std::move(one));
  runtimes_[b]->Adopt(static_cast<int>(a), std::move(two));
}

struct Pending::State {
  std::promise<Status> promise;
  std::future<Status> future = promise.get_future();
};

Status Pending::Wait() {
  WaitFor(state->future, kWaitSeconds, "an operation");
  return state->future.get();
}

Pending Start(Runtime& runtime, std::unique_ptr<Request> request) {
  Pending pending;
  auto state = std::make_shared<Pending::State>();
  pending.state = state;
  request->done = [state](const Status& status) { state->promise.set_value(status); };
  const Status status = runtime.Submit(std::move(request), &pending.id);
  if (!status.ok()) state->promise.set_value(status);
  return pending;
}

std::unique_ptr<Request> MakeRequest(CollectiveKind kind, const std::string& name, DType dtype) {
  auto request = std::make_unique<Request>();
  request->info.key = name;
  request->info.kind = kind;
  request->info.dtype = dtype;
  return request;
}

void AddTensor(Request* request, const void* input, void* output, const std::vector<int64_t>& shape,
               uint64_t hint) {
  request->tensors.push_back({static_cast<const uint8_t*>(input), static_cast<uint8_t*>(output),
                              ElementCount(shape), hint});
  request->info.shapes.push_back(shape);
}

Pending StartAllreduce(Runtime& runtime, const std::string& name, const float* in, float* out,
                       int64_t elements, ReduceOp op) {
  auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
  request->info.op = op;
  AddTensor(request.get(), in, out, {elements});
  return Start(runtime, std::move(request));
}

}  // namespace tfdist
