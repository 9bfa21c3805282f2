// Every transport of the table, through the same tests: what transport/link.h promises.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "base/config.h"
#include "base/deadline.h"
#include "check.h"
#include "transport/link_support.h"
#include "transport/transport.h"

namespace tfdist {
namespace {

constexpr int64_t kSecondUs = 1000000;

Config SmallConfig() {
  Config config;
  config.segment_bytes = 4096;
  config.shm_slots = 4;
  return config;
}

// Both ends of a link between ranks 3 and 5, and the doorbells of these ranks.
struct Pair {
  explicit Pair(const TransportEntry& entry, const Config& config = SmallConfig())
      : doorbell_a(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        doorbell_b(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    LinkEnds end_a;
    LinkEnds end_b;
    CHECK_OK(entry.make_pair(3, 5, doorbell_a.get(), doorbell_b.get(), config, &end_a, &end_b));
    auto made_a = entry.make(end_a, config);
    CHECK_OK(made_a.status());
    auto made_b = entry.make(end_b, config);
    CHECK_OK(made_b.status());
    a = std::move(made_a.value());
    b = std::move(made_b.value());
  }

  UniqueFd doorbell_a;
  UniqueFd doorbell_b;
  std::unique_ptr<Link> a;
  std::unique_ptr<Link> b;
};

void ForEachTransport(const std::function<void(const TransportEntry&)>& body) {
  for (const TransportEntry& entry : Transports()) {
    try {
      body(entry);
    } catch (const check::Failure& failure) {
      throw check::Failure(std::string(entry.name) + ": " + failure.what());
    }
  }
}

// Byte i of the payload of frame `ticket`.
uint8_t Pattern(uint64_t ticket, size_t i) {
  return static_cast<uint8_t>(ticket * 31 + i * 7 + (i >> 8));
}

bool TrySend(Link* link, Lane lane, size_t bytes, uint64_t ticket) {
  MutableByteSpan room = link->BeginSend(lane, bytes);
  if (room.data() == nullptr) return false;
  CHECK_EQ(room.size(), bytes);
  for (size_t i = 0; i < bytes; ++i) room[i] = Pattern(ticket, i);
  FrameHeader header;
  header.ticket = ticket;
  header.phase = static_cast<uint16_t>(ticket + 1);
  header.slice = static_cast<uint32_t>(ticket + 2);
  header.segment = static_cast<uint32_t>(ticket + 3);
  header.type = static_cast<uint8_t>(ticket + 4);
  header.generation = 9;
  link->CommitSend(lane, header);
  return true;
}

void CheckFrame(const InFrame& frame, Lane lane, size_t bytes, uint64_t ticket) {
  CHECK_EQ(frame.header.ticket, ticket);
  CHECK_EQ(frame.header.lane, static_cast<uint8_t>(lane));
  CHECK_EQ(frame.header.phase, static_cast<uint16_t>(ticket + 1));
  CHECK_EQ(frame.header.slice, static_cast<uint32_t>(ticket + 2));
  CHECK_EQ(frame.header.segment, static_cast<uint32_t>(ticket + 3));
  CHECK_EQ(frame.header.type, static_cast<uint8_t>(ticket + 4));
  CHECK_EQ(frame.header.generation, 9u);
  CHECK_EQ(frame.header.payload_bytes, static_cast<uint32_t>(bytes));
  CHECK_EQ(frame.payload.size(), bytes);
  for (size_t i = 0; i < bytes; ++i) CHECK_EQ(frame.payload[i], Pattern(ticket, i));
}

// Pumps both ends until `done` holds. Fails after ten seconds.
void PumpUntil(Pair* pair, const std::function<bool()>& done) {
  const int64_t deadline = NowUs() + 10 * kSecondUs;
  while (!done()) {
    bool moved = false;
    CHECK_OK(pair->a->Pump(&moved));
    CHECK_OK(pair->b->Pump(&moved));
    CHECK(NowUs() < deadline);
  }
}

InFrame Receive(Pair* pair, Link* link, Lane lane) {
  InFrame frame;
  PumpUntil(pair, [&] { return link->Poll(lane, &frame); });
  return frame;
}

// Sends on the data lane until it is full; returns how many frames went in. The receiver does not
// pump, so that a transport with the kernel in between fills up too.
uint64_t Fill(Link* link, size_t bytes) {
  uint64_t sent = 0;
  int refusals = 0;
  while (refusals < 3) {
    bool moved = false;
    CHECK_OK(link->Pump(&moved));
    if (TrySend(link, Lane::kData, bytes, sent)) {
      ++sent;
      refusals = 0;
    } else if (!moved) {
      ++refusals;
    }
    CHECK(sent < 1000000);
  }
  return sent;
}

TEST(table_is_ordered_and_found_by_name) {
  CHECK_EQ(Transports().size(), size_t{3});
  const char* names[] = {"inproc", "shm", "tcp"};
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(std::string(Transports()[i].name), names[i]);
    CHECK(FindTransport(names[i]) == &Transports()[i]);
  }
  CHECK(FindTransport("carrier pigeon") == nullptr);
}

TEST(names_of_the_ends) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    CHECK_EQ(pair.a->peer(), 5);
    CHECK_EQ(pair.b->peer(), 3);
    CHECK_EQ(std::string(pair.a->transport()), entry.name);
    CHECK(pair.a->MaxHeld() >= 1);
  });
}

TEST(sizes_arrive_whole_and_in_order_on_both_lanes) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    for (Lane lane : {Lane::kControl, Lane::kData}) {
      const size_t most = lane == Lane::kControl ? kMaxControlPayload : 4096;
      uint64_t ticket = 0;
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, most - 1, most, size_t{0}, most}) {
        for (auto [from, to] :
             {std::pair(pair.a.get(), pair.b.get()), std::pair(pair.b.get(), pair.a.get())}) {
          CHECK(TrySend(from, lane, bytes, ticket));
          const InFrame frame = Receive(&pair, to, lane);
          CheckFrame(frame, lane, bytes, ticket);
          to->Release(lane, frame);
          ++ticket;
        }
      }
    }
  });
}

TEST(order_is_kept_in_each_lane) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    constexpr uint64_t kFrames = 500;
    uint64_t sent[2] = {0, 0};
    uint64_t got[2] = {0, 0};
    PumpUntil(&pair, [&] {
      for (Lane lane : {Lane::kControl, Lane::kData}) {
        const int i = Index(lane);
        if (sent[i] < kFrames && TrySend(pair.a.get(), lane, sent[i] % 300, sent[i])) ++sent[i];
        InFrame frame;
        if (!pair.b->Poll(lane, &frame)) continue;
        CheckFrame(frame, lane, got[i] % 300, got[i]);
        pair.b->Release(lane, frame);
        ++got[i];
      }
      return got[0] == kFrames && got[1] == kFrames;
    });
  });
}

TEST(payload_is_aligned_to_a_cache_line) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    for (size_t bytes : {100, 4096, 7}) {
      MutableByteSpan room = pair.a->BeginSend(Lane::kData, bytes);
      CHECK_EQ(reinterpret_cast<uintptr_t>(room.data()) % 64, uintptr_t{0});
      pair.a->CommitSend(Lane::kData, FrameHeader());
      const InFrame frame = Receive(&pair, pair.b.get(), Lane::kData);
      CHECK_EQ(reinterpret_cast<uintptr_t>(frame.payload.data()) % 64, uintptr_t{0});
      pair.b->Release(Lane::kData, frame);
    }
  });
}

TEST(full_data_lane_does_not_hold_up_control) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    const uint64_t sent = Fill(pair.a.get(), 4096);
    CHECK(sent >= 4);
    CHECK(TrySend(pair.a.get(), Lane::kControl, 480, 77));
    const InFrame control = Receive(&pair, pair.b.get(), Lane::kControl);
    CheckFrame(control, Lane::kControl, 480, 77);
    pair.b->Release(Lane::kControl, control);
    for (uint64_t ticket = 0; ticket < sent; ++ticket) {
      const InFrame frame = Receive(&pair, pair.b.get(), Lane::kData);
      CheckFrame(frame, Lane::kData, 4096, ticket);
      pair.b->Release(Lane::kData, frame);
    }
    PumpUntil(&pair, [&] { return TrySend(pair.a.get(), Lane::kData, 0, sent); });
  });
}

TEST(full_control_lane_says_so_and_recovers) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    uint64_t sent = 0;
    while (sent < 100000 && TrySend(pair.a.get(), Lane::kControl, 480, sent)) ++sent;
    CHECK(sent >= 64);
    CHECK(sent < 100000);
    for (uint64_t ticket = 0; ticket < sent; ++ticket) {
      const InFrame frame = Receive(&pair, pair.b.get(), Lane::kControl);
      CheckFrame(frame, Lane::kControl, 480, ticket);
      pair.b->Release(Lane::kControl, frame);
    }
    CHECK(TrySend(pair.a.get(), Lane::kControl, 1, sent));
  });
}

TEST(frames_are_held_and_released_in_any_order) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    std::mt19937 random(7);
    const size_t hold = std::min<size_t>(pair.b->MaxHeld(), 3);
    std::vector<std::pair<uint64_t, InFrame>> held;
    uint64_t sent = 0;
    uint64_t got = 0;
    PumpUntil(&pair, [&] {
      if (sent < 1000 && TrySend(pair.a.get(), Lane::kData, sent % 4097, sent)) ++sent;
      InFrame frame;
      if (held.size() < hold && pair.b->Poll(Lane::kData, &frame)) held.push_back({got++, frame});
      if (held.size() == hold || got == 1000) {
        const size_t i = random() % held.size();
        CheckFrame(held[i].second, Lane::kData, held[i].first % 4097, held[i].first);
        pair.b->Release(Lane::kData, held[i].second);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
      return got == 1000 && held.empty();
    });
  });
}

TEST(a_frame_held_for_long_does_not_stop_the_lane) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    CHECK(TrySend(pair.a.get(), Lane::kData, 4096, 0));
    const InFrame first = Receive(&pair, pair.b.get(), Lane::kData);
    for (uint64_t ticket = 1; ticket < 50; ++ticket) {
      CHECK(TrySend(pair.a.get(), Lane::kData, 4096, ticket));
      const InFrame frame = Receive(&pair, pair.b.get(), Lane::kData);
      CheckFrame(frame, Lane::kData, 4096, ticket);
      pair.b->Release(Lane::kData, frame);
    }
    CheckFrame(first, Lane::kData, 4096, 0);
    pair.b->Release(Lane::kData, first);
  });
}

TEST(counts_are_of_the_data_lane) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    uint64_t bytes = 0;
    for (size_t n : {0, 1, 4096}) {
      CHECK(TrySend(pair.a.get(), Lane::kData, n, 0));
      CHECK(TrySend(pair.a.get(), Lane::kControl, 5, 0));
      bytes += n;
    }
    CHECK_EQ(pair.a->data_bytes_sent(), bytes);
    CHECK_EQ(pair.a->data_frames_sent(), uint64_t{3});
    CHECK_EQ(pair.b->data_frames_sent(), uint64_t{0});
    PumpUntil(&pair, [&] { return pair.a->Flushed(); });
    CHECK(!pair.a->WantsWrite());
  });
}

TEST(too_long_a_frame_is_an_error_of_the_sender) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    CHECK(pair.a->BeginSend(Lane::kControl, kMaxControlPayload + 1).data() == nullptr);
    bool moved = false;
    const Status status = pair.a->Pump(&moved);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kInternal));
  });
}

// Polls `link` empty while it reports no error, then once more: the frames that came before the
// loss must all be there.
TEST(loss_of_the_peer_is_reported_after_its_frames) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    uint64_t sent = Fill(pair.a.get(), 4096);
    uint64_t got = 0;
    auto take_all = [&] {
      InFrame frame;
      while (pair.b->Poll(Lane::kData, &frame)) {
        CheckFrame(frame, Lane::kData, 4096, got++);
        pair.b->Release(Lane::kData, frame);
      }
    };
    PumpUntil(&pair, [&] {
      take_all();
      return pair.a->Flushed();
    });
    for (int more = 0; more < 3; ++more) {
      PumpUntil(&pair, [&] { return pair.a->Flushed(); });
      if (TrySend(pair.a.get(), Lane::kData, 4096, sent)) ++sent;
    }
    bool moved = false;
    CHECK_OK(pair.a->Pump(&moved));
    CHECK(pair.a->Flushed());
    pair.a.reset();
    Status status;
    const int64_t deadline = NowUs() + 5 * kSecondUs;
    while ((status = pair.b->Pump(&moved)).ok()) CHECK(NowUs() < deadline);
    take_all();
    CHECK_EQ(got, sent);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(Code::kAborted));
    CHECK(status.message().find("rank 3 closed its connection") == 0);
    CHECK(status.payload().find("\"rank\": 3") != std::string::npos);
    CHECK(!pair.b->Pump(&moved).ok());
    CHECK(pair.b->BeginSend(Lane::kData, 1).data() == nullptr);
  });
}

TEST(loss_is_seen_while_sending) {
  ForEachTransport([](const TransportEntry& entry) {
    Pair pair(entry);
    pair.a.reset();
    bool moved = false;
    const int64_t deadline = NowUs() + 5 * kSecondUs;
    Status status;
    while ((status = pair.b->Pump(&moved)).ok()) {
      TrySend(pair.b.get(), Lane::kData, 4096, 0);
      CHECK(NowUs() < deadline);
    }
    CHECK(status.message().find("rank 3 closed its connection") == 0);
  });
}

// ---- the sleep protocol, two threads ----

// Sleeps until the doorbell or the link has something, as the progress thread does. False: ten
// seconds passed, which is a lost wake-up.
bool Sleep(Link* link, int doorbell) {
  pollfd fds[2] = {
      {doorbell, POLLIN, 0},
      {link->fd(), static_cast<short>(POLLIN | (link->WantsWrite() ? POLLOUT : 0)), 0}};
  const bool woken = ::poll(fds, 2, 10000) > 0;
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
      link->SetSleeping(true);
      turn(&moved);
      if (!moved && !finished()) {
        ++*sleeps;
        if (!Sleep(link, doorbell)) return "lost wake-up after ticket " + std::to_string(got[0]);
      }
      link->SetSleeping(false);
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
    pair.b->SetSleeping(true);
    CHECK(TrySend(pair.a.get(), Lane::kData, 8, 1));
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 2));
    CHECK_EQ_IN(take_rings(), uint64_t{1}, name);
    pair.b->SetSleeping(false);
    CHECK(TrySend(pair.a.get(), Lane::kControl, 8, 3));
    CHECK_EQ_IN(take_rings(), uint64_t{0}, name);
  }
}

TEST(release_wakes_a_sender_that_waits_for_room) {
  for (const char* name : {"inproc", "shm"}) {
    for (bool asleep_before_it_was_full : {false, true}) {
      Pair pair(*FindTransport(name));
      uint64_t rings = 0;
      uint64_t sent = 0;
      if (asleep_before_it_was_full) pair.a->SetSleeping(true);
      while (TrySend(pair.a.get(), Lane::kData, 8, sent)) ++sent;
      if (!asleep_before_it_was_full) pair.a->SetSleeping(true);
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
  pair.a->SetSleeping(true);
  const InFrame frame = Receive(&pair, pair.b.get(), Lane::kData);
  pair.b->Release(Lane::kData, frame);
  uint64_t rings = 0;
  CHECK(::read(pair.doorbell_a.get(), &rings, sizeof(rings)) < 0);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
