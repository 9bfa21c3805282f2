// shm: two ranks of one host over a memfd that both map.
//
// Layout: the sleeping word of each side, then for each direction a control lane and a data lane
// (shm_lane.h). The initiator sends through the first direction. The kernel closes the socket when
// the peer dies, whatever the way. A rank with many links has no eventfd for each peer: without
// `peer_doorbell_fd`, on both ends, a byte on the socket is the doorbell; else it carries none.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/deadline.h"
#include "transport/link_socket.h"
#include "transport/link_support.h"
#include "transport/shm_lane.h"

namespace tfdist {
namespace {

constexpr size_t kControlSlots = 64;
constexpr size_t kSleepingStride = 128;  // neighbouring lines are fetched in pairs
constexpr size_t kLanesOffset = 2 * kSleepingStride;
constexpr int kPumpsPerLook = 64;
constexpr int64_t kLookIntervalUs = 1000;

// Bits of a sleeping word.
constexpr uint32_t kAsleep = 1;     // wake me for a frame
constexpr uint32_t kWantsRoom = 2;  // ... and for a released slot: a lane was full

size_t DirectionBytes(const Config& config) {
  return ShmLane::Bytes(kControlSlots, kMaxControlPayload) +
         ShmLane::Bytes(static_cast<size_t>(config.shm_slots),
                        static_cast<size_t>(config.segment_bytes));
}

// The memory of a link, unmapped with it. A forked child does not inherit it: two processes
// playing the same end would corrupt the lanes.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  Status Map(int fd, size_t bytes) {
    struct stat info;
    if (::fstat(fd, &info) != 0) return SystemError("size of the shared memory");
    if (static_cast<size_t>(info.st_size) != bytes) {
      return Status(Code::kInvalidArgument,
                    "the shared memory of a link has " + std::to_string(info.st_size) +
                        " bytes, expected " + std::to_string(bytes) +
                        "; set TFDIST_SEGMENT_BYTES and TFDIST_SHM_SLOTS alike on all ranks");
    }
    // A peer that shrank the file would kill us with SIGBUS. Sealing fails when it is sealed
    // already; what counts is that it is.
    constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    (void)::fcntl(fd, F_ADD_SEALS, kSeals);
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) {
      return Status(Code::kInvalidArgument,
                    "the shared memory of a link is no memory file, or one whose size its sender "
                    "can still change (seals " +
                        std::to_string(seals) + ", expected " + std::to_string(kSeals) + ")");
    }
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return SystemError("map the shared memory of a link");
    data_ = static_cast<uint8_t*>(data);
    bytes_ = bytes;
    if (::madvise(data, bytes, MADV_DONTFORK) != 0) return SystemError("madvise(MADV_DONTFORK)");
    return Status();
  }
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

class ShmLink : public LinkBase {
 public:
  ShmLink(const LinkEnds& ends, const Config& config, UniqueFd socket, UniqueFd peer_doorbell)
      : LinkBase(ends, config, "shm"),
        socket_(std::move(socket)),
        peer_doorbell_(std::move(peer_doorbell)) {}
  // At once for the peer, whoever else may hold the socket.
  ~ShmLink() override { ::shutdown(socket_.get(), SHUT_RDWR); }

  Status Map(int memory_fd, bool initiator, const Config& config) {
    TFDIST_RETURN_IF_ERROR(PrepareFd(socket_.get()));
    if (peer_doorbell_.get() >= 0) TFDIST_RETURN_IF_ERROR(PrepareFd(peer_doorbell_.get()));
    TFDIST_RETURN_IF_ERROR(mapping_.Map(memory_fd, ShmBytes(config)));
    own_sleeping_ = SleepingWord(initiator ? 0 : 1);
    peer_sleeping_ = SleepingWord(initiator ? 1 : 0);
    data_slots_ = static_cast<size_t>(config.shm_slots);
    for (Lane lane : {Lane::kControl, Lane::kData}) {
      out_[Index(lane)] = ShmProducer(MakeLane(initiator ? 0 : 1, lane, config));
      in_[Index(lane)] = ShmConsumer(MakeLane(initiator ? 1 : 0, lane, config));
    }
    return Status();
  }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    if (!Open(lane, bytes)) return {};
    ShmProducer& out = out_[Index(lane)];
    Look look = out.FindSlot();
    if (look == Look::kNotYet && !wants_room_) {
      wants_room_ = true;
      // Asleep already (this is the last look before the wait): the peer must learn of it, and may
      // have made room in between.
      if (sleeping_) {
        own_sleeping_->store(kAsleep | kWantsRoom, std::memory_order_seq_cst);
        look = out.FindSlot();
      }
    }
    if (look == Look::kCorrupt) Fail(PeerGarbage(peer(), "a slot came back that it did not have"));
    if (look != Look::kReady) return {};
    return {out.payload(), bytes};
  }

  void CommitSend(Lane lane, FrameHeader header) override {
    Close(lane, &header);
    out_[Index(lane)].Publish(header);
    WakePeer(kAsleep);
  }

  bool Poll(Lane lane, InFrame* frame) override {
    if (corrupt_) return false;
    ShmConsumer& in = in_[Index(lane)];
    size_t slot = 0;
    const Look look = in.Take(&frame->header, &slot);
    if (look == Look::kNotYet) return false;
    if (look == Look::kCorrupt) return Refuse("an entry out of order, or a slot in use");
    const std::string fault = HeaderFault(frame->header, lane, capacity(lane));
    if (!fault.empty()) return Refuse(fault);
    frame->payload = {in.payload(slot), frame->header.payload_bytes};
    frame->token = slot;
    return true;
  }

  void Release(Lane lane, const InFrame& frame) override {
    in_[Index(lane)].Release(frame.token);
    WakePeer(kWantsRoom);
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

  void SetSleeping(bool sleeping) override {
    if (sleeping_ && !sleeping) woke_ = true;
    sleeping_ = sleeping;
    // Whether room is wanted is found out anew by the BeginSend calls of every waking period.
    if (!sleeping) wants_room_ = false;
    const uint32_t word = sleeping ? kAsleep | (wants_room_ ? kWantsRoom : 0) : 0;
    own_sleeping_->store(word, std::memory_order_seq_cst);
  }

  bool Flushed() const override { return true; }
  size_t MaxHeld() const override { return data_slots_ - 1; }
  bool WatchProcess() const override { return !RingsSocket(); }

 private:
  using SleepingWordType = std::atomic<uint32_t>;
  static_assert(SleepingWordType::is_always_lock_free, "a lock would be private to a process");

  SleepingWordType* SleepingWord(size_t side) const {
    return reinterpret_cast<SleepingWordType*>(mapping_.data() + side * kSleepingStride);
  }

  ShmLane MakeLane(size_t direction, Lane lane, const Config& config) const {
    uint8_t* base = mapping_.data() + kLanesOffset + direction * DirectionBytes(config);
    if (lane == Lane::kControl) return ShmLane(base, kControlSlots, kMaxControlPayload);
    return ShmLane(base + ShmLane::Bytes(kControlSlots, kMaxControlPayload), data_slots_,
                   capacity(Lane::kData));
  }

  // Rings once when the peer sleeps and waits for what `reason` says.
  void WakePeer(uint32_t reason) {
    if ((peer_sleeping_->load(std::memory_order_seq_cst) & reason) == 0) return;
    if (peer_sleeping_->exchange(0, std::memory_order_seq_cst) == 0) return;
    if (RingsSocket()) {
      // A full socket is one that rings already; of a broken one LookAtSocket tells.
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
  Mapping mapping_;
  SleepingWordType* own_sleeping_ = nullptr;
  SleepingWordType* peer_sleeping_ = nullptr;
  ShmProducer out_[kLanes];
  ShmConsumer in_[kLanes];
  size_t data_slots_ = 0;
  bool sleeping_ = false;
  bool wants_room_ = false;
  bool corrupt_ = false;
  bool woke_ = true;  // the first Pump looks at the socket
  int pumps_ = 0;
  int64_t looked_us_ = 0;
};

StatusOr<std::unique_ptr<Link>> Make(const LinkEnds& ends, const Config& config) {
  OwnedFds owned(ends);
  auto link = std::make_unique<ShmLink>(ends, config, std::move(owned.socket),
                                        std::move(owned.peer_doorbell));
  TFDIST_RETURN_IF_ERROR(link->Map(owned.memory.get(), ends.initiator, config));
  return std::unique_ptr<Link>(std::move(link));
}

Status MakePair(int a, int b, int doorbell_a, int doorbell_b, const Config& config, LinkEnds* end_a,
                LinkEnds* end_b) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return SystemError("socketpair");
  }
  UniqueFd socket_a(sockets[0]);
  UniqueFd socket_b(sockets[1]);
  UniqueFd memory(::memfd_create("tfdist-link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory.get() < 0) return SystemError("memfd_create");
  if (::ftruncate(memory.get(), static_cast<off_t>(ShmBytes(config))) != 0) {
    return SystemError("size the shared memory of a link");
  }
  StatusOr<UniqueFd> memory_b = DuplicateFd(memory.get());
  if (!memory_b.ok()) return memory_b.status();
  StatusOr<UniqueFd> rings_a = DuplicateFd(doorbell_a);
  if (!rings_a.ok()) return rings_a.status();
  StatusOr<UniqueFd> rings_b = DuplicateFd(doorbell_b);
  if (!rings_b.ok()) return rings_b.status();
  *end_a = LinkEnds{
      a,    b,      socket_a.release(), memory.release(), doorbell_a, rings_b.value().release(),
      true, nullptr};
  *end_b = LinkEnds{b,
                    a,
                    socket_b.release(),
                    memory_b.value().release(),
                    doorbell_b,
                    rings_a.value().release(),
                    false,
                    nullptr};
  return Status();
}

}  // namespace

size_t ShmBytes(const Config& config) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t bytes = kLanesOffset + 2 * DirectionBytes(config);
  return (bytes + page - 1) / page * page;
}

TransportEntry ShmTransport() { return {"shm", Make, MakePair}; }

}  // namespace tfdist
