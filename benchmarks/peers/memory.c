/* How fast this machine adds and copies memory while PROCESSES do it at the same time.
 *
 *     memory BYTES SECONDS PROCESSES
 *
 * Prints for each process, as JSON, the median rate in GB/s of d = a + b and of memcpy, counted in
 * bytes of d. All processes begin each of the two together. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PROCESSES = 64, MOST_SAMPLES = 4096, LEAST_SAMPLES = 5 };

typedef struct shared {
  pthread_barrier_t start;
  double add_gb_s[MOST_PROCESSES];
  double copy_gb_s[MOST_PROCESSES];
} shared;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void* left, const void* right) {
  const double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

__attribute__((noinline)) static void add(float* restrict d, const float* restrict a,
                                          const float* restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) d[i] = a[i] + b[i];
}

__attribute__((noinline)) static void copy(float* restrict d, const float* restrict a,
                                           const float* restrict b, size_t count) {
  (void)b;
  memcpy(d, a, count * sizeof *d);
}

static double median_gb_s(void (*work)(float* restrict, const float* restrict,
                                       const float* restrict, size_t),
                          float* d, const float* a, const float* b, size_t count, double limit_s) {
  static double samples_s[MOST_SAMPLES];
  int found = 0;
  const double begin_s = now_s();
  while (found < LEAST_SAMPLES || (found < MOST_SAMPLES && now_s() - begin_s < limit_s)) {
    const double before_s = now_s();
    work(d, a, b, count);
    samples_s[found++] = now_s() - before_s;
  }
  qsort(samples_s, (size_t)found, sizeof *samples_s, ascending);
  return (double)(count * sizeof *d) / samples_s[found / 2] * 1e-9;
}

static float* filled(size_t count, float value) {
  float* memory = aligned_alloc(4096, (count * sizeof *memory + 4095) / 4096 * 4096);
  if (!memory) exit(1);
  for (size_t i = 0; i < count; ++i) memory[i] = value;
  return memory;
}

static void measure(shared* common, int process, size_t count, double limit_s) {
  float *a = filled(count, 1.0f), *b = filled(count, 2.0f), *d = filled(count, 0.0f);
  pthread_barrier_wait(&common->start);
  common->add_gb_s[process] = median_gb_s(add, d, a, b, count, limit_s);
  pthread_barrier_wait(&common->start);
  common->copy_gb_s[process] = median_gb_s(copy, d, a, b, count, limit_s);
}

static void print(const char* name, const double* rates, int count, const char* end) {
  printf("\"%s\": [", name);
  for (int i = 0; i < count; ++i) printf("%s%.4f", i ? ", " : "", rates[i]);
  printf("]%s", end);
}

int main(int argc, char** argv) {
  const int processes = argc == 4 ? atoi(argv[3]) : 0;
  if (processes < 1 || processes > MOST_PROCESSES) {
    fprintf(stderr, "usage: memory BYTES SECONDS PROCESSES (1 to %d)\n", MOST_PROCESSES);
    return 2;
  }
  const size_t count = strtoull(argv[1], NULL, 10) / sizeof(float);
  shared* common =
      mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (common == MAP_FAILED) return 1;
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&common->start, &attributes, (unsigned)processes);
  for (int process = 0; process < processes; ++process) {
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) {
      measure(common, process, count, atof(argv[2]));
      _exit(0);
    }
  }
  int status = 0, failures = 0;
  while (wait(&status) > 0) failures += status != 0;
  printf("{");
  print("add_gb_s", common->add_gb_s, processes, ", ");
  print("copy_gb_s", common->copy_gb_s, processes, "}\n");
  return failures != 0;
}
