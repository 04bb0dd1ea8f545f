"""Does sparse attention change the answers? LongBench, needles, RULER-style tasks and BABILong, scored by rule."""
