// Somebody between two ranks who can change, drop, repeat, reorder and reflect what they send, but
// does not have the key: no frame that was not sent is delivered, and none out of turn.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tcp_peer.h"

namespace tfdist {
namespace {

constexpr size_t kFrames = 12;

Config WithMac(const char* mac) {
  Config config = SmallConfig();
  config.tcp_mac = mac;
  return config;
}

struct Sent {
  FrameHeader header;
  std::string payload;
};

// The frames that rank 0 sends: on both lanes, empty, short and long ones.
std::vector<Sent> Frames() {
  std::vector<Sent> frames;
  for (size_t i = 0; i < kFrames; ++i) {
    Sent sent;
    sent.header.lane = i % 3 == 0 ? 0 : 1;
    sent.header.ticket = 100 + i;
    sent.header.generation = 9;
    const size_t bytes = i == 5 ? 0 : sent.header.lane == 0 ? 40 * i : 300 * i + 1;
    for (size_t k = 0; k < bytes; ++k) sent.payload += static_cast<char>(Pattern(i, k));
    frames.push_back(sent);
  }
  return frames;
}

std::vector<std::string> Sealed(TcpPeer* peer, const std::vector<Sent>& frames) {
  std::vector<std::string> wire;
  for (const Sent& sent : frames) wire.push_back(peer->Frame(sent.header, AsBytes(sent.payload)));
  return wire;
}

// Lets the link read all of `bytes`. Every frame it delivers must be the next of its lane; returns
// how many it delivered, and in `*error` how the link ended.
size_t Deliver(TcpPeer* peer, const std::string& bytes, const std::vector<Sent>& frames,
               Status* error) {
  peer->Write(bytes.data(), bytes.size());
  peer->socket.reset();  // so that a frame cut short is an end, not a wait
  size_t next[kLanes] = {0, 0};
  size_t delivered = 0;
  const int64_t deadline = NowUs() + 5 * kSecondUs;
  *error = Status();
  while (error->ok()) {
    bool moved = false;
    *error = peer->link->Pump(&moved);
    CHECK(NowUs() < deadline);
    for (Lane lane : {Lane::kControl, Lane::kData}) {
      InFrame frame;
      while (peer->link->Poll(lane, &frame)) {
        size_t& at = next[Index(lane)];
        while (at < frames.size() && frames[at].header.lane != frame.header.lane) ++at;
        CHECK(at < frames.size());
        CHECK_EQ(frame.header.ticket, frames[at].header.ticket);
        CHECK_EQ(frame.header.generation, frames[at].header.generation);
        CHECK_EQ(frame.payload.size(), frames[at].payload.size());
        CHECK(std::equal(frame.payload.begin(), frame.payload.end(),
                         AsBytes(frames[at].payload).begin()));
        ++at;
        ++delivered;
        peer->link->Release(lane, frame);
      }
    }
  }
  return delivered;
}

std::string Joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

bool Noticed(const Status& error) {
  return error.message().find("rank 0 is connected by a link on which bytes were changed") == 0;
}

TEST(untouched_frames_all_arrive) {
  for (const char* mac : {"control", "all"}) {
    TcpPeer peer(WithMac(mac));
    const std::vector<Sent> frames = Frames();
    Status error;
    CHECK_EQ(Deliver(&peer, Joined(Sealed(&peer, frames)), frames, &error), kFrames);
    CHECK(error.message().find("closed its connection") != std::string::npos);
  }
}

TEST(every_flipped_bit_is_noticed) {
  std::mt19937 random(1);
  const std::vector<Sent> frames = Frames();
  for (int i = 0; i < 3000; ++i) {
    TcpPeer peer(WithMac(i % 2 == 0 ? "control" : "all"));
    std::vector<std::string> wire = Sealed(&peer, frames);
    // Half of the flips into the headers, which are a small part of the bytes.
    const size_t which = random() % kFrames;
    std::string& frame = wire[which];
    const size_t room = i % 4 < 2 ? std::min(frame.size(), sizeof(WireHeader)) : frame.size();
    const size_t at = random() % room;
    frame[at] = static_cast<char>(frame[at] ^ 1 << random() % 8);
    Status error;
    CHECK_EQ(Deliver(&peer, Joined(wire), frames, &error), which);
    CHECK_EQ_IN(Noticed(error), true, error.message());
  }
}

TEST(every_single_bit_of_a_header_counts) {
  const std::vector<Sent> frames = Frames();
  for (size_t bit = 0; bit < 8 * sizeof(WireHeader); ++bit) {
    TcpPeer peer;
    std::vector<std::string> wire = Sealed(&peer, frames);
    wire[1][bit / 8] = static_cast<char>(wire[1][bit / 8] ^ 1 << bit % 8);
    Status error;
    CHECK_EQ(Deliver(&peer, Joined(wire), frames, &error), size_t{1});
    CHECK_EQ_IN(Noticed(error), true, std::to_string(bit) + ": " + error.message());
  }
}

TEST(repeated_dropped_and_reordered_frames_are_noticed) {
  std::mt19937 random(2);
  const std::vector<Sent> frames = Frames();
  for (int i = 0; i < 600; ++i) {
    TcpPeer peer(WithMac(i % 2 == 0 ? "control" : "all"));
    std::vector<std::string> wire = Sealed(&peer, frames);
    const size_t at = random() % (kFrames - 3);
    const auto place = wire.begin() + static_cast<std::ptrdiff_t>(at);
    switch (i % 3) {
      case 0:
        wire.insert(place, wire[at]);
        break;
      case 1:
        wire.erase(place);  // a later frame of the same lane shows it
        break;
      default:
        std::swap(wire[at], wire[at + 3]);  // of the same lane
    }
    Status error;
    CHECK(Deliver(&peer, Joined(wire), frames, &error) < kFrames);
    CHECK_EQ_IN(Noticed(error), true, error.message());
  }
}

TEST(frames_of_another_connection_or_direction_are_noticed) {
  const std::vector<Sent> frames = Frames();
  TcpPeer old;
  const std::string recorded = Joined(Sealed(&old, frames));
  TcpPeer peer;
  Status error;
  CHECK_EQ(Deliver(&peer, recorded, frames, &error), size_t{0});
  CHECK(Noticed(error));
  // Bytes that the link itself sent, sent back to it.
  TcpPeer mirror;
  CHECK(mirror.link->BeginSend(Lane::kControl, 8).data() != nullptr);
  mirror.link->CommitSend(Lane::kControl, FrameHeader());
  bool moved = false;
  CHECK_OK(mirror.link->Pump(&moved));
  char bytes[sizeof(WireHeader) + 8];
  CHECK(::recv(mirror.socket.get(), bytes, sizeof(bytes), MSG_WAITALL) == sizeof(bytes));
  CHECK_EQ(Deliver(&mirror, std::string(bytes, sizeof(bytes)), frames, &error), size_t{0});
  CHECK(Noticed(error));
}

TEST(a_stream_cut_anywhere_delivers_whole_frames_only) {
  const std::vector<Sent> frames = Frames();
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    TcpPeer peer;
    const std::vector<std::string> wire = Sealed(&peer, frames);
    const std::string all = Joined(wire);
    const size_t cut = random() % all.size();
    size_t whole = 0;
    for (size_t end = 0; whole < kFrames && end + wire[whole].size() <= cut; ++whole) {
      end += wire[whole].size();
    }
    Status error;
    CHECK_EQ(Deliver(&peer, all.substr(0, cut), frames, &error), whole);
    CHECK(error.message().find("closed its connection") != std::string::npos);
  }
}

// CRC-32C alone cannot notice this: bytes and checksum changed together, by somebody with no key.
TEST(a_payload_and_its_checksum_changed_together_are_noticed) {
  TcpPeer peer;
  FrameHeader header;
  header.lane = 1;
  const std::string payload(200, 'x');
  std::string frame = peer.Frame(header, AsBytes(payload));
  TcpPeer other;
  const std::string forged = other.Frame(header, AsBytes(std::string(200, 'y')));
  frame.replace(sizeof(FrameHeader), kMacBytes, forged, sizeof(FrameHeader), kMacBytes);
  frame.replace(sizeof(WireHeader), std::string::npos, forged, sizeof(WireHeader));
  peer.Write(frame.data(), frame.size());
  CheckRefused(peer.link.get(), 0, "not authentic");
}

TEST(ends_with_other_ideas_of_what_is_authenticated_do_not_talk) {
  TcpPeer peer(WithMac("all"));
  peer.sealer = FrameMac(peer.SendKey(), false);
  FrameHeader header;
  header.lane = 1;
  const std::string frame = peer.Frame(header, AsBytes(std::string(10, 'x')));
  peer.Write(frame.data(), frame.size());
  CheckRefused(peer.link.get(), 0, "payload");
}

TEST(a_link_without_a_key_is_refused) {
  for (size_t bytes : {0, 32, 63, 65}) {
    LinkEnds end_a;
    LinkEnds end_b;
    CHECK_OK(FindTransport("tcp")->make_pair(0, 1, -1, -1, SmallConfig(), &end_a, &end_b));
    end_a.key.resize(bytes);
    const auto link = FindTransport("tcp")->make(end_a, SmallConfig());
    CHECK_EQ(static_cast<int>(link.status().code()), static_cast<int>(Code::kInvalidArgument));
    CHECK(link.status().message().find("session keys of 64 bytes") != std::string::npos);
    ::close(end_b.socket_fd);
  }
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
