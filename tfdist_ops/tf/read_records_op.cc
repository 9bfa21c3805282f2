// TfdistReadRecords: records by their positions, out of TFRecord files that TfdistIndexRecords has
// gone through, or whole files. Every record is read with its checksum and compared.
//
// The op is stateless: its output depends on its inputs alone, since the files of a training run do
// not change. A stateful one would be chained to its neighbors in a function, and tf.data would
// refuse to run it in parallel with a saved order. Two equal ones may be merged.
#include <algorithm>
#include <list>
#include <unordered_map>

#include "tf/record_format.h"

namespace tfdist {
namespace {

using tensorflow::Tensor;
using tensorflow::tstring;
using File = std::shared_ptr<tensorflow::RandomAccessFile>;

REGISTER_OP("TfdistReadRecords")
    .Input("files: string")       // [F]
    .Input("first: int64")        // [F + 1]: position of each file's first record, and their number
    .Input("offsets: int64")      // [N]: where each record's data begins in its file
    .Input("lengths: int64")      // [N]: bytes of its data
    .Input("positions: int64")    // any shape, 0..N-1
    .Output("records: string")    // the shape of positions
    .Attr("whole_files: bool")    // a record is a file; first, offsets and lengths are empty, N = F
    .Attr("keep_open: int >= 0")  // how many files stay open for the next record
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(4));
      return absl::OkStatus();
    });

// The files last read from, at most `limit`. Thread-safe: tf.data runs one kernel on many threads.
class OpenFiles {
 public:
  explicit OpenFiles(size_t limit) : limit_(limit) {}

  // Opening happens outside of the lock. When two threads open a file at once, one handle serves
  // its thread alone.
  absl::Status Get(tensorflow::Env* env, const std::string& name, File* file) {
    *file = Find(name);
    if (*file != nullptr) return absl::OkStatus();
    std::unique_ptr<tensorflow::RandomAccessFile> opened;
    const absl::Status status = env->NewRandomAccessFile(name, &opened);
    *file = std::move(opened);
    if (status.ok()) Keep(name, *file);
    return status;
  }

 private:
  using Entry = std::pair<std::string, File>;

  File Find(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = places_.find(name);
    if (found == places_.end()) return nullptr;
    files_.splice(files_.begin(), files_, found->second);
    return found->second->second;
  }

  void Keep(const std::string& name, const File& file) {
    File closing;  // closed after the lock is released
    const std::lock_guard<std::mutex> lock(mutex_);
    if (limit_ == 0 || places_.count(name) != 0) return;
    files_.emplace_front(name, file);
    places_[name] = files_.begin();
    if (files_.size() <= limit_) return;
    closing = std::move(files_.back().second);
    places_.erase(files_.back().first);
    files_.pop_back();
  }

  const size_t limit_;
  std::mutex mutex_;
  std::list<Entry> files_;  // guarded by mutex_, last used first
  std::unordered_map<std::string, std::list<Entry>::iterator> places_;  // guarded by mutex_
};

// Where a record is, for reading and for messages.
struct Place {
  std::string file;
  int64_t position;
  int64_t record;  // in its file
  std::string Text() const {
    return file + ": record " + std::to_string(record) + " (position " + std::to_string(position) +
           ")";
  }
};

class ReadRecordsOp : public tensorflow::OpKernel {
 public:
  explicit ReadRecordsOp(tensorflow::OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t keep_open = 0;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep_open", &keep_open));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("whole_files", &whole_files_));
    open_files_ = std::make_unique<OpenFiles>(static_cast<size_t>(keep_open));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckIndex(ctx));
    const auto positions = ctx->input(4).flat<int64_t>();
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(4).shape(), &output));
    auto records = output->flat<tstring>();
    for (int64_t i = 0; i < positions.size(); ++i) {
      OP_REQUIRES_OK(ctx, Read(ctx, positions(i), &records(i)));
    }
  }

 private:
  absl::Status CheckIndex(tensorflow::OpKernelContext* ctx) const {
    const int64_t files = ctx->input(0).NumElements();
    const int64_t first = ctx->input(1).NumElements();
    const int64_t records = ctx->input(2).NumElements();
    const bool right = whole_files_ ? first == 0 && records == 0
                                    : first == files + 1 && ctx->input(1).flat<int64_t>()(0) == 0 &&
                                          ctx->input(1).flat<int64_t>()(files) == records;
    if (right && ctx->input(3).NumElements() == records) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "expected first, offsets and lengths to be an index of the " + std::to_string(files) +
        " files, got " + std::to_string(first) + ", " + std::to_string(records) + " and " +
        std::to_string(ctx->input(3).NumElements()) + " numbers");
  }

  absl::Status Read(tensorflow::OpKernelContext* ctx, int64_t position, tstring* record) const {
    const auto files = ctx->input(0).flat<tstring>();
    const int64_t count = whole_files_ ? files.size() : ctx->input(2).NumElements();
    if (position < 0 || position >= count) {
      return absl::InvalidArgumentError("Expected positions in 0.." + std::to_string(count - 1) +
                                        ", got " + std::to_string(position));
    }
    if (whole_files_) return ReadFile(ctx->env(), files(position), record);
    const auto first = ctx->input(1).flat<int64_t>();
    const int64_t file =
        std::upper_bound(first.data(), first.data() + first.size(), position) - first.data() - 1;
    return ReadRecord(ctx->env(), {files(file), position, position - first(file)},
                      ctx->input(2).flat<int64_t>()(position),
                      ctx->input(3).flat<int64_t>()(position), record);
  }

  // The checksum follows the data: one read for both.
  absl::Status ReadRecord(tensorflow::Env* env, const Place& place, int64_t offset, int64_t length,
                          tstring* record) const {
    if (offset < 0 || length < 0) return absl::InvalidArgumentError("a negative offset or length");
    File file;
    absl::Status status = open_files_->Get(env, place.file, &file);
    if (!status.ok()) return FileError(place.Text(), status);
    const size_t bytes = static_cast<size_t>(length) + kRecordFooterBytes;
    record->resize_uninitialized(bytes);
    size_t found = 0;
    status = ReadUpTo(*file, static_cast<uint64_t>(offset), bytes, record->mdata(), &found);
    if (!status.ok()) return FileError(place.Text(), status);
    if (found < bytes) {
      return absl::DataLossError(place.Text() + ": expected " + std::to_string(bytes) +
                                 " bytes at byte " + std::to_string(offset) + ", found " +
                                 std::to_string(found) +
                                 " before the file ends: it was cut off "
                                 "after it was indexed");
    }
    const uint32_t expected = LittleEndian<uint32_t>(record->data() + length);
    const uint32_t checksum = MaskedCrc(record->data(), static_cast<size_t>(length));
    if (expected != checksum) {
      return absl::DataLossError(place.Text() + ": expected the checksum " + Hex(expected) +
                                 " of the " + std::to_string(length) + " bytes at byte " +
                                 std::to_string(offset) + ", found " + Hex(checksum) +
                                 ": the file is damaged, or was changed after it was indexed");
    }
    record->resize(static_cast<size_t>(length));
    return absl::OkStatus();
  }

  // Each whole file is read once in an epoch: keeping it open would serve nobody.
  static absl::Status ReadFile(tensorflow::Env* env, const std::string& name, tstring* record) {
    uint64_t size = 0;
    std::unique_ptr<tensorflow::RandomAccessFile> file;
    absl::Status status = env->GetFileSize(name, &size);
    if (status.ok()) status = env->NewRandomAccessFile(name, &file);
    if (!status.ok()) return FileError(name, status);
    record->resize_uninitialized(size);
    size_t found = 0;
    if (size > 0) status = ReadUpTo(*file, 0, size, record->mdata(), &found);
    if (!status.ok()) return FileError(name, status);
    if (found == size) return absl::OkStatus();
    return absl::DataLossError(name + ": expected " + std::to_string(size) + " bytes, found " +
                               std::to_string(found) + ": it was cut off while it was read");
  }

  bool whole_files_ = false;
  std::unique_ptr<OpenFiles> open_files_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistReadRecords").Device(tensorflow::DEVICE_CPU), ReadRecordsOp);

}  // namespace
}  // namespace tfdist
