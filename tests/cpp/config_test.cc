// The table of TFDIST_* variables: defaults, limits, errors, JSON.
#include "base/config.h"

#include <unistd.h>

#include <clocale>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/logging.h"
#include "check.h"

namespace tfdist {
namespace {

// An environment with nothing of ours but what the test sets.
struct CleanEnvironment {
  CleanEnvironment() { Clear(); }
  ~CleanEnvironment() { Clear(); }
  static void Clear() {
    std::vector<std::string> names;
    for (char** entry = ::environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      if (text.rfind("TFDIST_", 0) == 0) names.push_back(text.substr(0, text.find('=')));
    }
    for (const std::string& name : names) ::unsetenv(name.c_str());
  }
  void Set(const char* name, const char* value) { ::setenv(name, value, 1); }
};

Config Read() {
  auto config = ConfigFromEnvironment();
  CHECK_OK(config.status());
  return config.value();
}

std::string Refusal() {
  auto config = ConfigFromEnvironment();
  CHECK(!config.ok());
  CHECK_EQ(static_cast<int>(config.status().code()), static_cast<int>(Code::kInvalidArgument));
  CHECK(config.status().payload().find("\"invalid_argument\"") != std::string::npos);
  return config.status().message();
}

void CheckHas(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    check::Fail(__FILE__, __LINE__, "no '" + part + "' in: " + text);
  }
}

// The object of one variable in the table's JSON.
std::string RowOf(const std::string& name) {
  const std::string json = ConfigTableJson();
  const size_t begin = json.find("{\"name\": \"" + name + "\"");
  CHECK(begin != std::string::npos);
  return json.substr(begin, json.find('}', begin) - begin + 1);
}

TEST(defaults_without_environment) {
  CleanEnvironment environment;
  const Config config = Read();
  CHECK_EQ(config.timeout_s, 300.0);
  CHECK_EQ(config.first_bucket_bytes, int64_t{1} << 20);
  CHECK_EQ(config.bucket_bytes, int64_t{8} << 20);
  CHECK_EQ(config.fusion_bytes, int64_t{64} << 20);
  CHECK_EQ(config.allreduce_algorithm, "auto");
  CHECK_EQ(config.transport, "auto");
}

TEST(every_core_variable_reaches_its_field) {
  CleanEnvironment environment;
  environment.Set("TFDIST_TIMEOUT_S", "1.5");
  environment.Set("TFDIST_START_TIMEOUT_S", "2e1");
  environment.Set("TFDIST_STALL_WARNING_S", "4");
  environment.Set("TFDIST_FIRST_BUCKET_BYTES", "5");
  environment.Set("TFDIST_BUCKET_BYTES", "6");
  environment.Set("TFDIST_FUSION_BYTES", "0");
  environment.Set("TFDIST_BUCKET_ORDER", "traced");
  environment.Set("TFDIST_SEGMENT_BYTES", "4160");
  environment.Set("TFDIST_SHM_SLOTS", "2");
  environment.Set("TFDIST_MAX_ACTIVE", "7");
  environment.Set("TFDIST_SPIN_US", "0");
  environment.Set("TFDIST_ALLREDUCE_ALGORITHM", "ring");
  environment.Set("TFDIST_TRANSPORT", "tcp");
  environment.Set("TFDIST_LOG_LEVEL", "debug");
  const Config config = Read();
  CHECK_EQ(config.timeout_s, 1.5);
  CHECK_EQ(config.start_timeout_s, 20.0);
  CHECK_EQ(config.stall_warning_s, 4.0);
  CHECK_EQ(config.first_bucket_bytes, 5);
  CHECK_EQ(config.bucket_bytes, 6);
  CHECK_EQ(config.fusion_bytes, 0);
  CHECK_EQ(config.bucket_order, "traced");
  CHECK_EQ(config.segment_bytes, 4160);
  CHECK_EQ(config.shm_slots, 2);
  CHECK_EQ(config.max_active, 7);
  CHECK_EQ(config.spin_us, 0);
  CHECK_EQ(config.allreduce_algorithm, "ring");
  CHECK_EQ(config.transport, "tcp");
  CHECK_EQ(config.log_level, "debug");
}

TEST(wrong_values_name_the_variable_what_is_allowed_and_what_came) {
  const char* cases[][3] = {
      {"TFDIST_TIMEOUT_S", "soon", "a number from 0.1 to 86400, in s; got 'soon'"},
      {"TFDIST_TIMEOUT_S", "", "got ''"},
      {"TFDIST_TIMEOUT_S", "0", "got '0'"},
      {"TFDIST_TIMEOUT_S", "nan", "got 'nan'"},
      {"TFDIST_TIMEOUT_S", "inf", "got 'inf'"},
      {"TFDIST_TIMEOUT_S", "3s", "got '3s'"},
      {"TFDIST_TIMEOUT_S", " 3", "got ' 3'"},
      {"TFDIST_TIMEOUT_S", "1,5", "got '1,5'"},
      {"TFDIST_BUCKET_BYTES", "8M", "an integer from 1 to 4294967296, in bytes; got '8M'"},
      {"TFDIST_BUCKET_BYTES", "1.5", "got '1.5'"},
      {"TFDIST_BUCKET_BYTES", "99999999999999999999", "got '99999999999999999999'"},
      {"TFDIST_FUSION_BYTES", "-1", "an integer from 0"},
      {"TFDIST_SEGMENT_BYTES", "4097", "a multiple of 64"},
      {"TFDIST_SEGMENT_BYTES", "4032", "an integer from 4096"},
      {"TFDIST_SHM_SLOTS", "1", "an integer from 2 to 1024"},
      {"TFDIST_TRANSPORT", "udp", "one of auto, shm, tcp; got 'udp'"},
      {"TFDIST_TRANSPORT", "auto|shm", "one of auto, shm, tcp"},
      {"TFDIST_TRANSPORT", "", "got ''"},
      {"TFDIST_ALLREDUCE_ALGORITHM", "", "got ''"},
      {"TFDIST_BUCKET_ORDER", "static", "one of reverse, traced; got 'static'"},
      {"TFDIST_LOG_LEVEL", "loud", "one of debug, info, warning, error, silent"},
      {"TFDIST_RANK", "one", "an integer from 0"},
      {"TFDIST_SIZE", "0", "an integer from 1"},
      {"TFDIST_SIGNAL_GRACE_S", "-1", "a number from 0 to 3600, in s; got '-1'"},
  };
  for (const auto& [name, value, expected] : cases) {
    CleanEnvironment environment;
    environment.Set(name, value);
    const std::string message = Refusal();
    CheckHas(message, std::string(name) + " must be ");
    CheckHas(message, expected);
  }
}

TEST(unknown_variable_suggests_the_nearest_name) {
  CleanEnvironment environment;
  environment.Set("TFDIST_BUCKETBYTES", "1");
  CheckHas(Refusal(), "TFDIST_BUCKETBYTES; did you mean TFDIST_BUCKET_BYTES?");
  environment.Clear();
  environment.Set("TFDIST_TIMEOUT", "1");
  CheckHas(Refusal(), "did you mean TFDIST_TIMEOUT_S?");
  environment.Clear();
  environment.Set("TFDISTANCE", "not ours");
  Read();
  ::unsetenv("TFDISTANCE");
}

TEST(silence_is_suspicious_after_ten_beats_at_the_soonest) {
  CleanEnvironment environment;
  environment.Set("TFDIST_HEARTBEAT_S", "0.07");
  environment.Set("TFDIST_PEER_TIMEOUT_S", "0.7");  // in float64 less than 10 * 0.07
  Read();
  environment.Set("TFDIST_PEER_TIMEOUT_S", "0.69");
  CheckHas(Refusal(),
           "TFDIST_PEER_TIMEOUT_S must be at least ten times TFDIST_HEARTBEAT_S (0.07 s)");
}

TEST(decimal_point_whatever_the_locale) {
  CleanEnvironment environment;
  environment.Set("TFDIST_TIMEOUT_S", "2.5");
  for (const char* name : {"de_DE.UTF-8", "fr_FR.UTF-8", "C"}) {
    if (std::setlocale(LC_ALL, name) == nullptr) continue;
    CHECK_EQ_IN(Read().timeout_s, 2.5, name);
    CheckHas(RowOf("TFDIST_TIMEOUT_S"), "\"value\": 2.5");
  }
  std::setlocale(LC_ALL, "C");
}

TEST(json_describes_a_row) {
  CleanEnvironment environment;
  const std::string row = RowOf("TFDIST_SEGMENT_BYTES");
  for (const char* part :
       {"\"type\": \"int\"", "\"default\": 131072", "\"value\": 131072", "\"unit\": \"bytes\"",
        "\"minimum\": 4096", "\"maximum\": 16777216", "\"multiple_of\": 64", "\"choices\": []",
        "\"agreed\": true", "\"scope\": \"core\"", "\"help\": \""}) {
    CheckHas(row, part);
  }
  CheckHas(RowOf("TFDIST_TRANSPORT"), "\"choices\": [\"auto\", \"shm\", \"tcp\"]");
  CheckHas(RowOf("TFDIST_LOG_LEVEL"), "\"agreed\": false");
  CheckHas(RowOf("TFDIST_LOG_LEVEL"), "\"minimum\": null");
}

TEST(json_shows_the_environment_of_the_call) {
  CleanEnvironment environment;
  CheckHas(RowOf("TFDIST_SPIN_US"), "\"value\": 20");
  environment.Set("TFDIST_SPIN_US", "33");
  CheckHas(RowOf("TFDIST_SPIN_US"), "\"default\": 20, \"value\": 33");
  environment.Set("TFDIST_SPIN_US", "many");
  CheckHas(RowOf("TFDIST_SPIN_US"), "\"value\": 20");
}

TEST(rows_of_python_pass_the_text_through) {
  CleanEnvironment environment;
  CheckHas(RowOf("TFDIST_RANK"), "\"default\": null, \"value\": null");
  CheckHas(RowOf("TFDIST_RANK"), "\"scope\": \"python\"");
  CheckHas(RowOf("TFDIST_ADDRESS"), "\"value\": null");
  environment.Set("TFDIST_RANK", "3");
  environment.Set("TFDIST_JOB_ID", "a \"job\"");
  CheckHas(RowOf("TFDIST_RANK"), "\"value\": \"3\"");
  CheckHas(RowOf("TFDIST_JOB_ID"), "\"value\": \"a \\\"job\\\"\"");
  Read();
  CheckHas(RowOf("TFDIST_SIGNAL_GRACE_S"), "\"default\": null, \"value\": null");
  environment.Set("TFDIST_SIGNAL_GRACE_S", "7.5");
  CheckHas(RowOf("TFDIST_SIGNAL_GRACE_S"), "\"value\": \"7.5\"");
  environment.Set("TFDIST_RANK", "");
  Read();
  CheckHas(RowOf("TFDIST_RANK"), "\"value\": null");
}

TEST(rows_of_python_have_choices_and_defaults_too) {
  CleanEnvironment environment;
  CheckHas(RowOf("TFDIST_OBJECTS"), "\"default\": \"plain\", \"value\": \"plain\"");
  CheckHas(RowOf("TFDIST_OBJECTS"), "\"choices\": [\"plain\", \"pickle\"], \"agreed\": true");
  environment.Set("TFDIST_OBJECTS", "pickle");
  Read();
  CheckHas(RowOf("TFDIST_OBJECTS"), "\"value\": \"pickle\"");
  environment.Set("TFDIST_OBJECTS", "");
  Read();
  CheckHas(RowOf("TFDIST_OBJECTS"), "\"value\": \"plain\"");
  environment.Set("TFDIST_OBJECTS", "marshal");
  CheckHas(Refusal(), "TFDIST_OBJECTS must be one of plain, pickle; got 'marshal'");
}

TEST(log_levels_by_name) {
  LogLevel level = LogLevel::kDebug;
  CHECK(ParseLogLevel("error", &level));
  CHECK(level == LogLevel::kError);
  CHECK(!ParseLogLevel("loud", &level));
  CHECK(level == LogLevel::kError);
}

TEST(log_line_names_rank_subsystem_and_level) {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const int saved = ::dup(STDERR_FILENO);
  ::dup2(ends[1], STDERR_FILENO);
  SetLogLevel(LogLevel::kWarning);
  TFDIST_LOG(kInfo, 3, "ENGINE", "unheard");
  TFDIST_LOG(kWarning, 3, "ENGINE", "text " << 42);
  TFDIST_LOG(kError, -1, "CONFIG", "before there is a rank");
  ::dup2(saved, STDERR_FILENO);
  ::close(saved);
  ::close(ends[1]);
  char buffer[256] = {};
  const ssize_t n = ::read(ends[0], buffer, sizeof(buffer) - 1);
  ::close(ends[0]);
  CHECK(n > 0);
  CHECK_EQ(std::string(buffer),
           "[tfdist r3 ENGINE warning] text 42\n"
           "[tfdist CONFIG error] before there is a rank\n");
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
