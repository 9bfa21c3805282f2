// Span<T>: a view of contiguous elements, because C++17 has no std::span. The core passes buffers
// as Span, never as a separate pointer and length.
#ifndef TFDIST_OPS_BASE_SPAN_H_
#define TFDIST_OPS_BASE_SPAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tfdist {

template <typename T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T* data, size_t size) : data_(data), size_(size) {}
  // NOLINTNEXTLINE(google-explicit-constructor): a vector is a span.
  Span(std::vector<std::remove_const_t<T>>& v) : data_(v.data()), size_(v.size()) {}

  constexpr T* data() const { return data_; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr T& operator[](size_t i) const { return data_[i]; }
  constexpr T* begin() const { return data_; }
  constexpr T* end() const { return data_ + size_; }
  constexpr Span subspan(size_t offset, size_t count) const { return {data_ + offset, count}; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

using ByteSpan = Span<const uint8_t>;
using MutableByteSpan = Span<uint8_t>;

inline std::string AsText(ByteSpan bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}
inline ByteSpan AsBytes(const std::string& s) {
  return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_SPAN_H_
