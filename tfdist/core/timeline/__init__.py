"""The timeline of a job: one trace of the activity of all ranks; no TensorFlow.

With `TFDIST_TIMELINE=DIR`, the core of each rank writes its part, `DIR/rank-N.jsonl`,
while the job runs (tfdist_ops/runtime/timeline_writer.h). The last rank to leave merges
the parts into `DIR/trace.json`. `recording` begins and ends a part, `parts` reads the
parts, `clocks` aligns their clocks, `events` converts them to trace events, and
`merging` writes the trace.
"""
