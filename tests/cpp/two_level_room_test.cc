// One large allreduce, with no other operation under way, on hosts of several ranks: each fills the
// lanes that its inputs take to the owners of the parts.
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"

namespace tfdist {
namespace {

void AllreduceAlone(const std::string& algorithm, int64_t slots, std::vector<int32_t> host_of) {
  Config config = TestConfig();
  config.allreduce_algorithm = algorithm;
  config.shm_slots = slots;
  const int size = static_cast<int>(host_of.size());
  Ranks ranks(size, "shm", config, host_of);
  const int64_t elements = int64_t{size} * 400 * 1024;  // 400 segments of 4 KiB in each slice
  ranks.Each([&](int rank) {
    const std::vector<float> in(static_cast<size_t>(elements), static_cast<float>(rank + 1));
    std::vector<float> out(in.size());
    for (int i = 0; i < 3; ++i) {
      Pending pending = StartAllreduce(ranks[rank], "all", in.data(), out.data(), elements);
      CHECK_OK(pending.Wait());
      CHECK(out == std::vector<float>(in.size(), static_cast<float>(size * (size + 1) / 2)));
    }
  });
}

TEST(two_slots) { AllreduceAlone("two_level", 2, {0, 0, 0, 1, 1, 1}); }
TEST(six_slots) { AllreduceAlone("two_level", 6, {0, 0, 0, 1, 1, 1}); }
TEST(four_ranks_a_host) { AllreduceAlone("two_level", 6, {0, 0, 0, 0, 1, 1, 1, 1}); }
TEST(unequal_hosts) { AllreduceAlone("two_level", 2, {0, 0, 0, 0, 1, 1, 1, 2, 2}); }
TEST(rings) { AllreduceAlone("two_level_ring", 2, {0, 0, 0, 1, 1, 1, 2, 2, 2}); }

}  // namespace
}  // namespace tfdist

TEST_MAIN()
