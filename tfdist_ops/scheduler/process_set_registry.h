// ProcessSetRegistry: the process sets that this rank knows: finding, opening and removing them,
// and who may use them. No network, no clock.
#ifndef TFDIST_OPS_SCHEDULER_PROCESS_SET_REGISTRY_H_
#define TFDIST_OPS_SCHEDULER_PROCESS_SET_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "scheduler/process_set.h"
#include "scheduler/world.h"

namespace tfdist {

class ProcessSetRegistry {
 public:
  // Both must outlive the registry. The world's set is there from the beginning.
  ProcessSetRegistry(const World& world, const Config& config);

  // A set that this rank has not heard of yet is created, without ranks until it is opened. Null:
  // no set can have this id.
  ProcessSet* FindOrCreate(uint32_t id);
  ProcessSet* Find(uint32_t id) const;  // null: this rank does not know it
  // An error: this rank can't submit `request` to its set now.
  Status Check(const Request& request) const;

  // Adding and removing sets. From BeginChange until EndChange nothing may be submitted to a set
  // that is removed.
  void BeginChange(Request* request);
  // The set that is open now; null: none was opened.
  ProcessSet* EndChange(const Request& request, const Response& response);

  // The algorithm of a request that is fused with nothing; null: there is none.
  const AlgorithmEntry* AlgorithmAloneOf(const SetView& set, const RequestInfo& info) const;

  bool busy() const;       // operations of this rank are under way, or it joins
  bool agreeing() const;   // an operation of this rank waits for all ranks to agree on it
  bool deciding() const;   // ranks wait for this one as a leader
  size_t stashed() const;  // data frames that wait for their operation
  size_t copied() const;   // operations whose frames are copied out when they come

  using Map = std::map<uint32_t, std::unique_ptr<ProcessSet>>;
  Map::const_iterator begin() const { return sets_.begin(); }  // in the order of their ids
  Map::const_iterator end() const { return sets_.end(); }

 private:
  void Open(ProcessSet* set, std::vector<int32_t> ranks);

  const World& world_;
  const Config& config_;
  Map sets_;
};

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_PROCESS_SET_REGISTRY_H_
