// What the machine's processors have as last-level caches.
#ifndef TFDIST_OPS_BASE_LAST_LEVEL_CACHE_H_
#define TFDIST_OPS_BASE_LAST_LEVEL_CACHE_H_

#include <cstdint>
#include <string>

namespace tfdist {

// Bytes of all last-level caches of this machine, each counted once however many processors share
// it; 0 where the system does not tell. Read once.
int64_t LastLevelCacheBytes();

// The same by a folder as Linux' /sys/devices/system/cpu: cpuN/cache/indexM/{level, type, size,
// shared_cpu_list}. A virtual machine's may be those that it was told of.
int64_t LastLevelCacheBytesIn(const std::string& folder);

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_LAST_LEVEL_CACHE_H_
