// TfdistIndexRecords: the length of every record of a TFRecord file. Reads the headers alone, 12
// bytes a record, and steps over the data.
#include "tf/record_format.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistIndexRecords")
    .Input("file: string")
    .Output("lengths: int64")
    .SetIsStateful()  // another answer when the file has changed
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

absl::Status Damaged(const std::string& file, size_t record, uint64_t at, const std::string& what) {
  return absl::DataLossError(file + ": record " + std::to_string(record) + ", at byte " +
                             std::to_string(at) + ": " + what);
}

absl::Status BadHeader(const std::string& file, size_t record, uint64_t at, const char* header) {
  const std::string numbers = "expected " + Hex(MaskedCrc(header, 8)) +
                              " as the checksum of its header, found " +
                              Hex(LittleEndian<uint32_t>(header + 8));
  if (record > 0) return Damaged(file, record, at, numbers + ": the file is damaged");
  if (header[0] == '\x1f' && header[1] == '\x8b') {
    return absl::DataLossError(file +
                               ": expected a TFRecord file, found one compressed by gzip, "
                               "in which no record can be read alone; decompress it (gunzip)");
  }
  return absl::DataLossError(file +
                             ": expected a TFRecord file, found something else or damage "
                             "at its beginning: " +
                             numbers);
}

absl::Status Index(tensorflow::Env* env, const std::string& name, std::vector<int64_t>* lengths) {
  uint64_t size = 0;
  std::unique_ptr<tensorflow::RandomAccessFile> file;
  absl::Status status = env->GetFileSize(name, &size);
  if (status.ok()) status = env->NewRandomAccessFile(name, &file);
  if (!status.ok()) return FileError(name, status);
  uint64_t at = 0;
  while (at < size) {
    char header[kRecordHeaderBytes];
    size_t found = 0;
    status = ReadUpTo(*file, at, sizeof(header), header, &found);
    if (!status.ok()) return FileError(name, status);
    if (found < sizeof(header)) {
      return Damaged(name, lengths->size(), at,
                     "expected a header of 12 bytes, found " + std::to_string(found) +
                         " before the file ends: it was cut off");
    }
    if (MaskedCrc(header, 8) != LittleEndian<uint32_t>(header + 8)) {
      return BadHeader(name, lengths->size(), at, header);
    }
    const uint64_t length = LittleEndian<uint64_t>(header);
    const uint64_t left = size - at - kRecordHeaderBytes;
    if (left < kRecordFooterBytes || length > left - kRecordFooterBytes) {
      return Damaged(name, lengths->size(), at,
                     "expected " + std::to_string(length) +
                         " bytes of data and 4 of checksum, "
                         "found " +
                         std::to_string(left) + " before the file ends: it was cut off");
    }
    lengths->push_back(static_cast<int64_t>(length));
    at += kRecordHeaderBytes + length + kRecordFooterBytes;
  }
  return absl::OkStatus();
}

class IndexRecordsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* ctx) override {
    const tensorflow::Tensor& file = ctx->input(0);
    OP_REQUIRES(ctx, file.dims() == 0, absl::InvalidArgumentError("file: expected a scalar"));
    std::vector<int64_t> lengths;
    OP_REQUIRES_OK(ctx, Index(ctx->env(), file.scalar<tensorflow::tstring>()(), &lengths));
    tensorflow::Tensor* output = nullptr;
    const auto count = static_cast<int64_t>(lengths.size());
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, tensorflow::TensorShape({count}), &output));
    std::copy(lengths.begin(), lengths.end(), output->flat<int64_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistIndexRecords").Device(tensorflow::DEVICE_CPU), IndexRecordsOp);

}  // namespace
}  // namespace tfdist
