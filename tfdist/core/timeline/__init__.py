"""The timeline of a job: one trace of the activity of all ranks.

With `TFDIST_TIMELINE=DIR`, the core of each rank writes a *part* of the timeline, the
file `DIR/rank-N.jsonl`, while the job runs (tfdist_ops/runtime/timeline_writer.h). The
last rank to leave merges the parts into `DIR/trace.json`. `recording` begins and ends a
part, `parts` reads the parts, `clocks` aligns the clocks of the ranks, `events`
converts the parts to trace events, and `merging` writes the trace. This package does
not import TensorFlow.
"""
