#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <locale>
#include <optional>
#include <sstream>
#include <variant>
#include <vector>

namespace tfdist {
namespace {

constexpr const char* kPrefix = "TFDIST_";
constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr double kKiB = 1024;
constexpr double kMiB = 1024 * kKiB;
constexpr double kGiB = 1024 * kMiB;

enum class Type { kInt, kFloat, kString };
constexpr const char* kTypeNames[] = {"int", "float", "string"};

using Field =
    std::variant<std::monostate, int64_t Config::*, double Config::*, std::string Config::*>;

// One variable. A row with a field is read by the core, one without by Python, which gets the text;
// both are checked here.
struct Row {
  const char* name;
  Type type;
  const char* unit;
  double minimum;
  double maximum;
  int64_t multiple_of;  // ints: 0 = any
  const char* choices;  // strings: "a|b|c", empty = any text
  bool agreed;
  const char* help;
  Field field;
  const char* fallback;  // default of a row without a field; null: none
};

Row Int(const char* name, int64_t Config::* field, const char* unit, double minimum, double maximum,
        int64_t multiple_of, bool agreed, const char* help) {
  return {name, Type::kInt, unit, minimum, maximum, multiple_of, "", agreed, help, field, nullptr};
}
Row Float(const char* name, double Config::* field, const char* unit, double minimum,
          double maximum, bool agreed, const char* help) {
  return {name, Type::kFloat, unit, minimum, maximum, 0, "", agreed, help, field, nullptr};
}
Row Text(const char* name, std::string Config::* field, const char* choices, bool agreed,
         const char* help) {
  return {name, Type::kString, "", -kNoLimit, kNoLimit, 0, choices, agreed, help, field, nullptr};
}
Row PythonInt(const char* name, double minimum, const char* help) {
  return {name, Type::kInt, "", minimum, 1 << 20, 0, "", false, help, {}, nullptr};
}
Row PythonFloat(const char* name, const char* unit, double minimum, double maximum,
                const char* help) {
  return {name, Type::kFloat, unit, minimum, maximum, 0, "", false, help, {}, nullptr};
}
Row PythonText(const char* name, const char* fallback, bool agreed, const char* help) {
  return {name, Type::kString, "", -kNoLimit, kNoLimit, 0, "", agreed, help, {}, fallback};
}
Row PythonChoice(const char* name, const char* choices, const char* fallback, bool agreed,
                 const char* help) {
  return {name, Type::kString, "", -kNoLimit, kNoLimit, 0, choices, agreed, help, {}, fallback};
}

const std::vector<Row>& Table() {
  static const std::vector<Row> table = {
      Float("TFDIST_TIMEOUT_S", &Config::timeout_s, "s", 0.1, 86400, false,
            "Longest time that an operation waits for ranks that are running but have not called "
            "it."),
      Float("TFDIST_START_TIMEOUT_S", &Config::start_timeout_s, "s", 1, 86400, false,
            "Longest time that tfdist.init() waits for all ranks to start and connect."),
      Float("TFDIST_STALL_WARNING_S", &Config::stall_warning_s, "s", 0.1, 86400, false,
            "Time after which a warning names the operation and the ranks that it waits for."),
      Int("TFDIST_FIRST_BUCKET_BYTES", &Config::first_bucket_bytes, "bytes", 1, 4 * kGiB, 0, true,
          "Size at which the first bucket of gradients is complete. It is small, so that the first "
          "reduction starts early."),
      Int("TFDIST_BUCKET_BYTES", &Config::bucket_bytes, "bytes", 1, 4 * kGiB, 0, true,
          "Size at which the other buckets of gradients are complete."),
      Int("TFDIST_FUSION_BYTES", &Config::fusion_bytes, "bytes", 0, 4 * kGiB, 0, true,
          "Largest number of bytes that one operation reduces, except for a single larger tensor. "
          "With 0, each tensor has its own bucket."),
      Text("TFDIST_BUCKET_ORDER", &Config::bucket_order, "reverse|traced", true,
           "Order in which gradients are put into buckets: the reversed order of the list, or the "
           "order in which the traced function of rank 0 computes them "
           "(docs/gradients-advanced.md)."),
      Int("TFDIST_SEGMENT_BYTES", &Config::segment_bytes, "bytes", 4 * kKiB, 16 * kMiB, 64, true,
          "Size of the segments in which two ranks exchange data."),
      Int("TFDIST_SHM_SLOTS", &Config::shm_slots, "", 2, 1024, 0, true,
          "Number of segments that can be in flight in each direction between two ranks of one "
          "host. A small number of segments stays in the caches."),
      Text("TFDIST_SHM_WRITES", &Config::shm_writes, "auto|cached|nontemporal", false,
           "How segments for other ranks of the host are written: with ordinary stores, which are "
           "faster if their processors share a cache, or with stores that bypass the caches, which "
           "are faster otherwise. auto selects the faster one; the results have the same bits "
           "(docs/design/0009-stores.md)."),
      Int("TFDIST_MAX_ACTIVE", &Config::max_active, "", 1, 1024, 0, true,
          "Largest number of collectives that run at the same time; the others wait."),
      Int("TFDIST_MESH_RANKS", &Config::mesh_ranks, "", 2, 65536, 0, true,
          "Largest number of ranks that are all connected to each other from the start. In a "
          "larger job, a rank starts with connections to 2 log2(ranks) others, which relay its "
          "control messages. Connections for data are opened when they are first needed."),
      Int("TFDIST_SPIN_US", &Config::spin_us, "us", 0, 1e6, 0, false,
          "How long the progress thread polls for work before it sleeps."),
      Float("TFDIST_HEARTBEAT_S", &Config::heartbeat_s, "s", 0.02, 10, true,
            "Time between two heartbeats of a rank."),
      Float(
          "TFDIST_PEER_TIMEOUT_S", &Config::peer_timeout_s, "s", 0.2, 3600, true,
          "Time without any message after which a rank on another host is considered lost; at "
          "least ten heartbeats. A process of the same host may be stopped for half of this time."),
      Int("TFDIST_ATOMIC_STEPS", &Config::atomic_steps, "", 0, 1, 0, true,
          "1: no rank returns the gradients of a step before every rank has received all of them, "
          "so that the weights are equal after a failure (docs/design/0004-verdict-and-gate.md)."),
      Text("TFDIST_ALLREDUCE_ALGORITHM", &Config::allreduce_algorithm, "", true,
           "Name of the allreduce algorithm; auto chooses by topology, dtype and size. As in the "
           "next rows, auto also chooses if the given algorithm does not support a case "
           "(docs/algorithms.md)."),
      Text("TFDIST_REDUCE_SCATTER_ALGORITHM", &Config::reduce_scatter_algorithm, "", true,
           "Name of the reduce_scatter algorithm, or auto."),
      Text("TFDIST_ALLGATHER_ALGORITHM", &Config::allgather_algorithm, "", true,
           "Name of the allgather algorithm, or auto."),
      Text("TFDIST_BROADCAST_ALGORITHM", &Config::broadcast_algorithm, "", true,
           "Name of the broadcast algorithm, or auto."),
      Text("TFDIST_REDUCE_ALGORITHM", &Config::reduce_algorithm, "", true,
           "Name of the reduce algorithm, or auto."),
      Text("TFDIST_GATHER_ALGORITHM", &Config::gather_algorithm, "", true,
           "Name of the gather algorithm, or auto."),
      Text("TFDIST_SCATTER_ALGORITHM", &Config::scatter_algorithm, "", true,
           "Name of the scatter algorithm, or auto."),
      Text("TFDIST_ALLTOALL_ALGORITHM", &Config::alltoall_algorithm, "", true,
           "Name of the alltoall algorithm, or auto."),
      Text("TFDIST_RING_ORDER", &Config::ring_order, "", true,
           "Order of the ranks in ring algorithms: topology (the ranks of a host are neighbors), "
           "rank, or a list of all ranks such as 0,2,1,3. It also applies to process sets. Another "
           "order rounds differently (docs/algorithms.md)."),
      Text("TFDIST_TRANSPORT", &Config::transport, "auto|shm|tcp", true,
           "How ranks of one host exchange data; auto uses shared memory, or TCP if shared memory "
           "cannot be used."),
      Text("TFDIST_TCP_MAC", &Config::tcp_mac, "control|all", true,
           "Which data is authenticated between ranks that are connected by TCP. control: control "
           "messages and the headers of data, whose contents have a checksum. all: the contents "
           "too."),
      Int("TFDIST_TCP_SOCKETS", &Config::tcp_sockets, "", 1, 16, 0, true,
          "Number of TCP connections between two ranks, which share the data. More than one helps "
          "if the network limits the rate of a single connection."),
      Int("TFDIST_TIMELINE_BYTES", &Config::timeline_bytes, "bytes", 64 * kKiB, 64 * kGiB, 0, false,
          "Largest number of bytes in the trace of each rank; the oldest events are dropped."),
      Text("TFDIST_LOG_LEVEL", &Config::log_level, "debug|info|warning|error|silent", false,
           "Lowest severity of messages that are written to stderr."),
      PythonInt("TFDIST_RANK", 0, "Rank of this process; set by tfdistrun."),
      PythonInt("TFDIST_SIZE", 1, "Number of ranks; set by tfdistrun."),
      PythonInt("TFDIST_LOCAL_RANK", 0,
                "Index of this rank among those of its host; set by tfdistrun."),
      PythonInt("TFDIST_LOCAL_SIZE", 1, "Number of ranks on this host; set by tfdistrun."),
      PythonInt("TFDIST_CROSS_RANK", 0,
                "Index of this host among the hosts that have a rank with this local rank; set by "
                "tfdistrun."),
      PythonInt("TFDIST_CROSS_SIZE", 1,
                "Number of hosts that have a rank with this local rank; set by tfdistrun."),
      PythonText(
          "TFDIST_RENDEZVOUS", nullptr, false,
          "host:port of the store through which the ranks find each other; set by tfdistrun."),
      PythonText("TFDIST_SECRET_FILE", nullptr, false,
                 "Path of a file with mode 0600 that contains the secret with which the ranks of a "
                 "job authenticate each other."),
      PythonInt("TFDIST_MEMBER", 0,
                "Number of this process among all processes that an elastic job has started; set "
                "by tfdistrun --min-np (docs/elastic.md)."),
      PythonInt("TFDIST_MAX_SIZE", 1,
                "Largest number of ranks that an elastic job can have; set by tfdistrun --min-np "
                "(docs/elastic.md)."),
      PythonText("TFDIST_JOB_ID", nullptr, false,
                 "Name of the job, so that the ranks of two jobs never connect to each other; set "
                 "by tfdistrun."),
      PythonText(
          "TFDIST_ADDRESS", nullptr, false,
          "Address on which this rank accepts connections: an IP address of its host, a network "
          "(10.1.0.0/16) or an interface (eth1). If it is not set, the rank uses the address from "
          "which it reaches the rendezvous, or loopback if all ranks are on one host."),
      PythonChoice("TFDIST_OBJECTS", "plain|pickle", "plain", true,
                   "Objects that broadcast_object and allgather_object accept: plain data, or any "
                   "object that can be pickled. Unpickling runs code of any process that has the "
                   "secret of the job (docs/security.md)."),
      PythonChoice("TFDIST_WEIGHT_CHECK", "error|warn|off", "error", true,
                   "Reaction to ranks whose weights differ although they train the same model, or "
                   "whose callbacks would make different decisions: an error on all ranks, a "
                   "warning, or no comparison (docs/callbacks.md)."),
      PythonText(
          "TFDIST_TUNING_FILE", nullptr, false,
          "File with measured choices of algorithms, written by `tfdist bench --tune`. Rank 0 "
          "reads it for all ranks. Cases that are not in the file follow docs/algorithms.md."),
      PythonText("TFDIST_TIMELINE", nullptr, true,
                 "Folder for a trace of all ranks, which ui.perfetto.dev can show "
                 "(docs/timeline.md). If it is not set, no trace is written."),
      PythonText("TFDIST_ENGINE", "native", true,
                 "Library that transfers the tensors: native; mpi, the native engine, with MPI for "
                 "data between hosts; or horovod, an installed Horovod (docs/engines.md)."),
      PythonText("TFDIST_MPI_LIBRARY", nullptr, false,
                 "Library that `make mpi` has compiled, for TFDIST_ENGINE=mpi. If it is not set, "
                 "the library in the folder of tfdist is used."),
      PythonText("TFDIST_LOG_DIR", nullptr, false,
                 "Folder for the output of the ranks, with one file for each rank. If it is not "
                 "set: tfdist-logs/TIME-PID in the folder in which tfdistrun is started."),
      PythonFloat("TFDIST_SIGNAL_GRACE_S", "s", 0, 3600,
                  "Time from a signal that ends the job until the launcher kills the ranks. "
                  "tfdistrun uses it as the default of --signal-grace-s (25 if it is not set), and "
                  "sets it for the ranks. Set it if another launcher has its own limit. If it is "
                  "set, StopOnSignal ignores repeated signals."),
  };
  return table;
}

// The only getenv of the core. Null: not set.
const char* Environment(const char* name) { return std::getenv(name); }

std::string NumberText(double number) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(15);
  out << number;
  return out.str();
}

std::string Allowed(const Row& row) {
  if (row.type == Type::kString) {
    const std::string choices = row.choices;
    if (choices.empty()) return "a name";
    std::string out;
    for (char c : choices) out += c == '|' ? std::string(", ") : std::string(1, c);
    return "one of " + out;
  }
  std::string out = row.type == Type::kInt ? "an integer" : "a number";
  out += " from " + NumberText(row.minimum) + " to " + NumberText(row.maximum);
  if (row.multiple_of > 0) out += ", a multiple of " + std::to_string(row.multiple_of);
  if (*row.unit != '\0') out += std::string(", in ") + row.unit;
  return out;
}

std::optional<int64_t> ParseInt(const Row& row, const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) return std::nullopt;
  const double number = static_cast<double>(value);
  if (number < row.minimum || number > row.maximum) return std::nullopt;
  if (row.multiple_of > 0 && value % row.multiple_of != 0) return std::nullopt;
  return value;
}

// Not strtod: a decimal comma of the user's locale must not change what "0.5" means.
std::optional<double> ParseFloat(const Row& row, const std::string& text) {
  if (text.find_first_not_of("0123456789.eE+-") != std::string::npos) return std::nullopt;
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  double value = 0;
  if (!(in >> value) || in.peek() != std::char_traits<char>::eof()) return std::nullopt;
  if (value < row.minimum || value > row.maximum) return std::nullopt;
  return value;
}

bool IsChoice(const Row& row, const std::string& text) {
  if (*row.choices == '\0') return !text.empty();
  return !text.empty() && text.find('|') == std::string::npos &&
         ("|" + std::string(row.choices) + "|").find("|" + text + "|") != std::string::npos;
}

template <typename T>
void Store(const Row& row, const T& value, Config* config) {
  if (auto field = std::get_if<T Config::*>(&row.field)) (*config).*(*field) = value;
}

// Checks `text` and, when the core reads the row, writes it to `config`.
bool Apply(const Row& row, const std::string& text, Config* config) {
  // An empty variable that Python reads counts as not set, because launchers leave some empty; an
  // empty one that the core reads is an error.
  if (text.empty() && std::holds_alternative<std::monostate>(row.field)) return true;
  if (row.type == Type::kInt) {
    const std::optional<int64_t> value = ParseInt(row, text);
    if (value) Store(row, *value, config);
    return value.has_value();
  }
  if (row.type == Type::kFloat) {
    const std::optional<double> value = ParseFloat(row, text);
    if (value) Store(row, *value, config);
    return value.has_value();
  }
  if (!IsChoice(row, text)) return false;
  Store(row, text, config);
  return true;
}

// Levenshtein's distance.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

const Row* Nearest(const std::string& name) {
  return &*std::min_element(Table().begin(), Table().end(), [&](const Row& a, const Row& b) {
    return EditDistance(name, a.name) < EditDistance(name, b.name);
  });
}

Status ConfigError(const std::string& message) {
  return Status(Code::kInvalidArgument, message,
                ErrorRecord{"invalid_argument", -1, "", 0, "", message, ""});
}

Status CheckNames() {
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, kPrefix, std::strlen(kPrefix)) != 0) continue;
    const std::string name(*entry, std::strcspn(*entry, "="));
    const bool known = std::any_of(Table().begin(), Table().end(),
                                   [&](const Row& row) { return name == row.name; });
    if (known) continue;
    return ConfigError("unknown environment variable " + name + "; did you mean " +
                       Nearest(name)->name +
                       "? Unset it or correct the name (docs/config.md lists all)");
  }
  return Status();
}

std::string ValueJson(int64_t value) { return std::to_string(value); }
std::string ValueJson(double value) { return NumberText(value); }
std::string ValueJson(const std::string& value) { return JsonQuote(value); }

// The value of a row in `config` as JSON.
std::string FieldJson(const Row& row, const Config& config) {
  if (auto field = std::get_if<int64_t Config::*>(&row.field)) return ValueJson(config.*(*field));
  if (auto field = std::get_if<double Config::*>(&row.field)) return ValueJson(config.*(*field));
  if (auto field = std::get_if<std::string Config::*>(&row.field)) {
    return ValueJson(config.*(*field));
  }
  return row.fallback != nullptr ? JsonQuote(row.fallback) : "null";
}

std::string LimitJson(const Row& row, double limit) {
  return row.type == Type::kString ? "null" : NumberText(limit);
}

std::string ChoicesJson(const Row& row) {
  std::string out;
  std::istringstream in(row.choices);
  for (std::string choice; std::getline(in, choice, '|');) {
    out += (out.empty() ? "" : ", ") + JsonQuote(choice);
  }
  return "[" + out + "]";
}

std::string RowJson(const Row& row) {
  const bool core = !std::holds_alternative<std::monostate>(row.field);
  const std::string fallback = FieldJson(row, Config());
  const char* text = Environment(row.name);
  std::string value = fallback;
  if (text != nullptr && core) {
    Config config;
    Apply(row, text, &config);
    value = FieldJson(row, config);
  } else if (text != nullptr && *text != '\0') {
    value = JsonQuote(text);
  }
  return "{\"name\": " + JsonQuote(row.name) +
         ", \"type\": " + JsonQuote(kTypeNames[static_cast<int>(row.type)]) +
         ", \"default\": " + fallback + ", \"value\": " + value +
         ", \"unit\": " + JsonQuote(row.unit) + ", \"minimum\": " + LimitJson(row, row.minimum) +
         ", \"maximum\": " + LimitJson(row, row.maximum) +
         ", \"multiple_of\": " + std::to_string(row.multiple_of) +
         ", \"choices\": " + ChoicesJson(row) + ", \"agreed\": " + (row.agreed ? "true" : "false") +
         ", \"scope\": " + (core ? "\"core\"" : "\"python\"") +
         ", \"help\": " + JsonQuote(row.help) + "}";
}

}  // namespace

StatusOr<Config> ConfigFromEnvironment() {
  TFDIST_RETURN_IF_ERROR(CheckNames());
  Config config;
  for (const Row& row : Table()) {
    const char* text = Environment(row.name);
    if (text == nullptr || Apply(row, text, &config)) continue;
    return ConfigError(std::string(row.name) + " must be " + Allowed(row) + "; got '" + text + "'");
  }
  // 0.7 is ten times 0.07, although not in float64.
  if (config.peer_timeout_s * (1 + 1e-9) < 10 * config.heartbeat_s) {
    return ConfigError("TFDIST_PEER_TIMEOUT_S must be at least ten times TFDIST_HEARTBEAT_S (" +
                       NumberText(config.heartbeat_s) + " s); got '" +
                       NumberText(config.peer_timeout_s) + "'");
  }
  return config;
}

std::string ConfigTableJson() {
  std::string out;
  for (const Row& row : Table()) out += (out.empty() ? "" : ",\n ") + RowJson(row);
  return "[" + out + "]";
}

}  // namespace tfdist
