// A link whose data are messages: its own behaviour. That of all links: link_conformance_test.cc.
#include "transport/message_link.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_messages.h"
#include "link_pair.h"

namespace tfdist {
namespace {

// One end is a link; the other one is the library, and the link's own peer over TCP.
struct Half {
  Half() {
    LinkEnds own;
    LinkEnds other;
    const TransportEntry& tcp = *FindTransport("tcp");
    CHECK_OK(tcp.make_pair(3, 5, -1, -1, SmallConfig(), &own, &other));
    auto made = tcp.make(own, SmallConfig());
    auto peer_made = tcp.make(other, SmallConfig());
    CHECK_OK(made.status());
    CHECK_OK(peer_made.status());
    peer = std::move(peer_made.value());
    auto with_messages =
        MakeMessageLink(std::move(made.value()), messages.TableOf(true), SmallConfig());
    CHECK_OK(with_messages.status());
    link = std::move(with_messages.value());
  }

  void Send(const std::vector<uint8_t>& bytes) {
    uint64_t request = 0;
    const tfdist_messages table = messages.TableOf(false);
    CHECK_EQ(table.send(table.context, 3, bytes.data(), bytes.size(), &request), 0);
  }

  Status Error() {
    InFrame frame;
    bool moved = false;
    CHECK(!link->Poll(Lane::kData, &frame));
    return link->Pump(&moved);
  }

  FakeMessages messages;
  std::unique_ptr<Link> peer;
  std::unique_ptr<Link> link;
};

std::vector<uint8_t> Message(FrameHeader header, size_t payload_bytes) {
  std::vector<uint8_t> out(sizeof(header) + payload_bytes);
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

FrameHeader DataHeader(uint32_t payload_bytes) {
  FrameHeader header;
  header.lane = static_cast<uint8_t>(Lane::kData);
  header.payload_bytes = payload_bytes;
  return header;
}

TEST(a_message_that_is_no_frame_is_an_error) {
  FrameHeader control = DataHeader(0);
  control.lane = static_cast<uint8_t>(Lane::kControl);
  for (const auto& message :
       {std::vector<uint8_t>(31), Message(DataHeader(8), 7), Message(DataHeader(8), 9),
        Message(DataHeader(4097), 4097), Message(control, 0)}) {
    Half half;
    half.Send(message);
    const Status status = half.Error();
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kAborted));
    CHECK(status.message().find("rank 5") != std::string::npos);
  }
}

TEST(an_error_of_the_library_is_the_loss_of_the_peer) {
  Half half;
  half.messages.Break("MPI_Test: the network is down");
  const Status status = half.Error();
  CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kAborted));
  CHECK(status.message().find("rank 5") != std::string::npos);
  CHECK(status.message().find("the network is down") != std::string::npos);
}

TEST(a_send_that_the_peer_does_not_take_outlives_the_link) {
  Half half;
  CHECK(TrySend(half.link.get(), Lane::kData, 4096, 1));
  CHECK(!half.link->Flushed());
  half.link.reset();
  std::vector<uint8_t> memory(sizeof(FrameHeader) + 4096);
  uint64_t request = 0;
  const tfdist_messages table = half.messages.TableOf(false);
  CHECK_EQ(table.receive(table.context, 3, memory.data(), memory.size(), &request), 0);
  size_t bytes = 0;
  CHECK_EQ(table.test(table.context, &request, &bytes), 1);
  CHECK_EQ(bytes, memory.size());
  CHECK_EQ(memory[sizeof(FrameHeader) + 5], Pattern(1, 5));
}

TEST(any_number_of_messages_is_taken_before_they_are_polled) {
  Half half;
  bool moved = false;
  for (int i = 0; i < 100; ++i) {
    half.Send(Message(DataHeader(8), 8));
    CHECK_OK(half.link->Pump(&moved));
  }
  InFrame frame;
  for (int i = 0; i < 100; ++i) {
    CHECK(half.link->Poll(Lane::kData, &frame));
    half.link->Release(Lane::kData, frame);
  }
  CHECK(!half.link->Poll(Lane::kData, &frame));
}

// An idle rank sleeps until a control frame comes, unless there is still something to take.
TEST(an_idle_rank_takes_what_a_peer_sends_before_it_leaves) {
  Half half;
  const auto watched = [&] {
    std::vector<Watched> out;
    half.link->Watch(&out);
    return out.size();
  };
  half.link->SetWakeMode(WakeMode::kIdle);
  CHECK_EQ(watched(), size_t{1});
  half.link->PeerLeaves();
  CHECK_EQ(watched(), size_t{2});
}

TEST(a_message_that_comes_after_the_end_of_the_control_link_is_read) {
  Half half;
  half.peer.reset();
  bool moved = false;
  CHECK_OK(half.link->Pump(&moved));
  half.Send(Message(DataHeader(8), 8));
  InFrame frame;
  CHECK(half.link->Poll(Lane::kData, &frame));
  CHECK_EQ(frame.payload.size(), size_t{8});
  half.link->Release(Lane::kData, frame);
  const int64_t deadline_us = NowUs() + kSecondUs;
  while (half.link->Pump(&moved).ok()) CHECK(NowUs() < deadline_us);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
