#include "tcp_peer.h"

#include <sys/socket.h>

#include <utility>

namespace tfdist {
namespace {

std::vector<LinkEnds> Ends(const Config& config) {
  std::vector<LinkEnds> made(2);
  CHECK_OK(FindTransport("tcp")->make_pair(0, 1, -1, -1, config, &made[0], &made[1]));
  return made;
}

}  // namespace

std::unique_ptr<Link> MakeLink(const char* transport, const LinkEnds& ends, const Config& config) {
  auto link = FindTransport(transport)->make(ends, config);
  CHECK_OK(link.status());
  return std::move(link.value());
}

void CheckRefused(Link* link, int peer, const std::string& what) {
  const int64_t deadline = NowUs() + 5 * kSecondUs;
  Status status;
  while (status.ok()) {
    InFrame frame;
    CHECK(!link->Poll(Lane::kControl, &frame));
    CHECK(!link->Poll(Lane::kData, &frame));
    bool moved = false;
    status = link->Pump(&moved);
    CHECK(NowUs() < deadline);
  }
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kAborted));
  CHECK(status.payload().find("\"rank\": " + std::to_string(peer)) != std::string::npos);
  const std::string begin = "rank " + std::to_string(peer) + " ";
  if (status.message().find(begin) != 0 || status.message().find(what) == std::string::npos) {
    check::Fail(__FILE__, __LINE__, "expected '" + what + "', got: " + status.message());
  }
}

TcpPeer::TcpPeer(const Config& config)
    : ends(Ends(config)), sealer(SendKey(), config.tcp_mac == "all") {
  socket.reset(ends[0].socket_fd);
  key = ends[0].key;
  link = MakeLink("tcp", ends[1], config);
}

void TcpPeer::Write(const void* data, size_t bytes) {
  CHECK(::send(socket.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
}

WireHeader TcpPeer::Sealed(FrameHeader header, ByteSpan payload) {
  WireHeader wire{};
  wire.frame = header;
  wire.frame.payload_bytes = static_cast<uint32_t>(payload.size());
  sealer.Seal(&wire, payload);
  return wire;
}

std::string TcpPeer::Frame(FrameHeader header, ByteSpan payload) {
  const WireHeader wire = Sealed(header, payload);
  std::string bytes(reinterpret_cast<const char*>(&wire), sizeof(wire));
  return bytes.append(reinterpret_cast<const char*>(payload.data()), payload.size());
}

}  // namespace tfdist
