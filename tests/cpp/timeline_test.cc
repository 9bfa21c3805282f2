// The timeline of ranks as threads: what is recorded of an operation, whom a rank waits for, how
// clocks are compared, and what the file holds.
#include "scheduler/timeline.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "buckets.h"
#include "check.h"
#include "ranks.h"
#include "runtime/timeline_writer.h"
#include "scheduler/wait_accounting.h"

namespace tfdist {
namespace {

constexpr int64_t kAheadUs = 5000000;
int64_t AheadNs() { return NowNs() + kAheadUs * 1000; }

std::string TemporaryFolder() {
  char name[] = "/tmp/tfdist-timeline-XXXXXX";
  CHECK(mkdtemp(name) != nullptr);
  return name;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::vector<std::string> LinesWith(const std::string& text, const std::string& part) {
  std::vector<std::string> found;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.find(part) != std::string::npos) found.push_back(line);
  }
  return found;
}

// The number behind `"name":`.
int64_t Number(const std::string& line, const std::string& name) {
  const size_t at = line.find("\"" + name + "\":");
  CHECK(at != std::string::npos);
  return std::stoll(line.substr(at + name.size() + 3));
}

std::string Part(const std::string& folder, int rank) {
  return folder + "/rank-" + std::to_string(rank) + ".jsonl";
}

TEST(each_moment_of_waiting_counts_once_for_the_rank_that_was_last_first) {
  WaitAccounting waited;
  waited.Add(1, 100, 200);
  waited.Add(2, 150, 260);  // 200-260
  waited.Add(1, 120, 250);  // over already
  waited.Add(3, 300, 290);
  CHECK_EQ(waited.total_us(), 160);
  CHECK_EQ(waited.Json(),
           std::string("\"waited_us\": 160, \"waited_for_us\": {\"1\": 100, \"2\": 60}"));
}

TEST(an_operation_stands_still_between_its_start_and_data) {
  OperationTrace trace;
  trace.peers.resize(3);
  trace.Start(1000);
  CHECK_EQ(trace.Heard(2, 8, 1100).peer, -1);
  const OperationTrace::Wait wait = trace.Heard(0, 8, 5000);
  CHECK_EQ(wait.peer, 0);
  CHECK(wait.since_us == 1100 && wait.until_us == 5000);
  CHECK_EQ(trace.Heard(2, 8, 7000).peer, 2);
  CHECK_EQ(trace.longest.peer, 0);
  CHECK_EQ(trace.longest.until_us, 5000);
  CHECK_EQ(trace.peers[2].first_us, 1100);
  CHECK_EQ(trace.peers[2].last_us, 7000);
  CHECK_EQ(trace.peers[2].bytes, 16);
  CHECK(!trace.peers[1].heard);
}

TEST(a_full_ring_drops_what_comes_and_counts_it) {
  Timeline timeline(NowNs, 2);
  for (int i = 0; i < 3; ++i) {
    TimelineRecord* record = timeline.Begin();
    CHECK_EQ(record != nullptr, i < 2);
    if (record == nullptr) continue;
    record->done_us = i + 1;
    timeline.Commit();
  }
  CHECK_EQ(timeline.dropped(), uint64_t{1});
  std::string lines;
  CHECK_EQ(timeline.TakeLines(&lines), size_t{2});
  CHECK_EQ(Number(LinesWith(lines, "op")[1], "done"), 2);
  CHECK(timeline.Begin() != nullptr);
}

TEST(of_many_peers_the_last_are_kept) {
  OperationTrace trace;
  std::vector<int32_t> ranks;
  for (int r = 0; r < 40; ++r) {
    trace.peers.emplace_back();
    ranks.push_back(100 + r);
    trace.Heard(static_cast<size_t>(r), 1, 1000 + (r * 7) % 40);  // rank 117 comes last: 1039
  }
  TimelineRecord record;
  TracePeers(trace, ranks, &record);
  CHECK_EQ(record.peer_count, TimelineRecord::kMostPeers);
  CHECK_EQ(record.peers[0].rank, 117);
  CHECK_EQ(record.peers[0].first_us, 1039);
}

TEST(a_late_rank_is_named_and_the_file_says_what_happened) {
  const std::string folder = TemporaryFolder();
  for (const char* transport : {"inproc", "shm", "tcp"}) {
    std::vector<std::string> counters(3);
    {
      Ranks ranks(3, transport);
      ranks.Each([&](int rank) {
        CHECK_OK(ranks[rank].StartTimeline(folder, "{\"head\":1}"));
        CHECK(!ranks[rank].StartTimeline(folder, "").ok());
        std::vector<float> in(10000, 1.0f + static_cast<float>(rank));
        std::vector<float> out(in.size());
        for (int step = 0; step < 2; ++step) {
          CHECK_OK(Start(ranks[rank], MakeRequest(CollectiveKind::kBarrier, "meet")).Wait());
          if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
          CHECK_OK(StartAllreduce(ranks[rank], "x", in.data(), out.data(), 10000).Wait());
          CHECK_EQ(out[9999], 6.0f);
        }
        ranks[rank].AddSpan("step", 1, 2);
        counters[static_cast<size_t>(rank)] = ranks[rank].CountersJson();
      });
    }
    for (int rank = 0; rank < 3; ++rank) {
      const std::string text = ReadFile(Part(folder, rank));
      CHECK_EQ(text.find("{\"head\":1}\n"), size_t{0});
      CHECK_EQ(text.rfind("{\"type\":\"end\"}\n"), text.size() - 15);
      CHECK_EQ(LinesWith(text, "\"span\"").size(), size_t{1});
      const auto lines = LinesWith(text, "\"name\":\"x\"");
      CHECK_EQ_IN(lines.size(), size_t{2}, text);
      for (const std::string& line : lines) {
        CHECK_EQ_IN(Number(line, "last_ready"), 2, line);
        CHECK_EQ(Number(line, "bytes"), 40000);
        const char* order[] = {"submitted", "agreed", "started", "first_sent", "ended", "done"};
        for (int i = 0; i + 1 < 6; ++i) {
          CHECK_EQ_IN(Number(line, order[i]) <= Number(line, order[i + 1]), true, line);
        }
      }
      const std::string& told = counters[static_cast<size_t>(rank)];
      if (rank == 2) continue;
      CHECK_EQ_IN(Number(told, "waited_us") > 90000, true, told);
      int64_t waited = 0;
      for (const std::string& line : LinesWith(text, "\"type\":\"wait\"")) {
        waited += Number(line, "until") - Number(line, "since");
      }
      CHECK_EQ(waited, Number(told, "waited_us"));
      CHECK_EQ_IN(Number(told.substr(told.find("waited_for_us")), "2") > 90000, true, told);
    }
    CHECK(Number(counters[2], "waited_us") < Number(counters[0], "waited_us"));
  }
}

// Buckets start without agreement: only the data tells who is late, and in most algorithms it comes
// from ranks that themselves have waited.
TEST(the_rank_that_sleeps_waits_least_in_every_algorithm) {
  constexpr int kRanks = 4;
  constexpr int kLate = 2;
  for (const AlgorithmEntry& entry : Algorithms()) {
    if (entry.kind != CollectiveKind::kAllreduce) continue;
    Config config = TestConfig();
    SetAlgorithm(&config, entry);
    Ranks ranks(kRanks, "shm", config, {0, 0, 1, 1});
    std::vector<int64_t> waited(kRanks);
    std::vector<int64_t> predicted(kRanks);
    ranks.Each([&](int rank) {
      const std::string group = Register(ranks[rank], "w float32 [1000]");
      std::vector<float> data(1000, 1.0f);
      int64_t before = 0;
      for (int step = 0; step < 5; ++step) {
        if (step == 2) before = Counter(ranks[rank].CountersJson(), "waited_us");
        if (rank == kLate) std::this_thread::sleep_for(std::chrono::milliseconds(40));
        CHECK_OK(Start(ranks[rank], Bucket(group, 0, 1, &data)).Wait());
      }
      const std::string json = ranks[rank].CountersJson();
      waited[static_cast<size_t>(rank)] = Counter(json, "waited_us") - before;
      predicted[static_cast<size_t>(rank)] = Counter(json, "predicted");
    });
    CHECK_EQ(predicted[0], 4);
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      CHECK_EQ_IN(rank == kLate || waited[r] > 25000, true, entry.name);
      CHECK_EQ_IN(rank == kLate || waited[r] > waited[kLate], true, entry.name);
    }
  }
}

TEST(round_trips_tell_how_far_the_clocks_are_apart) {
  const std::string folder = TemporaryFolder();
  {
    Ranks ranks(2, "shm");
    CHECK_OK(ranks[0].StartTimeline(folder, "{}"));
    CHECK_OK(ranks[1].StartTimeline(folder, "{}", AheadNs));
    const std::string before = ranks[1].CountersJson();
    for (int tries = 0; tries < 200 && ReadFile(Part(folder, 1)).find("clock") == std::string::npos;
         ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    CHECK_EQ(Number(ranks[1].CountersJson(), "negotiation_messages"),
             Number(before, "negotiation_messages"));
  }
  CHECK(LinesWith(ReadFile(Part(folder, 0)), "clock").empty());
  const auto lines = LinesWith(ReadFile(Part(folder, 1)), "clock");
  CHECK(!lines.empty());
  for (const std::string& line : lines) {
    const int64_t there = Number(line, "heard") - Number(line, "asked");
    const int64_t back = Number(line, "answered") - Number(line, "back");
    const int64_t trip = Number(line, "back") - Number(line, "asked");
    CHECK(trip >= 0);
    CHECK_EQ_IN(std::abs((there + back) / 2 + kAheadUs) <= trip / 2 + 1, true, line);
  }
}

TEST(ranks_that_do_not_see_the_folder_of_rank_0_send_what_they_write) {
  const std::string folders[] = {TemporaryFolder(), TemporaryFolder(), TemporaryFolder()};
  constexpr int kSpans = 3000;  // several messages
  {
    Ranks ranks(3, "tcp");
    ranks.Each([&](int rank) {
      CHECK_OK(ranks[rank].StartTimeline(folders[rank], "{\"head\":" + std::to_string(rank) + "}"));
      for (int n = 0; n < 10; ++n) ranks[rank].AddSpan("early", n, n);
      std::vector<float> in(100, 1.0f);
      std::vector<float> out(100);
      // Like the agreement in tfdist.init(): rank 0 has begun.
      CHECK_OK(StartAllreduce(ranks[rank], "x", in.data(), out.data(), 100).Wait());
      if (rank > 0) ranks[rank].ForwardTimeline();
      for (int n = 0; n < kSpans; ++n) ranks[rank].AddSpan("late", n, n);
      // When it ends, rank 0 waits for the rest of those that it has heard of.
      CHECK_OK(StartAllreduce(ranks[rank], "y", in.data(), out.data(), 100).Wait());
    });
  }
  for (int rank = 1; rank < 3; ++rank) {
    const std::string own = ReadFile(Part(folders[rank], rank));
    const std::string sent = ReadFile(Part(folders[0], rank));
    CHECK_EQ(LinesWith(sent, "early").size(), size_t{10});
    CHECK_EQ(LinesWith(sent, "late").size(), size_t{kSpans});
    CHECK_EQ(sent.find("{\"head\":" + std::to_string(rank) + "}\n"), size_t{0});
    CHECK_EQ(sent.rfind(kTimelineEnd), sent.size() - std::strlen(kTimelineEnd));
    CHECK_EQ(LinesWith(own, "late").size(), size_t{kSpans});
  }
}

TEST(the_file_is_bounded_and_keeps_the_end) {
  const std::string folder = TemporaryFolder();
  const std::string path = Part(folder, 3);
  auto timeline = std::make_shared<Timeline>(NowNs);
  constexpr int64_t kLimit = 64 << 10;
  auto writer = TimelineWriter::Open(timeline, folder, 3, "{\"head\":1}", kLimit);
  CHECK_OK(writer.status());
  for (int i = 0; i < 4; ++i) {  // each about half of the limit
    for (int n = 0; n < 40; ++n) timeline->AddSpan({"span", i, n});
    const int64_t before = NowUs();
    std::string text;
    do {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      text = ReadFile(path);
    } while (text.find("\"begin\":" + std::to_string(i) + ",") == std::string::npos &&
             NowUs() - before < 20000000);
    for (int n = 0; n < 400; ++n) timeline->AddSpan({std::string(40, 'x'), i, n});
  }
  writer.value()->Close();
  const std::string now = ReadFile(path);
  const std::string old = ReadFile(path + ".old");
  CHECK(!old.empty());
  CHECK(static_cast<int64_t>(now.size() + old.size()) <= kLimit);
  CHECK_EQ(now.find("{\"head\":1}\n"), size_t{0});
  CHECK_EQ(old.find("{\"head\":1}\n"), size_t{0});
  CHECK(now.find("\"begin\":3,\"end\":399}") != std::string::npos);
}

TEST(a_file_that_can_not_be_written_is_an_error) {
  auto timeline = std::make_shared<Timeline>(NowNs);
  const auto writer = TimelineWriter::Open(timeline, "/nonexistent", 0, "{}", 1 << 20);
  CHECK(!writer.ok());
  CHECK(writer.status().message().find("/nonexistent/rank-0.jsonl: No such file") !=
        std::string::npos);
}

// Not even for its first line, by which the file is known.
TEST(a_disk_without_room_at_the_start_is_an_error) {
  const std::string folder = TemporaryFolder();
  auto timeline = std::make_shared<Timeline>(NowNs);
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  const auto writer = TimelineWriter::Open(timeline, folder, 0, "{}", 1 << 20);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  CHECK(!writer.ok());
  CHECK(writer.status().message().find("rank-0.jsonl: File too large") != std::string::npos);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
