// The reader of a tcp link, against a peer that has the key (without it every input ends at the
// first MAC): sound frames, frames with any header, any bytes, flipped bits, in any pieces.
//
// Every frame that the link delivers must be the next one that was sent whole on its lane.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <utility>

#include "base/config.h"
#include "fuzz.h"
#include "transport/frame_mac.h"
#include "transport/link_support.h"
#include "transport/transport.h"

namespace tfdist {
namespace {

enum Action : uint8_t { kSound, kAnyHeader, kRaw, kFlipped, kPolls, kReleases, kActions };

Config MakeConfig(bool all) {
  Config config;
  config.segment_bytes = 4096;
  config.tcp_mac = all ? "all" : "control";
  return config;
}

// One connection for all inputs. Each input's link has a copy of the descriptor; closing it ends
// the direction from the link to the test, in which nothing is sent here, and drains the other.
const LinkEnds* TheEnds() {
  static LinkEnds ends[2];
  static const bool made =
      FindTransport("tcp")->make_pair(0, 1, -1, -1, MakeConfig(false), &ends[0], &ends[1]).ok();
  FUZZ_CHECK(made);
  return ends;
}

// Bytes sent to the link's end since the connection was made.
uint64_t& Written() {
  static uint64_t bytes = 0;
  return bytes;
}

class Case {
 public:
  explicit Case(Decisions in)
      : in_(in),
        all_(in_.Take<uint8_t>() % 2 == 1),
        sealer_({TheEnds()[0].key.data(), kDirectionKeyBytes}, all_) {
    LinkEnds ends = TheEnds()[1];
    ends.socket_fd = ::dup(ends.socket_fd);
    auto made = FindTransport("tcp")->make(ends, MakeConfig(all_));
    FUZZ_CHECK(made.ok());
    link_ = std::move(made.value());
  }

  // Bytes that the link did not read must not be there for the next input. On a busy machine the
  // kernel may still be carrying them over.
  ~Case() {
    tcp_info info{};
    do {
      socklen_t size = sizeof(info);
      FUZZ_CHECK(::getsockopt(TheEnds()[1].socket_fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0);
    } while (info.tcpi_bytes_received < Written());
  }

  void Run() {
    for (int step = 0; step < 64 && !in_.empty(); ++step) Act();
    Pump();
    for (auto& [lane, frame] : held_) link_->Release(lane, frame);
  }

 private:
  void Act() {
    const auto action = static_cast<Action>(in_.Take<uint8_t>() % kActions);
    switch (action) {
      case kSound:
      case kAnyHeader:
      case kFlipped:
        SendFrame(action);
        break;
      case kRaw:
        Write(in_.Bytes(in_.Take<uint8_t>()));
        break;
      case kPolls:
        Pump();
        break;
      case kReleases:
        if (held_.empty()) break;
        link_->Release(held_.front().first, held_.front().second);
        held_.pop_front();
        break;
      default:
        break;
    }
  }

  void SendFrame(Action action) {
    WireHeader wire{};
    const uint16_t length = in_.Take<uint16_t>();
    wire.frame.lane = in_.Take<uint8_t>() % 2;
    const size_t most = wire.frame.lane == 0 ? kMaxControlPayload : 4096;
    std::string payload = in_.Bytes(length % 64);
    payload.resize(length % (most + 1), 'x');
    wire.frame.ticket = in_.Take<uint64_t>();
    wire.frame.payload_bytes = static_cast<uint32_t>(payload.size());
    if (action == kAnyHeader) {
      wire.frame.payload_bytes = in_.Take<uint32_t>();
      wire.frame.segment = in_.Take<uint32_t>();
      wire.frame.set = in_.Take<uint32_t>();
    }
    sealer_.Seal(&wire, AsBytes(payload));
    const bool sound = action != kFlipped && wire.frame.payload_bytes == payload.size() &&
                       HeaderFault(wire.frame, static_cast<Lane>(wire.frame.lane), most).empty();
    std::string bytes(reinterpret_cast<const char*>(&wire), sizeof(wire));
    bytes += payload;
    if (action == kFlipped) {
      const size_t at = in_.Take<uint16_t>() % bytes.size();
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << in_.Take<uint8_t>() % 8);
    }
    if (!sound || broken_) {
      broken_ = true;  // nothing from here on may be delivered
    } else {
      expected_[wire.frame.lane].push_back({wire.frame, payload});
    }
    WritePieces(bytes);
  }

  void WritePieces(const std::string& bytes) {
    const size_t piece = in_.Take<uint8_t>() % 4 == 0 ? 1 + in_.Take<uint8_t>() : bytes.size();
    for (size_t at = 0; at < bytes.size(); at += piece) {
      WriteSound(bytes.substr(at, piece));
      if (piece < bytes.size()) Pump();
    }
  }

  void Write(const std::string& bytes) {
    if (!bytes.empty()) broken_ = true;
    WriteSound(bytes);
  }
  void WriteSound(const std::string& bytes) {
    size_t at = 0;
    while (at < bytes.size()) {
      const ssize_t n = ::send(TheEnds()[0].socket_fd, bytes.data() + at, bytes.size() - at,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0) {  // full, because the link reads no more
        FUZZ_CHECK(failed_);
        return;
      }
      at += static_cast<size_t>(n);
      Written() += static_cast<size_t>(n);
    }
  }

  void Pump() {
    for (bool moved = true; moved && !failed_;) {
      moved = false;
      link_->SetWakeMode(
          WakeMode::kAwake);  // a rank that has been woken looks into the socket at once
      const Status status = link_->Pump(&moved);
      failed_ = !status.ok();
      if (failed_ && !broken_) std::fprintf(stderr, "%s\n", status.message().c_str());
    }
    FUZZ_CHECK(!failed_ || broken_);
    for (Lane lane : {Lane::kControl, Lane::kData}) {
      InFrame frame;
      while (link_->Poll(lane, &frame)) Check(lane, frame);
    }
  }

  void Check(Lane lane, const InFrame& frame) {
    auto& expected = expected_[Index(lane)];
    FUZZ_CHECK(!expected.empty());
    const auto& [header, payload] = expected.front();
    FUZZ_CHECK(std::memcmp(&header, &frame.header, sizeof(header)) == 0);
    FUZZ_CHECK(frame.payload.size() == payload.size());
    FUZZ_CHECK(payload.empty() ||
               std::memcmp(payload.data(), frame.payload.data(), payload.size()) == 0);
    expected.pop_front();
    held_.emplace_back(lane, frame);
  }

  Decisions in_;
  bool all_;
  FrameMac sealer_;
  std::unique_ptr<Link> link_;
  std::deque<std::pair<FrameHeader, std::string>> expected_[kLanes];
  std::deque<std::pair<Lane, InFrame>> held_;
  bool broken_ = false;
  bool failed_ = false;
};

}  // namespace

namespace fuzz {

std::vector<std::string> Seeds() {
  Script sound;
  sound.Add(uint8_t{0});
  for (uint8_t lane : {0, 1, 1, 0}) {
    sound.Add(uint8_t{kSound}).Add(uint16_t{40}).Add(lane).Add(std::string(40, 'p'));
    sound.Add(uint64_t{7}).Add(uint8_t{1});
  }
  sound.Add(uint8_t{kPolls}).Add(uint8_t{kReleases}).Add(uint8_t{kReleases});
  Script pieces;
  pieces.Add(uint8_t{1}).Add(uint8_t{kSound}).Add(uint16_t{4000}).Add(uint8_t{1});
  pieces.Add(std::string(32, 'q')).Add(uint64_t{8}).Add(uint8_t{0}).Add(uint8_t{200});
  Script header;
  header.Add(uint8_t{0}).Add(uint8_t{kAnyHeader}).Add(uint16_t{9}).Add(uint8_t{0});
  header.Add(std::string(9, 'r')).Add(uint64_t{9}).Add(uint32_t{481}).Add(uint32_t{1});
  header.Add(uint32_t{0}).Add(uint8_t{1});
  Script flipped;
  flipped.Add(uint8_t{1}).Add(uint8_t{kFlipped}).Add(uint16_t{9}).Add(uint8_t{1});
  flipped.Add(std::string(9, 's')).Add(uint64_t{9}).Add(uint16_t{66}).Add(uint8_t{3});
  flipped.Add(uint8_t{1});
  Script raw;
  raw.Add(uint8_t{0}).Add(uint8_t{kRaw}).Add(uint8_t{80}).Add(std::string(80, '\1'));
  return {sound.text(), pieces.text(), header.text(), flipped.text(), raw.text()};
}

}  // namespace fuzz
}  // namespace tfdist

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tfdist::Case({data, size}).Run();
  return 0;
}
