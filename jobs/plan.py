"""Build the data parts of a run from a typed config and refuse bad settings before weights are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from common.imports import import_function
from config.schema import Config
from config.schema_data import DataConfig
from data.batches import Segment
from data.chat import Renderer, vocabulary_fingerprint
from data.examples import SAYS_NOTHING, ExampleGroups, Examples, columns_of, make_examples, token_ids
from data.groups import check_token_ids
from data.quality import ONE_LABEL, advice, check_vocabulary, places, shortened
from data.rows import Loaded, reasons
from data.token_cache import TokenCache
from data.types import Group, Prompt
from data.views import prompt_ids, prompts_of
from jobs.preflight import LoadedData, errors_of_set
from models.distributed import on_main
from models.pretrained import model_config
from rollouts.rounds import usable_prompts
from trainers.basic import BasicTrainer


@dataclass(frozen=True)
class Plan:
    """The data that a run will train on and evaluate with, before anything is computed."""

    train: Segment
    held_out: Segment | None
    loaded: Loaded
    evaluation: Loaded
    examples: Examples
    cuts: dict[str, int]
    """Kind of shortening -> number of times that it was applied to the training rows."""
    prompts: tuple[Prompt, ...] = ()
    """Online: the prompts that are sampled, all that can be rendered."""

    @property
    def steps(self) -> int:
        return self.train.steps


def make_plan(config: Config, trainer: type[BasicTrainer], renderer: Renderer, data: LoadedData) -> Plan:
    """Make the loss's examples of the data and tokenise them.

    With ``data.logprob_range`` the plan has as many groups as will be kept; the initial weights decide later
    which ones (``jobs.initial_scores``). Raises ConfigError when nothing is left to train on.
    """
    check_data(config, data, renderer)
    loaded, evaluation = data.train, data.evaluation
    examples = _tokenised(config, loaded.groups, trainer, renderer)
    cuts = dict(renderer.cuts)
    if examples.count == 0:
        rendered = examples.dropped and SAYS_NOTHING not in examples.dropped  # the kind is not at fault
        fitting = "" if rendered else advice(loaded.groups)
        raise ConfigError(
            "data.path",
            config.data.path,
            f"gives loss={config.loss['name']} no example: {loaded.read} rows read, "
            f"{reasons(examples.dropped) or 'none dropped'}{fitting}",
        )
    check_labels(config, examples.groups)
    expected = examples.groups
    if config.data.logprob_range is not None:
        first, last = places(len(examples.groups), config.data.logprob_range)
        if last <= first:
            raise ConfigError(
                "data.logprob_range",
                config.data.logprob_range,
                f"keeps none of the {len(examples.groups)} groups; widen it",
            )
        expected = examples.groups[: last - first]
    held_out = make_examples(evaluation.groups[: config.n_eval_examples], trainer.view_of(config), renderer)
    for tokenised, source in ((examples, loaded), (held_out, evaluation)):
        check_vocabulary(renderer.tokenizer, token_ids(tokenised.groups), source.origin.partition(";")[0])
    return Plan(
        train=training_segment(config, expected),
        held_out=held_out_segment(config, held_out),
        loaded=loaded,
        evaluation=evaluation,
        examples=examples,
        cuts=cuts,
    )


def first_example(plan: Plan, renderer: Renderer) -> list[str]:
    """Return the decoded first example, special tokens included: its prompt, then its completions.

    Online it is only the first prompt that can be rendered. Without any, []."""
    decode = renderer.tokenizer.decode
    if plan.examples.groups:
        rows = plan.examples.groups[0][0].rows
        return [str(decode(rows[0].prompt_ids)), *(str(decode(row.completion_ids)) for row in rows)]
    prompts = (
        ids for g in plan.loaded.groups for ids in renderer.prompts([g.prompt]) if not isinstance(ids, str)
    )
    return [str(decode(ids)) for ids in itertools.islice(prompts, 1)]


def check_data(config: Config, data: LoadedData, renderer: Renderer) -> None:
    """Raise ConfigError for prompts that are rendered already, and DataError for token ids that are not the
    model's own. Online, the completions of the training data are not used, so their token ids are not
    checked."""
    train, evaluation = data.train.groups, data.evaluation.groups
    check_read(config, evaluation if config.online else itertools.chain(evaluation, train), renderer)
    check_not_rendered(itertools.chain(train, evaluation), renderer)


def check_not_rendered(groups: Iterable[Group], renderer: Renderer) -> None:
    """Raise ConfigError for prompts that the model's own chat template has written already (other templates'
    are read back by ``data.markup``)."""
    heading = "" if renderer.chat is None else renderer.chat.heading
    if renderer.controls.search(heading) is None:  # words alone may end a question
        return
    first = [group.prompt.turns[-1].content for group in itertools.islice(groups, 1000)]
    written = [text for text in first if text.rstrip().endswith(heading)]
    if written:
        raise ConfigError(
            "data.apply_chat_template",
            True,
            f"{len(written)} of the first {len(first)} prompts are already written in the model's chat "
            f"template (the first: {written[0][:80]!r}); type data.apply_chat_template=false",
        )


def check_read(config: Config, read: Iterable[Group], renderer: Renderer) -> None:
    """Raise ConfigError or DataError for completions given as tokens of another model, or sampled at another
    temperature where a correction reads their log-probabilities. ``read``: the groups that will be read."""
    sampled = (group for group in read if any(c.token_ids is not None for c in group.completions))
    first = next(sampled, None)
    if first is None:
        return
    tokenizer, text = renderer.tokenizer, model_config(config.model).get_text_config()
    size = getattr(text, "vocab_size", None) or len(tokenizer)  # some embeddings have more rows than tokens
    fingerprint = vocabulary_fingerprint(tokenizer)
    for group in itertools.chain([first], sampled):
        check_token_ids([group], fingerprint, size)
        check_temperatures(config, [group])


def check_temperatures(config: Config, groups: Iterable[Group]) -> None:
    """Raise ConfigError where behavior log-probabilities would be used that were taken at a temperature other
    than the trainer's."""
    wanted = config.model.logit_temperature
    if config.online or not config.reads_behavior or config.correction.mismatch == "allow":
        return
    for group in groups:
        for completion in group.completions:
            at = completion.behavior_temperature
            if completion.behavior_logprobs is not None and at != wanted:
                raise ConfigError(
                    *config.behavior_setting,
                    f"{group.place}: its behavior_logprobs are at temperature {at:g}, and "
                    f"model.logit_temperature={wanted:g}; set model.logit_temperature={at:g}, or "
                    "correction.mismatch=allow",
                )


def check_labels(config: Config, groups: ExampleGroups) -> None:
    """Raise ConfigError where a loss of labelled answers would train on one label alone."""
    if not config.accepts.labelled_examples or config.data.one_label:
        return
    labels = (example.label > 0 for group in groups for example in group)
    first = next(labels)
    if not any(label != first for label in labels):
        raise ConfigError(
            "data.path",
            config.data.path or config.data.name,
            f"gives loss={config.loss['name']} {ONE_LABEL.format('' if first else 'un')}",
        )


def held_out_segment(config: Config, held_out: Examples) -> Segment | None:
    """Return one epoch of the held-out examples; None without any."""
    count = held_out.count
    return Segment(held_out.groups, config.model.eval_batch_size, count, seed=0) if count else None


def training_segment(config: Config, groups: ExampleGroups) -> Segment:
    """Return the segment of offline training on these groups: all epochs, up to ``n_examples`` examples."""
    count = int(columns_of(groups).sizes.sum())
    units = (config.n_epochs or 10**9) * count
    return Segment(groups, config.model.batch_size, min(units, config.n_examples or units), config.seed)


def _tokenised(
    config: Config, groups: Sequence[Group], trainer: type[BasicTrainer], renderer: Renderer
) -> Examples:
    """Return the tokenised examples of ``groups``.

    Rank 0 makes them on all of the machine's cores, and the other ranks read the files that it wrote. A rank
    that cannot see these files makes its own examples, and so does a dry run, which writes no files."""
    cache = TokenCache(Path(config.cache_dir), write=not config.dry_run)
    examples: list[Examples] = []
    on_main(lambda: examples.append(make_examples(groups, trainer.view_of(config), renderer, cache)))
    return examples[0] if examples else make_examples(groups, trainer.view_of(config), renderer, cache)


# -- further held-out sets that every evaluation measures (``evaluations``) ------------------------


@dataclass(frozen=True)
class EvaluationSet:
    """A loaded evaluation set. The loss is measured on its rows, and its prompts are answered and checked; a
    set may have only one of the two."""

    name: str
    data: DataConfig
    held_out: Segment | None
    checkable: Sequence[Group]
    """Groups whose prompts are answered: they have a reference answer, and ``data`` has a verifier."""
    about: str
    """One sentence on what was read."""


def load_evaluation_sets(
    config: Config,
    trainer: type[BasicTrainer],
    renderer: Renderer,
    trained_on: Sequence[Group],
    loaded: Mapping[str, tuple[DataConfig, Loaded]],
) -> list[EvaluationSet]:
    """Return the sets that ``config.evaluations`` names, in its order.

    ``trained_on``: the training groups; a set should share no prompt with them. ``loaded``: name -> (its
    settings, what was read). Raises ConfigError or DataError that names the set if its rows are tokens of
    another model, or if neither the loss nor a verifier can use any of them.
    """
    seen = prompt_ids(trained_on)
    sets = []
    for name, (data, read) in loaded.items():
        with errors_of_set(name):
            sets.append(_evaluation_set(config, name, data, read, trainer, renderer, seen))
    _check_ranked(config, sets)
    return sets


def _evaluation_set(
    config: Config,
    name: str,
    data: DataConfig,
    loaded: Loaded,
    trainer: type[BasicTrainer],
    renderer: Renderer,
    seen: np.ndarray,
) -> EvaluationSet:
    key = f"evaluations.{name}"
    origin = loaded.origin.partition(";")[0]
    if loaded.groups == []:
        raise ConfigError(key, origin, "has no held-out row; give path or split")
    check_read(config, loaded.groups, renderer)
    examples = make_examples(loaded.groups[: config.n_eval_examples], trainer.view_of(config), renderer)
    check_vocabulary(renderer.tokenizer, token_ids(examples.groups), origin)
    checkable: list[Group] = []
    if data.verifier is not None and config.model.head != "reward":
        import_function(f"{key}.verifier", data.verifier)
        usable, _ = usable_prompts(prompts_of(loaded.groups), renderer)
        ids = {prompt.id for prompt in usable if prompt.reference_answer is not None}
        checkable = [group for group in loaded.groups if group.prompt.id in ids]
    dropped = reasons(examples.dropped)
    if examples.count == 0 and checkable == []:
        raise ConfigError(
            key,
            origin,
            f"gives loss={config.loss['name']} no example: {dropped or 'no group'}{advice(loaded.groups)}; "
            f"and no prompt has a reference answer to check answers by (verifier={data.verifier})",
        )
    shared = len(np.intersect1d(prompt_ids(loaded.groups), seen))
    facts = [
        f"{examples.count} {trainer.counts}" if examples.count else "no row that the loss can use",
        *([f"{len(prompts_of(checkable))} prompts whose answers are checked"] if checkable else []),
        *([f"{len(loaded.dropped)} of {loaded.read} rows dropped"] if loaded.dropped else []),
        *([f"groups dropped: {dropped}"] if dropped else []),
        *([f"{shared} of its prompts are trained on"] if shared else []),
    ]
    return EvaluationSet(
        name,
        data,
        held_out_segment(config, examples),
        checkable,
        about=f"{key}: {', '.join(facts)} ({shortened(origin)})",
    )


def _check_ranked(config: Config, sets: list[EvaluationSet]) -> None:
    """Raise ConfigError where ``keep_best`` names a metric that its evaluation set cannot give."""
    for one in sets:
        absent = ["loss", "reward_margin", "reward_accuracy"] if one.held_out is None else []
        absent += [] if one.checkable else ["accuracy_sampled", "accuracy_greedy"]
        if config.keep_best in [f"eval_{one.name}_{measure}" for measure in absent]:
            raise ConfigError(
                "keep_best", config.keep_best, f"evaluations.{one.name} has no such number: {one.about}"
            )
