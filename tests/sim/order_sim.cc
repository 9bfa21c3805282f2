// Three ways to agree on the order of a step's buckets, compared on equal random steps
// (docs/design/0003-order-by-name.md). Prints one row a case; the same seed prints the same table.
//
//   order_sim --steps 2000 --seed 1
//
// A step: on every rank the buckets become ready one after the other, in an order and with delays
// that differ between ranks. A bucket is reduced when all ranks have started it, and takes the
// same time whatever else runs; "ideal" is a start everywhere at the moment of readiness.
//   tickets    a rank tells the leader "ready"; when all have, the leader tells all "start"
//   predicted  ranks start buckets in the leader's last order without asking; the leader announces
//              its order as it goes; a difference makes everybody start over from there
//   by name    a rank starts a bucket when it is ready here; frames carry (group, bucket, sequence)
//              and wait at the receiver until it is ready too
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "clock.h"

namespace tfdist::sim {
namespace {

constexpr int kBuckets = 12;
constexpr double kGapUs = 1500;     // between two buckets of the backward pass
constexpr double kReduceUs = 1000;  // of a bucket, once all have started

enum class Noise { kNone, kSwaps, kShuffled };

struct Case {
  const char* name;
  int size;
  Noise noise;
  double slow_us;  // by which one rank comes later
};

// ready[rank][bucket], from the begin of the step
using Ready = std::vector<std::vector<double>>;

struct Cost {
  double messages = 0;   // control messages, of all ranks
  double restarts = 0;   // buckets a rank had started and starts again
  double added_us = 0;   // end of the step, over the ideal
  double bucket_us = 0;  // end of a bucket, over the ideal, mean
  double early = 0;      // share of bucket contributions that come before the receiver is ready
};

double Delay(Rng* rng) { return 40.0 + static_cast<double>(rng->Between(0, 80)); }

Ready MakeReady(const Case& c, Rng* rng) {
  Ready ready(static_cast<size_t>(c.size), std::vector<double>(kBuckets));
  const int slow = rng->Index(static_cast<size_t>(c.size));
  for (int r = 0; r < c.size; ++r) {
    std::vector<int> order(kBuckets);
    for (int b = 0; b < kBuckets; ++b) order[static_cast<size_t>(b)] = b;
    if (c.noise == Noise::kShuffled) rng->Shuffle(&order);
    if (c.noise == Noise::kSwaps) {
      for (size_t i = 0; i + 1 < order.size(); ++i) {
        if (rng->Chance(8)) std::swap(order[i], order[i + 1]);
      }
    }
    double time = r == slow ? c.slow_us : 0;
    for (int bucket : order) {
      time += kGapUs * (0.9 + 0.2 * static_cast<double>(rng->Between(0, 1000)) / 1000);
      ready[static_cast<size_t>(r)][static_cast<size_t>(bucket)] = time;
    }
  }
  return ready;
}

double LastReady(const Ready& ready, size_t bucket) {
  double last = 0;
  for (const auto& own : ready) last = std::max(last, own[bucket]);
  return last;
}

// The leader's order of readiness.
std::vector<size_t> OrderOf(const std::vector<double>& ready) {
  std::vector<size_t> order(ready.size());
  for (size_t b = 0; b < order.size(); ++b) order[b] = b;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ready[a] < ready[b]; });
  return order;
}

void Note(const Ready& ready, const std::vector<double>& end, Cost* cost) {
  double last = 0;
  double ideal = 0;
  for (size_t b = 0; b < kBuckets; ++b) {
    const double best = LastReady(ready, b) + kReduceUs;
    last = std::max(last, end[b]);
    ideal = std::max(ideal, best);
    cost->bucket_us += (end[b] - best) / kBuckets;
  }
  cost->added_us += last - ideal;
}

void Tickets(const Ready& ready, Rng* rng, Cost* cost) {
  std::vector<double> end(kBuckets);
  for (size_t b = 0; b < kBuckets; ++b) {
    double all = 0;
    for (size_t r = 0; r < ready.size(); ++r) {
      all = std::max(all, ready[r][b] + (r == 0 ? 0 : Delay(rng)));
    }
    double start = all;
    for (size_t r = 1; r < ready.size(); ++r) start = std::max(start, all + Delay(rng));
    end[b] = start + kReduceUs;
    cost->messages += 2.0 * static_cast<double>(ready.size() - 1);
  }
  Note(ready, end, cost);
}

// `plan` is the prediction, and becomes the leader's order of this step.
void Predicted(const Ready& ready, std::vector<size_t>* plan, Rng* rng, Cost* cost) {
  const std::vector<size_t> actual = OrderOf(ready[0]);
  std::vector<double> announced(ready.size(), 0);  // arrival of the last deviation, by rank
  std::vector<double> before(ready.size(), 0);     // start of the position before, by rank
  std::vector<size_t> rest = *plan;                // what is predicted from here on
  std::vector<double> end(kBuckets);
  for (size_t position = 0; position < kBuckets; ++position) {
    const size_t bucket = actual[position];
    const bool deviates = rest[0] != bucket;
    if (deviates) {
      // The leader's readiness for another bucket than the predicted one is the news. Ranks that
      // have started predicted ones by the time they hear it start those again.
      for (size_t r = 0; r < ready.size(); ++r) {
        if (r > 0) announced[r] = std::max(announced[r], ready[0][bucket] + Delay(rng));
        double start = before[r];
        for (size_t wrong : rest) {
          start = std::max(start, ready[r][wrong]);
          if (wrong == bucket || r == 0 || start >= announced[r]) break;
          cost->restarts += 1;
        }
      }
      cost->messages += static_cast<double>(ready.size() - 1);
    }
    rest.erase(std::find(rest.begin(), rest.end(), bucket));
    double last = 0;
    for (size_t r = 0; r < ready.size(); ++r) {
      before[r] = std::max({before[r], ready[r][bucket], announced[r]});
      last = std::max(last, before[r]);
    }
    end[bucket] = last + kReduceUs;
  }
  cost->messages += static_cast<double>(ready.size() - 1);  // "as predicted", once a step
  *plan = actual;
  Note(ready, end, cost);
}

void ByName(const Ready& ready, Rng* rng, Cost* cost) {
  std::vector<double> end(kBuckets);
  double early = 0;
  for (size_t b = 0; b < kBuckets; ++b) {
    end[b] = LastReady(ready, b) + kReduceUs;
    for (size_t from = 0; from < ready.size(); ++from) {
      for (size_t to = 0; to < ready.size(); ++to) {
        if (from != to && ready[from][b] + Delay(rng) < ready[to][b]) early += 1;
      }
    }
  }
  const auto n = static_cast<double>(ready.size());
  cost->early += early / (kBuckets * n * (n - 1));
  Note(ready, end, cost);
}

void Print(const Case& c, const char* scheme, const Cost& cost, double steps) {
  std::printf("%-34s %4d  %-9s %9.1f %9.2f %10.0f %10.0f %7.0f%%\n", c.name, c.size, scheme,
              cost.messages / steps, cost.restarts / steps, cost.added_us / steps,
              cost.bucket_us / steps, 100 * cost.early / steps);
}

}  // namespace
}  // namespace tfdist::sim

int main(int argc, char** argv) {
  using namespace tfdist::sim;
  int steps = 2000;
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--steps") == 0) steps = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--seed") == 0) seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  std::vector<Case> cases;
  for (int size : {2, 4, 8, 32}) {
    cases.push_back({"one order everywhere", size, Noise::kNone, 0});
    cases.push_back({"neighbours swap now and then", size, Noise::kSwaps, 0});
    cases.push_back({"any order", size, Noise::kShuffled, 0});
    cases.push_back({"swaps, one rank 3 ms behind", size, Noise::kSwaps, 3000});
  }
  std::printf("%-34s %4s  %-9s %9s %9s %10s %10s %8s\n", "readiness", "size", "scheme", "messages",
              "restarts", "step +us", "bucket +us", "early");
  for (const Case& c : cases) {
    Cost tickets;
    Cost predicted;
    Cost by_name;
    Rng rng(seed);
    std::vector<size_t> plan = OrderOf(MakeReady(c, &rng)[0]);
    for (int step = 0; step < steps; ++step) {
      const Ready ready = MakeReady(c, &rng);
      Tickets(ready, &rng, &tickets);
      Predicted(ready, &plan, &rng, &predicted);
      ByName(ready, &rng, &by_name);
    }
    Print(c, "tickets", tickets, steps);
    Print(c, "predicted", predicted, steps);
    Print(c, "by name", by_name, steps);
  }
  return 0;
}
