"""Piecework beside other engines: the same model, prompts, threads and hour. See docs/benchmarks.md."""
