// Size of the last-level caches of this machine.
#ifndef TFDIST_OPS_BASE_LAST_LEVEL_CACHE_H_
#define TFDIST_OPS_BASE_LAST_LEVEL_CACHE_H_

#include <cstdint>
#include <string>

namespace tfdist {

// Bytes of all last-level caches of this machine, each counted once however many processors share
// it; 0 if the system does not report them. Read once.
int64_t LastLevelCacheBytes();

// The same, read from a folder laid out like /sys/devices/system/cpu of Linux:
// cpuN/cache/indexM/{level, type, size, shared_cpu_list}. A virtual machine reports the caches that
// its hypervisor presents, which may differ from the real ones.
int64_t LastLevelCacheBytesIn(const std::string& folder);

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_LAST_LEVEL_CACHE_H_
