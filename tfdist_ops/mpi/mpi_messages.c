/* Messages between ranks over MPI: libtfdist_mpi.so, which `make mpi` compiles against the
 * installed MPI. tfdist/core/mpi.py loads it and passes its table of functions to the core.
 *
 * Each world of tfdist has its own communicator, so that its messages are not mixed up with those
 * of the program or of an earlier world. Its rank i is rank i of MPI_COMM_WORLD.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "transport/messages.h"

#define EXPORT __attribute__((visibility("default")))

_Static_assert(sizeof(MPI_Request) <= sizeof(uint64_t), "a request of MPI fits into one of tfdist");

static MPI_Comm world = MPI_COMM_NULL;
static int is_started_here = 0;
static _Thread_local char problem[MPI_MAX_ERROR_STRING + 64];

/* 0, or -1 with `problem` filled. */
static int check(int code, const char* what) {
  if (code == MPI_SUCCESS) return 0;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  snprintf(problem, sizeof(problem), "%s: %s", what, text);
  return -1;
}

static MPI_Request load(const uint64_t* request) {
  MPI_Request out;
  memcpy(&out, request, sizeof(out));
  return out;
}

static void store(MPI_Request request, uint64_t* out) {
  *out = 0;
  memcpy(out, &request, sizeof(request));
}

/* ---- messages ---- */

/* Synchronous mode: the send completes only after the peer has begun to receive it. */
static int32_t send_message(void* context, int32_t peer, const void* data, size_t bytes,
                            uint64_t* request) {
  (void)context;
  MPI_Request sent = MPI_REQUEST_NULL;
  const int code = MPI_Issend(data, (int)bytes, MPI_BYTE, peer, 0, world, &sent);
  store(sent, request);
  return check(code, "MPI_Issend");
}

static int32_t receive_message(void* context, int32_t peer, void* data, size_t bytes,
                               uint64_t* request) {
  (void)context;
  MPI_Request received = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, 0, world, &received);
  store(received, request);
  return check(code, "MPI_Irecv");
}

static int32_t test_message(void* context, uint64_t* request, size_t* bytes) {
  (void)context;
  MPI_Request tested = load(request);
  MPI_Status status;
  int has_ended = 0;
  const int code = MPI_Test(&tested, &has_ended, &status);
  store(tested, request);
  if (check(code, "MPI_Test") != 0) return -1;
  if (!has_ended || bytes == NULL) return has_ended;
  int count = 0;
  if (check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count") != 0) return -1;
  *bytes = (size_t)count;
  return 1;
}

static int32_t cancel_message(void* context, uint64_t* request) {
  (void)context;
  MPI_Request cancelled = load(request);
  return check(MPI_Cancel(&cancelled), "MPI_Cancel");
}

static const char* last_error(void* context) {
  (void)context;
  return problem;
}

static const tfdist_messages table = {
    TFDIST_MESSAGES_VERSION, "mpi",        NULL,           send_message,
    receive_message,         test_message, cancel_message, last_error,
};

/* ---- called by Python; an int result is 0, or -1 with the reason in tfdist_mpi_error ---- */

EXPORT const tfdist_messages* tfdist_mpi_messages(void) { return &table; }

EXPORT const char* tfdist_mpi_error(void) { return problem; }

/* Writes the name and version of the MPI library, in at most `capacity` bytes. */
EXPORT int tfdist_mpi_version(char* version, int capacity) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  const int code = MPI_Get_library_version(text, &length);
  snprintf(version, (size_t)capacity, "%s", text);
  return check(code, "MPI_Get_library_version");
}

/* Starts MPI unless the program has started it. Sets the rank of this process in MPI_COMM_WORLD
 * and the size of MPI_COMM_WORLD. */
EXPORT int tfdist_mpi_start(int* rank, int* size) {
  int is_running = 0, has_ended = 0, level = 0;
  if (check(MPI_Finalized(&has_ended), "MPI_Finalized") != 0) return -1;
  if (has_ended) {
    snprintf(problem, sizeof(problem), "the program has ended MPI (MPI_Finalize)");
    return -1;
  }
  if (check(MPI_Initialized(&is_running), "MPI_Initialized") != 0) return -1;
  if (is_running) {
    if (check(MPI_Query_thread(&level), "MPI_Query_thread") != 0) return -1;
  } else {
    if (check(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread") != 0) {
      return -1;
    }
    is_started_here = 1;
  }
  if (level < MPI_THREAD_MULTIPLE) {
    snprintf(problem, sizeof(problem), "MPI %s without MPI_THREAD_MULTIPLE, which tfdist needs",
             is_running ? "was started by the program" : "runs");
    return -1;
  }
  if (check(MPI_Comm_rank(MPI_COMM_WORLD, rank), "MPI_Comm_rank") != 0) return -1;
  return check(MPI_Comm_size(MPI_COMM_WORLD, size), "MPI_Comm_size");
}

/* A communicator for the next world, of the first `size` ranks, which all call this. */
EXPORT int tfdist_mpi_connect(int size, int generation) {
  MPI_Group all, first;
  int range[1][3] = {{0, size - 1, 1}};
  if (check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group") != 0) return -1;
  int code = MPI_Group_range_incl(all, 1, range, &first);
  MPI_Group_free(&all);
  if (check(code, "MPI_Group_range_incl") != 0) return -1;
  /* The earlier communicator stays: MPI may still send what was left in it. */
  MPI_Errhandler of_program;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &of_program);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  code = MPI_Comm_create_group(MPI_COMM_WORLD, first, generation & 0x7fff, &world);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, of_program);
  MPI_Errhandler_free(&of_program);
  MPI_Group_free(&first);
  if (check(code, "MPI_Comm_create_group") != 0) return -1;
  return check(MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

/* Sends the `bytes` bytes at `text` from rank 0 to all ranks of the world. */
EXPORT int tfdist_mpi_broadcast(char* text, int bytes) {
  return check(MPI_Bcast(text, bytes, MPI_CHAR, 0, world), "MPI_Bcast");
}

/* Ends MPI if tfdist has started it; waits for all ranks. */
EXPORT int tfdist_mpi_finish(void) {
  int has_ended = 0;
  MPI_Finalized(&has_ended);
  return is_started_here && !has_ended ? check(MPI_Finalize(), "MPI_Finalize") : 0;
}
