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
            "Longest wait of an operation for ranks that are alive but do not come."),
      Float("TFDIST_START_TIMEOUT_S", &Config::start_timeout_s, "s", 1, 86400, false,
            "Longest wait of tfdist.init() for all ranks to start and connect."),
      Float("TFDIST_STALL_WARNING_S", &Config::stall_warning_s, "s", 0.1, 86400, false,
            "Time after which a warning names the operation and the ranks that are missing."),
      Int("TFDIST_FIRST_BUCKET_BYTES", &Config::first_bucket_bytes, "bytes", 1, 4 * kGiB, 0, true,
          "Size at which the first bucket of gradients closes; small, so that reducing starts "
          "early."),
      Int("TFDIST_BUCKET_BYTES", &Config::bucket_bytes, "bytes", 1, 4 * kGiB, 0, true,
          "Size at which the later buckets of gradients close."),
      Int("TFDIST_FUSION_BYTES", &Config::fusion_bytes, "bytes", 0, 4 * kGiB, 0, true,
          "Most bytes reduced as one operation, a single larger tensor apart; 0 puts every tensor "
          "into a bucket of its own."),
      Text("TFDIST_BUCKET_ORDER", &Config::bucket_order, "reverse|traced", true,
           "In which order gradients are put into buckets: that of the list, backwards, or the one "
           "in which the traced function makes them, as rank 0 sees it (docs/gradients.md)."),
      Int("TFDIST_SEGMENT_BYTES", &Config::segment_bytes, "bytes", 4 * kKiB, 16 * kMiB, 64, true,
          "Size of the pieces in which data travels between two ranks."),
      Int("TFDIST_SHM_SLOTS", &Config::shm_slots, "", 2, 1024, 0, true,
          "Number of segments in flight each way between two ranks of one host; few stay in the "
          "caches."),
      Text(
          "TFDIST_SHM_WRITES", &Config::shm_writes, "auto|cached|nontemporal", false,
          "How segments for other ranks of the host are written: by ordinary stores, which is best "
          "where their processors share a cache, or past the caches, which is where they do not. "
          "auto: what takes less time; the bits are the same (docs/design/0009-stores.md)."),
      Int("TFDIST_MAX_ACTIVE", &Config::max_active, "", 1, 1024, 0, true,
          "Most collectives that run at the same time; later ones wait for their turn."),
      Int("TFDIST_MESH_RANKS", &Config::mesh_ranks, "", 2, 65536, 0, true,
          "Most ranks that are all connected with each other from the start. In a larger world a "
          "rank starts with links to 2 log2(ranks) others, which relay its control messages to the "
          "rest; links for data open when they are first needed."),
      Int("TFDIST_SPIN_US", &Config::spin_us, "us", 0, 1e6, 0, false,
          "How long the progress thread looks for work before it sleeps."),
      Float("TFDIST_HEARTBEAT_S", &Config::heartbeat_s, "s", 0.02, 10, true,
            "Time between two signs of life of a rank."),
      Float("TFDIST_PEER_TIMEOUT_S", &Config::peer_timeout_s, "s", 0.2, 3600, true,
            "Silence after which a rank on another host is taken for lost, at least ten "
            "heartbeats; half of it is how long a process of the same host may be stopped."),
      Int("TFDIST_ATOMIC_STEPS", &Config::atomic_steps, "", 0, 1, 0, true,
          "1: a step of gradients is handed out on no rank before every rank has all of it, so "
          "that a failure leaves equal weights (docs/design/0004-verdict-and-gate.md)."),
      Text("TFDIST_ALLREDUCE_ALGORITHM", &Config::allreduce_algorithm, "", true,
           "Name of the allreduce algorithm; auto follows topology, type and size. Like all of "
           "these: where the named one does not support a case, auto decides "
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
      Text(
          "TFDIST_RING_ORDER", &Config::ring_order, "", true,
          "Order of the ranks in algorithms that send round a ring: topology, those of a host side "
          "by side; rank; or all ranks as a list, such as 0,2,1,3. Process sets keep it. Another "
          "order rounds differently (docs/algorithms.md)."),
      Text("TFDIST_TRANSPORT", &Config::transport, "auto|shm|tcp", true,
           "How ranks of one host exchange data; auto is shared memory, or TCP where that fails."),
      Text("TFDIST_TCP_MAC", &Config::tcp_mac, "control|all", true,
           "What is authenticated between ranks joined by TCP: control messages and the headers of "
           "data, whose contents have a checksum; or all, contents of data too."),
      Int("TFDIST_TCP_SOCKETS", &Config::tcp_sockets, "", 1, 16, 0, true,
          "Connections between two ranks joined by TCP, each of which carries what it can: for a "
          "network that does not give one connection all of its rate."),
      Int("TFDIST_TIMELINE_BYTES", &Config::timeline_bytes, "bytes", 64 * kKiB, 64 * kGiB, 0, false,
          "Most bytes of each rank's part of the timeline; the oldest are dropped."),
      Text("TFDIST_LOG_LEVEL", &Config::log_level, "debug|info|warning|error|silent", false,
           "Least severe messages that are written to stderr."),
      PythonInt("TFDIST_RANK", 0, "Index of this process among all; set by tfdistrun."),
      PythonInt("TFDIST_SIZE", 1, "Number of processes; set by tfdistrun."),
      PythonInt("TFDIST_LOCAL_RANK", 0,
                "Index of this process among those of its host; set by tfdistrun."),
      PythonInt("TFDIST_LOCAL_SIZE", 1, "Number of processes on this host; set by tfdistrun."),
      PythonInt("TFDIST_CROSS_RANK", 0,
                "Index of this host among those that have a process of this local rank; set by "
                "tfdistrun."),
      PythonInt("TFDIST_CROSS_SIZE", 1,
                "Number of hosts that have a process of this local rank; set by tfdistrun."),
      PythonText("TFDIST_RENDEZVOUS", nullptr, false,
                 "host:port of the store through which the ranks find each other; set by "
                 "tfdistrun."),
      PythonText(
          "TFDIST_SECRET_FILE", nullptr, false,
          "Path of a file of mode 0600 with the secret by which the ranks of a job know each "
          "other."),
      PythonInt("TFDIST_MEMBER", 0,
                "Number of this process among all that an elastic job has started; set by "
                "tfdistrun --min-np (docs/elastic.md)."),
      PythonInt("TFDIST_MAX_SIZE", 1,
                "Largest number of ranks that an elastic job can have; set by tfdistrun --min-np "
                "(docs/elastic.md)."),
      PythonText("TFDIST_JOB_ID", nullptr, false,
                 "Name of the job, so that ranks of two jobs never meet; set by tfdistrun."),
      PythonText("TFDIST_ADDRESS", nullptr, false,
                 "Where this rank listens for its peers: an IP address of its host, a network "
                 "(10.1.0.0/16) or an interface (eth1); not set: the address that reaches the "
                 "rendezvous, loopback when all ranks are on one host."),
      PythonChoice("TFDIST_OBJECTS", "plain|pickle", "plain", true,
                   "What broadcast_object and allgather_object take: plain data; or any object, "
                   "which is unpickled where it arrives. That runs code of any process that has "
                   "the job's secret (docs/security.md)."),
      PythonChoice("TFDIST_WEIGHT_CHECK", "error|warn|off", "error", true,
                   "What happens when ranks that train one model have other weights, or callbacks "
                   "that would decide differently: an error on all ranks, a warning, or no "
                   "comparison (docs/callbacks.md)."),
      PythonText("TFDIST_TUNING_FILE", nullptr, false,
                 "File with the measured choice of algorithms, written by `tfdist bench --tune`. "
                 "Rank 0 reads it for all; what is not in it follows docs/algorithms.md."),
      PythonText("TFDIST_TIMELINE", nullptr, true,
                 "Folder in which a trace of all ranks is written, for ui.perfetto.dev "
                 "(docs/timeline.md); not set: none."),
      PythonText("TFDIST_ENGINE", "native", true,
                 "What carries the tensors: native; mpi, the native engine with its data between "
                 "hosts by MPI; or horovod, an installed Horovod (docs/engines.md)."),
      PythonText("TFDIST_MPI_LIBRARY", nullptr, false,
                 "Library that `make mpi` has compiled, for TFDIST_ENGINE=mpi; not set: the one in "
                 "the folder of tfdist."),
      PythonText("TFDIST_LOG_DIR", nullptr, false,
                 "Folder for the output of each rank, one file a rank; not set: "
                 "tfdist-logs/TIME-PID in the folder where tfdistrun is started."),
      PythonFloat("TFDIST_SIGNAL_GRACE_S", "s", 0, 3600,
                  "Time from a signal that ends the job until the launcher kills the ranks. "
                  "tfdistrun takes it for --signal-grace-s (not set: 25), and sets it for the "
                  "ranks; set it under a launcher with a limit of its own."),
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
  // What a launcher leaves empty is not set; what tunes the core is not left to such a guess.
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
