// Every transport of the table, through the same tests: what transport/link.h promises about
// frames. Sleeping and waking are in link_sleep_test.cc.
#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "link_pair.h"

namespace tfdist {
namespace {

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
  CHECK(Transports().size() >= 3);
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

TEST(a_rank_is_barred_or_has_decided_never_both) {
  ForEachTransport([](const TransportEntry& entry) {
    const bool can_bar = std::string(entry.name) == "shm";
    Pair barred(entry);
    CHECK_EQ(barred.a->BarPeer(), can_bar);
    CHECK_EQ(barred.a->BarPeer(), can_bar);
    CHECK_EQ(barred.b->ClaimVerdict(), !can_bar);
    CHECK(barred.a->ClaimVerdict());  // the other direction is another matter
    Pair decided(entry);
    CHECK(decided.b->ClaimVerdict());
    CHECK(decided.b->ClaimVerdict());
    CHECK(!decided.a->BarPeer());
    CHECK_EQ(decided.b->BarPeer(), can_bar);
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
    CHECK_EQ(pair.a->WantsWrite(), !pair.a->Flushed());
    const std::string name = entry.name;
    CHECK_EQ(pair.a->WantsWrite(), name == "tcp" || name == "mpi");
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

}  // namespace
}  // namespace tfdist

TEST_MAIN()
