#include "collective/slicing.h"

#include <utility>

namespace tfdist {
namespace {

constexpr int64_t kAlignBytes = 64;

int64_t AlignElements(size_t element_bytes) {
  return std::max<int64_t>(1, kAlignBytes / static_cast<int64_t>(element_bytes));
}

template <typename T>
T* Shifted(T* memory, int64_t elements, size_t element_bytes) {
  return memory == nullptr ? nullptr : memory + elements * static_cast<int64_t>(element_bytes);
}

void Append(Slice* slice, const TensorView& tensor, int64_t begin, int64_t end,
            size_t element_bytes, int32_t number = 0) {
  if (begin == end) return;  // a cursor relies on extents that are not empty
  Extent extent;
  extent.input = Shifted(tensor.input, begin, element_bytes);
  extent.output = Shifted(tensor.output, begin, element_bytes);
  extent.elements = end - begin;
  extent.tensor = number;
  slice->extents.push_back(extent);
  slice->elements += extent.elements;
}

}  // namespace

int64_t PartBegin(int64_t elements, size_t element_bytes, int size, uint64_t hint, int part) {
  const int64_t align = AlignElements(element_bytes);
  if (elements < align * size) {
    const int owner = static_cast<int>(hint % static_cast<uint64_t>(size));
    return part <= owner ? 0 : elements;
  }
  // Blocks of 64 bytes, the last one perhaps shorter; the first `rest` parts get one more.
  const int64_t blocks = (elements + align - 1) / align;
  const int64_t each = blocks / size;
  const int64_t rest = blocks % size;
  return std::min(elements, (each * part + std::min<int64_t>(part, rest)) * align);
}

std::vector<Slice> CutAllreduce(const std::vector<TensorView>& tensors, size_t element_bytes,
                                int parts) {
  std::vector<Slice> slices(static_cast<size_t>(parts));
  CutAllreduceAgain(tensors, element_bytes, &slices);
  return slices;
}

void CutAllreduceAgain(const std::vector<TensorView>& tensors, size_t element_bytes,
                       std::vector<Slice>* slices) {
  for (Slice& slice : *slices) {
    slice.extents.clear();
    slice.elements = 0;
  }
  const auto parts = static_cast<int>(slices->size());
  int32_t number = 0;
  for (const TensorView& tensor : tensors) {
    if (tensor.elements == 0) continue;
    for (int part = 0; part < parts; ++part) {
      Append(&(*slices)[static_cast<size_t>(part)], tensor,
             PartBegin(tensor.elements, element_bytes, parts, tensor.hint, part),
             PartBegin(tensor.elements, element_bytes, parts, tensor.hint, part + 1), element_bytes,
             number);
    }
    ++number;
  }
}

std::vector<Slice> CutAllgather(const TensorView& tensor, size_t element_bytes,
                                const std::vector<int64_t>& counts, int rank) {
  std::vector<Slice> slices(counts.size());
  int64_t begin = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    TensorView place;
    place.output = Shifted(tensor.output, begin, element_bytes);
    if (static_cast<int>(r) == rank) place.input = tensor.input;
    Append(&slices[r], place, 0, counts[r], element_bytes);
    begin += counts[r];
  }
  return slices;
}

std::vector<Slice> CutScatter(const TensorView& tensor, size_t element_bytes,
                              const std::vector<int64_t>& counts, int rank) {
  std::vector<Slice> slices(counts.size());
  int64_t begin = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    TensorView place;
    place.input = Shifted(tensor.input, begin, element_bytes);
    if (static_cast<int>(r) == rank) place.output = tensor.output;
    Append(&slices[r], place, 0, counts[r], element_bytes);
    begin += counts[r];
  }
  return slices;
}

std::vector<Slice> CutAlltoall(const TensorView& tensor, size_t element_bytes,
                               const std::vector<int64_t>& counts, int rank, int size) {
  const auto n = static_cast<size_t>(size);
  const auto own = static_cast<size_t>(rank);
  std::vector<Slice> slices(2 * n);
  int64_t sent = 0;
  int64_t received = 0;
  for (size_t peer = 0; peer < n; ++peer) {
    const int64_t to_peer = counts[own * n + peer];
    const int64_t from_peer = counts[peer * n + own];
    TensorView out;
    TensorView in;
    out.input = Shifted(tensor.input, sent, element_bytes);
    in.output = Shifted(tensor.output, received, element_bytes);
    if (peer == own) out.output = in.output;
    Append(&slices[peer], out, 0, to_peer, element_bytes);
    if (peer != own) Append(&slices[n + peer], in, 0, from_peer, element_bytes);
    sent += to_peer;
    received += from_peer;
  }
  return slices;
}

std::vector<Slice> CutWhole(const std::vector<TensorView>& tensors, bool has_input) {
  std::vector<Slice> slices(1);
  for (TensorView tensor : tensors) {
    if (!has_input) tensor.input = nullptr;
    Append(&slices[0], tensor, 0, tensor.elements, /*element_bytes=*/0);  // shift 0: size unused
  }
  return slices;
}

void AppendJoined(const std::vector<JoinedSlice>& joined, std::vector<Slice>* slices) {
  for (const JoinedSlice& j : joined) {
    Slice whole;
    for (int32_t s = j.first; s < j.first + j.count; ++s) {
      const Slice& part = (*slices)[static_cast<size_t>(s)];
      whole.extents.insert(whole.extents.end(), part.extents.begin(), part.extents.end());
      whole.elements += part.elements;
    }
    slices->push_back(std::move(whole));
  }
}

int64_t SegmentElements(int64_t segment_bytes, size_t element_bytes) {
  const int64_t blocks = std::max<int64_t>(1, segment_bytes / kAlignBytes);
  return blocks * AlignElements(element_bytes);
}

int64_t SegmentCount(int64_t slice_elements, int64_t segment_elements) {
  return (slice_elements + segment_elements - 1) / segment_elements;
}

}  // namespace tfdist
