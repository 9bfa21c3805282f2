// ShmProducer and ShmConsumer over one piece of ordinary memory. Here both see the same addresses,
// so that ThreadSanitizer, blind between two mappings of one file, checks the ordering.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "check.h"
#include "transport/shm_lane.h"

namespace tfdist {
namespace {

constexpr size_t kCapacity = 100;  // not a multiple of a cache line: slots must not share one

// A lane, and payloads for so many lanes.
struct Memory {
  explicit Memory(size_t handles, size_t slots) {
    bytes = ShmLane::Bytes(handles) + ShmPayloads::Bytes(slots, kCapacity);
    data.reset(static_cast<uint8_t*>(std::aligned_alloc(kCacheLine, bytes)));
    std::memset(data.get(), 0, bytes);
    lane = ShmLane(data.get(), handles);
    payloads = ShmPayloads(data.get() + ShmLane::Bytes(handles), slots, kCapacity);
  }
  explicit Memory(size_t slots) : Memory(slots, slots) {}
  ShmProducer Producer() const { return {lane, std::make_shared<SlotPool>(payloads), {}}; }
  ShmConsumer Consumer() const { return {lane, payloads}; }
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  size_t bytes;
  std::unique_ptr<uint8_t, Free> data;
  ShmLane lane;
  ShmPayloads payloads;
};

bool Send(ShmProducer* producer, uint64_t ticket) {
  if (producer->Find() != Look::kReady) return false;
  std::memset(producer->Begin(kCapacity), static_cast<int>(ticket % 251), kCapacity);
  FrameHeader header;
  header.ticket = ticket;
  producer->Publish(header, Lane::kData, kCapacity);
  return true;
}

TEST(zeroed_memory_is_an_empty_lane) {
  Memory memory(4);
  ShmConsumer consumer = memory.Consumer();
  ShmFrame frame;
  CHECK(consumer.Take(&frame) == Look::kNotYet);
}

TEST(layout_stays_inside_its_memory_and_parts_do_not_overlap) {
  for (size_t slots : {2, 3, 64}) {
    Memory memory(slots);
    const ShmLane& lane = memory.lane;
    const auto* end_of_entries = reinterpret_cast<uint8_t*>(&lane.entry(slots - 1) + 1);
    const auto* returned = reinterpret_cast<uint8_t*>(&lane.returned(0));
    const auto* end_of_returned = reinterpret_cast<uint8_t*>(&lane.returned(slots - 1) + 1);
    CHECK(end_of_entries <= returned);
    CHECK(end_of_returned <= memory.payloads.at(0));
    CHECK(memory.payloads.at(0) + kCapacity <= memory.payloads.at(1));
    CHECK(memory.payloads.at(slots - 1) + kCapacity <= memory.data.get() + memory.bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory.payloads.at(1)) % kCacheLine, uintptr_t{0});
  }
}

// Sends a payload of `bytes`, takes it and gives it back; returns where it lay in the window.
size_t PlaceOfNext(ShmProducer* producer, ShmConsumer* consumer, const Memory& memory,
                   size_t bytes) {
  CHECK(producer->Find() == Look::kReady);
  uint8_t* written = producer->Begin(bytes);
  producer->Publish(FrameHeader(), Lane::kData, static_cast<uint32_t>(bytes));
  ShmFrame frame;
  CHECK(consumer->Take(&frame) == Look::kReady);
  CHECK(frame.payload == written);
  consumer->Release(frame.handle);
  return static_cast<size_t>(written - memory.payloads.at(0));
}

TEST(slots_are_taken_in_turns_though_the_consumer_keeps_up) {
  Memory memory(8);
  ShmProducer producer = memory.Producer();
  ShmConsumer consumer = memory.Consumer();
  const size_t stride = memory.payloads.stride();
  for (size_t i = 0; i < 30; ++i) {
    CHECK_EQ(PlaceOfNext(&producer, &consumer, memory, kCapacity), i % 8 * stride);
  }
}

TEST(small_payloads_go_to_other_lines_of_a_slot_when_its_turn_comes_again) {
  Memory memory(2);
  ShmProducer producer = memory.Producer();
  ShmConsumer consumer = memory.Consumer();
  const size_t stride = memory.payloads.stride();
  CHECK_EQ(stride, size_t{128});
  for (size_t place : {size_t{0}, stride, kCacheLine, stride + kCacheLine, size_t{0}}) {
    CHECK_EQ(PlaceOfNext(&producer, &consumer, memory, 40), place);
  }
  // A payload with no room behind the last one begins the slot anew, even an empty one.
  CHECK_EQ(PlaceOfNext(&producer, &consumer, memory, 100), stride);
  CHECK_EQ(PlaceOfNext(&producer, &consumer, memory, 0), kCacheLine);
  CHECK_EQ(PlaceOfNext(&producer, &consumer, memory, 0), size_t{stride});
}

TEST(a_large_window_is_not_used_up_while_its_first_slots_are_free) {
  constexpr size_t kLarge = size_t{1} << 20;
  std::vector<uint8_t> memory(8 * kLarge);
  SlotPool pool(ShmPayloads(memory.data(), 8, kLarge));
  for (size_t slot : {0, 1, 0, 1}) {
    CHECK_EQ(pool.Next(), slot);
    pool.Out(slot);
    pool.Back(slot);
  }
  for (size_t slot : {0, 1, 2, 3}) {
    CHECK_EQ(pool.Next(), slot);
    pool.Out(slot);
  }
  pool.Back(1);
  CHECK_EQ(pool.Next(), size_t{1});
}

TEST(an_offset_outside_of_the_slot_is_refused) {
  for (uint32_t offset : {64u, 128u, ~0u}) {
    Memory memory(4);
    ShmProducer producer = memory.Producer();
    CHECK(producer.Find() == Look::kReady);
    producer.Begin(kCapacity);
    producer.Publish(FrameHeader(), Lane::kData, kCapacity);
    memory.lane.entry(0).offset = offset;
    ShmConsumer consumer = memory.Consumer();
    ShmFrame frame;
    CHECK(consumer.Take(&frame) == Look::kCorrupt);
  }
}

// Two lanes over one pool of slots.
struct Shared {
  Shared() : one(4, 8), two(4, 8), pool(std::make_shared<SlotPool>(one.payloads)) {
    for (Memory* memory : {&one, &two}) {
      producers.emplace_back(memory->lane, pool, WritePolicy());
      consumers.emplace_back(memory->lane, one.payloads);
    }
  }
  Memory one;
  Memory two;
  std::shared_ptr<SlotPool> pool;
  std::vector<ShmProducer> producers;
  std::vector<ShmConsumer> consumers;
};

// Whether the slot comes when all turns are taken once.
bool IsFree(SlotPool pool, size_t slot) {
  for (size_t i = 0; i < pool.payloads().slots(); ++i) {
    const size_t next = pool.Next();
    if (next == slot) return true;
    if (next < pool.payloads().slots()) pool.Out(next);
  }
  return false;
}

TEST(a_slot_that_is_out_on_two_lanes_is_free_when_both_have_returned_it) {
  Shared shared;
  CHECK(shared.producers[0].Find() == Look::kReady);
  FrameHeader header;
  header.ticket = 7;
  const size_t slot = shared.producers[0].Publish(header, Lane::kData, 0);
  CHECK(shared.producers[1].FindHandle() == Look::kReady);
  shared.producers[1].Announce(header, Lane::kData, 0, slot);
  ShmFrame frames[2];
  for (int i = 0; i < 2; ++i) {
    CHECK(shared.consumers[static_cast<size_t>(i)].Take(&frames[i]) == Look::kReady);
    CHECK_EQ(frames[i].header.ticket, uint64_t{7});
    CHECK(frames[i].payload == shared.one.payloads.at(slot));
  }
  const auto reap = [&] {
    for (ShmProducer& producer : shared.producers) CHECK(producer.Reap());
  };
  shared.consumers[0].Release(frames[0].handle);
  reap();
  CHECK(!IsFree(*shared.pool, slot));
  shared.consumers[1].Release(frames[1].handle);
  reap();
  CHECK(IsFree(*shared.pool, slot));
}

TEST(a_lane_that_ends_gives_back_what_is_out_on_it) {
  Shared shared;
  CHECK(shared.producers[0].Find() == Look::kReady);
  const size_t slot = shared.producers[0].Publish(FrameHeader(), Lane::kData, 0);
  CHECK(!IsFree(*shared.pool, slot));
  shared.producers[0].Drop();
  CHECK(IsFree(*shared.pool, slot));
}

TEST(each_lane_has_room_for_its_own_handles_whatever_the_others_hold) {
  Shared shared;
  for (uint64_t ticket = 0; ticket < 4; ++ticket) CHECK(Send(&shared.producers[0], ticket));
  CHECK(!Send(&shared.producers[0], 4));
  for (uint64_t ticket = 0; ticket < 4; ++ticket) CHECK(Send(&shared.producers[1], ticket));
}

TEST(what_was_never_sent_cannot_come_back) {
  Memory memory(4);
  ShmProducer producer = memory.Producer();
  for (uint64_t ticket = 0; ticket < 4; ++ticket) CHECK(Send(&producer, ticket));
  memory.lane.returned(2).count.store(2);
  CHECK(producer.Find() == Look::kCorrupt);
  CHECK(producer.FindHandle() == Look::kCorrupt);
}

// Sends a frame, takes it, seen by a glance, and gives it back; returns its handle.
size_t HandleOfNext(ShmProducer* producer, ShmConsumer* consumer) {
  ShmFrame frame;
  CHECK(!consumer->Ready());
  CHECK(Send(producer, 0));
  CHECK(consumer->Ready());
  CHECK(consumer->Take(&frame) == Look::kReady);
  CHECK(!consumer->Ready());
  consumer->Release(frame.handle);
  return frame.handle;
}

TEST(what_came_back_is_not_looked_at_while_there_is_room) {
  Memory memory(4);
  ShmProducer producer = memory.Producer();
  ShmConsumer consumer = memory.Consumer();
  // Another handle each time, though the one before is back.
  for (size_t i = 0; i < 9; ++i) CHECK_EQ(HandleOfNext(&producer, &consumer), i % 4);
}

TEST(a_slot_outside_of_the_window_is_refused) {
  Memory memory(4);
  ShmProducer producer = memory.Producer();
  CHECK(Send(&producer, 0));
  memory.lane.entry(0).slot = 4;
  ShmConsumer consumer = memory.Consumer();
  ShmFrame frame;
  CHECK(consumer.Take(&frame) == Look::kCorrupt);
}

// The consumer holds up to slots - 1 frames and gives back a random one; what it holds must not be
// overwritten.
void Exchange(size_t slots) {
  constexpr uint64_t kFrames = 100000;
  Memory memory(slots);
  const int64_t deadline = NowUs() + 60000000;
  std::thread sender([&] {
    ShmProducer producer = memory.Producer();
    for (uint64_t ticket = 0; ticket < kFrames && NowUs() < deadline;) {
      if (Send(&producer, ticket)) {
        ++ticket;
      } else {
        std::this_thread::yield();
      }
    }
  });
  ShmConsumer consumer = memory.Consumer();
  std::mt19937 random(static_cast<unsigned>(slots));
  std::vector<ShmFrame> held;
  uint64_t got = 0;
  uint64_t wrong = 0;
  while ((got < kFrames || !held.empty()) && NowUs() < deadline) {
    ShmFrame frame;
    if (held.size() < slots - 1 && consumer.Take(&frame) == Look::kReady) {
      if (frame.header.ticket != got++) ++wrong;
      held.push_back(frame);
      continue;
    }
    if (held.empty()) {
      std::this_thread::yield();
      continue;
    }
    std::swap(held[random() % held.size()], held.back());
    const ShmFrame back = held.back();
    held.pop_back();
    const auto expected = static_cast<uint8_t>(back.header.ticket % 251);
    if (!std::all_of(back.payload, back.payload + kCapacity,
                     [&](uint8_t x) { return x == expected; })) {
      ++wrong;
    }
    consumer.Release(back.handle);
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
