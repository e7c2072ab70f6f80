"""The paper's comparisons in miniature, on the embedded task, from one command: plan, runs, statistics,
claims, report."""
