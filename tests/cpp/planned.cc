#include "planned.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "check.h"
#include "ranks.h"
#include "schedule_runner.h"
#include "scheduler/row_counts.h"

namespace tfdist {

std::string Setting::Name() const {
  std::string name = std::string(CollectiveKindName(kind())) + "/" + entry->name + " " +
                     DTypeName(dtype) + " " + ReduceOpName(op) + " on " + std::to_string(size) +
                     " ranks, root " + std::to_string(root) + (in_place ? ", in place" : "") +
                     (read_late ? ", late" : "") + ", seed " + std::to_string(seed) + ", of";
  for (int64_t n : lengths) name += " " + std::to_string(n);
  for (int64_t n : rows) name += " " + std::to_string(n);
  if (!host_of.empty()) name += ", hosts";
  for (int32_t h : host_of) name += " " + std::to_string(h);
  return name;
}

Buffer::Buffer(const std::vector<int64_t>& lengths, DType dtype) {
  size_t end = 64;
  for (int64_t n : lengths) {
    begins.push_back(end);
    end += static_cast<size_t>(n) * DTypeSize(dtype) + 64;
  }
  bytes.assign(end, kGuard);
}

uint8_t* Buffer::At(size_t tensor, int64_t element, DType dtype) {
  return bytes.data() + begins[tensor] + static_cast<size_t>(element) * DTypeSize(dtype);
}

int64_t Planned::streamed = 0;

Planned::Planned(const Setting& setting) : s_(setting) {
  for (int rank = 0; rank < s_.size; ++rank) {
    inputs_.emplace_back(InputLengths(rank), s_.dtype);
    outputs_.emplace_back(OutputLengths(rank), s_.dtype);
    Fill(rank);
  }
  expected_inputs_ = inputs_;
  expected_outputs_ = outputs_;
  Plans();
}

Planned& Planned::Run() {
  std::vector<Schedule> schedules;
  std::vector<std::vector<Slice>> slices;
  for (const Plan& plan : plans_) {
    schedules.push_back(plan.schedule);
    slices.push_back(plan.slices);
  }
  RunnerOptions options;
  options.reduction.dtype = s_.dtype;
  options.reduction.op = s_.op;
  options.reduction.prescale = s_.prescale;
  options.reduction.finish = {s_.op == ReduceOp::kAverage ? s_.size : 1, s_.postscale};
  options.segment_bytes = s_.segment_bytes;
  options.seed = s_.seed;
  // Not by its parity, by which many tests choose what is in place.
  if (s_.seed / 2 % 2 == 0) options.streamed_bytes = 0;
  // Ranks that overwrite what they exchange rely on links that copy when they send.
  const std::string name = s_.entry->name;
  options.read_late = s_.read_late && name != "butterfly" && name != "one_shot";
  ScheduleRunner runner(schedules, slices, options);
  const std::string error = runner.Run();
  if (!error.empty()) CHECK_EQ_IN(error, "", s_.Name());
  if (!s_.in_place) streamed += runner.streamed();
  for (int rank = 0; rank < s_.size; ++rank) {
    const SendCount count = Count(rank);
    if (runner.count(rank).bytes == count.bytes && runner.count(rank).frames == count.frames) {
      continue;
    }
    CHECK_EQ_IN(runner.count(rank).bytes, count.bytes, s_.Name());
    CHECK_EQ_IN(runner.count(rank).frames, count.frames, s_.Name());
  }
  return *this;
}

std::unique_ptr<Request> Planned::RequestOf(int rank, const std::string& name) {
  auto request = std::make_unique<Request>();
  request->info = Info(rank);
  request->info.key = name;
  request->tensors = Views(rank);
  if (!HasRows(s_.kind())) return request;
  uint8_t* output = ResultAt(rank, 0, inputs_, outputs_);
  request->tensors[0].output = nullptr;
  request->allocate = [output](const std::vector<int64_t>&, int64_t) -> void* { return output; };
  return request;
}

void Planned::Expect() {
  for (int rank = 1; rank < s_.size && s_.kind() == CollectiveKind::kAllreduce; ++rank) {
    const bool same = AllOutput(rank) == AllOutput(0);
    if (!same) CHECK_EQ_IN(std::string("bits of rank 0"), "bits of all", s_.Name());
  }
  for (int rank = 0; rank < s_.size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    WriteExpected(rank);
    DropSigns(rank);
    const bool fits = inputs_[r].bytes == expected_inputs_[r].bytes &&
                      outputs_[r].bytes == expected_outputs_[r].bytes;
    if (fits) continue;
    const bool input = inputs_[r].bytes != expected_inputs_[r].bytes;
    CHECK_EQ_IN(std::string(input ? "input" : "output"), "",
                "rank " + std::to_string(rank) + ": " + s_.Name());
  }
}

SendCount Planned::Count(int rank) const {
  const Plan& plan = plans_[static_cast<size_t>(rank)];
  std::vector<int64_t> elements;
  for (const Slice& slice : plan.slices) elements.push_back(slice.elements);
  return CountSends(plan.schedule, elements, s_.dtype, s_.segment_bytes);
}

Bytes Planned::Output(int rank, size_t tensor) {
  const std::vector<int64_t> lengths = OutputLengths(rank);
  const uint8_t* begin = ResultAt(rank, tensor, inputs_, outputs_);
  return Bytes(begin, begin + static_cast<size_t>(lengths[tensor]) * DTypeSize(s_.dtype));
}

Bytes Planned::AllOutput(int rank) {
  Bytes all;
  for (size_t t = 0; t < s_.lengths.size(); ++t) {
    const Bytes one = Output(rank, t);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

int64_t Planned::Sum(int begin, int count, int stride) const {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) total += Rows(begin + i * stride);
  return total;
}

bool Planned::HasInput(int rank) const {
  const bool rooted =
      s_.kind() == CollectiveKind::kScatter || s_.kind() == CollectiveKind::kSendRecv;
  return !rooted || rank == s_.root;
}

bool Planned::HasOutput(int rank) const {
  if (s_.kind() == CollectiveKind::kSendRecv) return rank != s_.root || s_.size == 1;
  return s_.kind() != CollectiveKind::kGather || rank == s_.root;
}

std::vector<int64_t> Planned::InputLengths(int rank) const {
  if (!HasRows(s_.kind())) return s_.lengths;
  return {InputRows(rank) * kRowWidth};
}

int64_t Planned::InputRows(int rank) const {
  switch (s_.kind()) {
    case CollectiveKind::kAlltoall:
      return Sum(rank * s_.size, s_.size);
    case CollectiveKind::kReduceScatter:
      return Sum(0, s_.size);
    case CollectiveKind::kScatter:
      return rank == s_.root ? Sum(0, s_.size) : 0;
    default:
      return Rows(rank);
  }
}

std::vector<int64_t> Planned::OutputLengths(int rank) const {
  if (!HasRows(s_.kind())) return s_.lengths;
  switch (s_.kind()) {
    case CollectiveKind::kAlltoall:
      return {Sum(rank, s_.size, s_.size) * kRowWidth};
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kScatter:
      return {Rows(rank) * kRowWidth};
    case CollectiveKind::kGather:
      return {rank == s_.root ? Sum(0, s_.size) * kRowWidth : 0};
    default:
      return {Sum(0, s_.size) * kRowWidth};
  }
}

void Planned::Fill(int rank) {
  const auto r = static_cast<size_t>(rank);
  const std::vector<int64_t> lengths = InputLengths(rank);
  for (size_t t = 0; t < lengths.size(); ++t) {
    for (int64_t i = 0; i < lengths[t]; ++i) {
      StoreElement(s_.dtype, s_.At(rank, t, i), inputs_[r].At(t, i, s_.dtype));
    }
  }
  if (!s_.in_place) return;
  if (!HasRows(s_.kind())) {
    outputs_[r].bytes = inputs_[r].bytes;
  } else if (IsGather() && HasOutput(rank)) {
    std::memcpy(outputs_[r].At(0, Sum(0, rank) * kRowWidth, s_.dtype),
                inputs_[r].At(0, 0, s_.dtype),
                static_cast<size_t>(lengths[0]) * DTypeSize(s_.dtype));
  }
}

bool Planned::IsGather() const {
  return s_.kind() == CollectiveKind::kAllgather || s_.kind() == CollectiveKind::kGather;
}

bool Planned::OutputInInput(int rank) const {
  const bool scatters =
      s_.kind() == CollectiveKind::kReduceScatter || s_.kind() == CollectiveKind::kScatter;
  return s_.in_place && scatters && HasInput(rank);
}

uint8_t* Planned::ResultAt(int rank, size_t tensor, Buffers& inputs, Buffers& outputs) {
  const auto r = static_cast<size_t>(rank);
  if (OutputInInput(rank)) return inputs[r].At(0, Sum(0, rank) * kRowWidth, s_.dtype);
  return outputs[r].At(tensor, 0, s_.dtype);
}

TensorView Planned::View(int rank, size_t tensor) {
  const auto r = static_cast<size_t>(rank);
  TensorView view;
  view.elements = InputLengths(rank)[tensor];
  view.hint = s_.hints.empty() ? tensor : s_.hints[tensor];
  if (HasOutput(rank)) view.output = ResultAt(rank, tensor, inputs_, outputs_);
  if (HasInput(rank)) view.input = inputs_[r].At(tensor, 0, s_.dtype);
  if (s_.in_place && HasInput(rank) && HasOutput(rank)) {
    if (!HasRows(s_.kind())) view.input = view.output;
    if (IsGather()) view.input = outputs_[r].At(0, Sum(0, rank) * kRowWidth, s_.dtype);
  }
  return view;
}

RequestInfo Planned::Info(int rank) const {
  RequestInfo info;
  info.key = "planned";
  info.kind = s_.kind();
  info.dtype = s_.dtype;
  info.op = s_.op;
  info.prescale = s_.prescale;
  info.postscale = s_.postscale;
  info.root = s_.RankOf(s_.root);
  if (s_.kind() == CollectiveKind::kSendRecv) info.peer = s_.RankOf(s_.size - 1 - s_.root);
  if (!HasRows(s_.kind())) {
    for (int64_t n : s_.lengths) info.shapes.push_back({n});
    return info;
  }
  info.shapes = {{InputRows(rank), kRowWidth}};
  if (s_.kind() == CollectiveKind::kAlltoall) {
    const auto begin = s_.rows.begin() + rank * s_.size;
    info.splits = {begin, begin + s_.size};
  } else if (!IsGather()) {
    info.splits = s_.rows;
  }
  return info;
}

std::vector<TensorView> Planned::Views(int rank) {
  std::vector<TensorView> views;
  for (size_t t = 0; t < InputLengths(rank).size(); ++t) views.push_back(View(rank, t));
  return views;
}

void Planned::Plans() {
  Config config;
  SetAlgorithm(&config, *s_.entry);
  config.ring_order = s_.ring_order;
  SetView set;
  set.host_of = s_.host_of;
  std::vector<RequestInfo> infos;
  for (int rank = 0; rank < s_.size; ++rank) {
    set.ranks.push_back(s_.RankOf(rank));
    infos.push_back(Info(rank));
  }
  const std::vector<int64_t> rows = AgreedRows(infos, s_.root);
  for (int rank = 0; rank < s_.size; ++rank) {
    set.index = rank;
    const std::vector<TensorView> views = Views(rank);
    StatusOr<Plan> plan =
        PlanOperation({infos[static_cast<size_t>(rank)], views, rows, set}, config);
    if (!plan.ok()) CHECK_EQ_IN(plan.status().message(), "", s_.Name());
    plans_.push_back(std::move(plan.value()));
  }
}

Element Planned::Reduced(size_t tensor, int64_t i) {
  if (reduced_.size() <= tensor) reduced_.resize(tensor + 1);
  std::vector<Element>& known = reduced_[tensor];
  while (static_cast<int64_t>(known.size()) <= i) {
    known.push_back(Reduce(tensor, static_cast<int64_t>(known.size())));
  }
  return known[static_cast<size_t>(i)];
}

Element Planned::Reduce(size_t tensor, int64_t i) const {
  std::vector<Element> values;
  for (int rank = 0; rank < s_.size; ++rank) {
    values.push_back(s_.At(rank, tensor, i) * s_.prescale);
  }
  return ReduceAll(s_.dtype, s_.op, values) * s_.postscale;
}

Element Planned::Wanted(int rank, size_t tensor, int64_t i) {
  switch (s_.kind()) {
    case CollectiveKind::kReduce:
      if (rank != s_.root) return s_.At(rank, tensor, i);
      return Reduced(tensor, i);
    case CollectiveKind::kAllreduce:
      return Reduced(tensor, i);
    case CollectiveKind::kReduceScatter:
      return Reduced(0, Sum(0, rank) * kRowWidth + i);
    case CollectiveKind::kScatter:
      return s_.At(s_.root, 0, Sum(0, rank) * kRowWidth + i);
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kSendRecv:
      return s_.At(s_.root, tensor, i);
    default:
      break;
  }
  for (int source = 0; source < s_.size; ++source) {
    const bool all = s_.kind() == CollectiveKind::kAlltoall;
    const int64_t count = (all ? Sent(source, rank) : Rows(source)) * kRowWidth;
    const int64_t skip = all ? Sum(source * s_.size, rank) * kRowWidth : 0;
    if (i < count) return s_.At(source, 0, skip + i);
    i -= count;
  }
  return 0;
}

void Planned::WriteExpected(int rank) {
  const std::vector<int64_t> lengths = OutputLengths(rank);
  if (!HasOutput(rank)) return;
  for (size_t t = 0; t < lengths.size(); ++t) {
    uint8_t* at = ResultAt(rank, t, expected_inputs_, expected_outputs_);
    for (int64_t i = 0; i < lengths[t]; ++i) {
      StoreElement(s_.dtype, Wanted(rank, t, i), at + static_cast<size_t>(i) * DTypeSize(s_.dtype));
    }
  }
}

void Planned::DropSigns(int rank) {
  if (s_.op != ReduceOp::kProduct || !IsComplex(s_.dtype)) return;
  const size_t part = DTypeSize(s_.dtype) / 2;
  const std::vector<int64_t> lengths = OutputLengths(rank);
  for (size_t t = 0; t < lengths.size(); ++t) {
    for (uint8_t* at : {ResultAt(rank, t, inputs_, outputs_),
                        ResultAt(rank, t, expected_inputs_, expected_outputs_)}) {
      for (int64_t i = 1; i <= 2 * lengths[t]; ++i) {
        uint8_t* end = at + static_cast<size_t>(i) * part;
        if (end[-1] == 0x80 && std::all_of(end - part, end - 1, [](uint8_t b) { return b == 0; })) {
          end[-1] = 0;
        }
      }
    }
  }
}

}  // namespace tfdist
