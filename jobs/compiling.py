"""The trial that decides ``model.compile=auto``: layers are compiled if the policy then agrees with itself.

The reference's scores are computed without a gradient, the policy's with one. A compiler makes two programs
of them, which may round differently. Then log-ratios are not exactly 0 before the first step, as they are
with eager layers, and clipping acts on rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from config.schema import Config
from config.schema_model import AUTO
from data.batches import Segment
from data.types import Example, Sequence, Sequences
from models.distributed import gather_objects, reshard
from models.policy import Policy, causal_lm, set_up_layers
from trainers.basic import BasicTrainer


def compiled_where_exact(trainer: BasicTrainer, train: Segment, say: Callable[[str], None]) -> Config:
    """Decide ``model.compile=auto``, say what is decided, and return the settings with it. A collective.

    On GPUs the layers are compiled and tried on a microbatch of the first batch; elsewhere compiling does not
    pay."""
    config, policy = trainer.config, cast(Policy, trainer.policy)
    if config.model.compile != AUTO:
        return config
    why = "a CPU gains nothing by it"
    if config.model.router_aux_loss_coef is not None:
        why = "as compiled ones do not tell how they route"
    elif trainer.world.device.type == "cuda":
        vocabulary = causal_lm(policy.model).config.get_text_config().vocab_size
        batch = [drawn(example, i, vocabulary) for i, example in enumerate(train.batch(0))]
        set_up_layers(policy, config.model.activation_checkpointing, True)
        disagreements = gather_objects(disagreement(policy, trainer.microbatches(batch)[0].sequences))
        why = next(filter(None, disagreements), "")
        if why:
            set_up_layers(policy, config.model.activation_checkpointing, False)
    say(f"model.compile=auto: layers are {f'eager, {why}' if why else 'compiled, and agree with themselves'}")
    return replace(config, model=replace(config.model, compile=not why))


def drawn(example: Example, seed: int, vocabulary: int) -> Example:
    """Return a placeholder of a future round with tokens at random; a real example is returned unchanged."""
    if example.prompt_id:
        return example
    rng = np.random.default_rng(seed)
    rows = tuple(
        Sequence(
            *(rng.integers(0, vocabulary, len(ids), np.int32) for ids in (r.prompt_ids, r.completion_ids))
        )
        for r in example.rows
    )
    return replace(example, prompt_id=f"p{seed}", rows=rows)


def disagreement(policy: Policy, sequences: Sequences) -> str:
    """Return how the policy's scores with a gradient differ from those without, or fail; "" if they are equal
    to the bit. The backward is tried too, and its gradients are dropped."""
    try:
        with torch.no_grad():
            scores = policy(sequences)
        reshard(policy)
        trained = policy(sequences)
        trained.sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises
        return f"as compiled ones fail ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    policy.zero_grad()
    worst = float((trained.detach() - scores).abs().max())
    return "" if worst == 0 else f"as compiled ones would score and train {worst:.2g} nats apart"
