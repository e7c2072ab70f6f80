"""vLLM as the sampler of rounds. ``sampler.VllmSampler`` is the one interface; behind it stand the engines of
all nodes (``nodes``), each in a process of its own (``worker``). ``handover`` brings weights to them."""
