"""The timeline of a job: what each rank did when, in one trace; no TensorFlow.

With `TFDIST_TIMELINE=DIR` the core of each rank writes its part, `DIR/rank-N.jsonl`,
while the job runs (tfdist_ops/runtime/timeline_writer.h); the last rank to leave puts
the parts together in `DIR/trace.json`. `recording` begins and ends a part, `parts`
reads them, `clocks` aligns them, `events` converts them to trace events, `merging`
writes it.
"""
