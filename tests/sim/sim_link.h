// SimLink: a link whose frames travel through simulated time: two lanes that keep their order,
// bounded room, delays, cuts that heal or not, the end of a process, a reset.
#ifndef TFDIST_TESTS_SIM_SIM_LINK_H_
#define TFDIST_TESTS_SIM_SIM_LINK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "transport/link.h"

namespace tfdist::sim {

// One direction of a link.
struct SimPipe {
  struct Frame {
    FrameHeader header;
    std::vector<uint8_t> bytes;
    int64_t arrives_us = 0;
  };
  EventQueue* queue = nullptr;
  Rng* rng = nullptr;
  std::function<void()> wake_receiver;
  std::function<void()> wake_sender;
  int64_t low_us = 5;
  int64_t high_us = 100;
  size_t slots[2] = {64, 4};  // by lane

  std::deque<Frame> frames[2];   // not yet polled, by lane
  size_t used[2] = {0, 0};       // not yet released
  size_t returning[2] = {0, 0};  // released while the way back was cut
  int64_t last_us[2] = {0, 0};
  bool one_host = false;
  enum class Verdict : uint8_t { kUndecided, kBarred, kClaimed };
  Verdict verdict = Verdict::kUndecided;  // of the receiver, where both are on one host
  bool cut = false;
  bool closed = false;  // the sender's end is gone: its end follows its last frame
  bool silent = false;  // ... and nobody says so
  bool reset = false;
  int64_t end_us = 0;

  void Push(int lane, FrameHeader header, std::vector<uint8_t> bytes);
  bool Settle(Verdict wanted) {
    if (verdict == Verdict::kUndecided) verdict = wanted;
    return verdict == wanted;
  }
  void Heal();
  void Close();
  void Reset();
  // Whether everything that was sent has arrived, the end included.
  bool Ended() const;
};

// Send memory of one rank's links, like the window of shm: the last payload that one of them sent.
struct SimMemory {
  std::vector<uint8_t> last;
};

class SimLink : public Link {
 public:
  // `memory`: null, or what this rank's links to the ranks of its host have in common.
  SimLink(int peer, std::shared_ptr<SimPipe> out, std::shared_ptr<SimPipe> in,
          std::shared_ptr<SimMemory> memory = nullptr)
      : peer_(peer), out_(std::move(out)), in_(std::move(in)), memory_(std::move(memory)) {}
  ~SimLink() override { out_->Close(); }

  int peer() const override { return peer_; }
  const char* transport() const override { return "sim"; }
  MutableByteSpan BeginSend(Lane lane, size_t bytes) override;
  void CommitSend(Lane lane, const FrameHeader& header) override;
  const void* SendMemory() const override { return memory_.get(); }
  bool ShareSend(const FrameHeader& header, size_t bytes) override;
  bool Poll(Lane lane, InFrame* frame) override;
  void Release(Lane lane, const InFrame& frame) override;
  Status Pump(bool* moved) override;
  int fd() const override { return -1; }
  bool WantsWrite() const override { return false; }
  void SetWakeMode(WakeMode /*mode*/) override {}
  bool Flushed() const override { return true; }
  size_t MaxHeld() const override { return in_->slots[1]; }
  bool BarPeer() override { return out_->one_host && out_->Settle(SimPipe::Verdict::kBarred); }
  bool ClaimVerdict() override { return in_->Settle(SimPipe::Verdict::kClaimed); }

  size_t held() const { return held_[0].size() + held_[1].size(); }
  // Misuse by the caller, if any: a send that was not opened, a frame released twice.
  const std::string& misuse() const { return misuse_; }

 private:
  void Send(Lane lane, FrameHeader header, std::vector<uint8_t> bytes);

  const int peer_;
  std::shared_ptr<SimPipe> out_;
  std::shared_ptr<SimPipe> in_;
  std::shared_ptr<SimMemory> memory_;
  std::vector<uint8_t> open_[2];
  bool is_open_[2] = {false, false};
  size_t open_bytes_[2] = {0, 0};
  std::map<uint64_t, std::vector<uint8_t>> held_[2];
  uint64_t next_token_ = 1;
  std::string misuse_;
};

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_SIM_LINK_H_
