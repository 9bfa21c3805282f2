// Every transport of the table: a rank that sleeps is woken by all that concerns it, and by nothing
// else.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "link_pair.h"

namespace tfdist {
namespace {

// Sleeps until the doorbell or the link has something, as the progress thread does. False: ten
// seconds passed, which is a lost wake-up.
bool Sleep(Link* link, int doorbell) {
  std::vector<Watched> watched;
  link->Watch(&watched);
  std::vector<pollfd> fds = {{doorbell, POLLIN, 0}};
  for (const Watched& one : watched) {
    fds.push_back({one.fd, static_cast<short>(POLLIN | (one.write ? POLLOUT : 0)), 0});
  }
  const bool woken = ::poll(fds.data(), fds.size(), 10000) > 0;
  uint64_t count;
  while (::read(doorbell, &count, sizeof(count)) > 0) {
  }
  return woken;
}

struct Traffic {
  uint64_t frames = 0;  // to send, and to receive
  uint32_t seed = 0;    // of what is sent
  uint32_t peer_seed = 0;
  size_t most_bytes = 0;
};

size_t SizeOf(uint32_t seed, uint64_t ticket, size_t most) {
  uint64_t x = (ticket + 1) * 0x9e3779b97f4a7c15ull + seed;
  x ^= x >> 31;
  return x % 8 == 0 ? x / 8 % (most + 1) : x / 8 % std::min<size_t>(most, 256);
}

// One rank: sends and receives its frames on both lanes, even tickets on data, odd ones on control,
// holding some, sleeping whenever there is nothing to do.
std::string RunRank(Link* link, int doorbell, const Traffic& traffic, uint64_t* sleeps) {
  uint64_t sent[2] = {0, 1};  // next ticket of each lane: data takes 0, 2, ..., control 1, 3, ...
  uint64_t got[2] = {0, 1};
  std::vector<std::pair<Lane, InFrame>> held;
  auto size_of = [&](Lane lane, uint32_t seed, uint64_t ticket) {
    return SizeOf(seed, ticket, lane == Lane::kData ? traffic.most_bytes : kMaxControlPayload);
  };
  auto turn = [&](bool* moved) {
    const Status status = link->Pump(moved);
    if (!status.ok()) throw check::Failure(status.message());
    for (Lane lane : {Lane::kControl, Lane::kData}) {
      const int i = lane == Lane::kData ? 0 : 1;
      if (sent[i] < traffic.frames &&
          TrySend(link, lane, size_of(lane, traffic.seed, sent[i]), sent[i])) {
        sent[i] += 2;
        *moved = true;
      }
      InFrame frame;
      if (held.size() < 2 && link->Poll(lane, &frame)) {
        CheckFrame(frame, lane, size_of(lane, traffic.peer_seed, got[i]), got[i]);
        got[i] += 2;
        held.push_back({lane, frame});
        *moved = true;
      }
    }
    if (held.size() == 2 || (!*moved && !held.empty())) {
      const size_t i = got[0] % held.size();
      link->Release(held[i].first, held[i].second);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      *moved = true;
    }
  };
  auto finished = [&] {
    return std::min(sent[0], sent[1]) >= traffic.frames &&
           std::min(got[0], got[1]) >= traffic.frames && held.empty() && link->Flushed();
  };
  try {
    while (!finished()) {
      bool moved = false;
      turn(&moved);
      if (moved || finished()) continue;
      link->SetWakeMode(WakeMode::kAsleep);
      turn(&moved);
      if (!moved && !finished()) {
        ++*sleeps;
        if (!Sleep(link, doorbell)) return "lost wake-up after ticket " + std::to_string(got[0]);
      }
      link->SetWakeMode(WakeMode::kAwake);
    }
  } catch (const check::Failure& failure) {
    return failure.what();
  }
  return "";
}

TEST(random_frames_both_ways_with_sleeping) {
  ForEachTransport([](const TransportEntry& entry) {
    for (int64_t slots : {2, 8}) {
      Config config = SmallConfig();
      config.shm_slots = slots;
      Pair pair(entry, config);
      const Traffic traffic_a{50000, 11, 22, 4096};
      const Traffic traffic_b{50000, 22, 11, 4096};
      std::string error_a;
      std::string error_b;
      uint64_t sleeps_a = 0;
      uint64_t sleeps_b = 0;
      std::thread other(
          [&] { error_b = RunRank(pair.b.get(), pair.doorbell_b.get(), traffic_b, &sleeps_b); });
      error_a = RunRank(pair.a.get(), pair.doorbell_a.get(), traffic_a, &sleeps_a);
      other.join();
      CHECK_EQ(error_a, "");
      CHECK_EQ(error_b, "");
      std::printf("       %s, %d slots: %llu and %llu sleeps\n", entry.name,
                  static_cast<int>(slots), static_cast<unsigned long long>(sleeps_a),
                  static_cast<unsigned long long>(sleeps_b));
    }
  });
}

// One frame there, one back, asleep in between: every frame has to wake somebody.
TEST(ping_pong_asleep) {
  ForEachTransport([](const TransportEntry& entry) {
    constexpr uint64_t kRounds = 1000;
    Pair pair(entry);
    auto play = [&](Link* link, int doorbell, uint64_t first) -> std::string {
      uint64_t next = 0;  // frame to send or to receive, whoever's turn it is
      try {
        while (next < 2 * kRounds || !link->Flushed()) {
          bool moved = false;
          auto turn = [&] {
            CHECK_OK(link->Pump(&moved));
            InFrame frame;
            if (next >= 2 * kRounds) return;
            const Lane lane = next % 3 == 0 ? Lane::kControl : Lane::kData;
            if (next % 2 == first) {
              if (!TrySend(link, lane, next % 200, next)) return;
              ++next;
              moved = true;
            } else if (link->Poll(lane, &frame)) {
              CheckFrame(frame, lane, next % 200, next);
              link->Release(lane, frame);
              ++next;
              moved = true;
            }
          };
          link->SetWakeMode(WakeMode::kAsleep);
          turn();
          if (!moved && !Sleep(link, doorbell)) return "lost wake-up at " + std::to_string(next);
          link->SetWakeMode(WakeMode::kAwake);
        }
      } catch (const check::Failure& failure) {
        return failure.what();
      }
      return "";
    };
    std::string error_b;
    std::thread other([&] { error_b = play(pair.b.get(), pair.doorbell_b.get(), 1); });
    const std::string error_a = play(pair.a.get(), pair.doorbell_a.get(), 0);
    other.join();
    CHECK_EQ(error_a, "");
    CHECK_EQ(error_b, "");
  });
}

TEST(loss_wakes_a_sleeper_and_the_next_pump_tells) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    bool moved = false;
    for (int i = 0; i < 10; ++i) CHECK_OK(pair.b->Pump(&moved));
    pair.b->SetWakeMode(WakeMode::kAsleep);
    CHECK_OK(pair.b->Pump(&moved));
    pair.a.reset();
    CHECK(Sleep(pair.b.get(), pair.doorbell_b.get()));
    pair.b->SetWakeMode(WakeMode::kAwake);
    // With messages, whose last ones may come later, not at once.
    const bool waits = std::string(entry.name) == "mpi";
    const int64_t deadline_us = NowUs() + (waits ? kSecondUs : 0);
    while (pair.b->Pump(&moved).ok()) CHECK(NowUs() < deadline_us);
  });
}

// A doorbell costs a system call and a switch: it rings only for a sleeper, and once.
TEST(doorbell_rings_only_for_a_sleeper_and_once) {
  for (const char* name : {"inproc", "shm"}) {
    Pair pair(*FindTransport(name));
    uint64_t rings = 0;
    auto take_rings = [&] {
      rings = 0;
      (void)!::read(pair.doorbell_b.get(), &rings, sizeof(rings));
      return rings;
    };
    CHECK(TrySend(pair.a.get(), Lane::kData, 8, 0));
    CHECK_EQ_IN(take_rings(), uint64_t{0}, name);
    pair.b->SetWakeMode(WakeMode::kAsleep);
    CHECK(TrySend(pair.a.get(), Lane::kData, 8, 1));
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 2));
    CHECK_EQ_IN(take_rings(), uint64_t{1}, name);
    pair.b->SetWakeMode(WakeMode::kAwake);
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 3));
    CHECK_EQ_IN(take_rings(), uint64_t{0}, name);
  }
}

// Who is idle lets data lie, and need not say so again when it was not woken.
TEST(an_idle_rank_is_woken_for_control_frames_alone) {
  for (const char* name : {"inproc", "shm"}) {
    Pair pair(*FindTransport(name));
    const auto take_rings = [&] {
      uint64_t rings = 0;
      (void)!::read(pair.doorbell_b.get(), &rings, sizeof(rings));
      return rings;
    };
    for (uint64_t round = 0; round < 3; ++round) {
      pair.b->SetWakeMode(WakeMode::kIdle);
      pair.b->SetWakeMode(WakeMode::kIdle);
      CHECK(TrySend(pair.a.get(), Lane::kData, 8, 2 * round));
      CHECK_EQ_IN(take_rings(), uint64_t{0}, name);
      CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 2 * round));
      CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 2 * round + 1));
      CHECK_EQ_IN(take_rings(), uint64_t{1}, name);
      pair.b->SetWakeMode(round == 1 ? WakeMode::kAwake : WakeMode::kIdle);
      pair.b->SetWakeMode(WakeMode::kAsleep);
      CHECK(TrySend(pair.a.get(), Lane::kData, 8, 2 * round + 1));
      CHECK_EQ_IN(take_rings(), uint64_t{1}, name);
      for (Lane lane : {Lane::kControl, Lane::kData}) {
        for (int i = 0; i < 2; ++i) {
          pair.b->Release(lane, Receive(&pair, pair.b.get(), lane));
        }
      }
    }
  }
}

// Who expects an idle peer to come lets it rest for as long; nobody that waits is kept waiting.
TEST(an_idle_rank_that_is_expected_is_woken_when_it_is_no_longer) {
  for (WakeMode later : {WakeMode::kAwake, WakeMode::kIdle, WakeMode::kAsleep}) {
    Pair pair(*FindTransport("shm"));
    const auto take_rings = [&] {
      uint64_t rings = 0;
      (void)!::read(pair.doorbell_b.get(), &rings, sizeof(rings));
      return rings;
    };
    pair.b->SetWakeMode(WakeMode::kIdle);
    pair.a->SetWakeMode(WakeMode::kExpecting);
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 0));
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 1));
    CHECK_EQ(take_rings(), uint64_t{0});
    pair.a->SetWakeMode(later);
    CHECK_EQ(take_rings(), uint64_t{1});
    pair.b->SetWakeMode(WakeMode::kAsleep);
    pair.a->SetWakeMode(WakeMode::kExpecting);
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 2));
    CHECK_EQ(take_rings(), uint64_t{1});
    pair.b->SetWakeMode(WakeMode::kIdle);
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 3));
    pair.b->SetWakeMode(WakeMode::kAwake);  // it has come
    pair.a->SetWakeMode(later);
    CHECK_EQ(take_rings(), uint64_t{0});
  }
}

// There the ring may be for a rank behind the peer, which relays.
TEST(an_idle_rank_that_is_rung_by_its_socket_is_not_kept_waiting) {
  const TransportEntry& shm = *FindTransport("shm");
  const UniqueFd doorbell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  LinkEnds end_a;
  LinkEnds end_b;
  CHECK_OK(shm.make_pair(3, 5, doorbell.get(), doorbell.get(), SmallConfig(), &end_a, &end_b));
  for (LinkEnds* end : {&end_a, &end_b}) {
    ::close(end->peer_doorbell_fd);
    end->peer_doorbell_fd = -1;
  }
  auto a = shm.make(end_a, SmallConfig());
  auto b = shm.make(end_b, SmallConfig());
  CHECK_OK(a.status());
  CHECK_OK(b.status());
  b.value()->SetWakeMode(WakeMode::kIdle);
  a.value()->SetWakeMode(WakeMode::kExpecting);
  CHECK(TrySend(a.value().get(), Lane::kControl, 8, 0));
  pollfd waiting{b.value()->fd(), POLLIN, 0};
  CHECK_EQ(::poll(&waiting, 1, 0), 1);
}

TEST(an_idle_rank_that_has_come_and_gone_again_is_not_woken) {
  Pair pair(*FindTransport("shm"));
  pair.b->SetWakeMode(WakeMode::kIdle);
  pair.a->SetWakeMode(WakeMode::kExpecting);
  CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 0));
  pair.b->SetWakeMode(WakeMode::kAwake);
  pair.b->Release(Lane::kControl, Receive(&pair, pair.b.get(), Lane::kControl));
  pair.b->SetWakeMode(WakeMode::kIdle);
  pair.a->SetWakeMode(WakeMode::kIdle);
  uint64_t rings = 0;
  CHECK(::read(pair.doorbell_b.get(), &rings, sizeof(rings)) < 0);
}

TEST(an_idle_rank_that_is_expected_is_woken_when_no_more_room_is_left_for_it) {
  Pair pair(*FindTransport("shm"));
  pair.b->SetWakeMode(WakeMode::kIdle);
  pair.a->SetWakeMode(WakeMode::kExpecting);
  uint64_t sent = 0;
  while (TrySend(pair.a.get(), Lane::kControl, 8, sent)) ++sent;
  uint64_t rings = 0;
  CHECK(::read(pair.doorbell_b.get(), &rings, sizeof(rings)) == sizeof(rings));
  CHECK_EQ(rings, uint64_t{1});
}

TEST(release_wakes_a_sender_that_waits_for_room) {
  for (const char* name : {"inproc", "shm"}) {
    for (bool asleep_before_it_was_full : {false, true}) {
      Pair pair(*FindTransport(name));
      uint64_t rings = 0;
      uint64_t sent = 0;
      if (asleep_before_it_was_full) pair.a->SetWakeMode(WakeMode::kAsleep);
      while (TrySend(pair.a.get(), Lane::kData, 8, sent)) ++sent;
      if (!asleep_before_it_was_full) pair.a->SetWakeMode(WakeMode::kAsleep);
      const InFrame frame = Receive(&pair, pair.b.get(), Lane::kData);
      pair.b->Release(Lane::kData, frame);
      CHECK(::read(pair.doorbell_a.get(), &rings, sizeof(rings)) == sizeof(rings));
      CHECK_EQ_IN(rings, uint64_t{1}, name);
    }
  }
}

// The words of a sleeping rank that lacks no room: a release would wake it for nothing.
TEST(shm_release_lets_a_sleeper_sleep_that_wants_no_room) {
  Pair pair(*FindTransport("shm"));
  CHECK(TrySend(pair.a.get(), Lane::kData, 8, 0));
  pair.a->SetWakeMode(WakeMode::kAsleep);
  const InFrame frame = Receive(&pair, pair.b.get(), Lane::kData);
  pair.b->Release(Lane::kData, frame);
  uint64_t rings = 0;
  CHECK(::read(pair.doorbell_a.get(), &rings, sizeof(rings)) < 0);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
