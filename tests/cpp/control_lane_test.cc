// The control lane alone: messages over a link within this process, without an engine.
#include "scheduler/control_lane.h"

#include <string>
#include <utility>
#include <vector>

#include "link_pair.h"

namespace tfdist {
namespace {

struct Inbox : ControlLane::Receiver {
  struct Message {
    int peer;
    FrameType type;
    uint32_t set;
    std::string text;
  };
  void OnControlMessage(int peer, FrameType type, uint32_t set, ByteSpan message,
                        int64_t /*now_us*/) override {
    messages.push_back({peer, type, set, AsText(message)});
  }
  void OnBadControlFrame(int /*peer*/, int64_t /*now_us*/) override { ++bad; }

  std::vector<Message> messages;
  int bad = 0;
};

// A rank of a world of six whose only link leads to `peer`.
struct End {
  End(int rank, int peer, std::unique_ptr<Link> link, uint32_t generation)
      : monitor(rank, AllRanks(6), std::vector<bool>(6)), links(6) {
    world.rank = rank;
    world.size = 6;
    world.generation = generation;
    links[static_cast<size_t>(peer)] = std::move(link);
  }

  World world;
  HeartbeatMonitor monitor;
  Links links;
  Inbox inbox;
  ControlLane lane{world, links, &monitor, &inbox};
};

struct TwoEnds {
  explicit TwoEnds(uint32_t generation_b = 1)
      : pair(*FindTransport("inproc")),
        a(3, 5, std::move(pair.a), 1),
        b(5, 3, std::move(pair.b), generation_b) {}
  // Until nothing moves any more.
  void Exchange() {
    for (bool moved = true; moved;) {
      moved = a.lane.FlushAll();
      moved |= b.lane.FlushAll();
      moved |= a.lane.Read(5, 0);
      moved |= b.lane.Read(3, 0);
    }
  }

  Pair pair;
  End a;
  End b;
};

TEST(messages_of_any_length_come_whole_and_in_order) {
  TwoEnds ends;
  std::vector<std::string> texts = {"", "short", std::string(kMaxControlPayload, 'x'),
                                    std::string(kMaxControlPayload + 1, 'y'), ""};
  for (int i = 0; i < 100000; ++i) texts.back() += static_cast<char>('a' + i % 26);
  for (size_t i = 0; i < texts.size(); ++i) {
    ends.a.lane.Send(5, FrameType::kStall, static_cast<uint32_t>(i), texts[i]);
  }
  CHECK(ends.a.lane.HasQueued(5));
  ends.Exchange();
  CHECK(!ends.a.lane.HasQueued(5));
  CHECK_EQ(ends.b.inbox.messages.size(), texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const Inbox::Message& message = ends.b.inbox.messages[i];
    CHECK_EQ(message.peer, 3);
    CHECK(message.type == FrameType::kStall);
    CHECK_EQ(message.set, static_cast<uint32_t>(i));
    CHECK(message.text == texts[i]);
  }
  CHECK_EQ(ends.b.inbox.bad, 0);
}

TEST(frames_of_another_generation_are_reported_and_dropped) {
  TwoEnds ends(2);
  ends.a.lane.Send(5, FrameType::kStall, 0, "from the world before");
  ends.Exchange();
  CHECK(ends.b.inbox.messages.empty());
  CHECK_EQ(ends.b.inbox.bad, 1);
}

TEST(a_peer_without_a_link_gets_nothing) {
  TwoEnds ends;
  ends.a.lane.Send(4, FrameType::kReady, 0, "nobody");
  CHECK(!ends.a.lane.HasQueued(4) && !ends.a.lane.IsConnected(4));
  ends.a.lane.SendToAll(FrameType::kLeave, "goodbye");
  ProcessSet set(7);
  set.ranks = {2, 3, 5};
  ends.a.lane.SendToMembers(set, FrameType::kResponse, "to the others");
  ends.Exchange();
  CHECK_EQ(ends.b.inbox.messages.size(), size_t{2});
  CHECK_EQ(ends.b.inbox.messages[1].set, 7u);
}

TEST(what_waits_can_be_counted_and_discarded) {
  TwoEnds ends;
  ends.a.lane.Send(5, FrameType::kTimeline, 0, "lines");
  ends.a.lane.Send(5, FrameType::kBeat, 0, "beat");
  ends.a.lane.Send(5, FrameType::kTimeline, 0, "more lines");
  CHECK_EQ(ends.a.lane.CountQueued(5, FrameType::kTimeline), int64_t{2});
  ends.a.lane.DiscardQueue(5);
  CHECK_EQ(ends.a.lane.CountQueued(5, FrameType::kTimeline), int64_t{0});
  ends.Exchange();
  CHECK(ends.b.inbox.messages.empty());
}

TEST(only_messages_that_agree_on_work_count_as_negotiation) {
  TwoEnds ends;
  for (const FrameType type :
       {FrameType::kBeat, FrameType::kConsensus, FrameType::kGate, FrameType::kLeave,
        FrameType::kLeaveAck, FrameType::kClock, FrameType::kTimeline, FrameType::kBlocked}) {
    ends.a.lane.Send(5, type, 0, "");
  }
  CHECK_EQ(ends.a.lane.negotiation_messages(), uint64_t{0});
  for (const FrameType type : {FrameType::kReady, FrameType::kResponse, FrameType::kStall,
                               FrameType::kProbe, FrameType::kJoin, FrameType::kTakePart}) {
    ends.a.lane.Send(5, type, 0, "");
  }
  CHECK_EQ(ends.a.lane.negotiation_messages(), uint64_t{6});
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
