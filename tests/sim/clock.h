// The simulation's time and chance: an event queue in virtual microseconds and a seeded generator.
#ifndef TFDIST_TESTS_SIM_CLOCK_H_
#define TFDIST_TESTS_SIM_CLOCK_H_

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace tfdist::sim {

constexpr int64_t kMs = 1000;
constexpr int64_t kSecond = 1000 * kMs;

// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): the same
// numbers on every platform, which std::uniform_int_distribution does not promise.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // From low to high, both included.
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  int Index(size_t count) { return static_cast<int>(Between(0, static_cast<int64_t>(count) - 1)); }
  bool Chance(int percent) { return Between(1, 100) <= percent; }
  template <typename T>
  void Shuffle(std::vector<T>* values) {
    for (size_t i = values->size(); i > 1; --i) {
      std::swap((*values)[i - 1], (*values)[static_cast<size_t>(Index(i))]);
    }
  }

 private:
  uint64_t state_;
};

// Events run in the order of their time; those of one moment in the order in which they were made.
class EventQueue {
 public:
  int64_t now_us() const { return now_us_; }
  void At(int64_t time_us, std::function<void()> run) {
    events_.push({time_us < now_us_ ? now_us_ : time_us, next_++, std::move(run)});
  }
  void After(int64_t delay_us, std::function<void()> run) {
    At(now_us_ + delay_us, std::move(run));
  }
  // Runs everything up to `end_us`.
  void RunUntil(int64_t end_us) {
    while (!events_.empty() && events_.top().time_us <= end_us) {
      now_us_ = events_.top().time_us;
      auto run = std::move(const_cast<Event&>(events_.top()).run);
      events_.pop();
      run();
    }
    now_us_ = end_us;
  }

 private:
  struct Event {
    int64_t time_us;
    uint64_t number;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return time_us != other.time_us ? time_us > other.time_us : number > other.number;
    }
  };
  std::priority_queue<Event> events_;
  int64_t now_us_ = 0;
  uint64_t next_ = 0;
};

}  // namespace tfdist::sim

#endif  // TFDIST_TESTS_SIM_CLOCK_H_
