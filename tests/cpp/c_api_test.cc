// The C interface: what it owns, and what it says when it can't.
#include "runtime/c_api.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <string>

#include "check.h"

namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

tfdist_world Alone() {
  tfdist_world world{};
  world.size = 1;
  world.local_size = world.cross_size = 1;
  world.host = "testhost";
  world.own_doorbell_fd = -1;
  return world;
}

int32_t SubmitBarrier(std::promise<int32_t>* promise) {
  tfdist_request request{};
  request.kind = TFDIST_BARRIER;
  request.name = "b";
  request.prescale = request.postscale = 1;
  request.context = promise;
  request.done = [](void* context, const tfdist_status* status) {
    static_cast<std::promise<int32_t>*>(context)->set_value(status->code);
  };
  return tfdist_submit(&request, nullptr);
}

TEST(a_rank_is_crowded_by_those_that_share_its_processors_alone) {
  cpu_set_t own;
  CHECK_EQ(sched_getaffinity(0, sizeof(own), &own), 0);
  const int32_t processors = CPU_COUNT(&own);
  for (int32_t sharing : {0, 1, processors, processors + 1}) {
    tfdist_world world = Alone();
    world.local_size = sharing == 0 ? processors + 1 : 2 * processors + 2;
    world.sharing = sharing;
    CHECK_EQ(tfdist_init(&world), 0);
    const std::string counters = tfdist_counters_json();
    const bool crowded = counters.find("\"crowded\": true") != std::string::npos;
    CHECK_EQ_IN(crowded, sharing == 0 || sharing > processors, std::to_string(sharing));
    tfdist_shutdown(1);
  }
}

TEST(calls_before_init_are_refused_with_a_record) {
  std::promise<int32_t> promise;
  CHECK_EQ(SubmitBarrier(&promise), 9);
  const std::string payload = tfdist_last_error().payload;
  CHECK_EQ_IN(payload.find("not_initialized") != std::string::npos, true, payload);
  int32_t topology[6];
  tfdist_topology(topology);
  CHECK_EQ(topology[0], -1);
}

TEST(one_rank_lives_without_links) {
  const tfdist_world world = Alone();
  CHECK_EQ(tfdist_init(&world), 0);
  CHECK_EQ(tfdist_is_initialized(), 1);
  CHECK_EQ(tfdist_init(&world), 3);  // twice
  std::promise<int32_t> promise;
  CHECK_EQ(SubmitBarrier(&promise), 0);
  CHECK_EQ(promise.get_future().get(), 0);
  tfdist_shutdown(1);
  CHECK_EQ(tfdist_is_initialized(), 0);
}

TEST(a_forked_child_has_no_engine_and_says_so) {
  const tfdist_world world = Alone();
  CHECK_EQ(tfdist_init(&world), 0);
  const pid_t child = fork();
  if (child == 0) {
    std::promise<int32_t> promise;
    const bool refused = SubmitBarrier(&promise) == 9 &&
                         std::string(tfdist_last_error().message).find("fork") != std::string::npos;
    tfdist_shutdown(1);
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  tfdist_shutdown(1);
  CHECK_EQ(status, 0);
}

TEST(a_failed_init_closes_every_descriptor_it_was_given) {
  int sockets[2][2];
  tfdist_link links[2] = {};
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets[i]), 0);
    links[i].peer = i + 1;
    links[i].host = "testhost";
    links[i].transport = i == 0 ? "tcp" : "no such transport";
    links[i].socket_fd = sockets[i][0];
    links[i].memory_fd = links[i].peer_doorbell_fd = -1;
  }
  int more[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, more), 0);
  const int32_t more_fds[] = {more[0]};
  links[1].more_socket_fds = more_fds;
  links[1].more_sockets = 1;
  tfdist_world world = Alone();
  const int32_t host_of[3] = {0, 0, 1};
  world.size = world.local_size = 3;
  world.links = links;
  world.link_count = 2;
  world.host_of = host_of;
  world.own_doorbell_fd = eventfd(0, EFD_NONBLOCK);
  CHECK(tfdist_init(&world) != 0);
  CHECK(!IsOpen(sockets[0][0]) && !IsOpen(sockets[1][0]) && !IsOpen(world.own_doorbell_fd));
  CHECK(!IsOpen(more[0]));
  for (auto& pair : sockets) close(pair[1]);
  close(more[1]);
}

TEST(hosts_are_numbered_by_their_lowest_rank_or_refused) {
  const int32_t wrong[][2] = {{1, 0}, {0, 2}, {0, -1}};
  for (const auto& host_of : wrong) {
    tfdist_link link{};
    link.transport = "tcp";
    link.host = "testhost";
    link.peer = 1;
    link.socket_fd = link.memory_fd = link.peer_doorbell_fd = -1;
    tfdist_world world = Alone();
    world.size = 2;
    world.links = &link;
    world.link_count = 1;
    world.own_doorbell_fd = -1;
    for (const int32_t* given : {host_of + 0, static_cast<const int32_t*>(nullptr)}) {
      world.host_of = given;
      CHECK_EQ(tfdist_init(&world), 3);
      const std::string text = tfdist_last_error().message;
      CHECK_EQ_IN(text.find("tfdist_init: host_of") != std::string::npos, true, text);
    }
  }
}

TEST(rules_of_a_tuning_file_hold_and_unknown_names_are_refused) {
  const int32_t hosts[1] = {1};
  tfdist_tuning_rule rule{TFDIST_ALLREDUCE, 0, hosts, 1, 100, "tree"};
  tfdist_world world = Alone();
  world.tuning = &rule;
  world.tuning_count = 1;
  world.tuning_hash = "abc";
  CHECK(tfdist_algorithm(TFDIST_ALLREDUCE, 1, 100, nullptr) == nullptr);  // not initialized
  CHECK_EQ(tfdist_init(&world), 0);
  CHECK_EQ(std::string(tfdist_algorithm(TFDIST_ALLREDUCE, 1, 100, nullptr)), "tree");
  CHECK(std::string(tfdist_algorithm(TFDIST_ALLREDUCE, 1, 101, "")) != "tree");
  CHECK_EQ(std::string(tfdist_algorithm(TFDIST_ALLREDUCE, 1, 100, "ring")), "ring");
  CHECK(tfdist_algorithm(TFDIST_ALLREDUCE, 1, 100, "torus") == nullptr);  // of one rank
  CHECK(tfdist_algorithm(99, 1, 100, "auto") == nullptr);
  CHECK(std::string(tfdist_counters_json()).find("\"tuning\": \"abc\"") != std::string::npos);
  tfdist_shutdown(1);
  rule.algorithm = "no such";
  world = Alone();
  world.tuning = &rule;
  world.tuning_count = 1;
  CHECK_EQ(tfdist_init(&world), 3);
  const std::string text = tfdist_last_error().message;
  CHECK_EQ_IN(
      text.find("expected an algorithm of allreduce, one of auto, ring") != std::string::npos, true,
      text);
}

TEST(another_version_of_the_table_is_not_given_out) {
  CHECK(tfdist_api(TFDIST_API_VERSION) != nullptr);
  CHECK(tfdist_api(TFDIST_API_VERSION + 1) == nullptr);
}

}  // namespace

TEST_MAIN()
