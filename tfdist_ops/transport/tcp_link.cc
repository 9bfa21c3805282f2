// tcp: two ranks over one connected stream socket, or several (striped_link.h).
//
// Sending: data goes from the caller's memory into the kernel at once (SendPieces) while nothing
// waits; what the kernel does not take is copied. Frames that wait queue per lane in pooled buffers
// and Pump writes them, control before data, never one frame inside another. Receiving: Pump reads
// straight into the buffer of the frame at hand, and what comes after it into a small staging area,
// from which headers are taken; so a long frame costs one system call and one copy of at most
// kStagingBytes.
//
// Every frame is authenticated and counted (frame_mac.h): sealed when it is committed, while its
// payload is still in the cache; its header is opened before a field of it is used, its payload
// before it is delivered. A link without a key is refused.
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <deque>
#include <utility>

#include "base/deadline.h"
#include "transport/frame_mac.h"
#include "transport/frame_pool.h"
#include "transport/link_socket.h"
#include "transport/link_support.h"
#include "transport/striped_link.h"
#include "transport/tcp_pair.h"

namespace tfdist {
namespace {

constexpr size_t kMostQueued[kLanes] = {1024, 8};  // frames waiting for the kernel, per lane
constexpr size_t kMaxHeld = size_t{1} << 20;
constexpr size_t kStagingBytes = 4096;
constexpr size_t kMostParts = 16;                 // frames, or pieces of one, in one sendmsg
constexpr size_t kPumpBytes = size_t{4} << 20;    // at most this much of either way in one Pump
constexpr size_t kDrainBytes = size_t{16} << 20;  // see ~TcpLink
constexpr int kSocketBufferBytes = 4 << 20;
// Most data that the kernel may hold unsent, because a control frame has to wait for it.
constexpr int kMostUnsentBytes = 512 << 10;
// How often a rank that is awake looks into an empty socket, which costs a system call. In the
// middle of a frame the kernel wakes it when much of the rest has come (SO_RCVLOWAT).
constexpr int64_t kLookUs = 5;
// In units of peer_timeout_s: longer than the engine waits, because its error says more.
constexpr double kSilences = 5;
constexpr int64_t kLookInFrameUs = 50;
constexpr size_t kWorthWakingBytes = 64 << 10;

struct OutFrame {
  FrameBuffer buffer;
  size_t bytes = 0;  // with the header
};

struct Arrived {
  WireHeader wire;
  FrameBuffer buffer;

  const FrameHeader& header() const { return wire.frame; }
};

// With several sockets, half as much for each: at the end, the slowest one is waited for.
int MostUnsent(const Config& config, size_t sockets) {
  const int most = std::max<int>(kMostUnsentBytes, 4 * static_cast<int>(config.segment_bytes));
  return sockets > 1 ? most / 2 : most;
}

// The key of what one end sends: the initiator's is the first of the link's two.
ByteSpan SendKey(const std::vector<uint8_t>& key, bool initiator) {
  return {key.data() + (initiator ? 0 : kDirectionKeyBytes), kDirectionKeyBytes};
}

class TcpLink : public LinkBase {
 public:
  TcpLink(const LinkEnds& ends, const std::vector<uint8_t>& key, const Config& config,
          UniqueFd socket)
      : LinkBase(ends, config, "tcp"),
        socket_(std::move(socket)),
        most_unsent_(MostUnsent(config, ends.more_sockets.size() + 1)),
        silence_s_(static_cast<int>(std::ceil(kSilences * config.peer_timeout_s))),
        sealer_(SendKey(key, ends.initiator), config.tcp_mac == "all"),
        opener_(SendKey(key, !ends.initiator), config.tcp_mac == "all"),
        pools_{FramePool(capacity(Lane::kControl)), FramePool(capacity(Lane::kData))} {}

  // Closing a socket with unread bytes makes the kernel reset the connection and drop unsent bytes,
  // which may tell the peer why this rank leaves. So the unread bytes are read first.
  ~TcpLink() override {
    ::shutdown(socket_.get(), SHUT_WR);
    for (size_t drained = 0; drained < kDrainBytes;) {
      const ssize_t n = ::recv(socket_.get(), staging_, sizeof(staging_), MSG_DONTWAIT);
      if (n <= 0) break;
      drained += static_cast<size_t>(n);
    }
  }

  Status Prepare() {
    TFDIST_RETURN_IF_ERROR(PrepareFd(socket_.get()));
    const int one = 1;
    if (::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) != 0) {
      return SystemError("TCP_NODELAY");
    }
    (void)::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most_unsent_,
                       sizeof(most_unsent_));
    // Of several sockets, only one carries heartbeats. For the others, the kernel must detect the
    // loss of the peer, and keep idle connections alive in network devices on the way.
    const int interval_s = std::max(silence_s_ / 4, 1);
    const int silence_ms = silence_s_ * 1000;
    for (const auto& [option, value] :
         {std::pair(TCP_KEEPIDLE, &interval_s), std::pair(TCP_KEEPINTVL, &interval_s),
          std::pair(TCP_USER_TIMEOUT, &silence_ms)}) {
      if (::setsockopt(socket_.get(), IPPROTO_TCP, option, value, sizeof(*value)) != 0) {
        return SystemError("an option of TCP");
      }
    }
    if (::setsockopt(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one)) != 0) {
      return SystemError("SO_KEEPALIVE");
    }
    // The kernel caps these at its own limits; less is slower, not wrong.
    const int bytes = kSocketBufferBytes;
    (void)::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    (void)::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
    return Status();
  }

  MutableByteSpan BeginSend(Lane lane, size_t bytes) override {
    if (!Open(lane, bytes) || out_[Index(lane)].size() >= kMostQueued[Index(lane)]) return {};
    FrameBuffer& open = open_[Index(lane)];
    if (!open) open = pools_[Index(lane)].Take();
    if (!open) {
      Fail(TFDIST_INTERNAL("out of memory for a frame"));
      return {};
    }
    return {open.payload(), bytes};
  }

  void CommitSend(Lane lane, const FrameHeader& header) override {
    WireHeader wire{};
    wire.frame = header;
    Close(lane, &wire.frame);
    FrameBuffer buffer = std::move(open_[Index(lane)]);
    const size_t bytes = wire.frame.payload_bytes;
    sealer_.Seal(&wire, {buffer.payload(), bytes});
    std::memcpy(buffer.wire(), &wire, sizeof(wire));
    out_[Index(lane)].push_back({std::move(buffer), sizeof(wire) + bytes});
  }

  size_t MostPieces() const override { return kMostParts - 1; }

  bool SendPieces(const FrameHeader& header, Pieces payload) override {
    size_t bytes = 0;
    for (const ByteSpan& piece : payload) bytes += piece.size();
    bool moved = false;
    Write(&moved);
    refused_ = !Flushed() || !KernelHasRoom(bytes);
    if (refused_ || !Open(Lane::kData, bytes)) return false;
    WireHeader wire{};
    wire.frame = header;
    Close(Lane::kData, &wire.frame);
    sealer_.SealPieces(&wire, payload);
    iovec parts[kMostParts] = {{&wire, sizeof(wire)}};
    size_t count = 1;
    // sendmsg only reads.
    for (const ByteSpan& piece : payload) {
      parts[count++] = {const_cast<uint8_t*>(piece.data()), piece.size()};
    }
    const size_t sent = write_failed_ ? 0 : Send(parts, count);
    if (sent < sizeof(wire) + bytes) Keep(parts, count, sent);
    return true;
  }

  bool Poll(Lane lane, InFrame* frame) override {
    std::deque<Arrived>& arrived = arrived_[Index(lane)];
    if (arrived.empty()) return false;
    frame->header = arrived.front().header();
    frame->payload = {arrived.front().buffer.payload(), frame->header.payload_bytes};
    frame->token = held_[Index(lane)].Hold(std::move(arrived.front().buffer));
    arrived.pop_front();
    return true;
  }

  void Release(Lane lane, const InFrame& frame) override {
    pools_[Index(lane)].Give(held_[Index(lane)].Drop(frame.token));
  }

  // A broken connection is reported only when all that arrived is read: what the peer said before
  // it left may be the reason.
  Status Pump(bool* moved) override {
    if (!error().ok()) return error();
    refused_ = false;  // whoever still wants to send will say so
    Write(moved);
    if (awakened_ || NowUs() >= next_look_us_) Read(moved);
    if (!lost_.ok() && (read_ended_ || read_dry_)) Fail(lost_);
    return error();
  }

  int fd() const override { return socket_.get(); }
  bool WantsWrite() const override { return !write_failed_ && (!Flushed() || refused_); }
  void SetWakeMode(WakeMode mode) override { awakened_ = mode != WakeMode::kAsleep; }
  bool Flushed() const override { return out_[0].empty() && out_[1].empty(); }
  size_t MaxHeld() const override { return kMaxHeld; }

 private:
  // The frames to write next, in order: the rest of one begun, then control, then data.
  size_t Gather(iovec* parts) const {
    size_t count = 0;
    auto add = [&](const OutFrame& frame, size_t skip) {
      parts[count++] = {frame.buffer.wire() + skip, frame.bytes - skip};
    };
    if (written_ > 0) add(out_[writing_].front(), written_);
    for (int lane = 0; lane < kLanes; ++lane) {
      const size_t begin = written_ > 0 && lane == writing_ ? 1 : 0;
      for (size_t i = begin; i < out_[lane].size() && count < kMostParts; ++i) {
        add(out_[lane][i], 0);
      }
    }
    return count;
  }

  // Takes `bytes` that the kernel accepted off the queues, in the order of Gather.
  void Written(size_t bytes) {
    while (bytes > 0) {
      if (written_ == 0) writing_ = out_[0].empty() ? 1 : 0;
      OutFrame& frame = out_[writing_].front();
      const size_t n = std::min(bytes, frame.bytes - written_);
      bytes -= n;
      written_ += n;
      if (written_ < frame.bytes) return;
      pools_[writing_].Give(std::move(frame.buffer));
      out_[writing_].pop_front();
      written_ = 0;
    }
  }

  // Whether the kernel can take `bytes` more without delaying a control frame too long. A frame
  // that is refused here need not be copied.
  bool KernelHasRoom(size_t bytes) const {
    int unsent = 0;
    if (::ioctl(socket_.get(), SIOCOUTQNSD, &unsent) != 0 || unsent <= 0) return true;
    return static_cast<size_t>(unsent) + bytes <= static_cast<size_t>(most_unsent_);
  }

  // How many bytes the kernel took; 0: none now, or the connection is broken. Each call ends a
  // record (MSG_EOR). Otherwise the kernel would hold back the last packet until more data follows
  // or earlier packets are acknowledged (net.ipv4.tcp_autocorking): on a line with traffic shaping,
  // for the 40 ms after which the other end acknowledges a lone packet.
  size_t Send(iovec* parts, size_t count) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    while (true) {
      const ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT | MSG_EOR);
      if (n >= 0) return static_cast<size_t>(n);
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        write_failed_ = true;
        Lose(errno);
      }
      return 0;
    }
  }

  // Queues the data frame in `parts`, of which the kernel has `sent` bytes, as the only one.
  void Keep(const iovec* parts, size_t count, size_t sent) {
    OutFrame frame{pools_[Index(Lane::kData)].Take(), 0};
    if (!frame.buffer) return Fail(TFDIST_INTERNAL("out of memory for a frame"));
    for (size_t i = 0; i < count; ++i) {
      const size_t skip = std::min(parts[i].iov_len, sent - std::min(sent, frame.bytes));
      std::memcpy(frame.buffer.wire() + frame.bytes + skip,
                  static_cast<const uint8_t*>(parts[i].iov_base) + skip, parts[i].iov_len - skip);
      frame.bytes += parts[i].iov_len;
    }
    out_[Index(Lane::kData)].push_back(std::move(frame));
    writing_ = Index(Lane::kData);
    written_ = sent;
  }

  void Write(bool* moved) {
    for (size_t total = 0; !write_failed_ && !Flushed() && total < kPumpBytes;) {
      iovec parts[kMostParts];
      const size_t n = Send(parts, Gather(parts));
      if (n == 0) return;
      Written(n);
      total += n;
      *moved = true;
    }
  }

  // One recvmsg at a time: the rest of the payload at hand, then staging.
  void Read(bool* moved) {
    read_dry_ = false;
    for (size_t total = 0; !read_ended_ && error().ok() && total < kPumpBytes;) {
      const size_t missing = reading_.buffer ? reading_.header().payload_bytes - have_ : 0;
      iovec parts[2] = {{missing > 0 ? reading_.buffer.payload() + have_ : nullptr, missing},
                        {staging_ + staged_, sizeof(staging_) - staged_}};
      msghdr message{};
      message.msg_iov = missing > 0 ? parts : parts + 1;
      message.msg_iovlen = missing > 0 ? 2 : 1;
      const ssize_t n = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      read_dry_ = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
      if (read_dry_) return WaitForMore();
      if (n <= 0) {
        read_ended_ = true;
        Lose(n == 0 ? 0 : errno);
        return;
      }
      *moved = true;
      total += static_cast<size_t>(n);
      const size_t direct = std::min(static_cast<size_t>(n), missing);
      have_ += direct;
      staged_ += static_cast<size_t>(n) - direct;
      Parse();
      // A short read has emptied the socket: spare the call that would only say so.
      if (static_cast<size_t>(n) < missing + parts[1].iov_len) return WaitForMore();
    }
  }

  // The socket is empty.
  void WaitForMore() {
    const size_t missing = reading_.buffer ? reading_.header().payload_bytes - have_ : 0;
    awakened_ = false;
    next_look_us_ = NowUs() + (missing > 0 ? kLookInFrameUs : kLookUs);
    const int wanted = static_cast<int>(std::clamp<size_t>(missing, 1, kWorthWakingBytes));
    if (wanted == low_water_) return;
    low_water_ = wanted;
    (void)::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(wanted));
  }

  // Turns what is staged into frames; leaves less than a header of it.
  void Parse() {
    size_t used = 0;
    FinishFrame();
    while (error().ok() && !reading_.buffer && staged_ - used >= sizeof(WireHeader)) {
      std::memcpy(&reading_.wire, staging_ + used, sizeof(WireHeader));
      used += sizeof(WireHeader);
      if (!BeginFrame()) return;
      have_ = std::min(staged_ - used, static_cast<size_t>(reading_.header().payload_bytes));
      std::memcpy(reading_.buffer.payload(), staging_ + used, have_);
      used += have_;
      FinishFrame();
    }
    staged_ -= used;
    std::memmove(staging_, staging_ + used, staged_);
  }

  bool BeginFrame() {
    if (!opener_.OpenHeader(reading_.wire)) {
      Fail(PeerForged(peer(), "the header of a frame is not authentic"));
      return false;
    }
    const Lane lane = reading_.header().lane == 0 ? Lane::kControl : Lane::kData;
    const std::string fault = HeaderFault(reading_.header(), lane, capacity(lane));
    if (!fault.empty()) {
      Fail(PeerGarbage(peer(), fault));
      return false;
    }
    reading_.buffer = pools_[Index(lane)].Take();
    if (!reading_.buffer) Fail(TFDIST_INTERNAL("out of memory for a frame"));
    return error().ok();
  }

  void FinishFrame() {
    if (!reading_.buffer || have_ < reading_.header().payload_bytes) return;
    if (!opener_.OpenPayload(reading_.wire, {reading_.buffer.payload(), have_})) {
      Fail(PeerForged(peer(), "the payload of a frame is not what its header says"));
      return;
    }
    const int lane = reading_.header().lane;
    arrived_[lane].push_back(std::move(reading_));
    have_ = 0;
  }

  void Lose(int error_number) {
    if (!lost_.ok()) return;
    std::string cause = "closed its connection";
    if (error_number != 0) cause += std::string(" (") + std::strerror(error_number) + ")";
    lost_ = PeerLost(peer(), cause);
  }

  LinkSocket socket_;
  const int most_unsent_;
  const int silence_s_;  // after which the kernel takes the other host for lost
  FrameMac sealer_;
  FrameMac opener_;
  FramePool pools_[kLanes];

  std::deque<OutFrame> out_[kLanes];
  FrameBuffer open_[kLanes];
  int writing_ = 0;     // lane of the frame begun,
  size_t written_ = 0;  // of which so much is written; 0: none is begun
  bool write_failed_ = false;
  bool refused_ = false;  // SendPieces has, since the last Pump

  std::deque<Arrived> arrived_[kLanes];
  HeldFrames held_[kLanes];
  Arrived reading_;  // the frame at hand (no buffer: none),
  size_t have_ = 0;  // of whose payload so much is there
  uint8_t staging_[kStagingBytes];
  size_t staged_ = 0;
  bool awakened_ = true;      // since the last look at the socket
  int64_t next_look_us_ = 0;  // when to look again if it has not slept
  int low_water_ = 1;         // SO_RCVLOWAT
  bool read_ended_ = false;
  bool read_dry_ = false;  // the last Read saw an empty socket
  Status lost_;            // set when the connection broke, reported when all is read
};

StatusOr<std::unique_ptr<Link>> Make(const LinkEnds& ends, const Config& config) {
  OwnedFds owned(ends);
  std::vector<UniqueFd> sockets = std::move(owned.more_sockets);
  sockets.insert(sockets.begin(), std::move(owned.socket));
  const size_t key_bytes = sockets.size() * kLinkKeyBytes;
  if (ends.key.size() != key_bytes) {
    return Status(Code::kInvalidArgument, "a tcp link of " + std::to_string(sockets.size()) +
                                              " sockets needs session keys of " +
                                              std::to_string(key_bytes) + " bytes, got " +
                                              std::to_string(ends.key.size()) +
                                              "; its frames would not be authenticated");
  }
  Config own_config = config;
  if (sockets.size() > 1) own_config.segment_bytes += kStripeTrailerBytes;
  std::vector<std::unique_ptr<Link>> made;
  for (size_t i = 0; i < sockets.size(); ++i) {
    const auto key = ends.key.begin() + static_cast<ptrdiff_t>(i * kLinkKeyBytes);
    const std::vector<uint8_t> own_key(key, key + kLinkKeyBytes);
    auto link = std::make_unique<TcpLink>(ends, own_key, own_config, std::move(sockets[i]));
    TFDIST_RETURN_IF_ERROR(link->Prepare());
    made.push_back(std::move(link));
  }
  return made.size() == 1 ? std::move(made[0]) : MakeStripedLink(std::move(made));
}

}  // namespace

TransportEntry TcpTransport() { return {"tcp", Make, MakeTcpPair}; }

}  // namespace tfdist
