#include "collective/ring_order.h"

#include <algorithm>
#include <charconv>
#include <numeric>

namespace tfdist {
namespace {

// The numbers of "2,0,1"; nothing when it is not of this form.
std::vector<int32_t> Numbers(const std::string& text) {
  std::vector<int32_t> numbers;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    int32_t number = 0;
    const auto result = std::from_chars(at, end, number);
    if (result.ec != std::errc()) return {};
    numbers.push_back(number);
    if (result.ptr == end) return numbers;
    if (*result.ptr != ',') return {};
    at = result.ptr + 1;
  }
}

}  // namespace

Status CheckRingOrder(const std::string& wanted, int size) {
  if (wanted == "topology" || wanted == "rank") return Status();
  std::vector<int32_t> sorted = Numbers(wanted);
  std::sort(sorted.begin(), sorted.end());
  std::vector<int32_t> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  if (sorted == all) return Status();
  const std::string message =
      "TFDIST_RING_ORDER: expected topology, rank, or each of the ranks 0 to " +
      std::to_string(size - 1) + " once, such as 0,2,1,3 for a world of four; got \"" + wanted +
      "\"";
  return Status(Code::kInvalidArgument, message,
                ErrorRecord{"invalid_argument", -1, "", 0, "", message, ""});
}

std::vector<int32_t> RingOrder(const std::string& wanted, const std::vector<int32_t>& ranks,
                               const std::vector<int32_t>& host_of) {
  std::vector<int32_t> order;
  if (wanted == "rank") return order;
  if (wanted == "topology") {
    if (std::is_sorted(host_of.begin(), host_of.end())) return order;  // the usual case, for free
    ScheduleArgs args;
    args.size = static_cast<int>(ranks.size());
    args.host_of = host_of;
    for (const std::vector<int32_t>& host : RanksByHost(args)) {
      order.insert(order.end(), host.begin(), host.end());
    }
    return order;
  }
  for (int32_t rank : Numbers(wanted)) {
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank);
    if (at == ranks.end() || *at != rank) continue;  // not of the set
    order.push_back(static_cast<int32_t>(at - ranks.begin()));
  }
  return order;
}

}  // namespace tfdist
