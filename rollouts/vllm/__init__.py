"""vLLM as the sampler of rounds. ``sampler.VllmSampler`` is the one interface; behind it stands an engine in
a process of the run (``worker``) or a server anywhere (``server``). ``transfer`` brings weights to them."""
