// StoreChoice: whether what a rank writes for another to read goes past the caches.
//
// Two processors that share a cache hand lines over in it. Two that do not fetch every line that
// the other one has changed out of its cache, and take it away from there to write it again:
// several times as slow as memory, into which streaming stores bring it. Which of the two a rank
// and its peer are is not known (virtual machines do not tell) and changes when they are moved, so
// both ways are timed on payloads that are sent anyway: writing here plus reading there.
//
// Pure: no clock, no memory. The bytes that arrive are the same.
#ifndef TFDIST_OPS_TRANSPORT_STORE_CHOICE_H_
#define TFDIST_OPS_TRANSPORT_STORE_CHOICE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace tfdist {

// Of a payload that is timed, and that may go past the caches.
constexpr size_t kTimedBytes = size_t{16} << 10;

class StoreChoice {
 public:
  StoreChoice() = default;
  // "auto", or the one way: "cached", "streamed".
  explicit StoreChoice(const std::string& wanted)
      : streams_(wanted == "streamed"), fixed_(wanted != "auto") {}

  // Whether the next payload, of so many bytes, is to be streamed.
  bool Next(size_t bytes) {
    if (bytes < kTimedBytes) return false;
    if (fixed_) return streams_;
    const auto size = static_cast<int64_t>(bytes);
    if (state_ == State::kUsual) {
      left_ -= size;
      if (left_ <= 0) BeginTrial();
    }
    // At the end of a trial, until all its payloads are told, the usual way again.
    if (state_ != State::kTrying || left_ <= 0) return streams_;
    left_ -= size;
    ++untold_;
    return !streams_;
  }

  // What became of a payload. `phase`: of its step; costs of different phases, which do different
  // things while they read and write, are not compared. `ns`: writing and reading; 0: not known.
  void Add(bool streamed, uint16_t phase, size_t bytes, int64_t ns) {
    if (fixed_) return;
    const double cost = static_cast<double>(ns) / static_cast<double>(bytes);
    if (state_ == State::kTrying && streamed != streams_) {
      if (ns > 0 && phase == phase_) tried_ = std::min(tried_, cost);
      if (--untold_ > 0 || left_ > 0) return;
      state_ = State::kComparing;
      recent_count_ = 0;
      return;
    }
    if (streamed != streams_ || ns <= 0) return;
    if (phase != phase_) {
      if (++others_ < kOtherPhases) return;
      phase_ = phase;
      recent_count_ = 0;
      before_ = tried_ = kUnknown;
    }
    others_ = 0;
    recent_[recent_count_++ % kRecent] = cost;
    if (recent_count_ % kRecent != 0) return;
    if (state_ == State::kComparing) return Decide();
    if (state_ != State::kUsual) return;
    // Everything has become slower and stays so: perhaps one of the two ranks has been moved.
    risen_ = Recent() > kRise * level_ ? risen_ + 1 : 0;
    if (risen_ == kRisen) {
      left_ = 0;
      level_ = kUnknown;
    }
  }

 private:
  static constexpr int kRecent = 8;
  static constexpr int kOtherPhases = 32;  // until these are the ones that are compared
  // Bytes of a trial: enough to come to the same memory more than once, since at first it is in the
  // caches as the other way left it.
  static constexpr int64_t kTrial = int64_t{3} << 20;
  static constexpr int64_t kShortest = int64_t{32} << 20;  // bytes between two trials
  static constexpr int64_t kLongest = int64_t{512} << 20;
  // Of the cost of the way so far: what the other one may cost at most to be taken.
  static constexpr double kToStreamed = 0.9;
  static constexpr double kToCached = 1.05;
  static constexpr double kRise = 1.5;
  static constexpr int kRisen = 4;  // times kRecent payloads
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  // A trial lies between two looks at the way so far, which both must be worse: one alone might
  // have been taken while others slowed the machine down.
  enum class State { kUsual, kTrying, kComparing };

  // The least of the last few: whoever was interrupted took longer.
  double Recent() const {
    return recent_count_ < kRecent ? kUnknown : *std::min_element(recent_, recent_ + kRecent);
  }

  void BeginTrial() {
    state_ = State::kTrying;
    left_ = kTrial;
    untold_ = 0;
    tried_ = kUnknown;
    before_ = Recent();
    risen_ = 0;
  }

  void Decide() {
    const bool knows = before_ < kUnknown && tried_ < kUnknown;
    const double recent = knows ? std::min(before_, Recent()) : kUnknown;
    const bool changes = knows && tried_ < (streams_ ? kToCached : kToStreamed) * recent;
    if (changes) {
      streams_ = !streams_;
      recent_count_ = 0;
    }
    level_ = changes ? tried_ : recent;
    period_ = knows && !changes ? std::min(2 * period_, kLongest) : kShortest;
    left_ = period_;
    state_ = State::kUsual;
  }

  bool streams_ = false;
  bool fixed_ = false;
  State state_ = State::kUsual;
  int64_t left_ = kShortest;  // bytes until the next trial, or of the trial
  int64_t period_ = kShortest;
  int untold_ = 0;            // payloads of the trial whose costs are to come
  double tried_ = kUnknown;   // least cost of the other way, ns a byte
  double before_ = kUnknown;  // of this way, before the trial
  double level_ = kUnknown;   // cost of this way when it was last compared
  double recent_[kRecent] = {};
  int recent_count_ = 0;
  int risen_ = 0;
  uint16_t phase_ = 0;
  int others_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_TRANSPORT_STORE_CHOICE_H_
