"""From a typed config to the parts of a run. What can be refused is refused in here, before any weights are
loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from common.errors import ConfigError, require
from config.schema import Config
from data.batches import Segment
from data.chat import Renderer, vocabulary_fingerprint
from data.example_table import ExampleGroups, sizes_of
from data.examples import Examples, make_examples
from data.group_store import Groups
from data.groups import check_token_ids
from data.kinds import advice
from data.selection import places
from data.sources import Loaded, load_splits
from data.token_cache import TokenCache
from data.types import Example, Group
from data.vocabulary import check_vocabulary
from jobs.lengths import examples_of, stretches
from models.distributed import on_main
from models.pretrained import model_config
from trainers.basic import BasicTrainer


@dataclass(frozen=True)
class Plan:
    """What will be trained on and evaluated with, before anything is computed."""

    train: Segment
    held_out: Segment | None
    loaded: Loaded
    evaluation: Loaded
    examples: Examples
    cuts: dict[str, int]
    """What was shortened of the training rows, and how often."""
    ends: tuple[int, ...] = ()
    """Of a run that was made longer: the examples at the end of each stretch (``jobs.lengths``)."""

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    @cached_property
    def parts(self) -> tuple[Segment, ...]:
        """What is trained on, one stretch after the other."""
        return stretches(self.train, self.ends)

    def batch(self, step: int) -> list[Example]:
        """The global batch of a step of the run."""
        for part in self.parts:
            if step < part.steps:
                return part.batch(step)
            step -= part.steps
        raise IndexError(step)


def make_plan(config: Config, trainer: type[BasicTrainer], renderer: Renderer) -> Plan:
    """Load, view and tokenise the data. Raises ConfigError when nothing is left to train on.

    With ``data.logprob_range`` the plan trains on as many groups as will be kept; which ones only the initial
    weights can tell (``jobs.likelihood``).
    """
    loaded, evaluation = load_data(config, renderer)
    examples = _tokenised(config, loaded.groups, trainer, renderer)
    cuts = dict(renderer.cuts)
    if examples.count == 0:
        raise ConfigError(
            "data.path",
            config.data.path,
            f"gives loss={config.loss['name']} no example: {loaded.read} rows read, "
            f"{examples.dropped or 'none'} dropped{advice(loaded.groups)}",
        )
    expected = examples.groups
    if config.data.logprob_range is not None:
        first, last = places(len(examples.groups), config.data.logprob_range)
        require(
            last > first,
            "data.logprob_range",
            config.data.logprob_range,
            f"keeps none of the {len(examples.groups)} groups; widen it",
        )
        expected = examples.groups[: last - first]
    held_out = make_examples(evaluation.groups[: config.n_eval_examples], trainer.view_of(config), renderer)
    for made, of in ((examples, loaded), (held_out, evaluation)):
        check_vocabulary(renderer.tokenizer, token_ids(made), of.origin.partition(";")[0])
    return Plan(
        train=training_segment(config, expected),
        held_out=Segment(held_out.groups, config.model.eval_batch_size, held_out.count, seed=0)
        if held_out.count
        else None,
        loaded=loaded,
        evaluation=evaluation,
        examples=examples,
        cuts=cuts,
    )


def without_texts(plan: Plan) -> Plan:
    """The plan without the groups that were read, which take a file where they are many: offline nothing
    needs their texts once they are token ids and were reported on."""
    return replace(plan, loaded=replace(plan.loaded, groups=()))


def first_example(plan: Plan, renderer: Renderer) -> list[str]:
    """The first example as texts of its tokens, special ones included: its prompt, then its completions; of
    online training the first prompt alone. Nothing where there is none."""
    decode = renderer.tokenizer.decode
    if plan.examples.groups:
        rows = plan.examples.groups[0][0].rows
        return [str(decode(rows[0].prompt_ids)), *(str(decode(row.completion_ids)) for row in rows)]
    prompts = (
        ids for g in plan.loaded.groups for ids in renderer.prompts([g.prompt]) if not isinstance(ids, str)
    )
    return [str(decode(ids)) for ids in itertools.islice(prompts, 1)]


def token_ids(examples: Examples) -> Iterator[np.ndarray]:
    """The token ids of every row: of its prompt, of its completion."""
    for group in examples.groups:
        for example in group:
            for row in example.rows:
                yield from (row.prompt_ids, row.completion_ids)


def load_data(config: Config, renderer: Renderer) -> tuple[Loaded, Loaded]:
    """Training and evaluation data. Raises ConfigError, and DataError for token ids that are not the model's
    own where they would be read: online nobody reads those of the training data."""
    loaded, evaluation = load_splits(config.data)
    if config.loss.get("advantage") == "tokens" and not config.online:
        check_token_rewards(loaded.groups)
    read = evaluation.groups if config.online else itertools.chain(evaluation.groups, loaded.groups)
    check_read(config, read, renderer)
    return loaded, evaluation


def check_read(config: Config, read: Iterable[Group], renderer: Renderer) -> None:
    """Raise ConfigError, or DataError, for completions given as tokens of another model or at another
    temperature, where they would be read."""
    sampled = (group for group in read if any(c.token_ids is not None for c in group.completions))
    first = next(sampled, None)
    if first is None:
        return
    tokenizer, text = renderer.tokenizer, model_config(config.model).get_text_config()
    size = getattr(text, "vocab_size", None) or len(tokenizer)  # some have more rows than tokens
    fingerprint = vocabulary_fingerprint(tokenizer)
    for group in itertools.chain([first], sampled):
        check_token_ids([group], fingerprint, size)
        check_temperatures(config, [group])


def check_token_rewards(groups: Iterable[Group]) -> None:
    """Raise ConfigError where a completion has no reward for each token."""
    for group in groups:
        missing = sum(completion.token_rewards is None for completion in group.completions)
        where = group.place or f"prompt {group.prompt.id}"
        require(
            missing == 0,
            "loss.advantage",
            "tokens",
            f"takes each token's advantage from token_rewards, which {missing} of {len(group.completions)} "
            f"completions do not have ({where}); give all of them some, or choose another advantage",
        )


def check_temperatures(config: Config, groups: Iterable[Group]) -> None:
    """Raise ConfigError where a correction would divide by log-probabilities of another temperature than the
    trainer's."""
    wanted, correction = config.model.logit_temperature, config.correction
    if config.online or not correction.reads_behavior or correction.mismatch == "allow":
        return
    for group in groups:
        for completion in group.completions:
            at = completion.behavior_temperature
            require(
                completion.behavior_logprobs is None or at == wanted,
                "correction",
                correction.name,
                f"{group.place}: its behavior_logprobs are at temperature {at:g}, and "
                f"model.logit_temperature={wanted:g}; set model.logit_temperature={at:g}, or "
                "correction.mismatch=allow",
            )


def training_segment(config: Config, groups: ExampleGroups) -> Segment:
    """Offline training on these groups: all epochs of it, as far as ``n_examples`` goes."""
    count = int(sizes_of(groups).sum())
    units = examples_of(config.n_epochs, config.n_examples, count)
    return Segment(groups, config.model.batch_size, units, config.seed)


def _tokenised(config: Config, groups: Groups, trainer: type[BasicTrainer], renderer: Renderer) -> Examples:
    """The examples of ``groups``. Rank 0 makes them, on all of the machine's cores, and the others read what
    it wrote; a rank that does not see its files, or a dry run, which writes none, makes its own."""
    cache = TokenCache(Path(config.cache_dir), write=not config.dry_run)
    made: list[Examples] = []
    on_main(lambda: made.append(make_examples(groups, trainer.view_of(config), renderer, cache)))
    return made[0] if made else make_examples(groups, trainer.view_of(config), renderer, cache)
