// WantedLinks: which links the overlay wants, handed from the progress thread to the Python thread
// that connects (tfdist/core/rendezvous/on_demand_links.py) and sleeps on an eventfd of its own.
#ifndef TFDIST_OPS_RUNTIME_WANTED_LINKS_H_
#define TFDIST_OPS_RUNTIME_WANTED_LINKS_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/link_support.h"

namespace tfdist {

class WantedLinks {
 public:
  // `bell`: a copy of the eventfd, nonblocking.
  explicit WantedLinks(UniqueFd bell) : bell_(std::move(bell)) {}

  void Add(int peer) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      peers_.push_back(peer);
    }
    RingDoorbell(bell_.get());
  }
  // At most `capacity` of them, oldest first; they are forgotten here.
  std::vector<int32_t> Take(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto count =
        static_cast<std::ptrdiff_t>(capacity < peers_.size() ? capacity : peers_.size());
    std::vector<int32_t> taken(peers_.begin(), peers_.begin() + count);
    peers_.erase(peers_.begin(), peers_.begin() + count);
    return taken;
  }

 private:
  const UniqueFd bell_;
  std::mutex mutex_;  // guards peers_
  std::vector<int32_t> peers_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_RUNTIME_WANTED_LINKS_H_
