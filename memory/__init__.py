"""The memory plan: what the fullest rank of a run holds at most, and how a batch is cut so that it fits.

``bound`` says from the shapes alone what a rank cannot exceed. Where that fits several times over, nothing
more is done. Otherwise ``simulate`` takes the run's own steps with tensors that have no values, ``parts``
adds what lies beside them, ``fit`` finds the tokens of a microbatch, and ``plan`` compares the sums with the
card and puts them in words, in a process of its own. ``decisions`` is what a run calls.
"""
