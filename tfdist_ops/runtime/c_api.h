/* The C interface of the core (libtfdist_core.so): all that crosses the library's border.
 *
 * No C++ type, exception or allocation crosses it. Python calls it through ctypes, the TensorFlow
 * rim (tf/) through the table of tfdist_api(). Strings are UTF-8, valid for the call
 * (arguments) or until the next call on the same thread (results).
 */
#ifndef TFDIST_OPS_RUNTIME_C_API_H_
#define TFDIST_OPS_RUNTIME_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFDIST_API_VERSION 9
#define TFDIST_EXPORT __attribute__((visibility("default")))

/* Codes are TensorFlow's: 0 ok, 1 cancelled, 3 invalid argument, 4 deadline exceeded, 9 failed
 * precondition, 10 aborted, 13 internal. `payload` is JSON (ErrorRecord of base/status.h). */
typedef struct tfdist_status {
  int32_t code;
  const char* message;
  const char* payload;
} tfdist_status;

/* One link, connected and authenticated. The core owns the descriptors from tfdist_init on. */
typedef struct tfdist_link {
  int32_t peer;
  const char* transport; /* "shm" or "tcp" */
  const char* host;      /* of the peer, for messages */
  int64_t pid;           /* of the peer, for messages */
  int32_t socket_fd;
  int32_t memory_fd;        /* shm, else -1 */
  int32_t peer_doorbell_fd; /* shm, else -1: the peer's eventfd */
  int32_t initiator;
  int32_t window_fd;  /* shm, else -1: the peer's window */
  const uint8_t* key; /* tcp: session key of the link (transport/frame_mac.h), copied */
  int32_t key_bytes;  /* tcp: 64 for each socket; shm: 0 */
  /* tcp: further sockets to the peer, in the same order at both ends; their keys follow the first
   * one's */
  const int32_t* more_socket_fds;
  int32_t more_sockets;
} tfdist_link;

/* One line of a tuning file (docs/algorithms.md): on so many ranks on each host, up to so many
 * bytes, this algorithm. Lines of the same kind, half and hosts ascend in up_to_bytes. */
typedef struct tfdist_tuning_rule {
  int32_t kind;         /* TFDIST_ALLREDUCE, ... */
  int32_t half;         /* 1: of float16 and bfloat16; 0: of all other types */
  const int32_t* hosts; /* ranks on each host, hosts in the order of their first ranks */
  int32_t host_count;
  int64_t up_to_bytes;
  const char* algorithm;
} tfdist_tuning_rule;

struct tfdist_messages; /* transport/messages.h */

typedef struct tfdist_world {
  int32_t rank, size;
  int32_t local_rank, local_size, cross_rank, cross_size;
  uint32_t generation;
  const char* host;        /* of this rank, for messages */
  int32_t own_doorbell_fd; /* eventfd, nonblocking; the core owns it from tfdist_init on */
  /* Every peer once; above TFDIST_MESH_RANKS the neighbors of the overlay (transport/routes.h). */
  const tfdist_link* links;
  int32_t link_count;
  const int32_t* host_of;   /* `size` of them: index of each rank's host, hosts numbered by their
                               lowest rank, equal on all ranks; may be null when size is 1 */
  const char* const* hosts; /* by rank, `size` of them, for messages; null: those of the links */
  const int64_t* pids;      /* the same */
  int32_t wanted_fd;        /* eventfd, written when a link is wanted; not owned; -1: none */
  int32_t own_window_fd;    /* of tfdist_window_bytes for each shm link; not owned; -1: none */
  const tfdist_tuning_rule* tuning; /* equal on all ranks */
  int32_t tuning_count;
  const char* tuning_hash; /* shown by tfdist_counters_json; null: none */
  int32_t sharing;         /* ranks of this host, this one included, that may run on a processor of
                              this rank; 0: not known, then local_size */
} tfdist_world;

/* ---- start, end and state of the world ---- */
/* Starts the engine. Size 1 needs no links. Returns 0, or a code with tfdist_last_error filled. */
TFDIST_EXPORT int32_t tfdist_init(const tfdist_world* world);
/* Tells the peers that this rank leaves, waits at most `timeout_s` until they know, ends the
 * threads. Pending operations end with ABORTED. Safe to call twice, and at exit. */
TFDIST_EXPORT void tfdist_shutdown(double timeout_s);
TFDIST_EXPORT int32_t tfdist_is_initialized(void);
/* Above TFDIST_MESH_RANKS: the ranks to which a link is wanted since the last call, at most
 * `capacity`; wanted_fd has been written to. The lower rank of the two accepts, the higher one
 * connects. Returns how many. */
TFDIST_EXPORT int32_t tfdist_take_wanted(int32_t* ranks, int32_t capacity);
/* Hands over a link that was wanted; the core owns its descriptors, also when it returns an error.
 * A link to a rank that is lost, or that already has one, is closed. */
TFDIST_EXPORT int32_t tfdist_add_link(const tfdist_link* link);
/* From now on in this process, data between ranks without shared memory goes through `messages`,
 * which must live as long as the process; TCP carries the rest. Call it before tfdist_init. */
TFDIST_EXPORT int32_t tfdist_use_messages(const struct tfdist_messages* messages);
/* The calling thread's last error. */
TFDIST_EXPORT tfdist_status tfdist_last_error(void);
/* rank, size, local_rank, local_size, cross_rank, cross_size; -1 each when not initialized. */
TFDIST_EXPORT void tfdist_topology(int32_t out[6]);
/* Ends the world's work: every pending and later operation of every rank fails with ABORTED, with
 * `cause` in its message and `detail` in its record. For a rank whose own program failed.
 * `culprit`: the rank that is named; -1: this one. No effect when not initialized. */
TFDIST_EXPORT void tfdist_abort(const char* cause, const char* detail, int32_t culprit);
/* The error that ended the engine's work (code 0: none). After one, weights may be torn. */
TFDIST_EXPORT tfdist_status tfdist_failure(void);
/* Number of complete steps (all buckets of a group done on this rank, in a row) before a failure.
 */
TFDIST_EXPORT int64_t tfdist_good_steps(void);

/* For a program that repeats a step after a rank was lost. Holds for this process and all its
 * worlds; off at the start. While it is on, an allreduce that is ended by the failure of its world,
 * or submitted after it, ends well and is counted, with this rank's inputs as its result. Failure
 * means that the code of tfdist_failure is ABORTED: a rank failed, was excluded, has left, or there
 * is no majority. The program must not use such results: when tfdist_take_hidden is not 0, it
 * returns to an earlier state. An allreduce in place leaves what the buffer holds, which may be a
 * part of the sum. All other operations and errors are reported as ever; so is the end of an
 * allreduce by tfdist_shutdown of this rank. Records, timeline and tfdist_good_steps show a hidden
 * failure as a failure. */
TFDIST_EXPORT void tfdist_hide_failures(int32_t on);
/* How many allreduces have ended so since the last call, in this process. Each is counted before
 * its `done` is called. */
TFDIST_EXPORT int64_t tfdist_take_hidden(void);

/* ---- configuration: base/config.h ---- */
TFDIST_EXPORT const char* tfdist_config_json(
    void); /* re-reads the environment; null: tfdist_last_error */
TFDIST_EXPORT int64_t tfdist_shm_bytes(void); /* size of the memfd behind one shm link; <0: error */
/* Size of a rank's window for each of the other ranks of its host; <0: error. */
TFDIST_EXPORT int64_t tfdist_window_bytes(void);
TFDIST_EXPORT const char* tfdist_build_info(
    void); /* JSON: version, compiler, algorithms, transports */

/* ---- operations ---- */
enum {
  TFDIST_ALLREDUCE = 0,
  TFDIST_ALLGATHER = 1,
  TFDIST_BROADCAST = 2,
  TFDIST_BARRIER = 3,
  TFDIST_REDUCE_SCATTER = 5,
  TFDIST_REDUCE = 6,
  TFDIST_GATHER = 7,
  TFDIST_SCATTER = 8,
  TFDIST_ALLTOALL = 9,
  TFDIST_SENDRECV = 10
};

/* Whether an allreduce takes `op` of `dtype`: 0, or a code with tfdist_last_error filled, in the
 * words of CheckReducible (base/reducible.h). Needs no tfdist_init. */
TFDIST_EXPORT int32_t tfdist_check_reducible(int32_t dtype, int32_t op);

/* The algorithm of an operation of this world on `bytes` of this type, fused with nothing:
 * `wanted` by name, null or "" for the configured one. `bytes`: of all tensors of the request; of
 * allgather, gather, reduce_scatter, scatter and alltoall: of the rows of all ranks (alltoall: all
 * that is sent). Null: tfdist_last_error; also where `wanted` does not support the case. */
TFDIST_EXPORT const char* tfdist_algorithm(int32_t kind, int32_t dtype, int64_t bytes,
                                           const char* wanted);

typedef struct tfdist_tensor {
  const void* input;
  void* output;        /* null where `allocate` gives it */
  int32_t rank;        /* number of dimensions */
  const int64_t* dims; /* `rank` of them, of the input */
  uint64_t hint;       /* see collective/slicing.h; index in the gradient list, or 0 */
} tfdist_tensor;

typedef struct tfdist_request {
  int32_t kind;     /* TFDIST_ALLREDUCE, ... */
  const char* name; /* identifies the operation across ranks; unique among those in flight,
                       a second one of the same name waits for the first */
  int32_t dtype;    /* of base/dtype.h = TensorFlow's number */
  int32_t op;       /* ReduceOp of base/dtype.h: 0 sum, 1 average, 2 min, 3 max, 4 product,
                       5 logical_and, 6 logical_or, 7 logical_xor, 8 adasum */
  int32_t root;     /* broadcast, reduce, gather, scatter; sendrecv: the sender; all
                       ranks here are numbers in the world, also for a process set */
  int32_t peer;     /* sendrecv: the receiver */
  /* reduce_scatter, scatter (of the root), alltoall: rows of the first dimension for each rank;
   * count 0: as even as possible (alltoall: equal). */
  const int64_t* splits;
  int32_t split_count;
  double prescale, postscale;
  double timeout_s; /* <= 0: TFDIST_TIMEOUT_S */
  /* allreduce outside of a group, 0 or 1: the same request will come again and again under this
   * name, for example from one place in a graph. Once all ranks have said so and agreed several
   * times, and few such names take turns, the next requests under it start without agreement. A
   * rank whose request then differs ends the work of all, where before it would have ended this
   * operation alone. */
  int32_t repeats;
  const char* group;    /* id from tfdist_register_group when this is a bucket of it, else null */
  int32_t bucket;       /* index of the bucket, and */
  int32_t bucket_count; /* how many buckets the group has */
  uint32_t process_set; /* from tfdist_process_set_add; 0 = all ranks */
  const tfdist_tensor* tensors;
  int32_t tensor_count;
  void* context; /* given back to the callbacks */
  /* Called exactly once, perhaps before tfdist_submit returns: on the core's completion thread, or
   * on the calling thread of tfdist_submit_and_help and tfdist_run, as described there. */
  void (*done)(void* context, const tfdist_status* status);
  /* allgather, gather, reduce_scatter, scatter, alltoall, null for others: called at most once, on
   * the completion thread, before any byte moves. `output_rows`: first dimension of the output (a
   * scalar counts as one row). Where it comes from: rows[i] = what member i of `size` contributes
   * (allgather, gather), what it gets (reduce_scatter, scatter), what it sends to this rank
   * (alltoall). Returns the memory, or null (the operation then fails everywhere). */
  void* (*allocate)(void* context, const int64_t* rows, int32_t size, int64_t output_rows);
  /* Name of the algorithm, the same on all ranks ("auto", "ring", ...); null: the configured one.
   * Where it does not support the case (a torus of five ranks), auto decides. */
  const char* algorithm;
} tfdist_request;

/* Hands over one operation; returns at once. 0: `done` will come. Otherwise a code, with
 * tfdist_last_error filled; `done` will not come. `*id` (may be null) names it for tfdist_cancel;
 * it is written before `done` can run. Inputs must stay valid and unchanged, outputs untouched,
 * until `done`. Copies all else. */
TFDIST_EXPORT int32_t tfdist_submit(const tfdist_request* request, uint64_t* id);
/* As tfdist_submit, but the calling thread drives the operation itself while it makes progress, and
 * for at most `patience_us` without any: a short one then needs no switch of threads. If it ends
 * meanwhile, `done` runs here, before this returns; else it comes as after tfdist_submit. While
 * another thread does the same, this operation is left to that thread. Must not be called from
 * inside a callback. */
TFDIST_EXPORT int32_t tfdist_submit_and_help(const tfdist_request* request, uint64_t* id,
                                             int64_t patience_us);
/* As tfdist_submit_and_help, and blocks until `done` has run, on the calling thread. */
TFDIST_EXPORT int32_t tfdist_run(const tfdist_request* request);
/* The step that the operation belongs to failed on this rank: ends it with CANCELLED (through
 * `done`, soon) and tells the peers. Unknown or finished ids are ignored. */
TFDIST_EXPORT void tfdist_cancel(uint64_t id);

/* Agrees on a process set, `ranks`: ascending, each once; blocks until all ranks of the world, also
 * those outside of it, have called with the same list, or the deadline. The same list gives the
 * same id. Ids of another generation of the world are not known to this one. */
TFDIST_EXPORT int32_t tfdist_process_set_add(const int32_t* ranks, int32_t count, double timeout_s,
                                             uint32_t* id);
/* Likewise; FAILED_PRECONDITION on every rank while any has an operation of the set in flight. */
TFDIST_EXPORT int32_t tfdist_process_set_remove(uint32_t id, double timeout_s);

/* Agrees on a group of gradients of a process set; blocks until all its ranks have registered one
 * with the same description, or the deadline. `description`: one line a variable ("path dtype
 * [d0,d1]"), then one line of options ("op=average ..."), equal on all ranks; `present`: a byte for
 * each variable, 1 where this rank has a gradient. On success `present` holds 1 where any rank has
 * one, and `id` (char[33]) the group's id. A description registered before returns at once with the
 * earlier result. A gradient that this rank has now but none had then is FAILED_PRECONDITION. */
TFDIST_EXPORT int32_t tfdist_register_group(uint32_t process_set, const char* description,
                                            uint8_t* present, int32_t count, double timeout_s,
                                            char* id);

/* Looks up a group without asking other ranks: 1 when it was registered, with `present` and `id` as
 * above; else 0. The same on all ranks, also on one that had joined meanwhile. */
TFDIST_EXPORT int32_t tfdist_find_group(uint32_t process_set, const char* description,
                                        uint8_t* present, int32_t count, char* id);

/* This rank has no more data: blocks until all ranks of the process set have joined. Meanwhile it
 * takes part in what the others call: the identity in reductions (an average is over the ranks that
 * call it), no rows in what has rows; a broadcast or scatter whose root has joined is
 * FAILED_PRECONDITION on every rank. `timeout_s` (<= 0: TFDIST_TIMEOUT_S) is how long the others
 * may call nothing. `*complete`: how many ranks have called every collective themselves; `*latest`:
 * the lowest of them. */
TFDIST_EXPORT int32_t tfdist_join(uint32_t process_set, double timeout_s, int32_t* latest,
                                  int32_t* complete);

/* ---- ranks that wait for each other ---- */
/* For how many microseconds nothing has moved on this rank while operations of it wait; 0: none
 * waits, or there is no world. `*moves`: how often something had moved before. */
TFDIST_EXPORT int64_t tfdist_still_us(uint64_t* moves);
/* All threads of the program that call collectives are inside such a call, at `place` (in the
 * user's words), and were when tfdist_still_us gave `moves`. `how`: 0: in calls that last until
 * their operation ends; 1: in functions that may still submit other operations; 2: in either, for
 * so long that no thread is expected to submit more. If ranks that report this wait for each other
 * so that none of them can go on, all of them end with FAILED_PRECONDITION. No effect when
 * something has moved since. */
TFDIST_EXPORT void tfdist_report_blocked(uint64_t moves, int32_t how, const char* place);

/* ---- observation ---- */
/* One finished operation, from the ring buffer of the last 4096. Times: monotonic microseconds;
 * 0 = never got there. */
typedef struct tfdist_record {
  char name[96];
  int64_t bytes;
  int64_t submitted_us;
  int64_t agreed_us;
  int64_t done_us;
  int32_t code;
  int32_t kind;
} tfdist_record;
/* Copies up to `capacity` records, oldest first, and forgets them. Returns how many. None are kept
 * before the first call in this process, for which there need be no world. */
TFDIST_EXPORT int32_t tfdist_take_records(tfdist_record* out, int32_t capacity);
/* Writes what happens on this rank from now on to FOLDER/rank-N.jsonl, until tfdist_shutdown: lines
 * of JSON, the first of which is `head` (tfdist/core/timeline/ reads them). At half of
 * TFDIST_TIMELINE_BYTES the file is renamed to its name with .old, and a new one begins: both
 * together are no longer than that. Returns 0, or a code with tfdist_last_error filled when the
 * file can't be written. */
TFDIST_EXPORT int32_t tfdist_timeline_start(const char* folder, const char* head);
/* Also sends the whole timeline to rank 0, which writes it into its own folder: for a rank that
 * does not see that folder. */
TFDIST_EXPORT void tfdist_timeline_forward(void);
/* Something that this rank's program did, for the timeline; monotonic microseconds. No effect
 * without one. */
TFDIST_EXPORT void tfdist_timeline_span(const char* name, int64_t begin_us, int64_t end_us);
/* JSON: counters of the engine: "tickets" (announced), "finished", "good_steps",
 * "negotiation_messages" (sent), "predicted" (operations that started without agreement),
 * "deviations" (operations that needed agreement although it was given before), "probes" (questions
 * sent about predicted operations that stood still), "tuning" (hash of the tuning file in force,
 * "" without), "waited_us" (for other ranks to be ready), "waited_for_us" (the same, by the rank
 * that was last), "links" (bytes and frames sent), "blocked_us" (in which this rank's program could
 * only wait for its operations: runtime/blocked_time.h), "gate_messages" (sent by
 * scheduler/step_gate.h), "crowded" (whether more ranks share this rank's processors than there are
 * of them), "overlay" (its own counters, where there is an overlay). */
TFDIST_EXPORT const char* tfdist_counters_json(void);

/* ---- the table for the TensorFlow rim ---- */
typedef struct tfdist_api_table {
  int32_t version;
  int32_t (*submit)(const tfdist_request*, uint64_t*);
  void (*cancel)(uint64_t);
  tfdist_status (*last_error)(void);
  void (*topology)(int32_t out[6]);
  int32_t (*submit_and_help)(const tfdist_request*, uint64_t*, int64_t);
} tfdist_api_table;
/* Null when the core does not speak `version`. */
TFDIST_EXPORT const tfdist_api_table* tfdist_api(int32_t version);

#ifdef __cplusplus
}
#endif

#endif /* TFDIST_OPS_RUNTIME_C_API_H_ */
