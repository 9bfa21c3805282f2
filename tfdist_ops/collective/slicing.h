// Slicing: which part of which tensor belongs to which slice, and where segments begin. Pure.
//
// Slices are cut per tensor, never across a bucket: the part of a tensor that a slice
// holds, and with it the order in which its elements are added, depends on the tensor's length, the
// number of ranks and the tensor's own hint alone, not on what it happens to be fused with
// (decision E of docs/architecture.md).
#ifndef TFDIST_OPS_COLLECTIVE_SLICING_H_
#define TFDIST_OPS_COLLECTIVE_SLICING_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "collective/schedule.h"

namespace tfdist {

// One tensor of a collective as this rank sees it. `input` may equal `output` (in place) but must
// not overlap it otherwise.
struct TensorView {
  const uint8_t* input = nullptr;
  uint8_t* output = nullptr;
  int64_t elements = 0;
  uint64_t hint = 0;  // picks the slice of a tensor too small to cut; same on every rank
};

// A run of elements of one tensor. `input` or `output` is null where this rank has none.
struct Extent {
  const uint8_t* input = nullptr;
  uint8_t* output = nullptr;
  int64_t elements = 0;
  int32_t tensor = 0;  // allreduce: its number among the tensors that are not empty
};

// A slice: extents laid end to end, none of them empty.
struct Slice {
  std::vector<Extent> extents;
  int64_t elements = 0;
};

// Begin (in elements) of part `part` of a tensor cut for `size` ranks; part == size gives the end.
// Parts begin at multiples of 64 bytes; a tensor below 64 * size bytes is not cut: all of it is
// part `hint mod size`.
int64_t PartBegin(int64_t elements, size_t element_bytes, int size, uint64_t hint, int part);

// allreduce: `parts` slices over all the tensors.
std::vector<Slice> CutAllreduce(const std::vector<TensorView>& tensors, size_t element_bytes,
                                int parts);
// The same, into slices that are already there; their number is the number of parts.
void CutAllreduceAgain(const std::vector<TensorView>& tensors, size_t element_bytes,
                       std::vector<Slice>* slices);
// allgather and gather: slice r = the elements of rank r (counts[r] of them), at their place in the
// output of one tensor, if this rank has one; this rank's slice also has the input. In place means
// that the input lies at its place in the output, not at the output's beginning.
std::vector<Slice> CutAllgather(const TensorView& tensor, size_t element_bytes,
                                const std::vector<int64_t>& counts, int rank);
// reduce_scatter and scatter: slice r = the elements that rank r gets, at their place in the input,
// if this rank has one; this rank's slice also has the output. In place means that the output is
// that slice's place in the input.
std::vector<Slice> CutScatter(const TensorView& tensor, size_t element_bytes,
                              const std::vector<int64_t>& counts, int rank);
// alltoall: `counts` are elements from sender s to receiver r at [s * size + r]. Slice r < size =
// what this rank sends to r, slice size + s = what it receives from s, in this order in the input
// and the output. What it keeps is slice `rank`, with input and output; slice size + rank is empty.
std::vector<Slice> CutAlltoall(const TensorView& tensor, size_t element_bytes,
                               const std::vector<int64_t>& counts, int rank, int size);
// broadcast, reduce and sendrecv: one slice, with an input where the rank has one.
std::vector<Slice> CutWhole(const std::vector<TensorView>& tensors, bool has_input);
// Appends a slice for each of `joined`: the extents of its slices, one after the other.
void AppendJoined(const std::vector<JoinedSlice>& joined, std::vector<Slice>* slices);

// Elements of a segment, given its size in bytes: the largest multiple of 64 bytes in it, and never
// less than 64 bytes.
int64_t SegmentElements(int64_t segment_bytes, size_t element_bytes);
// Number of segments of a slice; none when it is empty: nothing is sent for it.
int64_t SegmentCount(int64_t slice_elements, int64_t segment_elements);

// The runs of memory that make up elements [begin, begin + count) of a slice, in order.
class SliceCursor {
 public:
  explicit SliceCursor(const Slice& slice) : slice_(&slice) {}
  // Calls fn(input, output, elements, offset_in_range) for each run. Sequential calls with growing
  // `begin` cost no search.
  template <typename Fn>
  void ForEachRun(int64_t begin, int64_t count, size_t element_bytes, Fn fn) {
    if (count <= 0) return;
    Seek(begin);
    int64_t done = 0;
    while (done < count) {
      const Extent& e = slice_->extents[extent_];
      const int64_t inside = begin + done - extent_begin_;
      const int64_t n = std::min(count - done, e.elements - inside);
      const int64_t shift = inside * static_cast<int64_t>(element_bytes);
      fn(e.input != nullptr ? e.input + shift : nullptr,
         e.output != nullptr ? e.output + shift : nullptr, n, done);
      done += n;
      if (done < count) {
        extent_begin_ += e.elements;
        ++extent_;
      }
    }
  }

 private:
  void Seek(int64_t begin) {
    if (begin < extent_begin_) {
      extent_ = 0;
      extent_begin_ = 0;
    }
    while (begin - extent_begin_ >= slice_->extents[extent_].elements) {
      extent_begin_ += slice_->extents[extent_].elements;
      ++extent_;
    }
  }
  const Slice* slice_;
  size_t extent_ = 0;
  int64_t extent_begin_ = 0;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_COLLECTIVE_SLICING_H_
