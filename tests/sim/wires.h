// Wires between simulated ranks: for every ordered pair a queue that keeps its order, delays what
// it carries, can be cut (letters wait until it heals), and ends with its sender's process.
#ifndef TFDIST_TESTS_SIM_WIRES_H_
#define TFDIST_TESTS_SIM_WIRES_H_

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "clock.h"

namespace tfdist::sim {

template <typename Letter>
class Wires {
 public:
  struct Delay {
    int64_t low_us = 50;
    int64_t high_us = 500;
  };
  using Deliver = std::function<void(int from, int to, const Letter& letter)>;

  Wires(int size, EventQueue* queue, Rng* rng, Deliver deliver)
      : size_(size),
        queue_(queue),
        rng_(rng),
        deliver_(std::move(deliver)),
        wires_(static_cast<size_t>(size * size)) {}

  void SetDelay(int from, int to, Delay delay) { At(from, to).delay = delay; }
  void SetDuplicates(int percent) { duplicates_ = percent; }

  void Send(int from, int to, const Letter& letter) {
    Wire& wire = At(from, to);
    if (wire.closed) return;
    Push(from, to, &wire, letter);
    if (duplicates_ == 0 || !rng_->Chance(duplicates_)) return;
    queue_->After(rng_->Between(0, 20 * kMs), [this, from, to, letter] {
      Wire& late = At(from, to);
      if (!late.closed) Push(from, to, &late, letter);
    });
  }
  // Nothing more can be sent; what is under way still arrives.
  void Close(int from, int to) { At(from, to).closed = true; }
  bool IsClosed(int from, int to) { return At(from, to).closed; }
  void Cut(int from, int to) { At(from, to).cut = true; }
  bool IsCut(int from, int to) const { return wires_[static_cast<size_t>(from * size_ + to)].cut; }
  void Heal(int from, int to) {
    Wire& wire = At(from, to);
    if (!wire.cut) return;
    wire.cut = false;
    wire.last_us = 0;
    for (Waiting& waiting : wire.letters) {
      waiting.time_us = Arrival(&wire);
      queue_->At(waiting.time_us, [this, from, to] { Arrive(from, to); });
    }
  }
  // Forgets what is under way.
  void Drop(int from, int to) { At(from, to).letters.clear(); }

 private:
  struct Waiting {
    int64_t time_us;
    Letter letter;
  };
  struct Wire {
    Delay delay;
    bool cut = false;
    bool closed = false;
    int64_t last_us = 0;
    std::deque<Waiting> letters;
  };
  Wire& At(int from, int to) { return wires_[static_cast<size_t>(from * size_ + to)]; }
  int64_t Arrival(Wire* wire) {
    const int64_t delay = rng_->Between(wire->delay.low_us, wire->delay.high_us);
    wire->last_us = std::max(wire->last_us, queue_->now_us() + delay);
    return wire->last_us;
  }
  void Push(int from, int to, Wire* wire, const Letter& letter) {
    const int64_t time_us = Arrival(wire);
    wire->letters.push_back({time_us, letter});
    if (!wire->cut) queue_->At(time_us, [this, from, to] { Arrive(from, to); });
  }
  void Arrive(int from, int to) {
    Wire& wire = At(from, to);
    if (wire.cut || wire.letters.empty()) return;
    if (wire.letters.front().time_us > queue_->now_us()) return;
    const Letter letter = std::move(wire.letters.front().letter);
    wire.letters.pop_front();
    deliver_(from, to, letter);
  }

  const int size_;
  EventQueue* queue_;
  Rng* rng_;
  Deliver deliver_;
  std::vector<Wire> wires_;
  int duplicates_ = 0;
};

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_WIRES_H_
