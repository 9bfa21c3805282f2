// One collective of any kind, planned as the engine plans it (PlanOperation) and run by all ranks
// in one thread (ScheduleRunner), on buffers with guards; and what must be in them afterwards.
#ifndef TFDIST_TESTS_CPP_PLANNED_H_
#define TFDIST_TESTS_CPP_PLANNED_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "collective/schedule.h"
#include "collective/slicing.h"
#include "elements.h"
#include "scheduler/operation_plan.h"

namespace tfdist {

struct Request;

using Bytes = std::vector<uint8_t>;
constexpr uint8_t kGuard = 0xa5;
constexpr int64_t kRowWidth = 3;  // elements of a row, in the kinds with rows

struct Setting {
  const AlgorithmEntry* entry = nullptr;
  int size = 1;
  int root = 0;  // index
  std::vector<int32_t> host_of;
  std::string ring_order = "topology";
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  bool in_place = false;
  int64_t segment_bytes = 256;
  uint64_t seed = 1;
  bool read_late = false;
  std::vector<int64_t> lengths;  // kinds without rows: elements of the tensors
  std::vector<uint64_t> hints;   // of them; empty: 0, 1, ...
  // Kinds with rows: rows that each rank has (allgather, gather) or gets (reduce_scatter, scatter),
  // or size x size by sender and receiver (alltoall).
  std::vector<int64_t> rows;
  std::function<Element(int rank, size_t tensor, int64_t i)> value;  // null: SmallValue
  bool whole_world = false;  // ranks are indices; otherwise the set is 5, 7, 9, ...

  CollectiveKind kind() const { return entry->kind; }
  int32_t RankOf(int index) const { return whole_world ? index : 2 * index + 5; }
  Element At(int rank, size_t tensor, int64_t i) const {
    return value ? value(rank, tensor, i)
                 : SmallValue(dtype, op, rank, i + static_cast<int64_t>(tensor));
  }
  std::string Name() const;
};

// Memory of several tensors, with guards before, between and after them.
struct Buffer {
  Bytes bytes;
  std::vector<size_t> begins;

  Buffer(const std::vector<int64_t>& lengths, DType dtype);
  uint8_t* At(size_t tensor, int64_t element, DType dtype);
};

class Planned {
 public:
  // Segments that were written past the caches, in all cases of this process.
  static int64_t streamed;

  explicit Planned(const Setting& setting);

  // Runs; checks what was sent against CountSends. Fails the test on any error of the runner.
  Planned& Run();

  // The same as a request for a runtime. Instead of Run().
  std::unique_ptr<Request> RequestOf(int rank, const std::string& name);

  // Every byte of all inputs and outputs, guards too, is what it should be.
  void Expect();

  SendCount Count(int rank) const;
  const Plan& plan(int rank) const { return plans_[static_cast<size_t>(rank)]; }
  // The result, without guards.
  Bytes Output(int rank, size_t tensor);
  Bytes AllOutput(int rank);

 private:
  using Buffers = std::vector<Buffer>;

  int64_t Rows(int index) const { return s_.rows[static_cast<size_t>(index)]; }
  int64_t Sent(int from, int to) const { return Rows(from * s_.size + to); }
  int64_t Sum(int begin, int count, int stride = 1) const;
  bool HasInput(int rank) const;
  bool HasOutput(int rank) const;
  std::vector<int64_t> InputLengths(int rank) const;
  int64_t InputRows(int rank) const;
  std::vector<int64_t> OutputLengths(int rank) const;
  void Fill(int rank);
  bool IsGather() const;
  // The output of these lies in the input, where the rank has one.
  bool OutputInInput(int rank) const;
  uint8_t* ResultAt(int rank, size_t tensor, Buffers& inputs, Buffers& outputs);
  TensorView View(int rank, size_t tensor);
  RequestInfo Info(int rank) const;
  std::vector<TensorView> Views(int rank);
  void Plans();
  Element Reduced(size_t tensor, int64_t i);
  Element Reduce(size_t tensor, int64_t i) const;
  Element Wanted(int rank, size_t tensor, int64_t i);
  void WriteExpected(int rank);
  // The sign of a zero part of a complex product follows from the order of multiplications: not
  // compared with a reference of one order.
  void DropSigns(int rank);

  const Setting s_;
  Buffers inputs_;
  Buffers outputs_;
  Buffers expected_inputs_;
  Buffers expected_outputs_;
  std::vector<Plan> plans_;
  std::vector<std::vector<Element>> reduced_;  // by tensor, as far as asked for
};

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_PLANNED_H_
