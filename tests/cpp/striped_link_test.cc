// Links of several sockets: what the tests of all transports (link_conformance_test.cc) do not say.
#include "transport/striped_link.h"

#include <sys/socket.h>

#include <cstring>
#include <utility>
#include <vector>

#include "link_pair.h"

namespace tfdist {
namespace {

std::vector<int> Sockets(const Link& link) {
  std::vector<Watched> watched;
  link.Watch(&watched);
  std::vector<int> fds;
  for (const Watched& one : watched) fds.push_back(one.fd);
  return fds;
}

// The error with which Pump of `link` ends; fails after ten seconds without one.
Status Ended(Link* link) {
  const int64_t begin_us = NowUs();
  while (true) {
    bool moved = false;
    const Status status = link->Pump(&moved);
    if (!status.ok()) return status;
    CHECK(NowUs() - begin_us < 10 * kSecondUs);
  }
}

// Both ends of a link over `count` pairs of ends in this process; `own` are its stripes at one end.
struct Striped {
  explicit Striped(int count) {
    Config config = SmallConfig();
    config.segment_bytes += kStripeTrailerBytes;
    std::vector<std::unique_ptr<Link>> parts[2];
    for (int i = 0; i < count; ++i) {
      pairs.push_back(std::make_unique<Pair>(*FindTransport("inproc"), config));
      own.push_back(pairs.back()->a.get());
      parts[0].push_back(std::move(pairs.back()->a));
      parts[1].push_back(std::move(pairs.back()->b));
    }
    from = MakeStripedLink(std::move(parts[0]));
    to = MakeStripedLink(std::move(parts[1]));
  }

  std::vector<std::unique_ptr<Pair>> pairs;  // their doorbells
  std::vector<Link*> own;
  std::unique_ptr<Link> from;
  std::unique_ptr<Link> to;
};

TEST(each_socket_carries_the_same_share_of_the_data) {
  Striped link(4);
  for (uint64_t ticket = 0; ticket < 40; ++ticket) {
    CHECK(TrySend(link.from.get(), Lane::kData, 4096, ticket));
    CHECK(TrySend(link.from.get(), Lane::kControl, 10, ticket));
    for (Lane lane : {Lane::kData, Lane::kControl}) {
      InFrame frame;
      CHECK(link.to->Poll(lane, &frame));
      CheckFrame(frame, lane, lane == Lane::kData ? 4096 : 10, ticket);
      link.to->Release(lane, frame);
    }
  }
  for (const Link* one : link.own) CHECK_EQ(one->data_frames_sent(), uint64_t{10});
  CHECK_EQ(link.from->data_bytes_sent(), uint64_t{40 * 4096});
  CHECK_EQ(link.from->data_frames_sent(), uint64_t{40});
}

TEST(a_socket_without_room_is_passed_over_and_the_order_kept) {
  Striped link(3);
  uint64_t sent = 0;
  while (TrySend(link.from.get(), Lane::kData, 100, sent)) ++sent;
  CHECK(sent % 3 == 0);
  std::vector<InFrame> held;  // all of the second one, which gets no room by that
  uint64_t received = 0;
  InFrame frame;
  for (; link.to->Poll(Lane::kData, &frame); ++received) {
    CheckFrame(frame, Lane::kData, 100, received);
    if (received % 3 == 1) {
      held.push_back(frame);
    } else {
      link.to->Release(Lane::kData, frame);
    }
  }
  CHECK_EQ(received, sent);
  const uint64_t before = link.own[1]->data_frames_sent();
  while (TrySend(link.from.get(), Lane::kData, 100, sent)) ++sent;
  CHECK_EQ(sent - received, 2 * before);
  CHECK_EQ(link.own[1]->data_frames_sent(), before);
  for (; link.to->Poll(Lane::kData, &frame); ++received) {
    CheckFrame(frame, Lane::kData, 100, received);
    link.to->Release(Lane::kData, frame);
  }
  CHECK_EQ(received, sent);
  for (const InFrame& one : held) link.to->Release(Lane::kData, one);
  while (TrySend(link.from.get(), Lane::kData, 100, sent)) ++sent;
  CHECK_EQ(sent - received, 3 * before);
}

TEST(nobody_runs_far_ahead_of_a_socket_that_stands_still) {
  Striped link(2);
  uint64_t sent = 0;
  while (TrySend(link.from.get(), Lane::kData, 8, sent)) ++sent;
  std::vector<InFrame> held;  // all of the second one
  InFrame frame;
  uint64_t received = 0;
  for (int idle = 0; idle < 2;) {
    for (idle += 1; link.to->Poll(Lane::kData, &frame); idle = 0) {
      if (received++ < sent && received % 2 == 0) {
        held.push_back(frame);
      } else {
        link.to->Release(Lane::kData, frame);
      }
    }
    while (TrySend(link.from.get(), Lane::kData, 8, received)) idle = 0;
    CHECK(received < 5000);
  }
  CHECK_EQ(link.from->data_frames_sent(), sent + 512);
  for (const InFrame& one : held) link.to->Release(Lane::kData, one);
  CHECK(TrySend(link.from.get(), Lane::kData, 8, received));
  CHECK(TrySend(link.from.get(), Lane::kData, 8, received));
}

TEST(frames_wait_for_those_of_other_sockets) {
  Pair pairs[2] = {Pair(*FindTransport("inproc")), Pair(*FindTransport("inproc"))};
  std::vector<std::unique_ptr<Link>> stripes;
  for (Pair& pair : pairs) stripes.push_back(std::move(pair.b));
  const std::unique_ptr<Link> to = MakeStripedLink(std::move(stripes));
  const auto send = [&](int stripe, uint64_t number) {
    Link* link = pairs[stripe].a.get();
    const MutableByteSpan room = link->BeginSend(Lane::kData, sizeof(number));
    std::memcpy(room.data(), &number, sizeof(number));
    FrameHeader header;
    header.ticket = number;
    link->CommitSend(Lane::kData, header);
  };
  InFrame frame;
  for (uint64_t number : {1, 2, 4}) {
    send(1, number);
    CHECK(!to->Poll(Lane::kData, &frame));
  }
  for (uint64_t number : {0, 3}) send(0, number);
  for (uint64_t number = 0; number < 5; ++number) {
    CHECK(to->Poll(Lane::kData, &frame));
    CHECK_EQ(frame.header.ticket, number);
    CHECK_EQ(frame.payload.size(), size_t{0});
    CHECK_EQ(frame.header.payload_bytes, uint32_t{0});
    to->Release(Lane::kData, frame);
  }
  bool moved = false;
  CHECK_OK(to->Pump(&moved));
  send(0, 2);  // again
  CHECK(!to->Poll(Lane::kData, &frame));
  const Status status = to->Pump(&moved);
  CHECK(status.code() == Code::kAborted);
  CHECK(status.message().find("without numbers of their own") != std::string::npos);
}

TEST(a_frame_that_comes_no_more_is_an_error_at_once) {
  Striped link(2);
  const uint64_t later = 5;
  for (Link* one : link.own) {
    const MutableByteSpan room = one->BeginSend(Lane::kData, sizeof(later));
    std::memcpy(room.data(), &later, sizeof(later));
    one->CommitSend(Lane::kData, FrameHeader{});
  }
  InFrame frame;
  CHECK(!link.to->Poll(Lane::kData, &frame));
  bool moved = false;
  CHECK(link.to->Pump(&moved).code() == Code::kAborted);
}

TEST(a_frame_without_room_for_a_number_is_garbage) {
  Pair pair(*FindTransport("inproc"));
  std::vector<std::unique_ptr<Link>> stripes;
  stripes.push_back(std::move(pair.b));
  const std::unique_ptr<Link> to = MakeStripedLink(std::move(stripes));
  CHECK(TrySend(pair.a.get(), Lane::kData, 7, 0));
  InFrame frame;
  CHECK(!to->Poll(Lane::kData, &frame));
  bool moved = false;
  CHECK(to->Pump(&moved).code() == Code::kAborted);
}

TEST(frames_that_a_full_socket_holds_up_keep_their_turns) {
  Pair pair(TcpOfThreeSockets());
  uint64_t sent = 0;
  uint64_t received = 0;
  while (received < 3000) {
    bool moved = false;
    while (sent < 3000 && TrySend(pair.a.get(), Lane::kData, 4096, sent)) ++sent;
    CHECK_OK(pair.a->Pump(&moved));
    CHECK_OK(pair.b->Pump(&moved));
    InFrame frame;
    for (int n = 0; n < 5 && pair.b->Poll(Lane::kData, &frame); ++n) {
      CheckFrame(frame, Lane::kData, 4096, received++);
      pair.b->Release(Lane::kData, frame);
    }
  }
}

TEST(the_end_of_one_socket_alone_is_a_loss) {
  for (size_t which : {0, 2}) {
    Pair pair(TcpOfThreeSockets());
    const std::vector<int> sockets = Sockets(*pair.a);
    CHECK_EQ(sockets.size(), size_t{3});
    CHECK(::shutdown(sockets[which], SHUT_RDWR) == 0);
    const int64_t begin_us = NowUs();
    const Status status = Ended(pair.b.get());
    CHECK(status.code() == Code::kAborted);
    CHECK(status.message().find("rank 3") != std::string::npos);
    CHECK(NowUs() - begin_us < 5 * kSecondUs);
  }
}

TEST(data_of_a_slower_socket_are_waited_for_when_another_has_ended) {
  Pair pairs[2] = {Pair(*FindTransport("inproc")), Pair(*FindTransport("inproc"))};
  std::vector<std::unique_ptr<Link>> stripes;
  for (Pair& pair : pairs) stripes.push_back(std::move(pair.b));
  const std::unique_ptr<Link> to = MakeStripedLink(std::move(stripes));
  bool moved = false;
  for (uint64_t number = 0; number < 4; ++number) {
    const int64_t begin_us = NowUs();
    if (number == 1) pairs[0].a.reset();
    while (number > 0 && NowUs() - begin_us < kSecondUs * 4 / 5) CHECK_OK(to->Pump(&moved));
    const MutableByteSpan room = pairs[1].a->BeginSend(Lane::kData, sizeof(number));
    std::memcpy(room.data(), &number, sizeof(number));
    pairs[1].a->CommitSend(Lane::kData, FrameHeader{});
    InFrame frame;
    CHECK(to->Poll(Lane::kData, &frame));
    to->Release(Lane::kData, frame);
    CHECK_OK(to->Pump(&moved));
  }
  CHECK(Ended(to.get()).code() == Code::kAborted);
}

TEST(last_words_are_read_although_another_socket_has_ended_before) {
  Pair pair(TcpOfThreeSockets());
  CHECK(::shutdown(Sockets(*pair.a)[1], SHUT_RDWR) == 0);
  bool moved = false;
  CHECK_OK(pair.b->Pump(&moved));
  CHECK_OK(pair.b->Pump(&moved));
  CHECK_EQ(Sockets(*pair.b).size(), size_t{2});  // one that has ended would never let it sleep
  CHECK(TrySend(pair.a.get(), Lane::kControl, 20, 7));
  (void)pair.a->Pump(&moved);
  pair.a.reset();
  CHECK(Ended(pair.b.get()).code() == Code::kAborted);
  InFrame frame;
  CHECK(pair.b->Poll(Lane::kControl, &frame));
  CheckFrame(frame, Lane::kControl, 20, 7);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
