"""An upper bound of a rank's memory, from the shapes of the model and of the batch alone, in milliseconds."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from config.schema import Config
from memory.parts import GIB, Card, Situation, neighbours, own_answers
from models.attention import KEPT_APART, heads_of, packs_rows
from models.logprobs import BUDGET
from models.routing import is_mixture
from models.shapes import layer_work, without_weights
from trainers.assembly import trainer_class

MARGIN = 3
"""Nothing is simulated where the bound fits this many times over."""
BYTES = 44
"""Of a weight in float32, as if one rank held it all: master weights, two slow references, gradients and two
moments (24), the gathered weights and their gradient (8), what is sent and received (8), the update (4)."""
COPIES = 3
"""Numbers that are kept or at work for each one that goes into or comes out of a weight. A layer keeps less
than one, as several weights read the same input; adapters on it keep about as many again."""
SCORES = 4
"""Attention scores of a query and a key that are kept at once where no kernel computes them in slices."""
SLICES = 8
"""Slices of logits that are held at once, float32."""


def bound(
    config: Config, hf_config: PretrainedConfig, longest: int, ranks: int, card: Card | None
) -> tuple[Situation, int, list[str]] | None:
    """Return (all a rank may hold, as if at one time; the model's parameters; notes on what is not counted).

    ``longest``: tokens of the longest example, trained on or evaluated. ``card``: the GPU; None for a CPU. A
    rank is taken to compute the whole batch, in one pass unless ``model.microbatch_tokens`` cuts it. None:
    shapes do not say it of recurrent layers, experts, a base in 4 bits, own code, or an engine on the GPU.
    """
    notes: list[str] = []
    beside = neighbours(config, ranks, card, notes)
    known = hf_config.model_type in KEPT_APART and type(hf_config).__module__.startswith("transformers.")
    known = known and not is_mixture(hf_config) and config.model.quantization is None
    if not known or beside.sampler is not None:
        return None
    model = without_weights(hf_config)
    parameters = sum(p.numel() for p in model.parameters())
    rows = longest * (1 if packs_rows(config.model, hf_config)[0] else trainer_class(config).rows_per_example)
    scores = SCORES * heads_of(hf_config)[0] * longest
    trained = kept_of_a_token(model, hf_config) + scores * hf_config.get_text_config().num_hidden_layers
    evaluated = 2 * layer_work(hf_config) + scores
    step = config.model.batch_size * rows
    step = min(step, config.model.microbatch_tokens or step)
    parts = {
        "weights, gradients and optimizer": BYTES * parameters / GIB,
        "activations": 4 * max(step * trained, config.model.eval_batch_size * rows * evaluated) / GIB,
        "head": 4 * SLICES * BUDGET["cpu" if card is None else "cuda"] / GIB,
        "own answers": own_answers(config, hf_config, ranks, evaluates=True),
    }
    return Situation("at most", parts | beside.always | beside.models), parameters, notes


def kept_of_a_token(model: PreTrainedModel, hf_config: PretrainedConfig) -> int:
    """Return how many numbers the layers hold for a token at most until its backward, but for attention's
    scores. Of the vocabulary's side of a matrix only slices are held."""
    vocabulary = hf_config.get_text_config().vocab_size
    return COPIES * sum(size for p in model.parameters() for size in p.shape if size != vocabulary)
