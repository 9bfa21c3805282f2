// Engines of several ranks driven by hand, in one thread and in time that the test makes: orders of
// events that threads meet once in a million runs.
#ifndef TFDIST_TESTS_CPP_HAND_DRIVEN_H_
#define TFDIST_TESTS_CPP_HAND_DRIVEN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"

namespace tfdist {

// The status with which a request ended: null while it is under way.
using Done = std::shared_ptr<std::unique_ptr<Status>>;

std::string TextOf(const Done& done);

// A link whose incoming frames of one lane can be held back. Counts what it sends.
class GatedLink : public Link {
 public:
  GatedLink(std::unique_ptr<Link> inner, Lane lane, const bool* open)
      : inner_(std::move(inner)), lane_(lane), open_(open) {}
  int peer() const override { return inner_->peer(); }
  const char* transport() const override { return inner_->transport(); }
  MutableByteSpan BeginSend(Lane lane, size_t bytes) override;
  void CommitSend(Lane lane, const FrameHeader& header) override;
  bool Poll(Lane lane, InFrame* frame) override;
  void Release(Lane lane, const InFrame& frame) override { inner_->Release(lane, frame); }
  Status Pump(bool* moved) override { return inner_->Pump(moved); }
  int fd() const override { return inner_->fd(); }
  void Watch(std::vector<Watched>* watched) const override { inner_->Watch(watched); }
  bool WantsWrite() const override { return inner_->WantsWrite(); }
  void SetWakeMode(WakeMode mode) override { inner_->SetWakeMode(mode); }
  bool Flushed() const override { return inner_->Flushed(); }
  size_t MaxHeld() const override { return inner_->MaxHeld(); }
  const void* SendMemory() const override { return inner_->SendMemory(); }
  bool BarPeer() override { return inner_->BarPeer(); }
  bool ClaimVerdict() override { return inner_->ClaimVerdict(); }
  bool ShareSend(const FrameHeader& header, size_t bytes) override;

 private:
  std::unique_ptr<Link> inner_;
  const Lane lane_;
  const bool* open_;
};

class HandDriven {
 public:
  HandDriven(int size, const Config& config, std::map<int, ProcessState>* processes = nullptr,
             const std::string& transport = "inproc", const std::vector<int32_t>& host_of = {});
  ~HandDriven();

  Engine& operator[](int rank) { return *engines[static_cast<size_t>(rank)]; }
  int size() const { return static_cast<int>(engines.size()); }
  // The process is killed: its links end, nothing is said.
  void Kill(int rank) { engines[static_cast<size_t>(rank)].reset(); }
  void Poll(int rank);
  void Settle(int turns = 12);
  // Lets time pass, in ticks of 50 ms.
  void Pass(int64_t us);
  Done Submit(int rank, std::unique_ptr<Request> request);
  Done Allreduce(int rank, const std::string& name, std::vector<float>* data);
  // Registers a group of gradients on all ranks.
  void Register(const std::string& group);
  Done Bucket(int rank, const std::string& group, int bucket, int count, std::vector<float>* data);
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
