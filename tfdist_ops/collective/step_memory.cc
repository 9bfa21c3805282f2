#include "collective/step_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/streaming_copy.h"

namespace tfdist {
namespace {
// The least that is streamed at once: with less, the fence after it would cost more than it gains.
constexpr size_t kLeastStreamed = size_t{8} << 10;
// How much is computed before it is copied on: it stays in the first-level cache.
constexpr size_t kBlockBytes = size_t{8} << 10;
// How much is prefetched while as much is computed: it hides the latency of memory, and a processor
// can have few more cache lines under way at once.
constexpr size_t kAheadBytes = size_t{2} << 10;

// Copies what was written past the caches, prefetching ahead.
void CopyAhead(uint8_t* target, const uint8_t* source, size_t bytes, bool streams) {
  while (bytes > 0) {
    const size_t now = std::min(bytes, kAheadBytes);
    FetchAhead(source + now, std::min(bytes - now, kAheadBytes));
    if (streams) {
      StreamingCopy(target, source, now);
    } else {
      std::memcpy(target, source, now);
    }
    target += now;
    source += now;
    bytes -= now;
  }
}

}  // namespace

size_t StreamedBytes(int64_t cache_bytes, int ranks) {
  constexpr int64_t kMost = int64_t{64} << 20;
  // Other ranks' results, inputs and what is under way come between a result and its reader.
  const int64_t of_all = cache_bytes > 0 ? cache_bytes : kMost;
  return static_cast<size_t>(std::min(kMost, of_all / std::max(ranks, 1)));
}

StepMemory::StepMemory(Schedule schedule, std::vector<Slice> slices, const Reduction& reduction,
                       int rank, int64_t segment_bytes, size_t streamed_bytes, int64_t step_bytes)
    : schedule_(std::move(schedule)),
      slices_(std::move(slices)),
      reduction_(reduction),
      rank_(rank),
      element_bytes_(DTypeSize(reduction.dtype)),
      partial_bytes_(DTypeSize(AccumulationType(reduction.dtype))),
      segment_elements_(ScheduleSegment(schedule_, reduction.dtype, segment_bytes)),
      dots_of_segment_(DotsOfSegment(segment_bytes)),
      least_streamed_(std::min(kLeastStreamed, streamed_bytes)) {
  const size_t base_slices = slices_.size();
  AppendJoined(schedule_.joined, &slices_);
  LayOutScratch(base_slices);
  SetCursors();
  const size_t own_bytes = output_bytes();
  streams_ =
      own_bytes > 0 && std::max(own_bytes, static_cast<size_t>(step_bytes)) >= streamed_bytes;
}

void StepMemory::SetCursors() {
  cursors_.clear();
  for (const Step& step : schedule_.steps) {
    cursors_.emplace_back(slices_[static_cast<size_t>(step.slice)]);
  }
}

void StepMemory::MoveTo(const std::vector<TensorView>& tensors) {
  slices_.resize(slices_.size() - schedule_.joined.size());
  CutAllreduceAgain(tensors, element_bytes_, &slices_);
  AppendJoined(schedule_.joined, &slices_);
  SetCursors();
}

bool StepMemory::InScratch(Place place) const {
  const bool is_apart = partial_bytes_ != element_bytes_ || schedule_.private_partials;
  return place == Place::kHeld || place == Place::kBeside || place == Place::kDots ||
         (place == Place::kPartial && is_apart);
}

void StepMemory::LayOutScratch(size_t base_slices) {
  scratch_begins_ = LayOut(base_slices, {Place::kPartial, Place::kHeld});
  beside_begins_ = LayOut(base_slices, {Place::kBeside});
  if (scratch_bytes_ > 0) scratch_.reset(new uint8_t[scratch_bytes_]);  // not zeroed
  const bool has_dots = std::any_of(schedule_.steps.begin(), schedule_.steps.end(), IsWhole);
  for (size_t s = 0; has_dots && s < base_slices; ++s) {
    for (const Extent& e : slices_[s].extents) {
      dots_.resize(std::max(dots_.size(), static_cast<size_t>(e.tensor) + 1));
    }
  }
}

std::vector<size_t> StepMemory::LayOut(size_t base_slices, std::initializer_list<Place> places) {
  std::vector<size_t> bytes(base_slices, 0);  // of an element; 0: the slice needs none
  for (const Step& step : schedule_.steps) {
    for (Place place : {step.own, step.to}) {
      const bool named = std::find(places.begin(), places.end(), place) != places.end();
      if (!named || !InScratch(place)) continue;
      size_t first = static_cast<size_t>(step.slice);
      size_t count = 1;
      if (first >= base_slices) {
        const JoinedSlice& joined = schedule_.joined[first - base_slices];
        first = static_cast<size_t>(joined.first);
        count = static_cast<size_t>(joined.count);
      }
      for (size_t s = first; s < first + count; ++s) bytes[s] = std::max(bytes[s], BytesIn(place));
    }
  }
  std::vector<size_t> begins;  // by slice, the joined ones too
  for (size_t s = 0; s < base_slices; ++s) {
    begins.push_back(scratch_bytes_);
    scratch_bytes_ += static_cast<size_t>(slices_[s].elements) * bytes[s];
  }
  for (const JoinedSlice& joined : schedule_.joined) {
    begins.push_back(begins[static_cast<size_t>(joined.first)]);
  }
  return begins;
}

size_t StepMemory::bytes() const {
  int64_t elements = 0;
  for (size_t s = 0; s + schedule_.joined.size() < slices_.size(); ++s) {
    elements += slices_[s].elements;
  }
  return static_cast<size_t>(elements) * element_bytes_;
}

size_t StepMemory::output_bytes() const {
  int64_t elements = 0;
  for (size_t s = 0; s + schedule_.joined.size() < slices_.size(); ++s) {
    for (const Extent& e : slices_[s].extents) elements += e.output != nullptr ? e.elements : 0;
  }
  return static_cast<size_t>(elements) * element_bytes_;
}

int64_t StepMemory::segments(size_t step) const {
  const auto dots = static_cast<int64_t>(dots_.size());
  if (IsWhole(schedule_.steps[step])) return std::min<int64_t>(1, dots);
  if (MovesDots(schedule_.steps[step])) return SegmentCount(dots, dots_of_segment_);
  const auto slice = static_cast<size_t>(schedule_.steps[step].slice);
  return SegmentCount(slices_[slice].elements, segment_elements_);
}

int64_t StepMemory::Count(size_t step, int64_t segment) const {
  const auto slice = static_cast<size_t>(schedule_.steps[step].slice);
  return std::min(segment_elements_, slices_[slice].elements - Begin(segment));
}

size_t StepMemory::WireBytes(size_t step, int64_t segment) const {
  if (MovesDots(schedule_.steps[step])) return DotsCount(segment) * sizeof(Dots);
  const bool partial = CarriesPartials(schedule_.steps[step]);
  return static_cast<size_t>(std::max<int64_t>(0, Count(step, segment))) *
         (partial ? partial_bytes_ : element_bytes_);
}

// Element `element` of a slice: in scratch, or else at `output`, its place in the output.
uint8_t* StepMemory::At(Place place, int32_t slice, uint8_t* output, int64_t element) {
  if (!InScratch(place)) return output;
  const std::vector<size_t>& begins = place == Place::kBeside ? beside_begins_ : scratch_begins_;
  return scratch_.get() + begins[static_cast<size_t>(slice)] +
         static_cast<size_t>(element) * BytesIn(place);
}

// Inputs travel as they are: whoever reduces them scales, in its accumulation type.
template <typename Fn>
void StepMemory::ForEachSent(size_t step, int64_t segment, Fn fn) {
  const Step& s = schedule_.steps[step];
  if (MovesDots(s)) {
    fn(reinterpret_cast<const uint8_t*>(dots_.data() + FirstDots(segment)),
       DotsCount(segment) * sizeof(Dots));
    return;
  }
  const size_t bytes = BytesIn(s.own);
  const int64_t begin = Begin(segment);
  cursors_[step].ForEachRun(
      begin, Count(step, segment), element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
        fn(s.own == Place::kInput ? input : At(s.own, s.slice, output, begin + offset),
           static_cast<size_t>(n) * bytes);
      });
}

// Whether this rank sends what the step writes, and so reads it again.
bool StepMemory::SentLater(size_t step) const {
  const Step& writer = schedule_.steps[step];
  return std::any_of(schedule_.steps.begin(), schedule_.steps.end(), [&writer](const Step& other) {
    return other.kind == StepKind::kSend && other.own == writer.to && other.slice == writer.slice;
  });
}

bool StepMemory::Streams(size_t step, bool also) const {
  const Step& s = schedule_.steps[step];
  if (!streams_ || s.kind == StepKind::kSend || IsWhole(s)) return false;
  return s.kind == StepKind::kReduce ? also : !InScratch(s.to) && !SentLater(step);
}

void StepMemory::Pack(size_t step, int64_t segment, uint8_t* wire, bool streams) {
  ForEachSent(step, segment, [&](const uint8_t* source, size_t bytes) {
    if (streams && bytes >= least_streamed_) {
      StreamingCopy(wire, source, bytes);
    } else {
      std::memcpy(wire, source, bytes);
    }
    wire += bytes;
  });
  if (streams) StreamingFence();
}

void StepMemory::Locate(size_t step, int64_t segment, std::vector<ByteSpan>* pieces) {
  pieces->clear();
  ForEachSent(step, segment,
              [&](const uint8_t* source, size_t bytes) { pieces->push_back({source, bytes}); });
}

void StepMemory::Take(size_t step, int64_t segment, const std::vector<const uint8_t*>& wire,
                      bool streamed, uint8_t* also, bool streams_also) {
  const Step& s = schedule_.steps[step];
  const DType partial = AccumulationType(reduction_.dtype);
  switch (s.kind) {
    case StepKind::kReduce:
      if (MovesDots(s)) return AddDots(segment, wire[0]);
      return Reduce(step, segment, wire, streamed, {also, streams_also});
    case StepKind::kDots:
      std::fill(dots_.begin(), dots_.end(), Dots());
      return ForEachPair(step, [&](uint8_t* own, const uint8_t* beside, int64_t n, Dots* dots) {
        const Dots part = DotsOf(partial, s.second ? beside : own, s.second ? own : beside, n);
        *dots = {dots->ab + part.ab, dots->aa + part.aa, dots->bb + part.bb};
      });
    case StepKind::kCombine:
      return ForEachPair(step, [&](uint8_t* own, const uint8_t* beside, int64_t n, Dots* dots) {
        const PairFactors factors = FactorsOf(*dots);
        const PairFactors swapped{factors.b, factors.a};
        AddPair(partial, s.second ? swapped : factors, own, beside, n);
      });
    default:
      break;
  }
  const size_t element_bytes = BytesIn(s.to);
  const bool streams = Streams(step, false);
  const int64_t begin = Begin(segment);
  cursors_[step].ForEachRun(
      begin, Count(step, segment), element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
        const uint8_t* source =
            wire.empty() ? input : wire[0] + static_cast<size_t>(offset) * element_bytes;
        uint8_t* target = At(s.to, s.slice, output, begin + offset);
        const size_t bytes = static_cast<size_t>(n) * element_bytes;
        if (source == target) return;
        const bool streams_out = streams && input != output;
        if (streamed) {
          CopyAhead(target, source, bytes, streams_out);
        } else if (streams_out) {
          StreamingCopy(target, source, bytes);
        } else {
          std::memcpy(target, source, bytes);
        }
      });
  if (streams) StreamingFence();
}

template <typename Fn>
void StepMemory::ForEachPair(size_t step, Fn fn) {
  const Step& s = schedule_.steps[step];
  int64_t begin = 0;
  for (const Extent& e : slices_[static_cast<size_t>(s.slice)].extents) {
    fn(At(s.own, s.slice, e.output, begin), At(Place::kBeside, s.slice, nullptr, begin), e.elements,
       &dots_[static_cast<size_t>(e.tensor)]);
    begin += e.elements;
  }
}

// Both ranks of a pair get the same bits: the order of two numbers does not change their sum.
void StepMemory::AddDots(int64_t segment, const uint8_t* wire) {
  const size_t first = FirstDots(segment);
  for (size_t i = first; i < first + DotsCount(segment); ++i) {
    Dots& dots = dots_[i];
    Dots other;
    std::memcpy(&other, wire, sizeof(Dots));
    dots = {dots.ab + other.ab, dots.aa + other.aa, dots.bb + other.bb};
    wire += sizeof(Dots);
  }
}

// Partial results come before inputs, as the kernels want it; both in the order of ranks. Two ranks
// that reduce the same two operands do it in the same order.
void StepMemory::Reduce(size_t step, int64_t segment, const std::vector<const uint8_t*>& wire,
                        bool streamed, Target also) {
  const Step& s = schedule_.steps[step];
  const bool own_partial = s.own == Place::kPartial;
  const bool peers_partial = CarriesPartials(s);
  Reduction reduction = reduction_;
  if (!s.finish) reduction.finish = {};
  reduction.partials = (own_partial ? 1 : 0) + (peers_partial ? static_cast<int>(wire.size()) : 0);
  reduction.to_partial = s.to == Place::kPartial;
  size_t own_place = 0;  // among the contributions
  if (own_partial == peers_partial) {
    while (own_place < wire.size() && s.peers[own_place] < rank_) ++own_place;
  } else if (peers_partial) {
    own_place = wire.size();
  }
  const size_t wire_bytes = peers_partial ? partial_bytes_ : element_bytes_;
  const bool streams = Streams(step, also.at != nullptr);
  const int64_t begin = Begin(segment);
  std::vector<const uint8_t*>& contributions = contributions_;
  contributions.resize(wire.size() + 1);
  cursors_[step].ForEachRun(
      begin, Count(step, segment), element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
        for (size_t c = 0; c < contributions.size(); ++c) {
          if (c == own_place) {
            contributions[c] = own_partial ? At(s.own, s.slice, output, begin + offset) : input;
          } else {
            contributions[c] =
                wire[c < own_place ? c : c - 1] + static_cast<size_t>(offset) * wire_bytes;
          }
        }
        const int count = static_cast<int>(contributions.size());
        const Target out{At(s.to, s.slice, output, begin + offset), streams && input != output};
        Target sent = also;
        if (sent.at != nullptr) sent.at += static_cast<size_t>(offset) * element_bytes_;
        const bool large = static_cast<size_t>(n) * element_bytes_ >= least_streamed_;
        if (large && (streamed || out.streams || sent.streams)) {
          ReduceInBlocks(reduction, contributions, own_place, streamed, out, sent, n);
        } else {
          tfdist::Reduce(reduction, contributions.data(), count, out.at, n, sent.at);
        }
      });
  if (streams || also.streams) StreamingFence();
}

// Values for a streamed target are first computed elsewhere and then copied: in the one of the two
// targets that is not streamed, or else in `scratch`.
void StepMemory::ReduceInBlocks(const Reduction& reduction,
                                std::vector<const uint8_t*> contributions, size_t own,
                                bool streamed, Target out, Target also, int64_t n) const {
  alignas(64) uint8_t scratch[kBlockBytes];
  const bool wants_also = also.at != nullptr;
  const size_t out_bytes = reduction.to_partial ? partial_bytes_ : element_bytes_;
  const auto most = static_cast<int64_t>((streamed ? kAheadBytes : kBlockBytes) / out_bytes);
  while (n > 0) {
    const int64_t now = std::min(n, most);
    const int64_t next = std::min(n - now, most);
    for (size_t c = 0; c < contributions.size(); ++c) {
      const size_t bytes = BytesOf(reduction, c);
      const uint8_t* behind = contributions[c] + static_cast<size_t>(now) * bytes;
      if (streamed && c != own) FetchAhead(behind, static_cast<size_t>(next) * bytes);
    }
    uint8_t* computed = !out.streams ? out.at : wants_also && !also.streams ? also.at : scratch;
    uint8_t* second = wants_also && computed == out.at && !also.streams ? also.at : nullptr;
    tfdist::Reduce(reduction, contributions.data(), static_cast<int>(contributions.size()),
                   computed, now, second);
    const size_t bytes = static_cast<size_t>(now) * out_bytes;
    if (out.streams) StreamingCopy(out.at, computed, bytes);
    if (also.streams) StreamingCopy(also.at, computed, bytes);
    out.at += bytes;
    if (wants_also) also.at += bytes;
    for (size_t c = 0; c < contributions.size(); ++c) {
      contributions[c] += static_cast<size_t>(now) * BytesOf(reduction, c);
    }
    n -= now;
  }
}

std::string StepMemory::Check() const {
  for (size_t i = 0; i < schedule_.steps.size(); ++i) {
    const Step& step = schedule_.steps[i];
    const bool reads_own = step.kind != StepKind::kCopy || step.peers.empty();
    const bool writes = step.kind != StepKind::kSend;
    for (const Extent& e : slices_[static_cast<size_t>(step.slice)].extents) {
      const auto missing = [&](Place place) {
        return place == Place::kInput ? e.input == nullptr
                                      : !InScratch(place) && e.output == nullptr;
      };
      const std::string where = "rank " + std::to_string(rank_) + " step " + std::to_string(i);
      if (reads_own && missing(step.own)) return where + " reads what the rank does not have";
      if (writes && missing(step.to)) return where + " writes where the rank has nothing";
    }
  }
  return "";
}

}  // namespace tfdist
