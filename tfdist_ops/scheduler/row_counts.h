// Rows: who gets how many rows of the first dimension in a collective whose outputs differ in size
// from its inputs. Pure functions on values; a scalar counts as one row.
#ifndef TFDIST_OPS_SCHEDULER_ROW_COUNTS_H_
#define TFDIST_OPS_SCHEDULER_ROW_COUNTS_H_

#include <cstdint>
#include <vector>

#include "scheduler/operation_plan.h"
#include "scheduler/request_info.h"

namespace tfdist {

// allgather, gather, reduce_scatter, scatter, alltoall: one tensor, and an output that is allocated
// when all ranks have agreed.
bool HasRows(CollectiveKind kind);

// reduce_scatter, scatter, alltoall: the caller may say how many rows go to each rank.
bool TakesSplits(CollectiveKind kind);

int64_t FirstDimension(const std::vector<int64_t>& shape);

// `rows` as even as possible: the first (rows mod size) ranks get one more.
std::vector<int64_t> EvenSplits(int64_t rows, int size);

// `info.splits`, or the default for them.
std::vector<int64_t> SplitsOf(const RequestInfo& info, int size);

// Row counts that the leader announces, from requests that agree (CheckRequestsMatch), by index:
//   allgather, gather: the rows that each rank has
//   reduce_scatter, scatter: the rows that each rank gets
//   alltoall: size * size numbers, what rank i sends to rank j at i * size + j
//   others: nothing
std::vector<int64_t> AgreedRows(const std::vector<RequestInfo>& by_index, int root_index);

// Whether announced rows can be those of this rank's request.
bool RowsFit(const std::vector<int64_t>& rows, const RequestInfo& own, const SetView& set);

// First dimension of the output of this rank. `rows` must fit (RowsFit), here and below.
int64_t OutputRows(const std::vector<int64_t>& rows, const RequestInfo& own, const SetView& set);

// The `rows` that `allocate` of runtime/c_api.h gets: alltoall: what each rank sends to this one;
// others: the announced `rows`, unchanged (AgreedRows).
std::vector<int64_t> SourceRows(const std::vector<int64_t>& rows, const RequestInfo& own,
                                const SetView& set);

}  // namespace tfdist

#endif  // TFDIST_OPS_SCHEDULER_ROW_COUNTS_H_
