// Engines of several ranks driven by hand, in one thread and in time that the test makes: orders of
// events that threads meet once in a million runs.
#ifndef TFDIST_TESTS_CPP_HAND_DRIVEN_H_
#define TFDIST_TESTS_CPP_HAND_DRIVEN_H_

#include <sys/eventfd.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ranks.h"

namespace tfdist {

// What became of a request: null while it is under way.
using Done = std::shared_ptr<std::unique_ptr<Status>>;

inline std::string TextOf(const Done& done) {
  return *done == nullptr ? "under way" : (*done)->ok() ? "ok" : (*done)->message();
}

// A link whose incoming frames of one lane can be held back. Counts what it sends.
class GatedLink : public Link {
 public:
  GatedLink(std::unique_ptr<Link> inner, Lane lane, const bool* open)
      : inner_(std::move(inner)), lane_(lane), open_(open) {}
  int peer() const override { return inner_->peer(); }
  const char* transport() const override { return inner_->transport(); }
  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    return inner_->BeginSend(lane, bytes);
  }
  void CommitSend(Lane lane, const FrameHeader& header) override {
    if (lane == Lane::kData) ++data_frames_sent_;
    inner_->CommitSend(lane, header);
  }
  bool Poll(Lane lane, InFrame* frame) override {
    return (lane != lane_ || *open_) && inner_->Poll(lane, frame);
  }
  void Release(Lane lane, const InFrame& frame) override { inner_->Release(lane, frame); }
  Status Pump(bool* moved) override { return inner_->Pump(moved); }
  int fd() const override { return inner_->fd(); }
  void Watch(std::vector<Watched>* watched) const override { inner_->Watch(watched); }
  bool WantsWrite() const override { return inner_->WantsWrite(); }
  void SetRest(Rest rest) override { inner_->SetRest(rest); }
  bool Flushed() const override { return inner_->Flushed(); }
  size_t MaxHeld() const override { return inner_->MaxHeld(); }
  const void* SendMemory() const override { return inner_->SendMemory(); }
  bool ShareSend(const FrameHeader& header, size_t bytes) override {
    const bool sent = inner_->ShareSend(header, bytes);
    if (sent) ++data_frames_sent_;
    return sent;
  }

 private:
  std::unique_ptr<Link> inner_;
  const Lane lane_;
  const bool* open_;
};

class HandDriven {
 public:
  HandDriven(int size, const Config& config, std::map<int, ProcessState>* processes = nullptr,
             const std::string& transport = "inproc", const std::vector<int32_t>& host_of = {}) {
    const auto n = static_cast<size_t>(size);
    const TransportEntry* entry = FindTransport(transport);
    if (transport == "shm") {
      for (size_t r = 0; r < n; ++r) windows_.push_back({config, size - 1});
    }
    std::vector<Links> links(n);
    for (size_t r = 0; r < n; ++r) {
      links[r].resize(n);
      doorbells_.push_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    }
    for (size_t a = 0; a < n; ++a) {
      for (size_t b = a + 1; b < n; ++b) {
        LinkEnds end_a;
        LinkEnds end_b;
        CHECK_OK(entry->make_pair(static_cast<int>(a), static_cast<int>(b), doorbells_[a],
                                  doorbells_[b], config, &end_a, &end_b));
        if (!windows_.empty()) {
          CHECK_OK(UseWindow(windows_[a].file.get(), windows_[a].window, &end_a, &end_b));
          CHECK_OK(UseWindow(windows_[b].file.get(), windows_[b].window, &end_b, &end_a));
        }
        links[a][b] = std::move(entry->make(end_a, config).value());
        links[b][a] = std::move(entry->make(end_b, config).value());
      }
    }
    data_open = std::make_unique<bool[]>(n);
    control_open = std::make_unique<bool[]>(n);
    for (size_t r = 0; r < n; ++r) {
      data_open[r] = control_open[r] = true;
      for (auto& link : links[r]) {
        if (link == nullptr) continue;
        link = std::make_unique<GatedLink>(std::move(link), Lane::kData, &data_open[r]);
        link = std::make_unique<GatedLink>(std::move(link), Lane::kControl, &control_open[r]);
      }
    }
    for (int r = 0; r < size; ++r) {
      World world;
      world.rank = r;
      world.size = world.local_size = size;
      world.hosts.assign(n, "testhost");
      world.host_of = host_of;
      for (int pid = 0; pid < size; ++pid) world.pids.push_back(4000 + pid);
      Engine::Hooks hooks;
      hooks.completions = &sink_;
      if (processes != nullptr) {
        hooks.process_state = [processes](int peer) { return processes->at(peer); };
      }
      engines.push_back(
          std::make_unique<Engine>(world, std::move(links[static_cast<size_t>(r)]), config, hooks));
    }
  }
  ~HandDriven() {
    engines.clear();
    for (int fd : doorbells_) close(fd);
  }

  Engine& operator[](int rank) { return *engines[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(engines.size()); }
  // The process is killed: its links end, nothing is said.
  void Kill(int rank) { engines[static_cast<size_t>(rank)].reset(); }
  void Poll(int rank) {
    now_us += 10;
    if (engines[static_cast<size_t>(rank)] != nullptr) (*this)[rank].Poll(now_us);
  }
  void Settle(int turns = 12) {
    for (int i = 0; i < turns * size(); ++i) Poll(i % size());
  }
  // Lets time pass, in ticks of 50 ms.
  void Pass(int64_t us) {
    for (const int64_t end_us = now_us + us; now_us < end_us;) {
      now_us += 50 * 1000;
      for (int r = 0; r < size(); ++r) {
        if (engines[static_cast<size_t>(r)] != nullptr) (*this)[r].Tick(now_us);
      }
      Settle(3);
    }
  }
  Done Submit(int rank, std::unique_ptr<Request> request) {
    auto done = std::make_shared<std::unique_ptr<Status>>();
    request->done = [done](const Status& s) { *done = std::make_unique<Status>(s); };
    request->id = ++last_id_;
    if (request->info.timeout_s <= 0) request->info.timeout_s = 15;
    (*this)[rank].Submit(std::move(request), now_us);
    return done;
  }
  Done Allreduce(int rank, const std::string& name, std::vector<float>* data) {
    auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
    AddTensor(request.get(), data->data(), data->data(), {static_cast<int64_t>(data->size())});
    return Submit(rank, std::move(request));
  }
  // Registers a group of gradients on all ranks.
  void Register(const std::string& group) {
    for (int r = 0; r < size(); ++r) {
      auto request = MakeRequest(CollectiveKind::kRegister, "register " + group);
      request->info.description = group;
      request->info.present = {1};
      request->group = group;
      request->agreed = [](const Response&) {};
      Submit(r, std::move(request));
    }
    Settle();
  }
  Done Bucket(int rank, const std::string& group, int bucket, int count, std::vector<float>* data) {
    auto request = MakeRequest(CollectiveKind::kAllreduce, group + "." + std::to_string(bucket),
                               DType::kFloat32);
    AddTensor(request.get(), data->data(), data->data(), {static_cast<int64_t>(data->size())});
    request->group = group;
    request->bucket_index = bucket;
    request->bucket_count = count;
    return Submit(rank, std::move(request));
  }
  uint64_t last_id() const { return last_id_; }

  int64_t now_us = 1000 * 1000;
  std::unique_ptr<bool[]> data_open;     // by rank: whether it reads data
  std::unique_ptr<bool[]> control_open;  // by rank: whether it reads messages
  std::vector<std::unique_ptr<Engine>> engines;

 private:
  struct InlineSink : CompletionSink {
    void Post(std::function<void()> callback) override { callback(); }
  };
  InlineSink sink_;
  std::vector<RankWindow> windows_;
  std::vector<int> doorbells_;
  uint64_t last_id_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_HAND_DRIVEN_H_
