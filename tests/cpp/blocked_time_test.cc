// BlockedTime: how long a program could only wait, whatever overlaps with its computation.
#include "runtime/blocked_time.h"

#include "check.h"

namespace tfdist {
namespace {

Request Bucket(int index, int count, int64_t submitted_us, const std::string& group = "g") {
  Request request;
  request.info.kind = CollectiveKind::kAllreduce;
  request.group = group;
  request.bucket_index = index;
  request.bucket_count = count;
  request.submitted_us = submitted_us;
  return request;
}

Request Single(int64_t submitted_us) { return Bucket(0, 0, submitted_us, ""); }

TEST(waiting_for_buckets_counts_from_the_last_submission_of_their_step) {
  BlockedTime blocked;
  // The backward pass takes 40 us here and 48 us on another rank, for which each bucket waits.
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < 4; ++i) {
      blocked.Add(Bucket(i, 4, 100 * step + 10 * (i + 1)), 100 * step + 12 * (i + 1));
    }
    CHECK_EQ(blocked.total_us(), 8 * (step + 1));
  }
}

TEST(buckets_may_end_in_any_order) {
  BlockedTime blocked;
  blocked.Add(Bucket(1, 3, 20), 25);
  blocked.Add(Bucket(2, 3, 30), 40);
  blocked.Add(Bucket(0, 3, 10), 60);
  CHECK_EQ(blocked.total_us(), 30);
  blocked.Add(Bucket(1, 3, 120), 125);  // this step remains incomplete
  blocked.Add(Bucket(1, 3, 220), 225);
  blocked.Add(Bucket(0, 3, 230), 235);
  blocked.Add(Bucket(2, 3, 240), 250);
  CHECK_EQ(blocked.total_us(), 40);
}

TEST(each_moment_of_blocking_counts_once) {
  BlockedTime blocked;
  blocked.Add(Single(10), 30);
  blocked.Add(Single(20), 40);                   // 30-40
  blocked.Add(Bucket(0, 1, 35, "another"), 45);  // 40-45
  blocked.Add(Single(15), 44);                   // over already
  blocked.Add(Bucket(0, 2, 50), 55);             // the other bucket is still to come
  blocked.Add(Single(52), 60);
  CHECK_EQ(blocked.total_us(), 20 + 10 + 5 + 8);
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
