/* Messages between ranks through a library outside of the core, as a table of C functions. For MPI,
 * mpi/mpi_messages.c provides the table. The core does not link to such a library.
 *
 * Any thread may call them. Messages from one rank to another arrive in the order in which they
 * were sent, and each goes to the oldest receive that waits for its sender.
 */
#ifndef TFDIST_OPS_TRANSPORT_MESSAGES_H_
#define TFDIST_OPS_TRANSPORT_MESSAGES_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFDIST_MESSAGES_VERSION 1

/* The functions return 0, unless stated otherwise, or -1 after an error that `error` describes. */
typedef struct tfdist_messages {
  int32_t version;  /* TFDIST_MESSAGES_VERSION */
  const char* name; /* of the transport: "mpi" */
  void* context;    /* the first argument of all functions */
  /* Begins to send. The bytes must not change until `test` says that the send has ended. It ends
   * only after the peer has begun to receive. */
  int32_t (*send)(void* context, int32_t peer, const void* data, size_t bytes, uint64_t* request);
  /* Begins to receive one message of at most `bytes`. */
  int32_t (*receive)(void* context, int32_t peer, void* data, size_t bytes, uint64_t* request);
  /* 1: the operation has ended, and the request is no longer valid; `*bytes` is the number of bytes
   * received (`bytes` may be null). 0: it has not ended yet. */
  int32_t (*test)(void* context, uint64_t* request, size_t* bytes);
  /* Asks a receive to end without a message, if none has come; `test` says when it has. */
  int32_t (*cancel)(void* context, uint64_t* request);
  /* The last error of the calling thread, as text; valid until the next call. */
  const char* (*error)(void* context);
} tfdist_messages;

#ifdef __cplusplus
}
#endif

#endif /* TFDIST_OPS_TRANSPORT_MESSAGES_H_ */
