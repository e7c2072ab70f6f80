"""Measurements, each a command: ``python -m benchmarks.<name>``. RESULTS.md has what they gave,
docs/performance.md what they are measured against."""
