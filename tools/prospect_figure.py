"""Figure 2 of the paper from a run, which shows how people would perceive the outputs of its policy and how
close its training data come to that.

    python -m tools.prospect_figure runs/NAME                # to runs/NAME/figure2.png
    python -m tools.prospect_figure runs/NAME --prompts 512 --to figure.pdf

An outcome is the surprisal of a token, log pi_theta - log pi_ref in nats, under the run's exported model and
its initial one. The horizontal axis is the share of the policy's own tokens with at most a given surprisal,
the vertical axis the share of tokens from another source with at most the same surprisal. So the policy's own
samples are the diagonal, and human perception (equation 4 on those samples) is an inverted S.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from common.errors import require
from common.options import options_of
from config.cli import guarded
from config.load import load_run
from config.schema import Config
from data import views
from data.batches import collate
from data.chat import Renderer, make_renderer
from data.examples import make_examples
from data.sources import load_splits
from data.types import Example, Group, Prompt, Sequence
from data.views import prompts_of
from models.distributed import World, started
from models.policy import Policy
from models.pretrained import load_policy, load_tokenizer
from models.reference import score
from reports.charts import BLUE, GREEN, ORANGE, STYLE
from reports.prospect import Array, decision_weights
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import SamplingSettings

ROWS = 32
"""Number of rows scored at once."""


def cumulative(values: Array, at: Array) -> Array:
    """Return [m], the share of the [n] ``values`` that are at most each element of ``at``."""
    return np.searchsorted(np.sort(values), at, side="right") / len(values)


def perceived(values: Array, at: Array) -> Array:
    """Return [m], the same share as people perceive it: the decision weights (equation 4, medians of Tversky
    and Kahneman) of the [n] ``values``, each equally likely, normalized by their sum."""
    distinct, counts = np.unique(values, return_counts=True)
    weights = decision_weights(distinct, counts / counts.sum())
    shares = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
    return shares[np.searchsorted(distinct, at, side="right")]


def draw(on_policy: Array, offline: dict[str, Array], bounds: tuple[float, float]) -> Figure:
    """Draw the figure from token surprisals in nats, of the policy's own samples and of the training data
    (``better`` and ``worse`` completions). ``bounds``: the range in which humanline clipping keeps a token's
    gradient."""
    at = np.unique(on_policy)
    across = cumulative(on_policy, at)
    everything = np.concatenate(list(offline.values()))
    kept = everything[(everything >= bounds[0]) & (everything <= bounds[1])]
    curves = [
        ("sampled from the policy", across, "--", "black", 1.5),
        ("as people perceive it", perceived(on_policy, at), "-", "black", 2.0),
    ]
    for (kind, values), colour in zip(offline.items(), (BLUE, ORANGE), strict=False):
        curves.append((f"training data, {kind}", cumulative(values, at), "-", colour, 1.5))
    if len(kept):
        label = f"training data in the humanline range, {len(kept) / len(everything):.1%} of its tokens"
        curves.append((label, cumulative(kept, at), ":", GREEN, 2.5))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 4.6), layout="constrained")
        axes = figure.add_subplot(aspect="equal", xlim=(0, 1), ylim=(0, 1))
        for label, up, stroke, colour, width in curves:
            axes.plot([0, *across], [0, *up], stroke, color=colour, linewidth=width, label=label)
        axes.set_xlabel("cumulative probability of a token's surprisal under the policy")
        axes.set_ylabel("cumulative probability, perceived or elsewhere")
        figure.legend(loc="outside upper left", ncols=1)
    return figure


def surprisals(now: Policy, before: Policy, rows: list[Sequence], device: torch.device) -> Array:
    """Return [tokens], log pi_theta - log pi_ref of every completion token in nats."""
    log_ratios = []
    for first in range(0, len(rows), ROWS):
        sequences = collate(rows[first : first + ROWS], device)
        ratio = score(now, sequences) - score(before, sequences)
        log_ratios.append(ratio[sequences.mask].double().cpu().numpy())
    return np.concatenate(log_ratios) if log_ratios else np.zeros(0)


def sampled(
    config: Config, policy: Policy, renderer: Renderer, prompts: list[Prompt], world: World
) -> list[Group]:
    """Return one completion of each prompt, from the policy's own distribution."""
    sampler = EmbeddedSampler(policy, renderer, world, batch_size=ROWS)
    settings = SamplingSettings(1.0, 1.0, config.model.max_length - config.model.max_prompt_length)
    answers = sampler.sample(prompts, 1, settings, config.seed)
    return [
        Group(prompt, (answer[0].completion(renderer),), (1.0,))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def examples_of(groups: Seq[Group], view: Callable[..., Any], renderer: Renderer) -> list[Example]:
    """Return the examples of all groups, tokenised."""
    return [e for of_prompt in make_examples(groups, view, renderer).groups for e in of_prompt]


def of_run(run: Path, prompts: int) -> Figure:
    """Return the figure of a finished run, from the completions of ``prompts`` of its prompts. Raises
    ConfigError, DataError."""
    config = load_run(run, trust_remote_code=True)
    exported = run / "model" / "config.json"
    require(exported.is_file(), "run", run, "is not the folder of a finished run: it has no model/")
    answers = "is a reward model's: it has no distribution of completions"
    require(config.model.head != "reward", "run", run, answers)
    whole: dict[str, Any] = {"use_peft": False, "head": None, "dtype": "float32", "packing": False}
    whole |= {"compile": False, "activation_checkpointing": False}
    with started() as world:
        renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
        train, _ = load_splits(config.data)
        chosen = {prompt.id: prompt for prompt in prompts_of(train.groups)[:prompts]}
        groups = [group for group in train.groups if group.prompt.id in chosen]
        examples = examples_of(groups, views.labelled, renderer)
        now, before = (
            load_policy(replace(config.model, name_or_path=path, **whole), world.device, config.seed)
            for path in (str(run), config.model.name_or_path)
        )
        drawn = sampled(config, now, renderer, list(chosen.values()), world)
        rows = {
            "": [e.rows[0] for e in examples_of(drawn, views.demonstrations, renderer)],
            "better": [e.rows[0] for e in examples if e.label > 0],
            "worse": [e.rows[0] for e in examples if e.label < 0],
        }
        on_policy = surprisals(now, before, rows.pop(""), world.device)
        offline = {kind: surprisals(now, before, some, world.device) for kind, some in rows.items() if some}
        return draw(on_policy, offline, (config.log_epsilon_P, config.log_epsilon_R))


def main() -> None:
    parser = options_of("python -m tools.prospect_figure", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument(
        "--prompts", type=int, default=256, help="prompts of the training data that are sampled and scored"
    )
    parser.add_argument(
        "--to", type=Path, help="the picture (.png, .pdf, .svg); default: figure2.png in the run's folder"
    )
    options = parser.parse_args()

    def write() -> None:
        path = options.to or options.run / "figure2.png"
        of_run(options.run, options.prompts).savefig(path, dpi=160)
        print(path)

    guarded(write)


if __name__ == "__main__":
    main()
