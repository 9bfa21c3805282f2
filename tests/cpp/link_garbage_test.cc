// Garbage from a broken peer, and ends of links from a broken set-up: every case is an error that
// names the peer, never a crash, never a wrong frame.
#include <dirent.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "link_pair.h"
#include "tcp_peer.h"
#include "transport/shm_lane.h"

namespace tfdist {
namespace {

constexpr uint64_t kMark = 0x7fd15700feedbeef;  // a ticket that memory is searched for

// ---- shm: rank 0 is sound, rank 1 sees memory that somebody scribbled on ----

struct ShmPair {
  ShmPair() : doorbell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    const Config config = SmallConfig();
    LinkEnds end_a;
    LinkEnds end_b;
    CHECK_OK(FindTransport("shm")->make_pair(0, 1, doorbell.get(), doorbell.get(), config, &end_a,
                                             &end_b));
    bytes = ShmBytes(config);
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, end_a.memory_fd, 0);
    CHECK(mapped != MAP_FAILED);
    memory = static_cast<uint8_t*>(mapped);
    socket_a.reset(::dup(end_a.socket_fd));
    a = MakeLink("shm", end_a);
    b = MakeLink("shm", end_b);
  }
  ~ShmPair() { ::munmap(memory, bytes); }

  void Send(Lane lane) {
    CHECK(a->BeginSend(lane, 16).data() != nullptr);
    FrameHeader header;
    header.ticket = kMark;
    a->CommitSend(lane, header);
  }
  // The `index`-th entry that carries the mark.
  ShmEntry* Find(int index = 0) {
    for (size_t at = 0; at + sizeof(ShmEntry) <= bytes; at += kCacheLine) {
      auto* entry = reinterpret_cast<ShmEntry*>(memory + at);
      if (entry->header.ticket == kMark && index-- == 0) return entry;
    }
    throw check::Failure("no entry carries the mark");
  }

  UniqueFd doorbell;
  UniqueFd socket_a;
  uint8_t* memory = nullptr;
  size_t bytes = 0;
  std::unique_ptr<Link> a;
  std::unique_ptr<Link> b;
};

TEST(shm_entries_that_break_the_protocol_are_refused) {
  struct Case {
    Lane lane;
    void (*break_it)(ShmEntry*);
    const char* what;
  };
  const Case cases[] = {
      {Lane::kData, [](ShmEntry* e) { e->header.lane = 0; }, "lane 0, expected 1"},
      {Lane::kControl, [](ShmEntry* e) { e->header.lane = 200; }, "lane 200, expected 0"},
      {Lane::kData, [](ShmEntry* e) { e->header.payload_bytes = 4097; }, "at most 4096"},
      {Lane::kControl, [](ShmEntry* e) { e->header.payload_bytes = ~0u; }, "at most 480"},
      {Lane::kData, [](ShmEntry* e) { e->slot = 4; }, "a slot in use"},
      {Lane::kData, [](ShmEntry* e) { e->slot = ~0u; }, "a slot in use"},
      {Lane::kData, [](ShmEntry* e) { e->handle = 4; }, "a slot in use"},
      {Lane::kControl, [](ShmEntry* e) { e->handle = ~0u; }, "a slot in use"},
      {Lane::kData, [](ShmEntry* e) { e->laps = 2; }, "out of order"},
      {Lane::kControl, [](ShmEntry* e) { e->laps = ~uint64_t{0}; }, "out of order"},
  };
  for (const Case& c : cases) {
    ShmPair pair;
    pair.Send(c.lane);
    c.break_it(pair.Find());
    CheckRefused(pair.b.get(), 0, c.what);
  }
}

TEST(shm_slot_that_is_still_held_is_refused) {
  ShmPair pair;
  pair.Send(Lane::kData);
  InFrame frame;
  CHECK(pair.b->Poll(Lane::kData, &frame));
  pair.Send(Lane::kData);
  pair.Find(1)->handle = pair.Find(0)->handle;
  CheckRefused(pair.b.get(), 0, "a slot in use");
}

TEST(shm_slot_that_comes_back_unasked_is_refused) {
  ShmPair pair;
  pair.Send(Lane::kData);
  // The counts of returned slots lie behind the four entries.
  auto* returned = reinterpret_cast<ShmReturned*>(pair.Find() + 4);
  returned[0].count = 17;
  while (pair.a->BeginSend(Lane::kData, 0).data() != nullptr) {
    pair.a->CommitSend(Lane::kData, FrameHeader());
  }
  CheckRefused(pair.a.get(), 1, "a slot came back");
}

TEST(shm_bytes_on_the_socket_are_refused) {
  ShmPair pair;
  CHECK(::write(pair.socket_a.get(), "x", 1) == 1);
  CheckRefused(pair.b.get(), 0, "bytes on the socket");
}

TEST(shm_memory_of_another_size_is_refused) {
  UniqueFd doorbell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  LinkEnds end_a;
  LinkEnds end_b;
  Config other = SmallConfig();
  other.shm_slots = 5;
  CHECK_OK(
      FindTransport("shm")->make_pair(0, 1, doorbell.get(), doorbell.get(), other, &end_a, &end_b));
  for (const LinkEnds& end : {end_a, end_b}) {
    auto link = FindTransport("shm")->make(end, SmallConfig());
    CHECK_EQ(static_cast<int>(link.status().code()), static_cast<int>(Code::kInvalidArgument));
    CHECK(link.status().message().find("TFDIST_SHM_SLOTS") != std::string::npos);
  }
}

TEST(shm_memory_cannot_be_shrunk_under_a_link) {
  UniqueFd doorbell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  LinkEnds end_a;
  LinkEnds end_b;
  CHECK_OK(FindTransport("shm")->make_pair(0, 1, doorbell.get(), doorbell.get(), SmallConfig(),
                                           &end_a, &end_b));
  UniqueFd memory(::dup(end_a.memory_fd));
  auto a = MakeLink("shm", end_a);
  auto b = MakeLink("shm", end_b);
  CHECK(::ftruncate(memory.get(), 0) != 0);
}

TEST(shm_memory_that_its_sender_could_shrink_is_refused) {
  struct Case {
    const char* name;
    int fd;
  };
  const Config config = SmallConfig();
  // A file that cannot be sealed: of /tmp, or a memory file made without permission to seal it.
  char path[] = "/tmp/tfdist-test-XXXXXX";
  const Case cases[] = {{"file", ::mkstemp(path)},
                        {"memfd", ::memfd_create("tfdist-test", MFD_CLOEXEC)}};
  ::unlink(path);
  for (const Case& c : cases) {
    CHECK(c.fd >= 0 && ::ftruncate(c.fd, static_cast<off_t>(ShmBytes(config))) == 0);
    LinkEnds ends;
    int sockets[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    UniqueFd other(sockets[1]);
    ends.socket_fd = sockets[0];
    ends.memory_fd = c.fd;
    ends.peer_doorbell_fd = ::eventfd(0, EFD_CLOEXEC);
    const auto link = FindTransport("shm")->make(ends, config);
    CHECK_EQ_IN(static_cast<int>(link.status().code()), static_cast<int>(Code::kInvalidArgument),
                c.name);
    CHECK(link.status().message().find("seals") != std::string::npos);
  }
}

// ---- tcp: the test is rank 0, knows the key, and writes bytes ----

TEST(tcp_headers_that_break_the_protocol_are_refused) {
  struct Case {
    void (*break_it)(FrameHeader*);
    const char* what;
  };
  const Case cases[] = {
      {[](FrameHeader* h) { h->lane = 2; }, "not authentic"},
      {[](FrameHeader* h) { h->lane = 255; }, "not authentic"},
      {[](FrameHeader* h) { h->payload_bytes = 481; }, "at most 480"},
      {[](FrameHeader* h) { h->lane = 1, h->payload_bytes = 4097; }, "at most 4096"},
      {[](FrameHeader* h) { h->lane = 1, h->payload_bytes = ~0u; }, "at most 4096"},
  };
  for (const Case& c : cases) {
    TcpPeer peer;
    WireHeader wire = peer.Sealed(FrameHeader(), {});
    c.break_it(&wire.frame);
    peer.sealer = FrameMac(peer.SendKey(), false);  // as the first frame, with the broken fields
    if (wire.frame.lane < kLanes) peer.sealer.Seal(&wire, {});
    peer.Write(&wire, sizeof(wire));
    CheckRefused(peer.link.get(), 0, c.what);
  }
}

TEST(tcp_frames_before_garbage_are_delivered) {
  TcpPeer peer;
  WireHeader wires[3] = {};
  for (uint64_t ticket : {1, 2}) {
    FrameHeader header;
    header.ticket = ticket;
    wires[ticket - 1] = peer.Sealed(header, {});
  }
  peer.Write(wires, sizeof(wires));
  bool moved = false;
  const int64_t deadline = NowUs() + 5000000;
  while (peer.link->Pump(&moved).ok()) CHECK(NowUs() < deadline);
  for (uint64_t ticket : {1, 2}) {
    InFrame frame;
    CHECK(peer.link->Poll(Lane::kControl, &frame));
    CHECK_EQ(frame.header.ticket, ticket);
  }
  CheckRefused(peer.link.get(), 0, "not authentic");
}

TEST(tcp_frame_that_comes_byte_by_byte) {
  TcpPeer peer;
  uint8_t bytes[sizeof(WireHeader) + 100];
  for (size_t i = sizeof(WireHeader); i < sizeof(bytes); ++i) bytes[i] = static_cast<uint8_t>(i);
  InFrame frame;
  for (int round = 0; round < 3; ++round) {
    const WireHeader wire = peer.Sealed(FrameHeader(), {bytes + sizeof(WireHeader), 100});
    std::memcpy(bytes, &wire, sizeof(wire));
    for (size_t i = 0; i < sizeof(bytes); ++i) {
      CHECK(!peer.link->Poll(Lane::kControl, &frame));
      peer.Write(&bytes[i], 1);
      bool moved = false;
      const int64_t deadline = NowUs() + 5000000;
      while (!moved) {
        CHECK_OK(peer.link->Pump(&moved));
        CHECK(NowUs() < deadline);
      }
    }
    CHECK(peer.link->Poll(Lane::kControl, &frame));
    CHECK(std::memcmp(frame.payload.data(), bytes + sizeof(wire), 100) == 0);
    peer.link->Release(Lane::kControl, frame);
  }
}

TEST(tcp_control_goes_before_data_that_waits) {
  TcpPeer peer;
  for (Lane lane : {Lane::kData, Lane::kData, Lane::kControl}) {
    CHECK(peer.link->BeginSend(lane, 8).data() != nullptr);
    peer.link->CommitSend(lane, FrameHeader());
  }
  bool moved = false;
  CHECK_OK(peer.link->Pump(&moved));
  CHECK(peer.link->Flushed());
  for (uint8_t lane : {0, 1, 1}) {
    uint8_t bytes[sizeof(WireHeader) + 8];
    CHECK(::recv(peer.socket.get(), bytes, sizeof(bytes), MSG_WAITALL) == sizeof(bytes));
    WireHeader wire;
    std::memcpy(&wire, bytes, sizeof(wire));
    CHECK_EQ(wire.frame.lane, lane);
    CHECK_EQ(wire.frame.payload_bytes, 8u);
  }
}

TEST(tcp_half_a_frame_and_the_end_is_a_loss) {
  TcpPeer peer;
  const uint8_t payload[100] = {};
  const WireHeader wire = peer.Sealed(FrameHeader(), {payload, sizeof(payload)});
  peer.Write(&wire, sizeof(wire));
  peer.Write("half", 4);
  peer.socket.reset();
  CheckRefused(peer.link.get(), 0, "closed its connection");
}

// ---- descriptors ----

size_t OpenDescriptors() {
  size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  CHECK(folder != nullptr);
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

TEST(links_close_what_they_own_and_nothing_else) {
  UniqueFd doorbell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const size_t before = OpenDescriptors();
  for (const TransportEntry& entry : Transports()) {
    LinkEnds end_a;
    LinkEnds end_b;
    CHECK_OK(entry.make_pair(0, 1, doorbell.get(), doorbell.get(), SmallConfig(), &end_a, &end_b));
    {
      auto a = MakeLink(entry.name, end_a);
      auto b = MakeLink(entry.name, end_b);
      for (int fd : {a->fd(), b->fd()}) {
        if (fd < 0) continue;
        CHECK((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        CHECK((::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
      }
    }
    end_a.pipe.reset();
    CHECK_EQ_IN(OpenDescriptors(), before, entry.name);
    CHECK(::fcntl(doorbell.get(), F_GETFD) >= 0);
  }
}

TEST(links_close_what_they_own_when_they_fail) {
  const size_t before = OpenDescriptors();
  for (const char* name : {"inproc", "shm", "tcp"}) {
    LinkEnds ends;
    ends.socket_fd = ::eventfd(0, EFD_CLOEXEC);  // not a socket
    ends.memory_fd = std::string(name) == "shm" ? ::eventfd(0, EFD_CLOEXEC) : -1;
    ends.peer_doorbell_fd = std::string(name) == "tcp" ? -1 : ::eventfd(0, EFD_CLOEXEC);
    CHECK(!FindTransport(name)->make(ends, SmallConfig()).ok());
    CHECK_EQ_IN(OpenDescriptors(), before, name);
  }
}

size_t MappedLinks() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:tfdist-link") != std::string::npos) ++count;
  }
  return count;
}

// Two processes that play the same end would hand out the same slots.
TEST(forked_child_has_no_shared_memory) {
  const size_t before = MappedLinks();
  UniqueFd doorbell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  std::unique_ptr<Link> a;
  std::unique_ptr<Link> b;
  {
    LinkEnds end_a;
    LinkEnds end_b;
    CHECK_OK(FindTransport("shm")->make_pair(0, 1, doorbell.get(), doorbell.get(), SmallConfig(),
                                             &end_a, &end_b));
    a = MakeLink("shm", end_a);
    b = MakeLink("shm", end_b);
  }
  CHECK_EQ(MappedLinks(), before + 6);  // of each end: its half of the link, two windows
  const pid_t child = ::fork();
  if (child == 0) ::_exit(static_cast<int>(MappedLinks()));
  int result = -1;
  CHECK(::waitpid(child, &result, 0) == child);
  CHECK_EQ(result, 0);
  a.reset();
  b.reset();
  CHECK_EQ(MappedLinks(), before);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
