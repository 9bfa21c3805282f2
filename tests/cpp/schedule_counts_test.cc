// The traffic of every algorithm, against closed formulas: bytes and messages that each rank sends.
//
// K ranks; N bytes of data as they are, W bytes as partial results (float32 where the type is a
// half type, else N). Formulas of ring, recursive doubling and halving, trees: R. Thakur, R.
// Rabenseifner, W. Gropp, Int. J. High Perform. Comput. Appl. 19 (2005), sections 3 and 4.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "scheduler/row_counts.h"
#include "settings.h"

namespace tfdist {
namespace {

struct Case {
  int rank;
  int size;  // K
  int root;
  uint64_t n;  // N; for kinds with rows: of one rank's rows
  uint64_t w;  // W
  std::vector<int32_t> host_of;

  int v() const { return (rank - root + size) % size; }  // place in a tree
};
using Formula = SendCount (*)(const Case&);

uint64_t Log2(int power) { return power == 1 ? 0 : 1 + Log2(power / 2); }
int PowerBelow(int size) { return size < 2 ? 1 : 2 * PowerBelow(size / 2); }
int LowBit(int v, int size) { return v == 0 ? 2 * PowerBelow(size) : v & -v; }
// Ranks of the subtree of v in a binomial tree, and the children of v.
int Subtree(int v, int size) { return std::min(size - v, LowBit(v, size)); }
uint64_t Children(int v, int size) {
  uint64_t count = 0;
  for (int bit = 1; bit < LowBit(v, size) && v + bit < size; bit *= 2) ++count;
  return count;
}

SendCount Nothing() { return {0, 0}; }
SendCount Plus(SendCount a, SendCount b) { return {a.bytes + b.bytes, a.frames + b.frames}; }
SendCount Times(uint64_t count, uint64_t bytes) { return {count * bytes, count}; }

// Reduce-scatter along a ring of k ranks, in slices of N / k: an input first, then partial results.
SendCount RingReduce(uint64_t k, uint64_t n, uint64_t w) {
  if (k == 1) return Nothing();
  return Plus(Times(1, n / k), Times(k - 2, w / k));
}
SendCount RingAllreduce(const Case& c) {
  const auto k = static_cast<uint64_t>(c.size);
  return Plus(RingReduce(k, c.n, c.w), Times(k - 1, c.n / k));  // 2 (K - 1) messages
}
SendCount PairwiseAllreduce(const Case& c) {
  const auto k = static_cast<uint64_t>(c.size);
  return Times(2 * (k - 1), c.n / k);
}
SendCount Star(const Case& c) {
  return c.rank == 0 ? Times(static_cast<uint64_t>(c.size) - 1, c.n) : Times(1, c.n);
}

// The part of a rank in folding: out of it, or what it sends besides (the result to the other one).
struct Folded {
  explicit Folded(const Case& c) : power(PowerBelow(c.size)) {
    const int rest = c.size - power;
    const bool paired = c.rank < 2 * rest;
    out = paired && c.rank % 2 == 0;
    two = paired && !out;
  }
  int power;
  bool out;
  bool two;
};
SendCount Butterfly(const Case& c) {
  const Folded f(c);
  if (c.size == 1) return Nothing();
  if (f.out) return Times(1, c.n);
  const SendCount steps =
      Plus(Times(1, f.two ? c.w : c.n), Times(Log2(f.power) - 1, c.w));  // log2 K messages
  return f.two ? Plus(steps, Times(1, c.n)) : steps;
}
SendCount HalvingDoubling(const Case& c) {
  const Folded f(c);
  if (c.size == 1) return Nothing();
  if (f.out) return Times(1, c.n);
  const auto p = static_cast<uint64_t>(f.power);
  SendCount count;
  count.frames = 2 * Log2(f.power);
  count.bytes = (f.two ? c.w : c.n) / 2 + c.w / 2 - c.w / p;  // 1/2 + (1/4 + ... + 1/P)
  count.bytes += c.n - c.n / p;
  return f.two ? Plus(count, Times(1, c.n)) : count;
}
SendCount TreeUp(const Case& c) {
  if (c.v() == 0) return Nothing();
  return Times(1, Subtree(c.v(), c.size) == 1 ? c.n : c.w);
}
SendCount TreeDown(const Case& c) { return Times(Children(c.v(), c.size), c.n); }
SendCount Tree(const Case& c) { return Plus(TreeUp(c), TreeDown(c)); }

SendCount Torus(const Case& c) {
  std::pair<uint64_t, uint64_t> grid;
  for (uint64_t x = 1; x * x <= static_cast<uint64_t>(c.size); ++x) {
    if (static_cast<uint64_t>(c.size) % x == 0) grid = {x, static_cast<uint64_t>(c.size) / x};
  }
  const auto [x, y] = grid;
  const SendCount rows = Plus(RingReduce(x, c.n, c.w), Times(x - 1, c.n / x));
  const SendCount columns = Plus(Times(y - 1, c.w / x / y), Times(y - 1, c.n / x / y));
  return Plus(rows, columns);  // 2 (X - 1) + 2 (Y - 1) messages
}

SendCount TwoLevel(const Case& c) {
  std::map<int32_t, std::vector<int>> hosts;
  for (int r = 0; r < c.size; ++r) {
    hosts[c.host_of.empty() ? 0 : c.host_of[static_cast<size_t>(r)]].push_back(r);
  }
  uint64_t s = static_cast<uint64_t>(c.size);
  for (const auto& [host, ranks] : hosts) s = std::min<uint64_t>(s, ranks.size());
  const uint64_t h = hosts.size();
  const std::vector<int>& own =
      hosts[c.host_of.empty() ? 0 : c.host_of[static_cast<size_t>(c.rank)]];
  const auto local = static_cast<uint64_t>(std::find(own.begin(), own.end(), c.rank) - own.begin());
  const uint64_t slice = c.n / (s * h);
  if (local >= s) return Times(s * h, slice);  // its input, to the owners on its host
  const SendCount inside = Times((s - 1) * h + (own.size() - 1) * h, slice);
  return Plus(inside, Plus(Times(h - 1, c.w / (s * h)), Times(h - 1, slice)));
}

SendCount RingReduceScatter(const Case& c) {
  const auto k = static_cast<uint64_t>(c.size);
  return RingReduce(k, k * c.n, k * c.w);
}
SendCount ToAllOthers(const Case& c) { return Times(static_cast<uint64_t>(c.size) - 1, c.n); }
SendCount FromRoot(const Case& c) { return c.v() == 0 ? ToAllOthers(c) : Nothing(); }
SendCount ToRoot(const Case& c) { return c.v() == 0 ? Nothing() : Times(1, c.n); }
SendCount GatherUp(const Case& c) {
  return c.v() == 0 ? Nothing() : Times(static_cast<uint64_t>(Subtree(c.v(), c.size)), c.n);
}
SendCount ScatterDown(const Case& c) {
  return Times(static_cast<uint64_t>(Subtree(c.v(), c.size)) - 1, c.n);
}

const std::map<std::string, Formula> kFormulas = {
    {"allreduce/ring", RingAllreduce},
    {"allreduce/pairwise", PairwiseAllreduce},
    {"allreduce/two_level", TwoLevel},
    {"allreduce/two_level_ring", TwoLevel},  // the same bytes, to other partners
    {"allreduce/halving_doubling", HalvingDoubling},
    {"allreduce/butterfly", Butterfly},
    {"allreduce/tree", Tree},
    {"allreduce/torus", Torus},
    {"allreduce/star", Star},
    {"reduce_scatter/ring", RingReduceScatter},
    {"reduce_scatter/pairwise", ToAllOthers},
    {"allgather/ring", ToAllOthers},
    {"allreduce/one_shot", ToAllOthers},
    {"allgather/pairwise", ToAllOthers},
    {"broadcast/binomial", TreeDown},
    {"broadcast/star", FromRoot},
    {"reduce/binomial", TreeUp},
    {"reduce/star", ToRoot},
    {"gather/star", ToRoot},
    {"gather/binomial", GatherUp},
    {"scatter/star", FromRoot},
    {"scatter/binomial", ScatterDown},
    {"alltoall/pairwise", ToAllOthers},
    {"sendrecv/direct", FromRoot},
};

std::string RowName(const AlgorithmEntry& entry) {
  return std::string(CollectiveKindName(entry.kind)) + "/" + entry.name;
}

// Slices of equal, whole multiples of 64 bytes for every number of parts up to 16, in one segment.
Setting CountSetting(Setting s, DType dtype) {
  s.dtype = dtype;
  s.segment_bytes = int64_t{16} << 20;
  const int parts =
      s.kind() == CollectiveKind::kAllreduce ? PartCount(*s.entry, {0, s.size, 0, s.host_of}) : 1;
  s.lengths = {64 * 2 * parts};
  s.rows = RaggedRows(s.size, 32, 0);
  if (s.kind() == CollectiveKind::kAlltoall) {
    s.rows.assign(static_cast<size_t>(s.size * s.size), 32);
  }
  return s;
}

TEST(bytes_and_messages_of_every_rank_are_those_of_the_formulas) {
  std::set<std::string> covered;
  for (const AlgorithmEntry& row : Algorithms()) {
    if (covered.count(CollectiveKindName(row.kind)) != 0) continue;
    covered.insert(CollectiveKindName(row.kind));
    ForEachRow(row.kind, [&](Setting base) {
      const auto formula = kFormulas.find(RowName(*base.entry));
      if (formula == kFormulas.end()) return;
      covered.insert(formula->first);
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt64}) {
        Setting s = CountSetting(base, dtype);
        s.root = HasRoot(s.kind()) ? s.size / 2 : 0;
        const auto elements =
            static_cast<uint64_t>(HasRows(s.kind()) ? 32 * kRowWidth : s.lengths[0]);
        Planned planned(s);
        planned.Run();  // sends what CountSends says
        for (int rank = 0; rank < s.size; ++rank) {
          const Case c{rank,
                       s.size,
                       s.root,
                       elements * DTypeSize(dtype),
                       elements * DTypeSize(AccumulationType(dtype)),
                       s.host_of};
          const SendCount wanted = formula->second(c);
          const std::string where = "rank " + std::to_string(rank) + ": " + s.Name();
          CHECK_EQ_IN(planned.Count(rank).bytes, wanted.bytes, where);
          CHECK_EQ_IN(planned.Count(rank).frames, wanted.frames, where);
        }
      }
    });
  }
  for (const auto& [name, formula] : kFormulas) CHECK_EQ_IN(covered.count(name), 1u, name);
}

// Half of the data along each of two trees: what goes up is the data, but for the two roots; what
// comes down is as much in all, and no rank sends more than twice the data.
TEST(a_double_tree_spreads_the_load) {
  for (int size : {2, 3, 4, 5, 6, 7, 8, 9, 16, 33}) {
    Setting s;
    s.entry =
        FindAlgorithm(CollectiveKind::kAllreduce, "double_tree", {0, size, 0, {}}, DType::kFloat32);
    s.size = size;
    s = CountSetting(s, DType::kFloat32);
    Planned planned(s);
    const auto n = static_cast<uint64_t>(s.lengths[0]) * 4;
    uint64_t bytes = 0;
    uint64_t frames = 0;
    for (int rank = 0; rank < size; ++rank) {
      const SendCount count = planned.Count(rank);
      bytes += count.bytes;
      frames += count.frames;
      CHECK(count.bytes <= 2 * n);
    }
    CHECK_EQ_IN(bytes, 2 * static_cast<uint64_t>(size - 1) * n, s.Name());
    CHECK_EQ_IN(frames, 4 * static_cast<uint64_t>(size - 1), s.Name());
  }
}

TEST(every_row_has_a_formula) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    const std::string name = RowName(entry);
    if (name != "allreduce/double_tree") CHECK_EQ_IN(kFormulas.count(name), 1u, name);
  }
}

// 1 MiB on four hosts of four: what crosses between hosts, which two_level is for.
TEST(two_level_sends_less_between_hosts_than_a_ring) {
  uint64_t between[2] = {0, 0};
  std::vector<int32_t> host_of;
  for (int r = 0; r < 16; ++r) host_of.push_back(r % 4);  // neighbours are apart
  for (int a = 0; a < 2; ++a) {
    const ScheduleArgs args{0, 16, 0, host_of};
    const AlgorithmEntry* entry = FindAlgorithm(
        CollectiveKind::kAllreduce, a == 0 ? "ring" : "two_level", args, DType::kFloat32);
    const int64_t part = (1 << 18) / PartCount(*entry, args);
    for (int rank = 0; rank < 16; ++rank) {
      for (const Step& step : entry->make({rank, 16, 0, host_of}).steps) {
        if (step.kind != StepKind::kSend || rank % 4 == step.peers[0] % 4) continue;
        between[a] += static_cast<uint64_t>(part) * 4;
      }
    }
  }
  CHECK_EQ(between[0], 30u << 20);  // every hop of 16 ranks: 16 * 2 * 15 / 16 MiB
  CHECK_EQ(between[1], 6u << 20);   // 4 parts * 4 owners * 2 * 3 / 4 of a part
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
