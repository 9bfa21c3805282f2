// Every row of the algorithm, transport, type and operation tables through complete runtimes with
// threads as ranks. A new row is covered by being in its table. schedule_test and its neighbours go
// through the full product; here each row meets real links, fusion, many operations at once and
// ranks that submit in orders of their own.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ranks.h"
#include "settings.h"

namespace tfdist {
namespace {

Config ConfigFor(const AlgorithmEntry& entry) {
  Config config = TestConfig();
  SetAlgorithm(&config, entry);
  config.fusion_bytes = 256 << 10;  // 70001 float32 are more
  return config;
}

// {0, 1, size-1, size, size+1, odd, more than one segment, more than the fusion threshold}.
int64_t LengthOf(int size, size_t number) {
  const int64_t lengths[] = {0, 1, size - 1, size, size + 1, 999, 9001, 70001};
  return lengths[number % 8];
}

// The kinds with rows: the same, by rank or by pair of ranks.
std::vector<int64_t> RowsOf(CollectiveKind kind, int size, size_t number) {
  const int64_t n = std::min<int64_t>(LengthOf(size, number), 9001);
  if (kind != CollectiveKind::kAlltoall) return RaggedRows(size, n, static_cast<int>(number % 3));
  std::vector<int64_t> rows;
  for (int pair = 0; pair < size * size; ++pair) rows.push_back(n * (pair % 4) / 6);
  return rows;
}

// Settings of a row for one world: a third of all cells or types with one length each, and float32
// and bfloat16 with every length. The three `shares` together have all cells.
std::vector<Setting> SettingsOf(const AlgorithmEntry& entry, int size,
                                const std::vector<int32_t>& host_of, size_t share = 0) {
  std::vector<Cell> cells;
  if (Reduces(entry.kind)) cells = AllCells();
  for (DType dtype : AllTypes()) {
    if (!Reduces(entry.kind)) cells.push_back({dtype, ReduceOp::kSum});
  }
  for (int i = 0; i < 8; ++i) cells.push_back({DType::kFloat32, ReduceOp::kSum});
  for (int i = 0; i < 8; ++i) cells.push_back({DType::kBfloat16, ReduceOp::kAverage});
  std::vector<Setting> settings;
  for (size_t c = 0; c < cells.size(); ++c) {
    if (c % 3 != share && c + 16 < cells.size()) continue;
    Setting s;
    s.entry = &entry;
    s.size = size;
    s.host_of = host_of;
    s.whole_world = true;
    s.segment_bytes = TestConfig().segment_bytes;
    s.dtype = cells[c].dtype;
    s.op = cells[c].op;
    s.lengths = {LengthOf(size, c)};
    s.hints = {c};
    s.rows = RowsOf(entry.kind, size, c);
    s.root = HasRoot(entry.kind) ? static_cast<int>(c) % size : 0;
    s.in_place = c % 2 == 0;
    settings.push_back(s);
  }
  return settings;
}

void RunOnLinks(Ranks* ranks, std::vector<std::unique_ptr<Planned>>* cases) {
  ranks->Each([&](int rank) {
    std::vector<Pending> pending;
    for (size_t c = 0; c < cases->size(); ++c) {
      // Every rank submits in its own order.
      const size_t slot = (c + static_cast<size_t>(rank) * 3) % cases->size();
      const std::string name = "case " + std::to_string(slot);
      pending.push_back(Start((*ranks)[rank], (*cases)[slot]->RequestOf(rank, name)));
    }
    for (Pending& p : pending) CHECK_OK(p.Wait());
  });
}

void CheckRow(const AlgorithmEntry& entry, const std::string& transport, int size,
              const std::vector<int32_t>& host_of = {}, size_t share = 0) {
  if (!entry.supports({0, size, 0, host_of}, DType::kFloat32)) return;
  Ranks ranks(size, transport, ConfigFor(entry), host_of);
  std::vector<std::unique_ptr<Planned>> cases;
  for (const Setting& s : SettingsOf(entry, size, host_of, share)) {
    cases.push_back(std::make_unique<Planned>(s));
  }
  RunOnLinks(&ranks, &cases);
  for (const auto& planned : cases) planned->Expect();
}

TEST(every_row_over_every_transport) {
  size_t turn = 0;
  for (const AlgorithmEntry& entry : Algorithms()) {
    const std::string name = std::string(CollectiveKindName(entry.kind)) + "/" + entry.name;
    size_t share = 0;
    for (const TransportEntry& transport : Transports()) {
      // Small worlds and larger ones, with and without a power of two; a torus needs a grid.
      const int sizes[] = {4, 6, 9, 4, 8, 3, 4, 5, 1, 4, 2, 7};
      const int size = entry.kind == CollectiveKind::kSendRecv ? 2 : sizes[turn++ % 12];
      const bool fits = entry.supports({0, size, 0, {}}, DType::kFloat32);
      CheckRow(entry, transport.name, fits ? size : 4, {}, share++ % 3);
      std::printf("covered: %s over %s\n", name.c_str(), transport.name);
    }
  }
}

// Rows that training on up to TFDIST_MESH_RANKS ranks uses, at every size. Under ThreadSanitizer,
// which looks for races and not for sums, at two of them. Each with one share of the cells, and all
// three shares with every row and transport; with --full all with every size too.
TEST(the_rows_of_training_over_every_transport_and_size) {
  const std::vector<std::string> rows = {"allreduce/ring", "allreduce/pairwise", "allgather/ring",
                                         "broadcast/binomial"};
  size_t found = 0;
  size_t turn = 0;
  for (const AlgorithmEntry& entry : Algorithms()) {
    const std::string name = std::string(CollectiveKindName(entry.kind)) + "/" + entry.name;
    if (std::find(rows.begin(), rows.end(), name) == rows.end()) continue;
    ++found;
    for (const TransportEntry& transport : Transports()) {
      for (const int size : {1, 2, 3, 4, 7, 8}) {
        if (kSlowness > 1 && size != 2 && size != 7) continue;
        ++turn;
        for (size_t share = 0; share < 3; ++share) {
          if (!check::Full() && share != turn % 3) continue;
          CheckRow(entry, transport.name, size, {}, share);
        }
      }
    }
  }
  CHECK_EQ(found, rows.size());
}

TEST(two_level_over_unequal_hosts) {
  const AlgorithmEntry* entry =
      FindAlgorithm(CollectiveKind::kAllreduce, "two_level", {0, 4, 0, {}}, DType::kFloat32);
  for (const std::vector<int32_t>& host_of : std::vector<std::vector<int32_t>>{
           {0, 1, 1, 1}, {0, 0, 1}, {0, 0, 0, 1, 1, 2}, {0, 1, 0, 1, 0}}) {
    CheckRow(*entry, "tcp", static_cast<int>(host_of.size()), host_of);
  }
}

// Numbers whose sums round: what comes out over links, fused and interleaved, are the bits of the
// schedules in one thread.
TEST(bits_over_links_are_those_of_the_schedule) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (!Reduces(entry.kind)) continue;
    for (int size : {4, 6}) {
      for (int64_t fusion : {int64_t{0}, int64_t{64} << 20}) {
        Config config = ConfigFor(entry);
        config.fusion_bytes = fusion;
        Ranks ranks(size, "shm", config);
        std::vector<std::unique_ptr<Planned>> cases;
        std::vector<std::unique_ptr<Planned>> alone;
        std::vector<Setting> settings = SettingsOf(entry, size, {});
        for (size_t c = settings.size() - 16; c < settings.size(); ++c) {
          settings[c].value = Rough;
          settings[c].prescale = 1.0 / 3.0;
          cases.push_back(std::make_unique<Planned>(settings[c]));
          alone.push_back(std::make_unique<Planned>(settings[c]));
          alone.back()->Run();
        }
        RunOnLinks(&ranks, &cases);
        for (size_t c = 0; c < cases.size(); ++c) {
          for (int rank = 0; rank < size; ++rank) {
            const bool same = cases[c]->Output(rank, 0) == alone[c]->Output(rank, 0);
            CHECK_EQ_IN(same, true, settings[settings.size() - 16 + c].Name());
          }
        }
      }
    }
  }
}

// The sum over all links of a counter of a rank.
uint64_t Counted(Ranks* ranks, int rank, const std::string& field) {
  const std::string json = (*ranks)[rank].CountersJson();
  const std::string key = "\"" + field + "\": ";
  uint64_t sum = 0;
  for (size_t at = 0; (at = json.find(key, at)) != std::string::npos;) {
    at += key.size();
    sum += std::stoull(json.substr(at));
  }
  return sum;
}

TEST(links_count_what_the_schedule_sends) {
  for (const AlgorithmEntry& entry : Algorithms()) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
      const int size = entry.kind == CollectiveKind::kSendRecv ? 2 : 6;
      Setting s = SettingsOf(entry, size, {})[0];
      s.dtype = dtype;
      s.lengths = {10000};
      s.rows = RowsOf(entry.kind, size, 6);
      s.root = HasRoot(entry.kind) ? 1 : 0;
      std::vector<std::unique_ptr<Planned>> cases;
      cases.push_back(std::make_unique<Planned>(s));
      Ranks ranks(size, "inproc", ConfigFor(entry));
      RunOnLinks(&ranks, &cases);
      for (int rank = 0; rank < size; ++rank) {
        const SendCount wanted = cases[0]->Count(rank);
        CHECK_EQ_IN(Counted(&ranks, rank, "data_bytes_sent"), wanted.bytes, s.Name());
        CHECK_EQ_IN(Counted(&ranks, rank, "data_frames_sent"), wanted.frames, s.Name());
      }
    }
  }
}

// A collective that the requested algorithm cannot do runs with another one.
TEST(a_torus_of_three_ranks_gives_way) {
  const AlgorithmEntry* torus =
      FindAlgorithm(CollectiveKind::kAllreduce, "torus", {0, 4, 0, {}}, DType::kFloat32);
  Ranks ranks(3, "inproc", ConfigFor(*torus));
  ranks.Each([&](int rank) {
    std::vector<float> data(500, static_cast<float>(rank + 1));
    CHECK_OK(StartAllreduce(ranks[rank], "t", data.data(), data.data(), 500).Wait());
    CHECK(data == std::vector<float>(500, 6.0f));
  });
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
