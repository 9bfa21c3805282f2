#include "collective/step_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/half_convert.h"

namespace tfdist {
namespace {

constexpr int64_t kBlock = 1024;         // elements; two blocks of the widest type stay in cache
constexpr size_t kMaxElementBytes = 16;  // complex128
constexpr size_t kWideBytes = 4;         // float32

void Widen(DType dtype, const uint8_t* in, float* out, int64_t n) {
  if (dtype == DType::kFloat16) return HalvesToFloats(in, out, n);
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, in + 2 * i, 2);
    out[i] = Bfloat16ToFloat(bits);
  }
}

void Narrow(DType dtype, const float* in, uint8_t* out, int64_t n) {
  if (dtype == DType::kFloat16) return FloatsToHalves(in, out, n);
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = FloatToBfloat16(in[i]);
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

// The kernels do the case at one go: all contributions of the type itself, and prescale on all of
// them, on none, or on the second of two.
bool CombineAtOnce(const Reduction& r, const std::vector<Contribution>& in, const Finish& finish,
                   uint8_t* out, int64_t elements) {
  const auto scaled =
      std::count_if(in.begin(), in.end(), [&](const Contribution& c) { return c.scaled; });
  const bool all = scaled == static_cast<std::ptrdiff_t>(in.size());
  const bool none = scaled == 0 || r.prescale == 1.0;
  if (!all && !none) {
    if (in.size() != 2 || !in[1].scaled) return false;
    ReducePartial(r.dtype, r.op, in[0].data, in[1].data, r.prescale, finish, out, elements);
    return true;
  }
  std::vector<const uint8_t*> data;
  for (const Contribution& c : in) data.push_back(c.data);
  ReduceRaw(r.dtype, r.op, data, none ? 1.0 : r.prescale, finish, out, elements);
  return true;
}

// Block by block in the accumulation type, two operands at a time.
void CombineInBlocks(const Reduction& r, const std::vector<Contribution>& in, const Finish& finish,
                     uint8_t* out, bool out_wide, int64_t elements) {
  const bool half = IsHalf(r.dtype);
  const DType type = half ? DType::kFloat32 : r.dtype;
  const auto wide_bytes = static_cast<int64_t>(DTypeSize(type));
  const auto bytes = static_cast<int64_t>(DTypeSize(r.dtype));
  const bool round = half && !out_wide;
  alignas(64) uint8_t total[kBlock * kMaxElementBytes];
  alignas(64) uint8_t next[kBlock * kMaxElementBytes];
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t n = std::min(kBlock, elements - begin);
    // The contribution in the accumulation type, scaled: where it lies when it is so already.
    const auto view = [&](const Contribution& c, uint8_t* buffer) {
      const uint8_t* data = c.data + begin * (half && !c.wide ? bytes : wide_bytes);
      if (half && !c.wide) {
        Widen(r.dtype, data, reinterpret_cast<float*>(buffer), n);
        data = buffer;
      }
      if (!c.scaled || r.prescale == 1.0) return data;
      CopyScaled(type, data, r.prescale, buffer, n);
      return static_cast<const uint8_t*>(buffer);
    };
    uint8_t* target = round ? total : out + begin * wide_bytes;
    const uint8_t* sum = view(in[0], total);
    for (size_t i = 1; i + 1 < in.size(); ++i) {
      ReduceRaw(type, r.op, {sum, view(in[i], next)}, 1.0, {}, total, n);
      sum = total;
    }
    std::vector<const uint8_t*> last = {sum};
    if (in.size() > 1) last.push_back(view(in.back(), next));
    ReduceRaw(type, r.op, last, 1.0, finish, target, n);
    if (round) Narrow(r.dtype, reinterpret_cast<const float*>(total), out + begin * bytes, n);
  }
}

}  // namespace

void Combine(const Reduction& reduction, const std::vector<Contribution>& contributions,
             const Finish& finish, uint8_t* out, bool out_wide, int64_t elements) {
  const bool wide = IsHalf(reduction.dtype) &&
                    (out_wide || std::any_of(contributions.begin(), contributions.end(),
                                             [](const Contribution& c) { return c.wide; }));
  if (!wide && CombineAtOnce(reduction, contributions, finish, out, elements)) return;
  CombineInBlocks(reduction, contributions, finish, out, out_wide, elements);
}

StepMemory::StepMemory(Schedule schedule, std::vector<Slice> slices, const Reduction& reduction,
                       int rank, int64_t segment_bytes)
    : schedule_(std::move(schedule)),
      slices_(std::move(slices)),
      reduction_(reduction),
      rank_(rank),
      half_(IsHalf(reduction.dtype)),
      element_bytes_(DTypeSize(reduction.dtype)),
      segment_elements_(ScheduleSegment(schedule_, reduction.dtype, segment_bytes)) {
  const size_t base_slices = slices_.size();
  AppendJoined(schedule_.joined, &slices_);
  LayOutScratch(base_slices);
  cursors_.reserve(schedule_.steps.size());
  for (const Step& step : schedule_.steps) {
    cursors_.emplace_back(slices_[static_cast<size_t>(step.slice)]);
  }
}

bool StepMemory::InScratch(Place place) const {
  return place == Place::kHeld ||
         (place == Place::kPartial && (half_ || schedule_.private_partials));
}

size_t StepMemory::BytesIn(Place place) const {
  return place == Place::kPartial && half_ ? kWideBytes : element_bytes_;
}

void StepMemory::LayOutScratch(size_t base_slices) {
  std::vector<size_t> bytes(base_slices, 0);  // of an element; 0: the slice needs none
  for (const Step& step : schedule_.steps) {
    for (Place place : {step.own, step.to}) {
      if (!InScratch(place)) continue;
      size_t first = static_cast<size_t>(step.slice);
      size_t count = 1;
      if (first >= base_slices) {
        const JoinedSlice& joined = schedule_.joined[first - base_slices];
        first = static_cast<size_t>(joined.first);
        count = static_cast<size_t>(joined.count);
      }
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(first), count, BytesIn(place));
    }
  }
  for (size_t s = 0; s < base_slices; ++s) {
    scratch_begins_.push_back(scratch_bytes_);
    scratch_bytes_ += static_cast<size_t>(slices_[s].elements) * bytes[s];
  }
  for (const JoinedSlice& joined : schedule_.joined) {
    scratch_begins_.push_back(scratch_begins_[static_cast<size_t>(joined.first)]);
  }
  if (scratch_bytes_ > 0) scratch_.reset(new uint8_t[scratch_bytes_]);  // not zeroed
}

int64_t StepMemory::segments(size_t step) const {
  const auto slice = static_cast<size_t>(schedule_.steps[step].slice);
  return SegmentCount(slices_[slice].elements, segment_elements_);
}

int64_t StepMemory::Count(size_t step, int64_t segment) const {
  const auto slice = static_cast<size_t>(schedule_.steps[step].slice);
  return std::min(segment_elements_, slices_[slice].elements - Begin(segment));
}

size_t StepMemory::WireBytes(size_t step, int64_t segment) const {
  const bool wide = TravelsWide(schedule_.steps[step], reduction_.dtype);
  return static_cast<size_t>(std::max<int64_t>(0, Count(step, segment))) *
         (wide ? kWideBytes : element_bytes_);
}

// Element `element` of a slice in scratch, or `output`, which is that element's place there.
uint8_t* StepMemory::At(Place place, int32_t slice, uint8_t* output, int64_t element) {
  if (!InScratch(place)) return output;
  return scratch_.get() + scratch_begins_[static_cast<size_t>(slice)] +
         static_cast<size_t>(element) * BytesIn(place);
}

void StepMemory::Pack(size_t step, int64_t segment, uint8_t* wire) {
  const Step& s = schedule_.steps[step];
  const size_t bytes = BytesIn(s.own);
  const int64_t begin = Begin(segment);
  // Inputs travel as they are: whoever reduces them scales, in its accumulation type.
  cursors_[step].ForEachRun(
      begin, Count(step, segment), element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
        const uint8_t* source =
            s.own == Place::kInput ? input : At(s.own, s.slice, output, begin + offset);
        std::memcpy(wire + static_cast<size_t>(offset) * bytes, source,
                    static_cast<size_t>(n) * bytes);
      });
}

void StepMemory::Take(size_t step, int64_t segment, const std::vector<const uint8_t*>& wire) {
  const Step& s = schedule_.steps[step];
  if (s.kind == StepKind::kReduce) return Reduce(step, segment, wire);
  const int64_t begin = Begin(segment);
  cursors_[step].ForEachRun(
      begin, Count(step, segment), element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
        const uint8_t* source =
            wire.empty() ? input : wire[0] + static_cast<size_t>(offset) * element_bytes_;
        uint8_t* target = At(s.to, s.slice, output, begin + offset);
        if (source != target) std::memcpy(target, source, static_cast<size_t>(n) * element_bytes_);
      });
}

void StepMemory::Reduce(size_t step, int64_t segment, const std::vector<const uint8_t*>& wire) {
  const Step& s = schedule_.steps[step];
  const bool wide = TravelsWide(s, reduction_.dtype);
  const size_t wire_bytes = wide ? kWideBytes : element_bytes_;
  const int64_t begin = Begin(segment);
  std::vector<Contribution> contributions(wire.size() + 1);
  cursors_[step].ForEachRun(
      begin, Count(step, segment), element_bytes_,
      [&](const uint8_t* input, uint8_t* output, int64_t n, int64_t offset) {
        Contribution own{input, false, true};
        if (s.own == Place::kPartial) {
          own = {At(s.own, s.slice, output, begin + offset), half_, false};
        }
        size_t count = 0;
        bool placed = false;
        for (size_t p = 0; p < wire.size(); ++p) {
          if (!placed && !s.own_last && s.peers[p] > rank_) {
            contributions[count++] = own;
            placed = true;
          }
          contributions[count++] = {wire[p] + static_cast<size_t>(offset) * wire_bytes, wide,
                                    s.raw};
        }
        if (!placed) contributions[count] = own;
        Combine(reduction_, contributions, s.finish ? reduction_.finish : Finish{},
                At(s.to, s.slice, output, begin + offset), half_ && s.to == Place::kPartial, n);
      });
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
