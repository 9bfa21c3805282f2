// StepMemory: what the steps of one rank's schedule read and write. It knows where slices lie and
// how they are reduced, not when: the engine's Operation and the tests' runner call it.
//
// Memory for partial and held slices (Place) is taken only for the slices whose steps name it.
#ifndef TFDIST_OPS_COLLECTIVE_STEP_MEMORY_H_
#define TFDIST_OPS_COLLECTIVE_STEP_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "base/span.h"
#include "collective/adasum.h"
#include "collective/reduce_kernels.h"
#include "collective/schedule.h"
#include "collective/slicing.h"

namespace tfdist {

// The size of results from which a rank writes them past the caches, because their reader would not
// find them there anyway. `ranks`: how many ranks of the host take part; `cache_bytes`: size of all
// last-level caches of the host (0: unknown). Measured with a reader after it (docs/design/0007).
size_t StreamedBytes(int64_t cache_bytes, int ranks);

class StepMemory {
 public:
  // `slices`: those of slicing.h, without the joined ones. `reduction`: of the whole collective;
  // its `finish` is for the steps that finish. `rank`: index in the set. Outputs of
  // `streamed_bytes` or more in all are written past the caches; of fewer, the next reader finds a
  // part in a cache. `step_bytes`: size of all results that come together, these included; counts
  // in place of the outputs' own size where it is larger.
  StepMemory(Schedule schedule, std::vector<Slice> slices, const Reduction& reduction, int rank,
             int64_t segment_bytes, size_t streamed_bytes, int64_t step_bytes = 0);

  // Prepares the same allreduce again, for tensors of the same sizes at other addresses.
  void MoveTo(const std::vector<TensorView>& tensors);

  const std::vector<Step>& steps() const { return schedule_.steps; }
  // Finish::divide; before the last contribution comes.
  void SetDivide(int64_t divide) { reduction_.finish.divide = divide; }
  int64_t segments(size_t step) const;                   // of the step's slice
  size_t WireBytes(size_t step, int64_t segment) const;  // payload of a segment
  // Whether Take, with `also` or without, writes past the caches what is not in place.
  bool Streams(size_t step, bool also) const;
  // kSend: copies the payload to `wire`; `streams`: past the caches.
  void Pack(size_t step, int64_t segment, uint8_t* wire, bool streams = false);
  // kSend: the memory that Pack would copy, in the order of the payload.
  void Locate(size_t step, int64_t segment, std::vector<ByteSpan>* pieces);
  // All kinds but kSend; `wire`: one payload per peer; `streamed`: these were written past the
  // caches. `also`, for a kReduce that finishes into the output: the payload of a send of the same
  // segment, filled along the way; `streams`: writes it past the caches.
  void Take(size_t step, int64_t segment, const std::vector<const uint8_t*>& wire, bool streamed,
            uint8_t* also = nullptr, bool streams = false);

  // Checks that every step has the memory that it names; returns "" or what is wrong. For tests,
  // that schedules and slices of the table fit together.
  std::string Check() const;
  size_t scratch_bytes() const { return scratch_bytes_; }
  size_t bytes() const;         // of all slices
  size_t output_bytes() const;  // of those that this rank gets

 private:
  int64_t Begin(int64_t segment) const { return segment * segment_elements_; }
  int64_t Count(size_t step, int64_t segment) const;
  bool InScratch(Place place) const;
  size_t BytesIn(Place place) const {
    return place == Place::kPartial || place == Place::kBeside ? partial_bytes_ : element_bytes_;
  }
  // Of an element of contribution `c`.
  size_t BytesOf(const Reduction& reduction, size_t c) const {
    return c < static_cast<size_t>(reduction.partials) ? partial_bytes_ : element_bytes_;
  }
  void LayOutScratch(size_t base_slices);
  // Room for the slices that a step names at one of `places`, which share it.
  std::vector<size_t> LayOut(size_t base_slices, std::initializer_list<Place> places);
  void SetCursors();
  bool SentLater(size_t step) const;
  uint8_t* At(Place place, int32_t slice, uint8_t* output, int64_t element);
  // Where a result goes.
  struct Target {
    uint8_t* at = nullptr;
    bool streams = false;  // past the caches
  };
  void Reduce(size_t step, int64_t segment, const std::vector<const uint8_t*>& wire, bool streamed,
              Target also);
  // A reduction some of whose contributions or results go past the caches. `own`: the contribution
  // that is not from the wire.
  void ReduceInBlocks(const Reduction& reduction, std::vector<const uint8_t*> contributions,
                      size_t own, bool streamed, Target out, Target also, int64_t n) const;
  // For each part of a tensor in the step's slice: fn(own partial result, kBeside, elements, its
  // tensor's dots).
  template <typename Fn>
  void ForEachPair(size_t step, Fn fn);
  void AddDots(int64_t segment, const uint8_t* wire);
  // Of a segment of dots: the first one, and their number.
  size_t FirstDots(int64_t segment) const {
    return static_cast<size_t>(segment * dots_of_segment_);
  }
  size_t DotsCount(int64_t segment) const {
    return std::min(static_cast<size_t>(dots_of_segment_), dots_.size() - FirstDots(segment));
  }
  template <typename Fn>  // fn(source, bytes), in the order of the payload
  void ForEachSent(size_t step, int64_t segment, Fn fn);

  const Schedule schedule_;
  std::vector<Slice> slices_;  // the joined ones too
  Reduction reduction_;
  const int rank_;
  const size_t element_bytes_;
  const size_t partial_bytes_;  // of an element of a partial result
  const int64_t segment_elements_;
  const int64_t dots_of_segment_;
  const size_t least_streamed_;         // bytes of a run
  std::vector<SliceCursor> cursors_;    // one per step
  std::vector<size_t> scratch_begins_;  // by slice; of kPartial and kHeld
  std::vector<size_t> beside_begins_;   // of kBeside
  std::unique_ptr<uint8_t[]> scratch_;
  size_t scratch_bytes_ = 0;
  bool streams_ = false;
  std::vector<Dots> dots_;                     // one per tensor that is not empty
  std::vector<const uint8_t*> contributions_;  // of the reduction in hand
};

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_STEP_MEMORY_H_
