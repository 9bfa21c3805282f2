// Each frame of the data lane is one message, header and payload. kSlots receives are posted ahead;
// what has arrived is kept until it is polled, and another receive is posted at once. A send has
// ended when the peer has begun to receive it, so at most kSlots sends are under way, and a link
// that has flushed its sends can be closed: the peer has received them, or is about to.
//
// Messages have no descriptor to sleep on. While this rank waits for data, for its sends to end, or
// for the last messages of a peer that leaves, a timer wakes it, at growing intervals: the library
// moves nothing unless it is called.
#include "transport/message_link.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/frame_pool.h"
#include "transport/link_support.h"

namespace tfdist {
namespace {

constexpr size_t kSlots = 16;
constexpr size_t kMaxHeld = size_t{1} << 20;
constexpr int64_t kShortestWaitNs = 20 * 1000;
constexpr int64_t kLongestWaitNs = 1000 * 1000;
// The end of the control link may overtake messages that the peer had sent before it left. So the
// loss is reported only when no message has come for kLastWordsUs and in kLastLooks calls of Pump.
constexpr int64_t kLastWordsUs = 100 * 1000;
constexpr int kLastLooks = 16;
// How long the end of a link waits for its receives to be cancelled.
constexpr int64_t kCancelUs = 20 * 1000;

struct Underway {
  FrameBuffer buffer;
  uint64_t request = 0;
};

struct Arrived {
  FrameBuffer buffer;
  size_t bytes = 0;
};

// Header and payload side by side, the payload on a cache line.
uint8_t* MessageOf(const FrameBuffer& buffer) { return buffer.payload() - sizeof(FrameHeader); }

// Keeps forever the memory that the library may still use when a link ends before its messages.
void Abandon(Underway underway) {
  static std::mutex mutex;
  static auto* const abandoned = new std::vector<Underway>();
  const std::lock_guard<std::mutex> lock(mutex);
  abandoned->push_back(std::move(underway));
}

class MessageLink : public LinkBase {
 public:
  MessageLink(const LinkEnds& ends, std::unique_ptr<Link> control, const tfdist_messages& messages,
              const Config& config)
      : LinkBase(ends, config, messages.name),
        control_(std::move(control)),
        messages_(messages),
        pool_(capacity(Lane::kData)),
        timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {}

  ~MessageLink() override {
    for (Underway& receive : receives_) messages_.cancel(messages_.context, &receive.request);
    const int64_t deadline_us = NowUs() + kCancelUs;
    while (!receives_.empty()) {
      const int32_t ended = Test(&receives_.front(), nullptr);
      if (ended == 0 && NowUs() < deadline_us) continue;
      if (ended != 1) Abandon(std::move(receives_.front()));
      receives_.pop_front();
    }
    EndSends();
    for (Underway& send : sends_) Abandon(std::move(send));
  }

  Status Prepare() {
    if (timer_.get() < 0) return SystemError("timerfd_create");
    while (error().ok() && receives_.size() < kSlots) PostReceive();
    return error();
  }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    if (lane == Lane::kControl) return control_->BeginSend(lane, bytes);
    if (sends_.size() >= kSlots) EndSends();
    if (sends_.size() >= kSlots || !Open(lane, bytes)) return {};
    if (!open_) open_ = pool_.Take();
    if (!open_) {
      Fail(TFDIST_INTERNAL("out of memory for a frame"));
      return {};
    }
    return {open_.payload(), bytes};
  }

  void CommitSend(Lane lane, const FrameHeader& header) override {
    if (lane == Lane::kControl) return control_->CommitSend(lane, header);
    FrameHeader closed = header;
    Close(lane, &closed);
    std::memcpy(MessageOf(open_), &closed, sizeof(closed));
    Underway send{std::move(open_)};
    const size_t bytes = sizeof(closed) + closed.payload_bytes;
    const int32_t code =
        messages_.send(messages_.context, peer(), MessageOf(send.buffer), bytes, &send.request);
    if (code != 0) return FailByMessages();
    sends_.push_back(std::move(send));
    wait_ns_ = kShortestWaitNs;
  }

  bool HasFrame() const override { return !arrived_.empty() || control_->HasFrame(); }

  bool Poll(Lane lane, InFrame* frame) override {
    if (lane == Lane::kControl) return control_->Poll(lane, frame);
    if (arrived_.empty() && !TakeArrived()) return false;
    Arrived arrived = std::move(arrived_.front());
    arrived_.pop_front();
    std::memcpy(&frame->header, MessageOf(arrived.buffer), sizeof(FrameHeader));
    const std::string fault = FaultOf(frame->header, arrived.bytes);
    if (!fault.empty()) {
      Fail(PeerGarbage(peer(), fault));
      return false;
    }
    frame->payload = {arrived.buffer.payload(), frame->header.payload_bytes};
    frame->token = held_.Hold(std::move(arrived.buffer));
    return true;
  }

  void Release(Lane lane, const InFrame& frame) override {
    if (lane == Lane::kControl) return control_->Release(lane, frame);
    pool_.Give(held_.Drop(frame.token));
  }

  Status Pump(bool* moved) override {
    if (!error().ok()) return error();
    const size_t before = sends_.size();
    EndSends();
    size_t count = 0;
    while (count < kSlots && TakeArrived()) ++count;
    *moved |= count > 0 || sends_.size() < before;
    const Status status = control_->Pump(moved);
    if (!status.ok()) NoteLoss(status, count > 0);
    return error();
  }

  int fd() const override { return control_->fd(); }
  bool WantsWrite() const override { return !sends_.empty() || control_->WantsWrite(); }
  void Watch(std::vector<Watched>* watched) const override {
    control_->Watch(watched);
    if (mode_ != WakeMode::kAsleep && sends_.empty() && !leaves_) return;
    itimerspec once{};
    once.it_value.tv_nsec = wait_ns_;
    (void)timerfd_settime(timer_.get(), 0, &once, nullptr);
    wait_ns_ = std::min(2 * wait_ns_, kLongestWaitNs);
    watched->push_back({timer_.get(), false});
  }
  void SetWakeMode(WakeMode mode) override {
    mode_ = mode;
    control_->SetWakeMode(mode);
  }
  bool Flushed() const override { return sends_.empty() && control_->Flushed(); }
  size_t MaxHeld() const override { return kMaxHeld; }
  void PeerLeaves() override {
    leaves_ = true;
    control_->PeerLeaves();
  }

 private:
  void FailByMessages() { Fail(PeerLost(peer(), messages_.error(messages_.context))); }

  int32_t Test(Underway* underway, size_t* bytes) {
    return messages_.test(messages_.context, &underway->request, bytes);
  }

  void PostReceive() {
    Underway receive{pool_.Take()};
    if (!receive.buffer) return Fail(TFDIST_INTERNAL("out of memory for a frame"));
    const size_t most = sizeof(FrameHeader) + capacity(Lane::kData);
    const int32_t code = messages_.receive(messages_.context, peer(), MessageOf(receive.buffer),
                                           most, &receive.request);
    if (code != 0) return FailByMessages();
    receives_.push_back(std::move(receive));
  }

  // Whether the oldest receive has ended: keeps what has arrived, and posts another one.
  bool TakeArrived() {
    if (receives_.empty()) return false;
    size_t bytes = 0;
    const int32_t ended = Test(&receives_.front(), &bytes);
    if (ended < 0) FailByMessages();
    if (ended <= 0) return false;
    arrived_.push_back({std::move(receives_.front().buffer), bytes});
    receives_.pop_front();
    PostReceive();
    wait_ns_ = kShortestWaitNs;
    return true;
  }

  std::string FaultOf(const FrameHeader& header, size_t bytes) const {
    if (bytes < sizeof(header)) return "a message of " + std::to_string(bytes) + " bytes";
    const std::string fault = HeaderFault(header, Lane::kData, capacity(Lane::kData));
    if (!fault.empty() || header.payload_bytes == bytes - sizeof(header)) return fault;
    return "a message whose length differs from the one in its header";
  }

  // Takes the sends that have ended off the queue, in their order.
  void EndSends() {
    while (!sends_.empty()) {
      const int32_t ended = Test(&sends_.front(), nullptr);
      if (ended < 0) FailByMessages();
      if (ended <= 0) return;
      pool_.Give(std::move(sends_.front().buffer));
      sends_.pop_front();
      wait_ns_ = kShortestWaitNs;
    }
  }

  void NoteLoss(const Status& status, bool has_arrived) {
    if (status.code() != Code::kAborted) return Fail(status);  // not a loss
    if (looks_ == 0 || has_arrived) {
      looks_ = 0;
      silent_since_us_ = NowUs();
    }
    ++looks_;
    if (looks_ > kLastLooks && NowUs() - silent_since_us_ >= kLastWordsUs) Fail(status);
  }

  std::unique_ptr<Link> control_;
  const tfdist_messages messages_;
  FramePool pool_;
  FrameBuffer open_;
  std::deque<Underway> sends_;
  std::deque<Underway> receives_;  // in the order in which they were posted
  std::deque<Arrived> arrived_;
  HeldFrames held_;
  UniqueFd timer_;
  WakeMode mode_ = WakeMode::kAwake;
  bool leaves_ = false;                        // the peer has said goodbye
  mutable int64_t wait_ns_ = kShortestWaitNs;  // until the timer next wakes this rank
  int looks_ = 0;                              // since the control link was lost; 0: not lost
  int64_t silent_since_us_ = 0;                // after the loss: when a message last came
};

}  // namespace

StatusOr<std::unique_ptr<Link>> MakeMessageLink(std::unique_ptr<Link> control,
                                                const tfdist_messages& messages,
                                                const Config& config) {
  LinkEnds ends;
  ends.peer = control->peer();
  auto link = std::make_unique<MessageLink>(ends, std::move(control), messages, config);
  TFDIST_RETURN_IF_ERROR(link->Prepare());
  return std::unique_ptr<Link>(std::move(link));
}

}  // namespace tfdist
