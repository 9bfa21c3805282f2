// WritePolicy: whether what a rank writes for another to read goes past the caches.
//
// If two processors share a cache, lines pass between them in it. If not, each has to fetch every
// line that the other one has changed from the other's cache, and to invalidate it there to write
// it again. This is several times slower than through memory, to which streaming stores write.
// Whether a rank and its peer share a cache is not known (virtual machines do not tell) and changes
// when they are moved, so both ways are timed on payloads that are sent anyway: writing here plus
// reading there.
//
// Pure: reads no clock and touches no payload. The bytes that arrive are the same either way.
#ifndef TFDIST_OPS_TRANSPORT_WRITE_POLICY_H_
#define TFDIST_OPS_TRANSPORT_WRITE_POLICY_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tfdist {

// Smallest payload that is timed and may go past the caches.
constexpr size_t kTimedBytes = size_t{16} << 10;

class WritePolicy {
 public:
  WritePolicy() = default;
  // "auto", or one fixed way: "cached" or "nontemporal".
  explicit WritePolicy(const std::string& wanted)
      : streams_(wanted == "nontemporal"), fixed_(wanted != "auto") {}

  // Whether the next payload, of so many bytes, is to be streamed.
  bool Next(size_t bytes) {
    if (bytes < kTimedBytes) return false;
    if (fixed_) return streams_;
    const auto size = static_cast<int64_t>(bytes);
    if (state_ == State::kUsual) {
      left_ -= size;
      if (left_ <= 0) BeginTrial();
    }
    // At the end of a trial, the usual way again until the costs of all its payloads are known.
    if (state_ != State::kTrying || left_ <= 0) return streams_;
    left_ -= size;
    ++untold_;
    return !streams_;
  }

  // A payload of the peer has come. The cost of one rank's way depends on the other's: if both
  // could gain by streaming, a rank that streams alone gains nothing. So this rank starts a trial
  // when the peer leaves the way on which it had settled for the one that this rank does not use,
  // unless this rank has had a trial lately (otherwise two ranks that send in turn would react to
  // each other forever), and when the peer has settled on streaming and this rank does not stream.
  void Saw(bool streamed, size_t bytes) {
    if (bytes < kTimedBytes) return;
    const bool was_settled = peer_sent_ > kSettled;
    const bool begins = streamed != peer_streams_ && was_settled && left_ <= period_ / 2;
    if (streamed != peer_streams_) peer_sent_ = 0;
    peer_streams_ = streamed;
    peer_sent_ += static_cast<int64_t>(bytes);
    const bool settles = streamed && !was_settled && peer_sent_ > kSettled;
    if ((begins || settles) && streamed != streams_ && state_ == State::kUsual) left_ = 0;
  }

  // Adds the cost of a payload. `phase`: of its step; different phases do different things while
  // they read and write, so each is compared with itself. `ns`: writing and reading; 0: not known.
  void Add(bool streamed, uint16_t phase, size_t bytes, int64_t ns) {
    if (fixed_) return;
    const double cost = static_cast<double>(ns) / static_cast<double>(bytes);
    if (state_ == State::kTrying && streamed != streams_) {
      if (ns > 0) tried_.Add(phase, cost);
      if (--untold_ > 0 || left_ > 0) return;
      state_ = State::kComparing;
      recent_ = Costs();
      left_ = kLap;
      return;
    }
    if (streamed != streams_) return;
    if (state_ == State::kComparing && left_ > 0) {
      left_ -= static_cast<int64_t>(bytes);
      return;
    }
    if (ns <= 0) return;
    recent_.Add(phase, cost);
    if (recent_.count() % kLook != 0) return;
    if (state_ == State::kComparing) return Decide();
    if (state_ != State::kUsual) return;
    // Everything has become slower and stays so: perhaps one of the two ranks has been moved.
    const Sums sums = Compare(level_, recent_);
    risen_ = sums.phases > 0 && kRise * sums.typical < sums.least ? risen_ + 1 : 0;
    if (risen_ == kRisen) {
      left_ = 0;
      level_ = Costs();
    }
  }

 private:
  static constexpr int kLook = 16;  // payloads between two looks
  // In bytes. After a change of the way, the caches are still as the other way left them, which
  // makes the first payloads cheaper or more expensive than those that follow. So only the last
  // payloads of a trial count, and after a trial none of the first kLap bytes.
  static constexpr int64_t kTrial = int64_t{3} << 20;
  static constexpr int64_t kLap = int64_t{1} << 20;
  // After so many bytes in one way, the peer has settled on it; more than a trial.
  static constexpr int64_t kSettled = int64_t{16} << 20;
  static constexpr int64_t kShortest = int64_t{32} << 20;  // bytes between two trials
  static constexpr int64_t kLongest = int64_t{512} << 20;
  // The other way is chosen if it costs less than this multiple of the cost of the current way.
  static constexpr double kToStreamed = 0.9;
  static constexpr double kToCached = 1.05;
  static constexpr double kRise = 1.5;
  static constexpr int kRisen = 4;  // looks

  // The costs of the last payloads, in ns per byte.
  class Costs {
   public:
    // Phases whose numbers are equal modulo kPhases are treated as one.
    static constexpr size_t kPhases = 4;

    void Add(uint16_t phase, double cost) {
      const size_t p = phase % kPhases;
      last_[p][static_cast<size_t>(counts_[p]++) % kLast] = cost;
      ++count_;
    }
    int count() const { return count_; }
    bool Knows(size_t phase) const { return counts_[phase] >= kLeast; }
    double Least(size_t phase) const { return Sorted(phase, 0); }
    // The lower quartile: many are interrupted, and a few find what they read in a cache by luck.
    double Typical(size_t phase) const { return Sorted(phase, Kept(phase) / 4); }

   private:
    size_t Kept(size_t phase) const { return std::min(static_cast<size_t>(counts_[phase]), kLast); }
    // The cost at this place among the kept ones, from the least on.
    double Sorted(size_t phase, size_t place) const {
      std::array<double, kLast> sorted = last_[phase];
      std::sort(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(Kept(phase)));
      return sorted[place];
    }
    static constexpr size_t kLast = 8;
    static constexpr int kLeast = 4;

    std::array<std::array<double, kLast>, kPhases> last_ = {};
    std::array<int, kPhases> counts_ = {};
    int count_ = 0;
  };

  // The typical costs of one way (or period) and the least costs of another, summed over all phases
  // that both know.
  struct Sums {
    double typical = 0;
    double least = 0;
    int phases = 0;
  };
  static Sums Compare(const Costs& typical, const Costs& least) {
    Sums sums;
    for (size_t phase = 0; phase < Costs::kPhases; ++phase) {
      if (!typical.Knows(phase) || !least.Knows(phase)) continue;
      sums.typical += typical.Typical(phase);
      sums.least += least.Least(phase);
      ++sums.phases;
    }
    return sums;
  }

  // The current way is measured before and after a trial, and even its least costs must be worse
  // both times: one measurement alone might be from a time when other processes slowed the machine.
  enum class State { kUsual, kTrying, kComparing };

  void BeginTrial() {
    state_ = State::kTrying;
    left_ = kTrial;
    untold_ = 0;
    tried_ = Costs();
    before_ = recent_;
    risen_ = 0;
  }

  void Decide() {
    const double most = streams_ ? kToCached : kToStreamed;
    const Sums before = Compare(tried_, before_);
    const Sums after = Compare(tried_, recent_);
    const bool knows = before.phases > 0 && after.phases > 0;
    const bool changes =
        knows && before.typical < most * before.least && after.typical < most * after.least;
    level_ = changes ? tried_ : recent_;
    if (changes) {
      streams_ = !streams_;
      recent_ = Costs();
    }
    period_ = knows && !changes ? std::min(2 * period_, kLongest) : kShortest;
    left_ = period_;
    state_ = State::kUsual;
  }

  bool streams_ = false;
  bool fixed_ = false;
  State state_ = State::kUsual;
  int64_t left_ = kShortest;  // bytes until the next trial, of the trial, or of the lap after it
  int64_t period_ = kShortest;
  bool peer_streams_ = false;
  int64_t peer_sent_ = 0;  // bytes, since the peer changed its way
  int untold_ = 0;         // payloads of the trial whose costs are to come
  Costs recent_;           // of this way
  Costs before_;           // of this way, before the trial
  Costs tried_;            // of the other way
  Costs level_;            // of this way, when it was last compared
  int risen_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_WRITE_POLICY_H_
