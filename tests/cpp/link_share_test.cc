// Links of one rank that share a window: one payload for several peers.
#include <sys/eventfd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "link_pair.h"
#include "ranks.h"
#include "transport/write_policy.h"

namespace tfdist {
namespace {

// Rank 0 and its links to ranks 1 and 2.
struct Fan {
  explicit Fan(const Config& config = SmallConfig()) : window(config, 2) {
    for (int peer = 1; peer <= 2; ++peer) {
      bells.emplace_back(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      bells.emplace_back(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
      LinkEnds own;
      LinkEnds other;
      const TransportEntry* shm = FindTransport("shm");
      CHECK_OK(shm->make_pair(0, peer, bells[bells.size() - 2].get(), bells.back().get(), config,
                              &own, &other));
      CHECK_OK(UseWindow(window.file.get(), window.window, &own, &other));
      auto near = shm->make(own, config);
      auto far = shm->make(other, config);
      CHECK_OK(near.status());
      CHECK_OK(far.status());
      links.push_back(std::move(near.value()));
      peers.push_back(std::move(far.value()));
    }
  }

  RankWindow window;
  std::vector<UniqueFd> bells;
  std::vector<std::unique_ptr<Link>> links;  // of rank 0
  std::vector<std::unique_ptr<Link>> peers;  // their other ends
};

TEST(one_payload_reaches_both_and_is_counted_twice) {
  Fan fan;
  CHECK(fan.links[0]->SendMemory() != nullptr);
  CHECK(fan.links[0]->SendMemory() == fan.links[1]->SendMemory());
  for (uint64_t ticket = 0; ticket < 50; ++ticket) {
    CHECK(TrySend(fan.links[0].get(), Lane::kData, 1000, ticket));
    CHECK(fan.links[1]->ShareSend(HeaderOf(ticket), 1000));
    for (auto& peer : fan.peers) {
      InFrame frame;
      CHECK(peer->Poll(Lane::kData, &frame));
      CheckFrame(frame, Lane::kData, 1000, ticket);
      peer->Release(Lane::kData, frame);
    }
  }
  CHECK_EQ(fan.links[1]->data_bytes_sent(), uint64_t{50000});
  CHECK_EQ(fan.links[1]->data_frames_sent(), uint64_t{50});
}

TEST(what_one_peer_holds_is_not_overwritten) {
  Fan fan;
  CHECK(TrySend(fan.links[0].get(), Lane::kData, 4096, 7));
  CHECK(fan.links[1]->ShareSend(HeaderOf(7), 4096));
  InFrame held;
  CHECK(fan.peers[1]->Poll(Lane::kData, &held));
  for (uint64_t ticket = 8; ticket < 40; ++ticket) {
    InFrame frame;
    CHECK(fan.peers[0]->Poll(Lane::kData, &frame));
    CheckFrame(frame, Lane::kData, 4096, ticket - 1);
    fan.peers[0]->Release(Lane::kData, frame);
    CHECK(TrySend(fan.links[0].get(), Lane::kData, 4096, ticket));
  }
  CheckFrame(held, Lane::kData, 4096, 7);
}

TEST(a_lane_that_is_full_takes_no_share_and_the_other_goes_on) {
  Fan fan;
  for (uint64_t ticket = 0; ticket < 4; ++ticket) {
    CHECK(TrySend(fan.links[1].get(), Lane::kData, 10, ticket));
  }
  CHECK(TrySend(fan.links[0].get(), Lane::kData, 10, 9));
  CHECK(!fan.links[1]->ShareSend(HeaderOf(9), 10));
  InFrame frame;
  CHECK(fan.peers[0]->Poll(Lane::kData, &frame));
  CheckFrame(frame, Lane::kData, 10, 9);
}

TEST(a_link_that_ends_gives_its_slots_back) {
  Fan fan;
  for (uint64_t ticket = 0; ticket < 4; ++ticket) {
    CHECK(TrySend(fan.links[1].get(), Lane::kData, 10, ticket));
  }
  fan.links[1].reset();
  for (uint64_t ticket = 0; ticket < 4; ++ticket) {
    CHECK(TrySend(fan.links[0].get(), Lane::kData, 10, ticket));
  }
}

// Frames of kTimedBytes, with the stores that `stores` names.
Config TimedConfig(const char* stores) {
  Config config = SmallConfig();
  config.segment_bytes = kTimedBytes;
  config.shm_writes = stores;
  return config;
}

TEST(a_link_says_which_payloads_go_past_the_caches) {
  for (const char* stores : {"cached", "nontemporal"}) {
    Pair pair(*FindTransport("shm"), TimedConfig(stores));
    CHECK(pair.a->BeginSend(Lane::kData, kTimedBytes).data() != nullptr);
    const bool streams = std::string(stores) == "nontemporal";
    CHECK_EQ(pair.a->StreamsSend(), streams);
    pair.a->CommitSend(Lane::kData, HeaderOf(1));
    CHECK(pair.a->BeginSend(Lane::kData, kTimedBytes - 64).data() != nullptr);
    CHECK(!pair.a->StreamsSend());
    pair.a->CommitSend(Lane::kData, HeaderOf(2));
    InFrame frame;
    CHECK(pair.b->Poll(Lane::kData, &frame));
    CHECK_EQ(frame.streamed, streams);
    CHECK(pair.b->Poll(Lane::kData, &frame));
    CHECK(!frame.streamed);
  }
}

TEST(who_shares_a_payload_learns_too_that_it_went_past_the_caches) {
  Fan fan(TimedConfig("nontemporal"));
  for (size_t bytes : {kTimedBytes, kTimedBytes - 64}) {
    CHECK(TrySend(fan.links[0].get(), Lane::kData, bytes, 7));
    CHECK(fan.links[1]->ShareSend(HeaderOf(7), bytes));
    InFrame frame;
    CHECK(fan.peers[1]->Poll(Lane::kData, &frame));
    CHECK_EQ(frame.streamed, bytes == kTimedBytes);
  }
}

// The reader claims what cached payloads cost it; the sender's own times are nothing beside that.
int Streamed(Pair* pair, int64_t cached_ns, int64_t streamed_ns, int frames) {
  int streamed = 0;
  for (int i = 0; i < frames; ++i) {
    CHECK(pair->a->BeginSend(Lane::kData, kTimedBytes).data() != nullptr);
    const bool streams = pair->a->StreamsSend();
    pair->a->CommitSend(Lane::kData, FrameHeader());
    InFrame frame;
    CHECK(pair->b->Poll(Lane::kData, &frame));
    pair->b->NoteRead(frame, streams ? streamed_ns : cached_ns);
    pair->b->Release(Lane::kData, frame);
    streamed += streams ? 1 : 0;
  }
  return streamed;
}

TEST(what_reading_took_decides_how_the_sender_writes) {
  constexpr int64_t kLong = 900'000'000;
  Pair pair(*FindTransport("shm"), TimedConfig("auto"));
  CHECK(Streamed(&pair, kLong, kLong / 4, 4000) > 1500);
  CHECK(Streamed(&pair, kLong / 4, kLong, 4000) < 1000);
}

TEST(a_peer_that_tries_the_other_way_is_followed) {
  Pair pair(*FindTransport("shm"), TimedConfig("auto"));
  const auto send = [](Link* from, Link* to) {
    CHECK(from->BeginSend(Lane::kData, kTimedBytes).data() != nullptr);
    const bool streams = from->StreamsSend();
    from->CommitSend(Lane::kData, FrameHeader());
    InFrame frame;
    CHECK(to->Poll(Lane::kData, &frame));
    to->Release(Lane::kData, frame);
    return streams;
  };
  int sent = 0;
  while (!send(pair.a.get(), pair.b.get())) {
    CHECK(++sent < 10000);
    if (sent % 4 != 0) CHECK(!send(pair.b.get(), pair.a.get()));
  }
  CHECK(send(pair.b.get(), pair.a.get()));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
