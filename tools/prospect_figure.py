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

from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from common.errors import require
from common.options import options_of
from config.cli import guarded
from config.load import load_run
from config.schema import Config
from config.schema_model import ModelConfig
from data import views
from data.batches import collate
from data.chat import Renderer, make_renderer
from data.examples import make_examples
from data.sources import load_splits
from data.types import Group, Prompt, Sequence
from data.views import prompts_of
from models.distributed import World, start, stop
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
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 4.6), layout="constrained")
        axes = figure.add_subplot(aspect="equal")
        axes.plot([0, *across], [0, *across], "--", color="black", label="sampled from the policy")
        axes.plot(
            [0, *across],
            [0, *perceived(on_policy, at)],
            color="black",
            linewidth=2,
            label="as people perceive it",
        )
        for (kind, values), colour in zip(offline.items(), (BLUE, ORANGE), strict=False):
            axes.plot(
                [0, *across], [0, *cumulative(values, at)], color=colour, label=f"training data, {kind}"
            )
        if len(kept):
            label = f"training data in the humanline range, {len(kept) / len(everything):.1%} of its tokens"
            axes.plot([0, *across], [0, *cumulative(kept, at)], ":", color=GREEN, linewidth=2.5, label=label)
        axes.set(
            xlim=(0, 1),
            ylim=(0, 1),
            xlabel="cumulative probability of a token's surprisal under the policy",
            ylabel="cumulative probability, perceived or elsewhere",
        )
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
) -> list[Sequence]:
    """Return one tokenised completion of each prompt, from the policy's own distribution."""
    sampler = EmbeddedSampler(policy, renderer, world, batch_size=ROWS)
    settings = SamplingSettings(1.0, 1.0, config.model.max_length - config.model.max_prompt_length)
    answers = sampler.sample(prompts, 1, settings, config.seed)
    groups = [
        Group(prompt, (answer[0].completion(renderer),), (1.0,))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return [
        example.rows[0]
        for of_prompt in make_examples(groups, views.demonstrations, renderer).groups
        for example in of_prompt
    ]


def of_run(run: Path, prompts: int) -> Figure:
    """Return the figure of a finished run, from the completions of ``prompts`` of its prompts. Raises
    ConfigError, DataError."""
    config = load_run(run, trust_remote_code=True)
    exported = run / "model" / "config.json"
    require(exported.is_file(), "run", run, "is not the folder of a finished run: it has no model/")
    require(
        config.model.head != "reward",
        "run",
        run,
        "is a reward model's: it has no distribution of completions",
    )
    world = start()
    try:
        renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
        train, _ = load_splits(config.data)
        chosen = {prompt.id: prompt for prompt in prompts_of(train.groups)[:prompts]}
        groups = [group for group in train.groups if group.prompt.id in chosen]
        examples = [
            e for of_prompt in make_examples(groups, views.labelled, renderer).groups for e in of_prompt
        ]
        now, before = (
            load_policy(replace(plain(config.model), name_or_path=path), world.device, config.seed)
            for path in (str(run), config.model.name_or_path)
        )
        own = surprisals(
            now, before, sampled(config, now, renderer, list(chosen.values()), world), world.device
        )
        sides = {
            kind: [e.rows[0] for e in examples if e.label * sign > 0]
            for kind, sign in (("better", 1), ("worse", -1))
        }
        offline = {kind: surprisals(now, before, rows, world.device) for kind, rows in sides.items() if rows}
        return draw(own, offline, (config.log_epsilon_P, config.log_epsilon_R))
    finally:
        stop()


def plain(model: ModelConfig) -> ModelConfig:
    """Return the settings that read a run's model back whole: merged, in float32, without features that only
    training needs."""
    return replace(
        model,
        use_peft=False,
        head=None,
        dtype="float32",
        packing=False,
        compile=False,
        activation_checkpointing=False,
    )


def main() -> None:
    parser = options_of("python -m tools.prospect_figure", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument(
        "--prompts", type=int, default=256, help="prompts of the training data that are sampled and scored"
    )
    parser.add_argument(
        "--to", type=Path, help="the picture (.png, .pdf, .svg); default: figure2.png in the run's folder"
    )
    given = parser.parse_args()

    def write() -> None:
        path = given.to or given.run / "figure2.png"
        of_run(given.run, given.prompts).savefig(path, dpi=160)
        print(path)

    guarded(write)


if __name__ == "__main__":
    main()
