#include "engine_program.h"

#include <algorithm>
#include <numeric>

namespace tfdist::sim {
namespace {

// Small whole numbers: every sum of them is exact in every type used here.
int Value(const Call& call, int rank, int64_t element) {
  return static_cast<int>((call.number * 31 + rank * 7 + element * 3) % 17);
}

void Append(DType dtype, int value, int divide, std::vector<uint8_t>* bytes) {
  const auto add = [bytes](const auto& number) {
    const auto* begin = reinterpret_cast<const uint8_t*>(&number);
    bytes->insert(bytes->end(), begin, begin + sizeof(number));
  };
  switch (dtype) {
    case DType::kFloat64:
      return add(static_cast<double>(value) / divide);
    case DType::kInt32:
      return add(static_cast<int32_t>(value / divide));
    default:
      return add(static_cast<float>(value) / static_cast<float>(divide));
  }
}

// Rows [begin, end) of what `rank` passed in.
void AppendRows(const Call& call, int rank, int64_t begin, int64_t end,
                std::vector<uint8_t>* bytes) {
  for (int64_t i = begin * call.row_elements; i < end * call.row_elements; ++i) {
    Append(call.dtype, Value(call, rank, i), 1, bytes);
  }
}

void AppendSum(const Call& call, int64_t begin, int64_t end, std::vector<uint8_t>* bytes) {
  for (int64_t i = begin * call.row_elements; i < end * call.row_elements; ++i) {
    int sum = 0;
    for (int caller : call.callers) sum += Value(call, caller, i);
    Append(call.dtype, sum, call.average ? static_cast<int>(call.callers.size()) : 1, bytes);
  }
}

int IndexOf(const Call& call, int rank) {
  return static_cast<int>(std::find(call.members.begin(), call.members.end(), rank) -
                          call.members.begin());
}

// First row of part `index` of `rows` rows, cut as even as possible.
int64_t EvenBegin(int64_t rows, int64_t parts, int64_t index) {
  return rows / parts * index + std::min(rows % parts, index);
}

std::vector<int> Subset(int size, Rng* rng) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  rng->Shuffle(&ranks);
  ranks.resize(static_cast<size_t>(rng->Between(1, size)));
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

Call NamedCall(const std::string& key, int number, const std::vector<int>& members, int size,
               Rng* rng) {
  static constexpr CollectiveKind kKinds[] = {
      CollectiveKind::kAllreduce, CollectiveKind::kAllreduce,     CollectiveKind::kAllreduce,
      CollectiveKind::kAllgather, CollectiveKind::kBroadcast,     CollectiveKind::kBarrier,
      CollectiveKind::kReduce,    CollectiveKind::kReduceScatter, CollectiveKind::kGather,
      CollectiveKind::kScatter,   CollectiveKind::kAlltoall,      CollectiveKind::kSendRecv};
  static constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kInt32};
  Call call;
  call.kind = kKinds[rng->Index(std::size(kKinds))];
  call.key = key;
  call.number = number;
  call.members = members;
  call.dtype = kTypes[rng->Index(std::size(kTypes))];
  call.row_elements = rng->Between(1, 5);
  call.rows = rng->Chance(10) ? 0 : rng->Between(1, rng->Chance(20) ? 400 : 12);
  call.root = members[static_cast<size_t>(rng->Index(members.size()))];
  if (call.kind == CollectiveKind::kAllgather || call.kind == CollectiveKind::kGather) {
    call.ragged = rng->Chance(70);
  }
  if (call.kind == CollectiveKind::kAlltoall) call.rows *= static_cast<int64_t>(members.size());
  if (call.kind == CollectiveKind::kSendRecv) {
    call.root = rng->Index(static_cast<size_t>(size));
    call.peer = (call.root + static_cast<int>(rng->Between(1, size - 1))) % size;
    call.members = {std::min(call.root, call.peer), std::max(call.root, call.peer)};
    call.set.clear();
  }
  return call;
}

}  // namespace

Program MakeProgram(int size, Rng* rng) {
  struct Group {
    std::string name;
    std::string set;
    std::vector<int> members;
    std::vector<int64_t> elements;  // by bucket
  };
  Program program;
  int number = 0;
  std::vector<int> world(static_cast<size_t>(size));
  std::iota(world.begin(), world.end(), 0);
  std::vector<std::pair<std::string, std::vector<int>>> sets = {{"", world}};
  Phase phase;
  for (int64_t n = rng->Between(0, 2); n > 0; --n) {
    const std::string name = "set" + std::to_string(n);
    Call call;
    call.kind = CollectiveKind::kAddSet;
    call.group = name;
    call.members = world;
    call.added = Subset(size, rng);
    call.key = "process set " + name;
    sets.push_back({name, call.added});
    phase.calls = {call};
    program.phases.push_back(phase);
  }
  std::vector<Group> groups;
  for (int64_t n = rng->Between(1, 3); n > 0; --n) {
    const auto& [set, members] = sets[static_cast<size_t>(rng->Index(sets.size()))];
    Group group{"group" + std::to_string(n), set, members, {}};
    for (int64_t b = rng->Between(1, 6); b > 0; --b) {
      group.elements.push_back(rng->Between(1, rng->Chance(30) ? 4000 : 300));
    }
    Call call;
    call.kind = CollectiveKind::kRegister;
    call.key = "gradients " + group.name;
    call.group = group.name;
    call.set = set;
    call.members = members;
    phase.calls = {call};  // the registrations of a set come in one order on all ranks
    program.phases.push_back(phase);
    groups.push_back(std::move(group));
  }
  std::vector<Call> loops;  // come again, mostly as they were
  for (int64_t n = rng->Between(0, 6); n > 0; --n) {
    const auto& [set, members] = sets[static_cast<size_t>(rng->Index(sets.size()))];
    Call call;
    call.kind = CollectiveKind::kAllreduce;
    call.key = "loop" + std::to_string(n) + "/" + set;
    call.set = set;
    call.members = members;
    call.dtype = rng->Chance(50) ? DType::kFloat64 : DType::kInt32;
    call.rows = rng->Between(1, rng->Chance(30) ? 2000 : 20);
    call.repeats = true;
    loops.push_back(call);
  }
  program.first_step = program.phases.size();
  for (int64_t steps = rng->Between(2, 6); steps > 0; --steps) {
    phase.calls.clear();
    for (const Group& group : groups) {
      const auto count = static_cast<int>(group.elements.size());
      for (int b = 0; b < count; ++b) {
        Call call;
        call.kind = CollectiveKind::kAllreduce;
        call.key = "g." + group.name + "." + std::to_string(b);
        call.group = group.name;
        call.set = group.set;
        call.members = group.members;
        call.bucket = b;
        call.buckets = count;
        call.number = number++;
        call.rows = group.elements[static_cast<size_t>(b)];
        phase.calls.push_back(call);
      }
    }
    for (Call& loop : loops) {
      if (rng->Chance(15)) ++loop.rows;
      if (rng->Chance(20)) continue;
      loop.silent =
          rng->Chance(10) ? loop.members[static_cast<size_t>(rng->Index(loop.members.size()))] : -1;
      for (int64_t times = rng->Between(1, 5); times > 0; --times) {
        loop.number = number++;
        phase.calls.push_back(loop);
      }
    }
    for (int64_t n = rng->Between(0, 4); n > 0; --n) {
      const auto& [set, members] = sets[static_cast<size_t>(rng->Index(sets.size()))];
      // Some names come again every step with another content.
      const std::string key = rng->Chance(50)
                                  ? "metric" + std::to_string(n)
                                  : "step" + std::to_string(steps) + "." + std::to_string(n);
      Call call = NamedCall(key + "/" + set, number++, members, size, rng);
      if (call.kind == CollectiveKind::kSendRecv) {
        call.key += "/pair";
      } else {
        call.set = set;
      }
      phase.calls.push_back(call);
    }
    rng->Shuffle(&phase.calls);
    program.phases.push_back(phase);
  }
  for (Phase& made : program.phases) {
    for (Call& call : made.calls) call.callers = call.members;
  }
  return program;
}

int64_t InputRows(const Call& call, int rank) {
  if (call.ragged) return (call.rows + rank * 5) % 9;
  return call.rows;
}

std::vector<uint8_t> Input(const Call& call, int rank) {
  std::vector<uint8_t> bytes;
  AppendRows(call, rank, 0, InputRows(call, rank), &bytes);
  return bytes;
}

std::vector<uint8_t> Expected(const Call& call, int rank) {
  std::vector<uint8_t> bytes;
  const auto size = static_cast<int64_t>(call.members.size());
  const int64_t index = IndexOf(call, rank);
  const int64_t begin = EvenBegin(call.rows, size, index);
  const int64_t end = EvenBegin(call.rows, size, index + 1);
  switch (call.kind) {
    case CollectiveKind::kAllreduce:
      AppendSum(call, 0, call.rows, &bytes);
      break;
    case CollectiveKind::kReduce:
      if (rank == call.root) {
        AppendSum(call, 0, call.rows, &bytes);
      } else {
        AppendRows(call, rank, 0, call.rows, &bytes);
      }
      break;
    case CollectiveKind::kReduceScatter:
      AppendSum(call, begin, end, &bytes);
      break;
    case CollectiveKind::kBroadcast:
    case CollectiveKind::kSendRecv:
      AppendRows(call, call.root, 0, call.rows, &bytes);
      break;
    case CollectiveKind::kScatter:
      AppendRows(call, call.root, begin, end, &bytes);
      break;
    case CollectiveKind::kAllgather:
    case CollectiveKind::kGather:
      if (call.kind == CollectiveKind::kGather && rank != call.root) break;
      for (int caller : call.callers) AppendRows(call, caller, 0, InputRows(call, caller), &bytes);
      break;
    case CollectiveKind::kAlltoall:
      for (int caller : call.callers) AppendRows(call, caller, begin, end, &bytes);
      break;
    default:
      break;
  }
  return bytes;
}

}  // namespace tfdist::sim
