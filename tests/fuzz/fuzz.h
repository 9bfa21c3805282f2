// The interface of a fuzz target: it defines Seeds, apart from libFuzzer's LLVMFuzzerTestOneInput.
#ifndef TFDIST_TESTS_FUZZ_FUZZ_H_
#define TFDIST_TESTS_FUZZ_FUZZ_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// libFuzzer's entry: must return 0 and may do what it likes with any input except crash.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tfdist::fuzz {

// Inputs to start from; made by the code under test, so they follow its formats.
std::vector<std::string> Seeds();

}  // namespace tfdist::fuzz

namespace tfdist {

// Ends the process the way a sanitizer would, so that the input is kept.
#define FUZZ_CHECK(condition)                                                         \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: FUZZ_CHECK %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                   \
    }                                                                                 \
  } while (false)

// Reads an input as a list of decisions; zeros when it is used up.
class Decisions {
 public:
  Decisions(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <typename T>
  T Take() {
    T value{};
    const size_t n = sizeof(T) < size_ ? sizeof(T) : size_;
    if (n > 0) std::memcpy(&value, data_, n);
    Skip(n);
    return value;
  }
  // At most `most` bytes.
  std::string Bytes(size_t most) {
    const size_t n = most < size_ ? most : size_;
    std::string bytes(reinterpret_cast<const char*>(data_), n);
    Skip(n);
    return bytes;
  }
  bool empty() const { return size_ == 0; }

 private:
  void Skip(size_t n) {
    data_ += n;
    size_ -= n;
  }

  const uint8_t* data_;
  size_t size_;
};

// Builds such a list, for seeds.
class Script {
 public:
  template <typename T>
  Script& Add(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  Script& Add(const std::string& bytes) {
    text_ += bytes;
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_FUZZ_FUZZ_H_
