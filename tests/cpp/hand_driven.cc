#include "hand_driven.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "runtime/hidden_failures.h"

namespace tfdist {

std::string TextOf(const Done& done) {
  return *done == nullptr ? "under way" : (*done)->ok() ? "ok" : (*done)->message();
}

MutableByteSpan GatedLink::BeginSend(Lane lane, size_t bytes) {
  return inner_->BeginSend(lane, bytes);
}

void GatedLink::CommitSend(Lane lane, const FrameHeader& header) {
  if (lane == Lane::kData) ++data_frames_sent_;
  inner_->CommitSend(lane, header);
}

bool GatedLink::Poll(Lane lane, InFrame* frame) {
  return (lane != lane_ || *open_) && inner_->Poll(lane, frame);
}

bool GatedLink::ShareSend(const FrameHeader& header, size_t bytes) {
  const bool sent = inner_->ShareSend(header, bytes);
  if (sent) ++data_frames_sent_;
  return sent;
}

HandDriven::HandDriven(int size, const Config& config, std::map<int, ProcessState>* processes,
                       const std::string& transport, const std::vector<int32_t>& host_of) {
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
    hooks.hide_failure = EndHidden;  // off until a test calls HideFailures
    if (processes != nullptr) {
      hooks.process_state = [processes](int peer) { return processes->at(peer); };
    }
    engines.push_back(
        std::make_unique<Engine>(world, std::move(links[static_cast<size_t>(r)]), config, hooks));
  }
}

HandDriven::~HandDriven() {
  engines.clear();
  for (int fd : doorbells_) close(fd);
}

void HandDriven::Poll(int rank) {
  now_us += 10;
  if (engines[static_cast<size_t>(rank)] != nullptr) (*this)[rank].Poll(now_us);
}

void HandDriven::Settle(int turns) {
  for (int i = 0; i < turns * size(); ++i) Poll(i % size());
}

void HandDriven::Pass(int64_t us) {
  for (const int64_t end_us = now_us + us; now_us < end_us;) {
    now_us += 50 * 1000;
    for (int r = 0; r < size(); ++r) {
      if (engines[static_cast<size_t>(r)] != nullptr) (*this)[r].Tick(now_us);
    }
    Settle(3);
  }
}

Done HandDriven::Submit(int rank, std::unique_ptr<Request> request) {
  auto done = std::make_shared<std::unique_ptr<Status>>();
  request->done = [done](const Status& s) { *done = std::make_unique<Status>(s); };
  request->id = ++last_id_;
  if (request->info.timeout_s <= 0) request->info.timeout_s = 15;
  (*this)[rank].Submit(std::move(request), now_us);
  return done;
}

Done HandDriven::Allreduce(int rank, const std::string& name, std::vector<float>* data) {
  auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
  AddTensor(request.get(), data->data(), data->data(), {static_cast<int64_t>(data->size())});
  return Submit(rank, std::move(request));
}

void HandDriven::Register(const std::string& group) {
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

Done HandDriven::Bucket(int rank, const std::string& group, int bucket, int count,
                        std::vector<float>* data) {
  auto request = MakeRequest(CollectiveKind::kAllreduce, group + "." + std::to_string(bucket),
                             DType::kFloat32);
  AddTensor(request.get(), data->data(), data->data(), {static_cast<int64_t>(data->size())});
  request->group = group;
  request->bucket_index = bucket;
  request->bucket_count = count;
  return Submit(rank, std::move(request));
}

}  // namespace tfdist
