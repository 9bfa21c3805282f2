#include "scheduler/request_info.h"

#include <tuple>

namespace tfdist {
namespace {

// Fields that ranks must agree on; the numbers first, which differ more often.
auto Agreed(const RequestInfo& i) {
  return std::tie(i.kind, i.dtype, i.op, i.root, i.peer, i.prescale, i.postscale, i.bucket,
                  i.bucket_index, i.bucket_count, i.key, i.group, i.shapes, i.sizes, i.hints,
                  i.splits, i.algorithm, i.description, i.present);
}

}  // namespace

void RequestInfo::Clear() {
  key.clear();
  set = 0;
  kind = CollectiveKind::kBarrier;
  dtype = DType::kInvalid;
  op = ReduceOp::kSum;
  root = 0;
  peer = -1;
  prescale = postscale = 1.0;
  timeout_s = 0;
  algorithm.clear();
  bucket = repeats = false;
  for (std::vector<int64_t>& shape : shapes) shape.clear();
  splits.clear();
  description.clear();
  present.clear();
  predicted = 0;
  sizes.clear();
  hints.clear();
  group.clear();
  bucket_index = bucket_count = 0;
}

bool SameRequest(const RequestInfo& a, const RequestInfo& b) { return Agreed(a) == Agreed(b); }

int64_t ElementCount(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t dim : shape) count *= dim;
  return count;
}

int64_t ShapeBytes(const RequestInfo& info) {
  int64_t elements = 0;
  for (const auto& shape : info.shapes) elements += ElementCount(shape);
  return elements * static_cast<int64_t>(DTypeSize(info.dtype));
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace tfdist
