// Ranks are too many for their processors only where they share them.
#include "runtime/crowding.h"

#include <initializer_list>

#include "check.h"

namespace tfdist {
namespace {

cpu_set_t Set(std::initializer_list<int> processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int processor : processors) CPU_SET(processor, &set);
  return set;
}

TEST(ranks_that_may_use_all_are_crowded_when_they_are_more) {
  const cpu_set_t all = Set({0, 1, 2, 3});
  CHECK(!IsCrowded(4, all, {all, all, all}));
  CHECK(IsCrowded(5, all, {all, all, all, all}));
}

TEST(ranks_bound_to_processors_of_their_own_are_not) {
  CHECK(!IsCrowded(3, Set({0}), {Set({1}), Set({2})}));
  CHECK(!IsCrowded(2, Set({0, 1}), {Set({2, 3})}));
}

TEST(ranks_bound_to_one_processor_are) {
  CHECK(IsCrowded(3, Set({0}), {Set({0, 1}), Set({2})}));
  CHECK(IsCrowded(2, Set({7}), {Set({7})}));
}

TEST(a_rank_that_is_not_known_may_use_any) {
  CHECK(IsCrowded(2, Set({0}), {}));
  CHECK(!IsCrowded(2, Set({0, 1}), {}));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
