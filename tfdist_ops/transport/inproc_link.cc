// inproc: two ranks that are threads of one process, for tests. Both ends share queues under a
// lock; room on the data lane is counted as in shared memory, so that a schedule that would stall
// there stalls here too.
#include <deque>
#include <mutex>

#include "transport/frame_pool.h"
#include "transport/link_support.h"

namespace tfdist {
namespace {

constexpr size_t kControlSlots = 64;

struct Letter {
  FrameHeader header;
  FrameBuffer buffer;
};

// State shared by both ends. Side 0 is the initiator's.
struct Pipe {
  struct Side {
    std::deque<Letter> inbox[kLanes];
    size_t used[kLanes] = {0, 0};  // frames in the inbox or polled from it and not yet released
    WakeMode mode = WakeMode::kAwake;
    bool closed = false;
  };
  std::mutex mutex;
  Side sides[2];
};

class InprocLink : public LinkBase {
 public:
  InprocLink(const LinkEnds& ends, const Config& config, UniqueFd peer_doorbell)
      : LinkBase(ends, config, "inproc"),
        pipe_(std::static_pointer_cast<Pipe>(ends.pipe)),
        own_(pipe_->sides[ends.initiator ? 0 : 1]),
        other_(pipe_->sides[ends.initiator ? 1 : 0]),
        peer_doorbell_(std::move(peer_doorbell)),
        slots_{kControlSlots, static_cast<size_t>(config.shm_slots)},
        pools_{FramePool(capacity(Lane::kControl)), FramePool(capacity(Lane::kData))} {}

  ~InprocLink() override {
    std::lock_guard<std::mutex> lock(pipe_->mutex);
    own_.closed = true;
    WakePeer();
  }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    const int i = Index(lane);
    if (!Open(lane, bytes)) return {};
    {
      std::lock_guard<std::mutex> lock(pipe_->mutex);
      if (other_.used[i] >= slots_[i]) return {};
    }
    if (!open_[i]) open_[i] = pools_[i].Take();
    if (!open_[i]) {
      Fail(TFDIST_INTERNAL("out of memory for a frame"));
      return {};
    }
    return {open_[i].payload(), bytes};
  }

  void CommitSend(Lane lane, const FrameHeader& header) override {
    FrameHeader closed = header;
    Close(lane, &closed);
    std::lock_guard<std::mutex> lock(pipe_->mutex);
    other_.inbox[Index(lane)].push_back({closed, std::move(open_[Index(lane)])});
    ++other_.used[Index(lane)];
    if (lane == Lane::kControl || other_.mode == WakeMode::kAsleep) WakePeer();
  }

  bool Poll(Lane lane, InFrame* frame) override {
    std::lock_guard<std::mutex> lock(pipe_->mutex);
    std::deque<Letter>& inbox = own_.inbox[Index(lane)];
    if (inbox.empty()) return false;
    frame->header = inbox.front().header;
    frame->payload = {inbox.front().buffer.payload(), frame->header.payload_bytes};
    frame->token = held_[Index(lane)].Hold(std::move(inbox.front().buffer));
    inbox.pop_front();
    return true;
  }

  void Release(Lane lane, const InFrame& frame) override {
    pools_[Index(lane)].Give(held_[Index(lane)].Drop(frame.token));
    std::lock_guard<std::mutex> lock(pipe_->mutex);
    --own_.used[Index(lane)];
    if (lane == Lane::kControl || other_.mode == WakeMode::kAsleep) WakePeer();
  }

  Status Pump(bool* /*moved*/) override {
    std::lock_guard<std::mutex> lock(pipe_->mutex);
    if (other_.closed) Fail(PeerLost(peer(), "closed its connection"));
    return error();
  }

  int fd() const override { return -1; }
  bool WantsWrite() const override { return false; }
  void SetWakeMode(WakeMode mode) override {
    std::lock_guard<std::mutex> lock(pipe_->mutex);
    own_.mode = mode;
  }
  bool Flushed() const override { return true; }
  size_t MaxHeld() const override { return slots_[Index(Lane::kData)]; }

 private:
  // With the lock held, so that a ring never comes after the peer's "I am awake".
  void WakePeer() {
    if (Looks(other_.mode)) return;
    other_.mode = WakeMode::kAwake;
    RingDoorbell(peer_doorbell_.get());
  }

  std::shared_ptr<Pipe> pipe_;
  Pipe::Side& own_;
  Pipe::Side& other_;
  UniqueFd peer_doorbell_;
  size_t slots_[kLanes];
  FramePool pools_[kLanes];
  FrameBuffer open_[kLanes];
  HeldFrames held_[kLanes];
};

StatusOr<std::unique_ptr<Link>> Make(const LinkEnds& ends, const Config& config) {
  OwnedFds owned(ends);
  if (ends.pipe == nullptr) {
    return Status(
        Code::kInvalidArgument,
        "an inproc link needs the pipe of its make_pair; between processes use shm or tcp");
  }
  return std::unique_ptr<Link>(
      std::make_unique<InprocLink>(ends, config, std::move(owned.peer_doorbell)));
}

Status MakePair(int a, int b, int doorbell_a, int doorbell_b, const Config& /*config*/,
                LinkEnds* end_a, LinkEnds* end_b) {
  StatusOr<UniqueFd> rings_a = DuplicateFd(doorbell_a);
  if (!rings_a.ok()) return rings_a.status();
  StatusOr<UniqueFd> rings_b = DuplicateFd(doorbell_b);
  if (!rings_b.ok()) return rings_b.status();
  auto pipe = std::make_shared<Pipe>();
  *end_a = LinkEnds{a, b, -1, -1, doorbell_a, rings_b.value().release(), true, pipe};
  *end_b = LinkEnds{b, a, -1, -1, doorbell_b, rings_a.value().release(), false, pipe};
  return Status();
}

}  // namespace

TransportEntry InprocTransport() { return {"inproc", Make, MakePair}; }

}  // namespace tfdist
