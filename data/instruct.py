"""The embedded instructions: prompts with many good answers, offline data written by other authors, and
labels from a judge that errs (``data.stories`` has the language).

As in the paper's main setting, the training data are written by several authors, none of them the model, and
labelled by one judge. The reported reward is measured by another judge, which does not err.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

from common.errors import ConfigError, DataError, require
from config.files import section
from config.schema_data import DataConfig
from config.schema_instruct import StoriesConfig
from data.groups import read_groups
from data.rows import Loaded
from data.stories import Language, error, read_language
from data.types import Completion, Group, Prompt, Turn
from data.views import best_and_worst

HELD_OUT = 768
"""prompts that are never trained on, half of them for validation, half for test"""

HALVES = ("validation", "test")


# Prompts


@cache
def prompts(language: Language, split: str, number: int | None = None) -> tuple[Prompt, ...]:
    """Return the first ``number`` prompts (None: all) of a split, in a fixed order that differs from that of
    the words. The split is ``train``, ``validation``, ``test``, or ``eval``, which is validation and test
    together. Train, validation and test share no prompt."""
    order = list(range(language.prompts))
    random.Random("prompts").shuffle(order)
    held_out = min(HELD_OUT, language.prompts // 4)
    places = {
        "train": order[held_out:],
        "eval": order[:held_out],
        "validation": order[: held_out // 2],
        "test": order[held_out // 2 : held_out],
    }[split]
    return tuple(story_prompt(language.prompt(place)) for place in places[:number])


def story_prompt(text: str) -> Prompt:
    """Return the prompt of a text. The text, which says what is asked for, is also the reference."""
    return Prompt((Turn("user", text),), reference_answer=text)


def text_of(prompt: Prompt) -> str:
    """Return what a prompt of this task asks for, independent of earlier turns."""
    return prompt.turns[-1].content


# What answers are worth


def grader(language: Callable[[], Language]) -> Callable[..., list[float | None]]:
    """Return the verifier of a language. It gives the true reward divided by its maximum, in [0, 1]; None if
    the reference is not a prompt of the language."""

    def grade(completions: list[str], references: list[str | None]) -> list[float | None]:
        tongue = language()
        most = sum(tongue.reward.values())
        return [
            None if (points := judged(tongue, asked, story)) is None else points / most
            for story, asked in zip(completions, references, strict=True)
        ]

    return grade


def judged(
    language: Language, asked: str | None, story: str, noise: float = 0.0, length_bias: float = 0.0
) -> float | None:
    """Return a judge's reward of a story; None if ``asked`` is not a prompt of the language."""
    if asked is None or not language.is_prompt(asked):
        return None
    return language.score(asked, story) + error(asked, story, noise, length_bias)


def embedded() -> Language:
    """Return the language that comes with the project."""
    return read_language(section("data/instruct.yaml:instruct")["language"])


graded = grader(embedded)
"""The verifier of the embedded language."""


# Offline data


def candidates(language: Language, prompt: Prompt, authors: Sequence[str]) -> list[Completion]:
    """Return a story by each author; the same arguments always give the same stories."""
    asked = text_of(prompt)
    return [
        Completion(text=language.story(asked, author, random.Random(f"{author}/{asked}")))
        for author in authors
    ]


def pair(
    language: Language, prompt: Prompt, answers: Sequence[Completion], noise: float, length_bias: float
) -> Group:
    """Return the best and the worst of ``answers`` by the judge, with its rewards; if the judge finds none
    better, return the prompt alone."""
    asked = text_of(prompt)
    rewards = tuple(
        judged(language, asked, answer.text or "", noise, length_bias) or 0.0 for answer in answers
    )
    ends = best_and_worst(Group(prompt, tuple(answers), rewards))
    if ends is None:
        return Group(prompt)
    return Group(prompt, tuple(answers[i] for i in ends), tuple(rewards[i] for i in ends))


def story_pairs(config: DataConfig, split: str) -> Loaded:
    """Return pairs of stories by ``data.instruct.authors``, or by the model itself (``own``), labelled by the
    judge. ``data.eval_split`` is validation or test, one half of the held-out prompts each, or null for both.

    Raises ConfigError, DataError.
    """
    settings = _settings(config)
    language = read_language(settings.language)
    check_authors(language, settings)
    if split == "train":
        asked = prompts(language, "train", settings.prompts)
        require(
            len(asked) == settings.prompts,
            "data.instruct.prompts",
            settings.prompts,
            f"this language has {len(asked)} prompts that are not held out; give as many at most",
        )
        own = own_answers(settings, asked)
        by_authors = _told(language, tuple(p for p in asked if p.id not in own), settings)
        by_model = [
            pair(language, p, own[p.id], settings.noise, settings.length_bias) for p in asked if p.id in own
        ]
        groups_by_id = {group.prompt.id: group for group in (*by_authors, *by_model)}
        groups = [groups_by_id[p.id] for p in asked]
    else:
        half = "eval" if config.eval_split is None else config.eval_split
        require(half in ("eval", *HALVES), "data.eval_split", half, f"must be {' or '.join(HALVES)}, or null")
        groups = list(_told(language, prompts(language, half), settings))
    return Loaded(groups, len(groups), origin=f"stories by {', '.join(settings.authors)} ({split})")


def _told(language: Language, asked: tuple[Prompt, ...], settings: StoriesConfig) -> tuple[Group, ...]:
    """Return the pairs of the authors' stories. They are cached for the next run in this process, because a
    study has hundreds of runs."""
    return _kept(language, asked, tuple(settings.authors), settings.noise, settings.length_bias)


@lru_cache(maxsize=4)
def _kept(
    language: Language, asked: tuple[Prompt, ...], authors: tuple[str, ...], noise: float, length_bias: float
) -> tuple[Group, ...]:
    return tuple(
        pair(language, prompt, candidates(language, prompt, authors), noise, length_bias) for prompt in asked
    )


def _settings(config: DataConfig) -> StoriesConfig:
    if config.instruct is None:
        raise ConfigError("data.instruct", None, "its source writes stories: choose data=instruct")
    return config.instruct


def check_authors(language: Language, settings: StoriesConfig) -> None:
    """Raise ConfigError for an author that the language does not have."""
    known = [*language.authors, *language.mixtures]
    for author in settings.authors:
        require(author in known, "data.instruct.authors", author, f"is none of {', '.join(known)}")


def own_answers(settings: StoriesConfig, asked: Sequence[Prompt]) -> dict[str, list[Completion]]:
    """Return the model's own answers by prompt id, for a share of the prompts: the first ones. Raises
    DataError if the file lacks one of them."""
    wanted = asked[: round(settings.own_share * len(asked))]
    if settings.own is None or not wanted:
        return {}
    known = {group.prompt.id: group.completions for group in read_groups(Path(settings.own))}
    answers_by_id: dict[str, list[Completion]] = {}
    for prompt in wanted:
        answers = [Completion(text=answer.text) for answer in known.get(prompt.id, ())]
        if len(answers) < 2:
            raise DataError(
                f"{settings.own}: has not two answers to {text_of(prompt)!r}, and "
                f"data.instruct.own_share={settings.own_share:g} needs them for the first {len(wanted)} "
                "prompts; sample as many prompts, or lower the share"
            )
        answers_by_id[prompt.id] = answers
    return answers_by_id


def demonstrations(config: DataConfig, split: str) -> Loaded:
    """Return a story by the author ``data.subset`` for each prompt of ``data.instruct.language``, made on the
    fly. Raises ConfigError."""
    language = read_language(_settings(config).language)
    known = [*language.authors, *language.mixtures]
    require(config.subset in known, "data.subset", config.subset, f"name an author: {', '.join(known)}")
    assert config.subset is not None
    groups = list(_demonstrated(language, split, config.subset))
    return Loaded(groups, len(groups), origin=f"stories by {config.subset} ({split})")


def _demonstrated(language: Language, split: str, author: str) -> Iterator[Group]:
    for prompt in prompts(language, split):
        yield Group(prompt, tuple(candidates(language, prompt, [author])), (1.0,))
