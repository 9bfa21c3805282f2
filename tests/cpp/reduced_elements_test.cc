// What of reduced gradients steps may use, and which operations count.
#include "runtime/reduced_elements.h"

#include <thread>

#include "ranks.h"

namespace tfdist {
namespace {

TEST(a_step_uses_what_was_counted_and_no_other_does) {
  ReducedElements reduced;
  CHECK_EQ(reduced.Use(0, 0), true);
  CHECK_EQ(reduced.Use(1, 0), false);
  CHECK_EQ(reduced.Count(10), int64_t{10});
  CHECK_EQ(reduced.Use(6, 0), true);
  CHECK_EQ(reduced.Use(6, 0), false);  // and has used nothing
  CHECK_EQ(reduced.Use(4, 0), true);
  CHECK_EQ(reduced.Count(-3), int64_t{7});  // was about something else
  CHECK_EQ(reduced.Use(1, 0), false);
}

TEST(what_was_counted_before_the_last_step_is_of_no_use) {
  ReducedElements reduced;
  reduced.Count(100);
  CHECK_EQ(reduced.Use(10, 0), true);
  CHECK_EQ(reduced.Use(10, 100), false);
  reduced.Count(10);
  CHECK_EQ(reduced.Use(10, 100), true);
  CHECK_EQ(reduced.Use(1, 110), false);
}

TEST(the_sum_goes_on_in_the_next_world_and_nothing_is_left_of_the_last_one) {
  ReducedElements reduced;
  reduced.GoOn(100);
  CHECK_EQ(reduced.Count(0), int64_t{100});
  CHECK_EQ(reduced.Use(1, 0), false);
  reduced.Count(10);
  CHECK_EQ(reduced.Use(10, 100), true);
}

TEST(threads_use_no_element_twice) {
  ReducedElements reduced;
  reduced.Count(3000);
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) taken += reduced.Use(1, 0) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(taken.load(), 3000);
}

TEST(operations_count_when_they_have_ended_well) {
  Ranks ranks(2, "inproc");
  ranks.Each([&](int rank) {
    Runtime& runtime = ranks[rank];
    const std::vector<float> in(8, 1.0F);
    std::vector<float> out(8);
    const auto counting = [&](const std::string& name, int64_t elements, int64_t counted) {
      auto request = MakeRequest(CollectiveKind::kAllreduce, name, DType::kFloat32);
      AddTensor(request.get(), in.data(), out.data(), {elements});
      request->counted = counted;
      return Start(runtime, std::move(request)).Wait();
    };
    CHECK_OK(counting("a", 8, 8));
    CHECK_EQ(runtime.reduced().Count(0), int64_t{8});
    CHECK_OK(counting("b", 8, 0));
    CHECK_EQ(runtime.reduced().Count(0), int64_t{8});
    // The ranks differ: an error on both.
    CHECK_EQ(counting("c", rank == 0 ? 8 : 4, 8).ok(), false);
    CHECK_EQ(runtime.reduced().Count(0), int64_t{8});
    const std::string json = runtime.CountersJson();
    CHECK_EQ_IN(json.find("\"reduced_elements\": 8") != std::string::npos, true, json);
  });
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
