/* Operations repeated and timed in C, so that microseconds are those of the library alone.
 *
 * Linked with nothing: Python hands over the functions of the libraries that it has loaded. */
#include <errno.h>
#include <semaphore.h>
#include <stdint.h>
#include <time.h>

#include "runtime/c_api.h"

#define DEADLINE_S 60

typedef int32_t (*submit_function)(const tfdist_request*, uint64_t*);
typedef int32_t (*run_function)(const tfdist_request*);
/* Handles are pointers (Open MPI) or ints (MPICH), which travel in the same registers. */
typedef int (*allreduce_function)(const void*, void*, int, void*, void*, void*);

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static sem_t ended;
static volatile int32_t failed;

static void done(void* context, const tfdist_status* status) {
  (void)context;
  if (status->code != 0) failed = status->code;
  sem_post(&ended);
}

static int32_t await_done(void) {
  if (sem_trywait(&ended) == 0) return 0; /* else a clock would be asked that no peer asks */
  struct timespec deadline;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += DEADLINE_S;
  while (sem_timedwait(&ended, &deadline) != 0) {
    if (errno != EINTR) return 4;
  }
  return 0;
}

/* One step is `count` requests handed over and awaited by this thread, which helps until the last
 * of them has ended. Returns 0 or the first error's code; `seconds[i]` is what step i took. */
int32_t time_core(submit_function submit, run_function run, tfdist_request* requests, int32_t count,
                  double* seconds, int32_t repetitions) {
  if (count < 1 || sem_init(&ended, 0, 0) != 0) return 3;
  failed = 0;
  for (int32_t i = 0; i < count; ++i) requests[i].done = done;
  for (int32_t step = 0; step < repetitions; ++step) {
    const double begin_s = now_s();
    for (int32_t i = 0; i < count; ++i) {
      const int32_t code = i < count - 1 ? submit(&requests[i], 0) : run(&requests[i]);
      if (code != 0) return code;
    }
    for (int32_t i = 0; i < count; ++i) {
      const int32_t code = await_done();
      if (code != 0) return code;
    }
    seconds[step] = now_s() - begin_s;
    if (failed != 0) return failed;
  }
  return 0;
}

/* One step is `count` calls of MPI_Allreduce, one after the other. */
int32_t time_mpi(allreduce_function allreduce, const void* const* inputs, void* const* outputs,
                 const int32_t* elements, int32_t count, void* type, void* op, void* communicator,
                 double* seconds, int32_t repetitions) {
  for (int32_t step = 0; step < repetitions; ++step) {
    const double begin_s = now_s();
    for (int32_t i = 0; i < count; ++i) {
      const int code = allreduce(inputs[i], outputs[i], elements[i], type, op, communicator);
      if (code != 0) return code;
    }
    seconds[step] = now_s() - begin_s;
  }
  return 0;
}
