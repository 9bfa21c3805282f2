// Times every row of the algorithm table over a transport, threads as ranks, private input and
// output buffers, float32 sum, submitted and awaited by one thread a rank.
//
//   collective_bench [--ranks N] [--transport shm] [--max-bytes B] [--repeat R] [--json]
//
// Columns are those of nccl-tests: algbw = bytes / time, where a gather's bytes are those of its
// result; busbw = algbw * 2(n-1)/n for an allreduce, (n-1)/n where a rank keeps its own part, 1 for
// broadcast, reduce and sendrecv. Results are verified before they are timed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "collective/schedule.h"
#include "ranks.h"
#include "scheduler/row_counts.h"

namespace tfdist {
namespace {

struct Options {
  int ranks = 2;
  std::string transport = "shm";
  int64_t max_bytes = int64_t{16} << 20;
  int repeat = 20;
  bool json = false;
};

struct Result {
  double median_us = 0;
  int64_t wrong = 0;
};

// Elements of a rank's output, for `elements` of input on every rank; root is rank 0.
int64_t OutputElements(CollectiveKind kind, int64_t elements, int size, int rank) {
  switch (kind) {
    case CollectiveKind::kAllgather:
      return elements * size;
    case CollectiveKind::kGather:
      return rank == 0 ? elements * size : 0;
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kScatter:
      return EvenSplits(elements, size)[static_cast<size_t>(rank)];
    case CollectiveKind::kAlltoall:
      return EvenSplits(elements, size)[static_cast<size_t>(rank)] * size;
    case CollectiveKind::kSendRecv:
      return rank == 0 ? 0 : elements;
    default:
      return elements;
  }
}

Pending StartOne(Runtime& runtime, CollectiveKind kind, int size, std::vector<float>* in,
                 std::vector<float>* out) {
  auto request = MakeRequest(kind, "bench", DType::kFloat32);
  const auto elements = static_cast<int64_t>(in->size());
  AddTensor(request.get(), in->data(), out->data(), {elements});
  if (kind == CollectiveKind::kSendRecv) request->info.peer = size - 1;
  if (kind == CollectiveKind::kAlltoall) request->info.splits = EvenSplits(elements, size);
  if (HasRows(kind)) {
    request->tensors[0].output = nullptr;
    request->allocate = [out](const std::vector<int64_t>&, int64_t) -> void* {
      return out->data();
    };
  }
  return Start(runtime, std::move(request));
}

// Element `index` of the output of `rank`: rank r has put r + 1 everywhere.
float Expected(CollectiveKind kind, int size, int rank, int64_t index, int64_t elements) {
  const auto total = static_cast<float>(size * (size + 1) / 2);
  switch (kind) {
    case CollectiveKind::kAllreduce:
    case CollectiveKind::kReduceScatter:
      return total;
    case CollectiveKind::kReduce:
      return rank == 0 ? total : static_cast<float>(rank + 1);
    case CollectiveKind::kAllgather:
    case CollectiveKind::kGather:
      return static_cast<float>(index / elements + 1);
    case CollectiveKind::kAlltoall:
      return static_cast<float>(index / EvenSplits(elements, size)[static_cast<size_t>(rank)] + 1);
    default:
      return 1.0f;  // what rank 0 has
  }
}

Result Measure(const AlgorithmEntry& algorithm, int64_t bytes, const Options& options) {
  Config config;
  SetAlgorithm(&config, algorithm);
  Ranks ranks(options.ranks, options.transport, config);
  const int64_t elements = bytes / 4;
  const int repeat = bytes >= (4 << 20) ? std::max(5, options.repeat / 4) : options.repeat;
  std::vector<std::vector<double>> times(static_cast<size_t>(options.ranks));
  std::vector<int64_t> wrong(static_cast<size_t>(options.ranks));
  ranks.Each([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    std::vector<float> in(static_cast<size_t>(elements), static_cast<float>(rank + 1));
    std::vector<float> out(
        static_cast<size_t>(OutputElements(algorithm.kind, elements, options.ranks, rank)));
    out.reserve(1);  // a pointer also where there are no elements
    for (int i = 0; i < repeat + 3; ++i) {
      CHECK_OK(Start(ranks[rank], MakeRequest(CollectiveKind::kBarrier, "go")).Wait());
      const int64_t begin = NowUs();
      CHECK_OK(StartOne(ranks[rank], algorithm.kind, options.ranks, &in, &out).Wait());
      if (i >= 3) times[r].push_back(static_cast<double>(NowUs() - begin));
    }
    for (size_t i = 0; i < out.size(); ++i) {
      wrong[r] += out[i] !=
                  Expected(algorithm.kind, options.ranks, rank, static_cast<int64_t>(i), elements);
    }
  });
  Result result;
  std::vector<double> slowest(times[0].size());  // of the ranks, in each repetition
  for (const auto& own : times) {
    for (size_t i = 0; i < own.size(); ++i) slowest[i] = std::max(slowest[i], own[i]);
  }
  std::nth_element(slowest.begin(),
                   slowest.begin() + static_cast<std::ptrdiff_t>(slowest.size() / 2),
                   slowest.end());
  result.median_us = slowest[slowest.size() / 2];
  for (int64_t w : wrong) result.wrong += w;
  return result;
}

bool IsGather(CollectiveKind kind) {
  return kind == CollectiveKind::kAllgather || kind == CollectiveKind::kGather;
}

double BusFactor(CollectiveKind kind, int n) {
  if (kind == CollectiveKind::kAllreduce) return 2.0 * (n - 1) / n;
  const bool keeps_part = HasRows(kind);
  return keeps_part ? static_cast<double>(n - 1) / n : 1.0;
}

int Run(const Options& options) {
  int64_t wrong = 0;
  if (!options.json) {
    std::printf("# %d ranks as threads over %s, float32, slowest rank, median\n", options.ranks,
                options.transport.c_str());
    std::printf("%-28s %12s %12s %10s %12s %12s %8s\n", "algorithm", "bytes", "elements", "time_us",
                "algbw_GB/s", "busbw_GB/s", "wrong");
  }
  for (const AlgorithmEntry& algorithm : Algorithms()) {
    if (!algorithm.supports({0, options.ranks, 0, {}}, DType::kFloat32)) continue;
    const std::string name = std::string(CollectiveKindName(algorithm.kind)) + "/" + algorithm.name;
    for (int64_t bytes = 1024; bytes <= options.max_bytes; bytes *= 16) {
      const Result result = Measure(algorithm, bytes, options);
      const int parts = IsGather(algorithm.kind) ? options.ranks : 1;
      const double algbw = static_cast<double>(bytes * parts) / result.median_us * 1e-3;
      const double busbw = algbw * BusFactor(algorithm.kind, options.ranks);
      wrong += result.wrong;
      std::printf(options.json
                      ? "{\"algorithm\": \"%s\", \"bytes\": %lld, \"elements\": %lld, \"time_us\": "
                        "%.1f, \"algbw\": %.3f, \"busbw\": %.3f, \"wrong\": %lld}\n"
                      : "%-28s %12lld %12lld %10.1f %12.3f %12.3f %8lld\n",
                  name.c_str(), static_cast<long long>(bytes), static_cast<long long>(bytes / 4),
                  result.median_us, algbw, busbw, static_cast<long long>(result.wrong));
      std::fflush(stdout);
    }
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tfdist

int main(int argc, char** argv) {
  tfdist::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--json") {
      options.json = true;
      continue;
    }
    if (flag == "--ranks") {
      options.ranks = std::atoi(value);
    } else if (flag == "--transport") {
      options.transport = value;
    } else if (flag == "--max-bytes") {
      options.max_bytes = std::atoll(value);
    } else if (flag == "--repeat") {
      options.repeat = std::atoi(value);
    } else {
      std::fprintf(stderr,
                   "unknown flag %s\nusage: collective_bench [--ranks N] [--transport NAME] "
                   "[--max-bytes B] [--repeat R] [--json]\n",
                   flag.c_str());
      return 2;
    }
    ++i;
  }
  if (options.ranks < 1 || options.repeat < 1 || options.max_bytes < 1024 ||
      tfdist::FindTransport(options.transport) == nullptr) {
    std::fprintf(stderr,
                 "expected --ranks >= 1, --repeat >= 1, --max-bytes >= 1024 and a transport "
                 "of the table (inproc, shm, tcp)\n");
    return 2;
  }
  return tfdist::Run(options);
}
