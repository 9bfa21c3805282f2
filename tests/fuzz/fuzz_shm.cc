// A shared-memory link whose peer writes anything anywhere into the memory, at any moment.
//
// Rank 1 is the link; rank 0 is a sound link in between, and scribbles. No crash, no read outside
// of the mapping (frames are read to their last byte), and what is held stays within its lane.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <utility>

#include "base/config.h"
#include "fuzz.h"
#include "transport/link_support.h"
#include "transport/shm_lane.h"
#include "transport/transport.h"

namespace tfdist {
namespace {

enum Action : uint8_t {
  kPeerSends,
  kScribble,
  kScribbleEntry,
  kPoll,
  kRelease,
  kSend,
  kSleep,
  kSocket,
  kActions
};

Config MakeConfig() {
  Config config;
  config.segment_bytes = 4096;
  config.shm_slots = 2;
  return config;
}

class Case {
 public:
  explicit Case(Decisions in) : in_(in), bytes_(ShmBytes(MakeConfig())) {
    static const int doorbell = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    LinkEnds ends[2];
    const TransportEntry* shm = FindTransport("shm");
    FUZZ_CHECK(shm->make_pair(0, 1, doorbell, doorbell, MakeConfig(), &ends[0], &ends[1]).ok());
    void* mapped =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, ends[0].memory_fd, 0);
    FUZZ_CHECK(mapped != MAP_FAILED);
    memory_ = static_cast<uint8_t*>(mapped);
    socket_.reset(::dup(ends[0].socket_fd));
    auto peer = shm->make(ends[0], MakeConfig());
    auto link = shm->make(ends[1], MakeConfig());
    FUZZ_CHECK(peer.ok() && link.ok());
    peer_ = std::move(peer.value());
    link_ = std::move(link.value());
  }
  ~Case() { ::munmap(memory_, bytes_); }

  void Run() {
    for (int step = 0; step < 64 && !in_.empty(); ++step) Act();
    for (auto& [lane, frame] : held_) link_->Release(lane, frame);
    bool moved = false;
    (void)link_->Pump(&moved).ok();
  }

 private:
  Lane TakeLane() { return in_.Take<uint8_t>() % 2 == 0 ? Lane::kControl : Lane::kData; }

  void Act() {
    switch (in_.Take<uint8_t>() % kActions) {
      case kPeerSends:
        Send(peer_.get());
        break;
      case kScribble: {
        const size_t at = in_.Take<uint32_t>() % (bytes_ - 8) / 4 * 4;
        const auto value = in_.Take<uint64_t>();
        std::memcpy(memory_ + at, &value, in_.Take<uint8_t>() % 2 == 0 ? 4 : 8);
        break;
      }
      case kScribbleEntry: {  // the first lines of a lane: entries, then counts of slots
        const size_t lane = in_.Take<uint8_t>() % 4;
        const size_t control = ShmLane::Bytes(64) + ShmPayloads::Bytes(64, kMaxControlPayload);
        const size_t data = ShmLane::Bytes(2);
        const size_t start = 256 + (lane / 2) * (control + data) + (lane % 2) * control;
        const size_t at = start + in_.Take<uint8_t>() % 4 * kCacheLine + in_.Take<uint8_t>() % 60;
        const auto value = in_.Take<uint32_t>();
        std::memcpy(memory_ + at, &value, sizeof(value));
        break;
      }
      case kPoll:
        Poll(TakeLane());
        break;
      case kRelease:
        if (held_.empty()) break;
        link_->Release(held_.front().first, held_.front().second);
        held_.pop_front();
        break;
      case kSend:
        Send(link_.get());
        break;
      case kSleep:
        link_->SetWakeMode(static_cast<WakeMode>(in_.Take<uint8_t>() % 4));
        break;
      default: {
        const std::string bytes = in_.Bytes(in_.Take<uint8_t>() % 4);
        [[maybe_unused]] const ssize_t n = ::write(socket_.get(), bytes.data(), bytes.size());
        bool moved = false;
        (void)link_->Pump(&moved).ok();
      }
    }
  }

  void Send(Link* link) {
    const Lane lane = TakeLane();
    const size_t bytes = in_.Take<uint16_t>() % (lane == Lane::kControl ? 481 : 4097);
    const MutableByteSpan room = link->BeginSend(lane, bytes);
    if (room.data() == nullptr) return;
    FUZZ_CHECK(room.size() == bytes);
    std::memset(room.data(), 'x', bytes);
    link->CommitSend(lane, FrameHeader());
  }

  void Poll(Lane lane) {
    InFrame frame;
    if (!link_->Poll(lane, &frame)) return;
    FUZZ_CHECK(frame.payload.size() <= (lane == Lane::kControl ? kMaxControlPayload : 4096));
    uint32_t sum = 0;
    for (uint8_t byte : frame.payload) sum += byte;
    __asm__ volatile("" : : "r"(sum));  // the reads are the point
    // A slot is never given out twice.
    for (const auto& [other_lane, other] : held_) {
      FUZZ_CHECK(other_lane != lane || other.token != frame.token);
    }
    held_.emplace_back(lane, frame);
  }

  Decisions in_;
  size_t bytes_;
  uint8_t* memory_ = nullptr;
  UniqueFd socket_;
  std::unique_ptr<Link> peer_;
  std::unique_ptr<Link> link_;
  std::deque<std::pair<Lane, InFrame>> held_;
};

}  // namespace

namespace fuzz {

std::vector<std::string> Seeds() {
  Script sound;
  for (uint8_t lane : {0, 1}) {
    sound.Add(uint8_t{kPeerSends}).Add(lane).Add(uint16_t{100});
    sound.Add(uint8_t{kPoll}).Add(lane).Add(uint8_t{kRelease});
    sound.Add(uint8_t{kSend}).Add(lane).Add(uint16_t{4});
  }
  sound.Add(uint8_t{kSleep}).Add(uint8_t{0}).Add(uint8_t{kSocket}).Add(uint8_t{0});
  std::vector<std::string> seeds = {sound.text()};
  // Each word of the entry that the link reads next: laps, the header's parts, the slot; and the
  // counts of slots that it sends into.
  for (uint8_t lane : {0, 1, 2, 3}) {
    for (uint8_t line : {0, 1, 2, 3}) {
      for (uint8_t offset : {0, 8, 12, 36, 40, 44}) {
        Script script;
        script.Add(uint8_t{kPeerSends}).Add(uint8_t(lane % 2)).Add(uint16_t{100});
        script.Add(uint8_t{kScribbleEntry}).Add(lane).Add(line).Add(offset).Add(uint32_t{481});
        script.Add(uint8_t{kPoll}).Add(uint8_t(lane % 2)).Add(uint8_t{kSend});
        script.Add(uint8_t(lane % 2)).Add(uint16_t{9}).Add(uint8_t{kPoll}).Add(uint8_t(lane % 2));
        seeds.push_back(script.text());
      }
    }
  }
  return seeds;
}

}  // namespace fuzz
}  // namespace tfdist

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tfdist::Case({data, size}).Run();
  return 0;
}
