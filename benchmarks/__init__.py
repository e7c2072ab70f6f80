"""Measurements, each a command.

A module is run with ``python -m benchmarks.<name>``. RESULTS.md has the results.
"""

from config.removed import refuse_command

refuse_command()
