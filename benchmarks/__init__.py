"""Measurements, each a command, ``python -m benchmarks.<name>``. RESULTS.md has their results,
docs/performance.md the targets that they are compared with."""
