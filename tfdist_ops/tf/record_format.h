// A TFRecord file is records one after the other, each of
//   8 bytes  length of the data, little-endian
//   4 bytes  masked CRC-32C of those 8 bytes, little-endian
//   n bytes  data
//   4 bytes  masked CRC-32C of the data, little-endian
//
// Source: tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details"; the mask is
// that of LevelDB (util/crc32c.h).
#ifndef TFDIST_OPS_TF_RECORD_FORMAT_H_
#define TFDIST_OPS_TF_RECORD_FORMAT_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "tensorflow/core/platform/env.h"
#include "tf/tf_bridge.h"
#include "transport/crc32c.h"

namespace tfdist {

constexpr uint64_t kRecordHeaderBytes = 12;
constexpr uint64_t kRecordFooterBytes = 4;

template <typename T>
T LittleEndian(const char* bytes) {
  T value = 0;
  for (size_t i = sizeof(T); i-- > 0;) value = (value << 8) | static_cast<uint8_t>(bytes[i]);
  return value;
}

// "Masked": rotated and offset, because a checksum of bytes that hold their own checksum is weak.
inline uint32_t MaskedCrc(const char* data, size_t bytes) {
  const uint32_t crc = Crc32c({reinterpret_cast<const uint8_t*>(data), bytes});
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

inline std::string Hex(uint32_t value) {
  char text[11];
  std::snprintf(text, sizeof(text), "0x%08x", value);
  return text;
}

// Reads `bytes` bytes at `offset` into `data`; `*found` is smaller where the file ends before that.
inline absl::Status ReadUpTo(const tensorflow::RandomAccessFile& file, uint64_t offset,
                             size_t bytes, char* data, size_t* found) {
  absl::string_view result;
  const absl::Status status = file.Read(offset, bytes, &result, data);
  *found = result.size();
  if (result.data() != data) std::copy(result.begin(), result.end(), data);
  return absl::IsOutOfRange(status) ? absl::OkStatus() : status;
}

// The file system's error, which does not always name the file. OUT_OF_RANGE ends a
// tf.data pipeline as if there were no more data; it becomes DATA_LOSS.
inline absl::Status FileError(const std::string& place, const absl::Status& status) {
  const auto code = absl::IsOutOfRange(status) ? absl::StatusCode::kDataLoss : status.code();
  return absl::Status(code, place + ": cannot be read: " + std::string(status.message()));
}

}  // namespace tfdist

#endif  // TFDIST_OPS_TF_RECORD_FORMAT_H_
