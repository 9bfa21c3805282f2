// shm: two ranks of one host over a memfd that both map.
//
// Layout: the sleeping word and the verdict word of each side, then for each direction a control
// lane with its payloads and a data lane (shm_lane.h), whose payloads lie in the sender's window
// (shm_window.h). The initiator sends through the first direction. The kernel closes the socket
// when the peer dies, however it dies. A rank with many links has no eventfd for each peer: if
// neither end has a `peer_doorbell_fd`, a byte on the socket is the doorbell; otherwise the socket
// carries no bytes.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/deadline.h"
#include "transport/link_socket.h"
#include "transport/link_support.h"
#include "transport/shm_lane.h"
#include "transport/shm_window.h"

namespace tfdist {
namespace {

constexpr size_t kControlSlots = 64;
constexpr size_t kRestStride = 128;    // adjacent cache lines are fetched in pairs
constexpr size_t kVerdictOffset = 64;  // of a side's verdict word from its sleeping word
constexpr size_t kLanesOffset = 2 * kRestStride;
constexpr int kPumpsPerLook = 64;
constexpr int64_t kLookIntervalUs = 1000;

// The sleeping word of a rank that is not awake: what must wake it.
constexpr uint32_t kForControl = 1;  // a frame of the control lane
constexpr uint32_t kForData = 2;     // one of the data lane
constexpr uint32_t kForRoom = 4;     // a released slot: a lane was full

// The verdict word of a rank: claimed by the rank itself or barred by the peer, whichever is first.
// It changes once.
constexpr uint32_t kUndecided = 0;
constexpr uint32_t kBarred = 1;
constexpr uint32_t kClaimed = 2;

const size_t kControlBytes =
    ShmLane::Bytes(kControlSlots) + ShmPayloads::Bytes(kControlSlots, kMaxControlPayload);

size_t DirectionBytes(const Config& config) {
  return kControlBytes + ShmLane::Bytes(static_cast<size_t>(config.shm_slots));
}

class ShmLink : public LinkBase {
 public:
  ShmLink(const LinkEnds& ends, const Config& config, UniqueFd socket, UniqueFd peer_doorbell)
      : LinkBase(ends, config, "shm"),
        socket_(std::move(socket)),
        peer_doorbell_(std::move(peer_doorbell)) {}
  // With shutdown, the peer sees the end at once, even if another process holds the socket too.
  ~ShmLink() override {
    ::shutdown(socket_.get(), SHUT_RDWR);
    out_[Index(Lane::kData)].Drop();
  }

  Status Map(const OwnedFds& fds, const LinkEnds& ends, const Config& config) {
    TFDIST_RETURN_IF_ERROR(PrepareFd(socket_.get()));
    if (peer_doorbell_.get() >= 0) TFDIST_RETURN_IF_ERROR(PrepareFd(peer_doorbell_.get()));
    TFDIST_RETURN_IF_ERROR(memory_.Map(fds.memory.get(), /*writable=*/true));
    if (memory_.bytes() != ShmBytes(config)) return OtherSize(config);
    if (ends.window == nullptr) {
      return Status(Code::kInvalidArgument, "a shared-memory link needs the rank's window");
    }
    window_ = ends.window;
    TFDIST_RETURN_IF_ERROR(peer_window_.Map(fds.window.get(), /*writable=*/false));
    StatusOr<ShmPayloads> payloads = WindowPayloads(peer_window_, config);
    TFDIST_RETURN_IF_ERROR(payloads.status());
    const bool initiator = ends.initiator;
    own_word_ = RestWord(initiator ? 0 : 1);
    peer_word_ = RestWord(initiator ? 1 : 0);
    own_verdict_ = VerdictWord(initiator ? 0 : 1);
    peer_verdict_ = VerdictWord(initiator ? 1 : 0);
    data_slots_ = static_cast<size_t>(config.shm_slots);
    const int out = initiator ? 0 : 1;
    const int in = initiator ? 1 : 0;
    out_[0] = ShmProducer(MakeLane(out, Lane::kControl, config),
                          std::make_shared<SlotPool>(ControlPayloads(out, config)), WritePolicy());
    in_[0] = ShmConsumer(MakeLane(in, Lane::kControl, config), ControlPayloads(in, config));
    out_[1] = ShmProducer(MakeLane(out, Lane::kData, config), window_->pool(),
                          WritePolicy(config.shm_writes));
    in_[1] = ShmConsumer(MakeLane(in, Lane::kData, config), payloads.value());
    return Status();
  }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    if (!Open(lane, bytes)) return {};
    ShmProducer& out = out_[Index(lane)];
    if (!HasRoom(lane, out.Find(), [&out] { return out.Find(); })) return {};
    return {out.Begin(bytes), bytes};
  }

  void CommitSend(Lane lane, const FrameHeader& header) override {
    const size_t slot = out_[Index(lane)].Publish(header, lane, Close(lane));
    if (lane == Lane::kData) window_->set_last(slot);
    WakePeer(lane == Lane::kData ? kForData : kForControl);
  }

  bool StreamsSend() const override { return out_[Index(Lane::kData)].streams(); }

  const void* SendMemory() const override { return window_.get(); }

  bool ShareSend(const FrameHeader& header, size_t bytes) override {
    if (!Open(Lane::kData, bytes)) return false;
    ShmProducer& out = out_[Index(Lane::kData)];
    if (!HasRoom(Lane::kData, out.FindHandle(), [&out] { return out.FindHandle(); })) return false;
    out.Announce(header, Lane::kData, Close(Lane::kData), window_->last());
    WakePeer(kForData);
    return true;
  }

  bool HasFrame() const override {
    return in_[Index(Lane::kData)].Ready() || in_[Index(Lane::kControl)].Ready();
  }

  bool Poll(Lane lane, InFrame* frame) override {
    if (corrupt_) return false;
    ShmFrame found;
    const Look look = in_[Index(lane)].Take(&found);
    if (look == Look::kNotYet) return false;
    if (look == Look::kCorrupt) return Refuse("an entry out of order, or a slot in use");
    const std::string fault = HeaderFault(found.header, lane, capacity(lane));
    if (!fault.empty()) return Refuse(fault);
    frame->header = found.header;
    frame->payload = {found.payload, found.header.payload_bytes};
    frame->token = found.handle;
    frame->streamed = found.streamed;
    if (lane == Lane::kData) out_[Index(lane)].Saw(found.streamed, found.header.payload_bytes);
    return true;
  }

  void Release(Lane lane, const InFrame& frame) override {
    in_[Index(lane)].Release(frame.token);
    WakePeer(kForRoom);
  }

  void NoteRead(const InFrame& frame, int64_t ns) override {
    in_[Index(Lane::kData)].NoteRead(frame.token, ns);
  }

  Status Pump(bool* /*moved*/) override {
    // Memory needs no pumping; the socket is looked at only now and then, because a system call in
    // every turn of the loop would cost more than the frames.
    if (!error().ok()) return error();
    if (!woke_) {
      if (++pumps_ < kPumpsPerLook) return Status();
      pumps_ = 0;
      if (NowUs() - looked_us_ < kLookIntervalUs) return Status();
    }
    woke_ = false;
    pumps_ = 0;
    looked_us_ = NowUs();
    LookAtSocket();
    return error();
  }

  int fd() const override { return socket_.get(); }
  bool WantsWrite() const override { return false; }

  void SetWakeMode(WakeMode mode) override {
    // Whether room is wanted is found out anew by the BeginSend calls of every waking period.
    if (mode != WakeMode::kAsleep) wants_room_ = false;
    if (!Looks(wake_mode_) && Looks(mode)) woke_ = true;
    wake_mode_ = mode;
    if (mode != WakeMode::kExpecting && owes_ring_) PayRing();
    // The peer reads the word with every frame: storing the same value would make it fetch the
    // cache line again. It clears the word when it rings.
    if (mode == WakeMode::kIdle && own_word_->load(std::memory_order_relaxed) == Word()) return;
    own_word_->store(Word(), std::memory_order_seq_cst);
  }

  bool Flushed() const override { return true; }
  size_t MaxHeld() const override { return data_slots_; }
  bool WatchProcess() const override { return !RingsSocket(); }
  bool BarPeer() override { return Settle(peer_verdict_, kBarred); }
  bool ClaimVerdict() override { return Settle(own_verdict_, kClaimed); }

 private:
  using Word32 = std::atomic<uint32_t>;
  static_assert(Word32::is_always_lock_free, "a lock would be private to a process");

  Word32* RestWord(size_t side) const {
    return reinterpret_cast<Word32*>(memory_.data() + side * kRestStride);
  }
  Word32* VerdictWord(size_t side) const {
    return reinterpret_cast<Word32*>(memory_.data() + side * kRestStride + kVerdictOffset);
  }
  // Sets an undecided verdict word to `wanted`. Returns whether it is `wanted` now.
  static bool Settle(Word32* word, uint32_t wanted) {
    uint32_t found = kUndecided;
    return word->compare_exchange_strong(found, wanted) || found == wanted;
  }

  uint8_t* Direction(int direction, const Config& config) const {
    return memory_.data() + kLanesOffset + static_cast<size_t>(direction) * DirectionBytes(config);
  }
  ShmLane MakeLane(int direction, Lane lane, const Config& config) const {
    uint8_t* base = Direction(direction, config);
    if (lane == Lane::kControl) return ShmLane(base, kControlSlots);
    return ShmLane(base + kControlBytes, data_slots_);
  }
  ShmPayloads ControlPayloads(int direction, const Config& config) const {
    return ShmPayloads(Direction(direction, config) + ShmLane::Bytes(kControlSlots), kControlSlots,
                       kMaxControlPayload);
  }

  Status OtherSize(const Config& config) const {
    return Status(Code::kInvalidArgument,
                  "the shared memory of a link has " + std::to_string(memory_.bytes()) +
                      " bytes, expected " + std::to_string(ShmBytes(config)) +
                      "; set TFDIST_SEGMENT_BYTES and TFDIST_SHM_SLOTS alike on all ranks");
  }

  // Whether there is room after a `look`, which `again` repeats.
  template <typename Again>
  bool HasRoom(Lane lane, Look look, Again again) {
    if (look == Look::kNotYet && lane == Lane::kControl && owes_ring_) PayRing();
    // A thread that drives an idle rank (runtime/progress.h) wakes the progress thread for
    // unfinished work, so it need not be woken for room in the data lane.
    const bool matters = lane == Lane::kControl || wake_mode_ != WakeMode::kIdle;
    if (look == Look::kNotYet && !wants_room_ && matters) {
      wants_room_ = true;
      // Asleep already (this is the last look before the wait): the peer must learn of it, and may
      // have made room in between.
      if (!Looks(wake_mode_)) {
        own_word_->store(Word(), std::memory_order_seq_cst);
        look = again();
      }
    }
    if (look == Look::kCorrupt) Fail(PeerGarbage(peer(), "a slot came back that it did not have"));
    return look == Look::kReady;
  }

  uint32_t Word() const {
    if (Looks(wake_mode_)) return 0;
    return kForControl | (wake_mode_ == WakeMode::kAsleep ? kForData : 0) |
           (wants_room_ ? kForRoom : 0);
  }

  // Rings once if the peer is to be woken for `reason`.
  void WakePeer(uint32_t reason) {
    const uint32_t word = peer_word_->load(std::memory_order_seq_cst);
    if ((word & reason) == 0) return;
    // The ring of an idle peer may be put off, but not if a socket is the doorbell: then the frame
    // may be for a rank behind this peer, which relays it.
    if (wake_mode_ == WakeMode::kExpecting && word == kForControl && !RingsSocket()) {
      owes_ring_ = true;
      return;
    }
    Ring();
  }
  // Makes up for a ring that was put off, unless the peer has read the frame in the meantime.
  void PayRing() {
    owes_ring_ = false;
    const bool waits = (peer_word_->load(std::memory_order_seq_cst) & kForControl) != 0;
    if (waits && out_[Index(Lane::kControl)].Unread()) Ring();
  }
  void Ring() {
    if (peer_word_->exchange(0, std::memory_order_seq_cst) == 0) return;
    if (RingsSocket()) {
      // If the socket is full, it rings already; if it is broken, LookAtSocket reports it.
      (void)::send(socket_.get(), "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
      RingDoorbell(peer_doorbell_.get());
    }
  }
  bool RingsSocket() const { return peer_doorbell_.get() < 0; }

  bool Refuse(const std::string& fault) {
    corrupt_ = true;
    Fail(PeerGarbage(peer(), fault));
    return false;
  }

  void LookAtSocket() {
    uint8_t bytes[64];
    ssize_t n = 0;
    do {
      n = ::recv(socket_.get(), bytes, RingsSocket() ? sizeof(bytes) : 1, MSG_DONTWAIT);
    } while (n > 0 && RingsSocket());
    if (n > 0) {
      Fail(PeerGarbage(peer(), "bytes on the socket of a shared-memory link"));
    } else if (n == 0) {
      Fail(PeerLost(peer(), "closed its connection"));
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      Fail(PeerLost(peer(), std::string("closed its connection (") + std::strerror(errno) + ")"));
    }
  }

  LinkSocket socket_;
  UniqueFd peer_doorbell_;
  SharedMemory memory_;
  std::shared_ptr<ShmWindow> window_;
  SharedMemory peer_window_;
  Word32* own_word_ = nullptr;
  Word32* peer_word_ = nullptr;
  Word32* own_verdict_ = nullptr;
  Word32* peer_verdict_ = nullptr;
  ShmProducer out_[kLanes];
  ShmConsumer in_[kLanes];
  size_t data_slots_ = 0;
  WakeMode wake_mode_ = WakeMode::kAwake;
  bool wants_room_ = false;
  bool owes_ring_ = false;  // to an idle peer
  bool corrupt_ = false;
  bool woke_ = true;  // the first Pump looks at the socket
  int pumps_ = 0;
  int64_t looked_us_ = 0;
};

StatusOr<std::unique_ptr<Link>> Make(const LinkEnds& ends, const Config& config) {
  OwnedFds owned(ends);
  auto link = std::make_unique<ShmLink>(ends, config, std::move(owned.socket),
                                        std::move(owned.peer_doorbell));
  TFDIST_RETURN_IF_ERROR(link->Map(owned, ends, config));
  return std::unique_ptr<Link>(std::move(link));
}

StatusOr<UniqueFd> MemoryFile(size_t bytes) {
  UniqueFd memory(::memfd_create("tfdist-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) return SystemError("memfd_create");
  if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
    return SystemError("size the shared memory of a link");
  }
  return memory;
}

Status MakePair(int a, int b, int doorbell_a, int doorbell_b, const Config& config, LinkEnds* end_a,
                LinkEnds* end_b) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return SystemError("socketpair");
  }
  UniqueFd socket_a(sockets[0]);
  UniqueFd socket_b(sockets[1]);
  StatusOr<UniqueFd> memory = MemoryFile(ShmBytes(config));
  if (!memory.ok()) return memory.status();
  StatusOr<UniqueFd> memory_b = DuplicateFd(memory.value().get());
  if (!memory_b.ok()) return memory_b.status();
  StatusOr<UniqueFd> rings_a = DuplicateFd(doorbell_a);
  if (!rings_a.ok()) return rings_a.status();
  StatusOr<UniqueFd> rings_b = DuplicateFd(doorbell_b);
  if (!rings_b.ok()) return rings_b.status();
  *end_a = LinkEnds();
  end_a->self = a;
  end_a->peer = b;
  end_a->socket_fd = socket_a.release();
  end_a->memory_fd = memory.value().release();
  end_a->own_doorbell_fd = doorbell_a;
  end_a->peer_doorbell_fd = rings_b.value().release();
  end_a->initiator = true;
  *end_b = LinkEnds();
  end_b->self = b;
  end_b->peer = a;
  end_b->socket_fd = socket_b.release();
  end_b->memory_fd = memory_b.value().release();
  end_b->own_doorbell_fd = doorbell_b;
  end_b->peer_doorbell_fd = rings_a.value().release();
  for (auto [own, other] : {std::pair(end_a, end_b), std::pair(end_b, end_a)}) {
    StatusOr<int> file = MakeWindowFile(config, 1);
    if (!file.ok()) return file.status();
    UniqueFd owned(file.value());
    auto window = ShmWindow::Make(owned.get(), config);
    if (!window.ok()) return window.status();
    TFDIST_RETURN_IF_ERROR(UseWindow(owned.get(), window.value(), own, other));
  }
  return Status();
}

}  // namespace

size_t ShmBytes(const Config& config) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t bytes = kLanesOffset + 2 * DirectionBytes(config);
  return (bytes + page - 1) / page * page;
}

StatusOr<int> MakeWindowFile(const Config& config, int peers) {
  StatusOr<UniqueFd> file = MemoryFile(WindowBytes(config) * static_cast<size_t>(peers));
  if (!file.ok()) return file.status();
  return file.value().release();
}

Status UseWindow(int window_fd, const std::shared_ptr<ShmWindow>& window, LinkEnds* own,
                 LinkEnds* other) {
  StatusOr<UniqueFd> copy = DuplicateFd(window_fd);
  if (!copy.ok()) return copy.status();
  if (other->window_fd >= 0) ::close(other->window_fd);
  other->window_fd = copy.value().release();
  own->window = window;
  return Status();
}

TransportEntry ShmTransport() { return {"shm", Make, MakePair}; }

}  // namespace tfdist
