// ShmProducer and ShmConsumer over one piece of ordinary memory. Here both see the same addresses,
// so that ThreadSanitizer, blind between two mappings of one file, checks the ordering.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "base/deadline.h"
#include "check.h"
#include "transport/shm_lane.h"

namespace tfdist {
namespace {

constexpr size_t kCapacity = 100;  // not a multiple of a cache line: slots must not share one

struct Memory {
  explicit Memory(size_t slots) : bytes(ShmLane::Bytes(slots, kCapacity)) {
    data.reset(static_cast<uint8_t*>(std::aligned_alloc(kCacheLine, bytes)));
    std::memset(data.get(), 0, bytes);
  }
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  size_t bytes;
  std::unique_ptr<uint8_t, Free> data;
};

bool Send(ShmProducer* producer, uint64_t ticket) {
  if (producer->FindSlot() != Look::kReady) return false;
  std::memset(producer->payload(), static_cast<int>(ticket % 251), kCapacity);
  FrameHeader header;
  header.ticket = ticket;
  producer->Publish(header);
  return true;
}

TEST(zeroed_memory_is_an_empty_lane) {
  Memory memory(4);
  ShmConsumer consumer(ShmLane(memory.data.get(), 4, kCapacity));
  FrameHeader header;
  size_t slot = 0;
  CHECK(consumer.Take(&header, &slot) == Look::kNotYet);
}

TEST(layout_stays_inside_its_memory_and_parts_do_not_overlap) {
  for (size_t slots : {2, 3, 64}) {
    Memory memory(slots);
    const ShmLane lane(memory.data.get(), slots, kCapacity);
    const auto* end_of_entries = reinterpret_cast<uint8_t*>(&lane.entry(slots - 1) + 1);
    const auto* returned = reinterpret_cast<uint8_t*>(&lane.returned(0));
    const auto* end_of_returned = reinterpret_cast<uint8_t*>(&lane.returned(slots - 1) + 1);
    CHECK(end_of_entries <= returned);
    CHECK(end_of_returned <= lane.payload(0));
    CHECK(lane.payload(0) + kCapacity <= lane.payload(1));
    CHECK(lane.payload(slots - 1) + kCapacity <= memory.data.get() + memory.bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(lane.payload(1)) % kCacheLine, uintptr_t{0});
  }
}

TEST(a_consumer_that_keeps_up_sees_one_slot) {
  Memory memory(8);
  const ShmLane lane(memory.data.get(), 8, kCapacity);
  ShmProducer producer(lane);
  ShmConsumer consumer(lane);
  for (uint64_t ticket = 0; ticket < 30; ++ticket) {
    CHECK(Send(&producer, ticket));
    FrameHeader header;
    size_t slot = 99;
    CHECK(consumer.Take(&header, &slot) == Look::kReady);
    CHECK_EQ(header.ticket, ticket);
    CHECK_EQ(slot, size_t{0});
    consumer.Release(slot);
  }
}

// The consumer holds up to slots - 1 frames and gives back a random one; what it holds must not be
// overwritten.
void Exchange(size_t slots) {
  constexpr uint64_t kFrames = 100000;
  Memory memory(slots);
  const ShmLane lane(memory.data.get(), slots, kCapacity);
  const int64_t deadline = NowUs() + 60000000;
  std::thread sender([&] {
    ShmProducer producer(lane);
    for (uint64_t ticket = 0; ticket < kFrames && NowUs() < deadline;) {
      if (Send(&producer, ticket)) {
        ++ticket;
      } else {
        std::this_thread::yield();
      }
    }
  });
  ShmConsumer consumer(lane);
  std::mt19937 random(static_cast<unsigned>(slots));
  std::vector<std::pair<uint64_t, size_t>> held;
  uint64_t got = 0;
  uint64_t wrong = 0;
  while ((got < kFrames || !held.empty()) && NowUs() < deadline) {
    FrameHeader header;
    size_t slot = 0;
    if (held.size() < slots - 1 && consumer.Take(&header, &slot) == Look::kReady) {
      if (header.ticket != got) ++wrong;
      held.push_back({got++, slot});
      continue;
    }
    if (held.empty()) {
      std::this_thread::yield();
      continue;
    }
    std::swap(held[random() % held.size()], held.back());
    const auto [ticket, back] = held.back();
    held.pop_back();
    const uint8_t* payload = consumer.payload(back);
    const auto expected = static_cast<uint8_t>(ticket % 251);
    if (!std::all_of(payload, payload + kCapacity, [&](uint8_t x) { return x == expected; })) {
      ++wrong;
    }
    consumer.Release(back);
  }
  sender.join();
  CHECK_EQ(got, kFrames);
  CHECK_EQ(wrong, uint64_t{0});
}

TEST(two_threads_with_2_slots) { Exchange(2); }
TEST(two_threads_with_3_slots) { Exchange(3); }
TEST(two_threads_with_8_slots) { Exchange(8); }

}  // namespace
}  // namespace tfdist

TEST_MAIN()
