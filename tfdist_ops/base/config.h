// Config: every TFDIST_* variable, in one table (config.cc). The only getenv of the core is there.
// docs/config.md is generated from the table; Python reads it through the C interface.
#ifndef TFDIST_OPS_BASE_CONFIG_H_
#define TFDIST_OPS_BASE_CONFIG_H_

#include <cstdint>
#include <string>

#include "base/status.h"

namespace tfdist {

struct Config {
  double timeout_s = 300;
  double start_timeout_s = 120;
  double stall_warning_s = 30;
  int64_t first_bucket_bytes = int64_t{1} << 20;
  int64_t bucket_bytes = int64_t{8} << 20;
  int64_t fusion_bytes = int64_t{64} << 20;
  std::string bucket_order = "reverse";
  int64_t segment_bytes = int64_t{128} << 10;
  int64_t shm_slots = 6;
  std::string shm_writes = "auto";
  int64_t max_active = 16;
  int64_t mesh_ranks = 16;
  int64_t spin_us = 20;
  double heartbeat_s = 0.1;
  double peer_timeout_s = 2.0;
  int64_t atomic_steps = 0;
  int64_t timeline_bytes = int64_t{64} << 20;
  std::string allreduce_algorithm = "auto";
  std::string reduce_scatter_algorithm = "auto";
  std::string allgather_algorithm = "auto";
  std::string broadcast_algorithm = "auto";
  std::string reduce_algorithm = "auto";
  std::string gather_algorithm = "auto";
  std::string scatter_algorithm = "auto";
  std::string alltoall_algorithm = "auto";
  std::string ring_order = "topology";
  std::string transport = "auto";
  std::string tcp_mac = "control";
  int64_t tcp_sockets = 1;
  std::string log_level = "warning";
};

// Reads the environment over the defaults. An unknown TFDIST_* variable or a value that does not
// parse or is out of range is an error that names the variable, what is allowed, and what came.
StatusOr<Config> ConfigFromEnvironment();

// The table as JSON, for Python and the docs: [{"name", "type", "default", "value", "unit",
// "minimum", "maximum", "multiple_of", "choices", "agreed", "scope", "help"}, ...]; "value" is the
// value in use (if the environment has an invalid one: in scope "core" the default, in scope
// "python" that one), "agreed" whether it must be the same on all ranks, "scope" who reads it:
// "core", or "python", whose values are strings or null.
std::string ConfigTableJson();

}  // namespace tfdist

#endif  // TFDIST_OPS_BASE_CONFIG_H_
