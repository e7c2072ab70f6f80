"""The paper's comparisons in miniature, on the embedded tasks, from one command, with plan, runs, statistics,
claims and report."""
