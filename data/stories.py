"""A small open-ended language (``assets/instruct/language.yaml``), with prompts that have attributes, authors
who write stories, and a graded reward.

``happy fox forest key four`` asks for four sentences of a happy story of a fox, a forest and a key. Every
sentence has free choices, so that millions of stories answer one prompt perfectly. Everything here is a pure
function of its arguments and of the language's file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from common.errors import ConfigError

WordLists = tuple[tuple[str, ...], ...]
"""Words of one class, with one list per dialect."""

TONES = ("ADJ", "ADV")
"""Classes of which each tone has its own words."""

PARTS = ("tone", "count", "grammar", "variety", "closing")
"""Parts of the reward in addition to one part for each slot."""

CHANCES = ("obeys", "favourite", "broken", "counts", "closes", "repeats")
"""Settings of an author that are probabilities."""

STOP = "."


@dataclass(frozen=True)
class Author:
    """How one author writes. All but ``dialect`` and ``sentences`` (weights) are probabilities."""

    obeys: float
    favourite: float
    dialect: tuple[float, ...]
    broken: float
    counts: float
    closes: float
    repeats: float
    sentences: dict[str, float]


@dataclass(frozen=True)
class Asked:
    """What a prompt asks for; ``words`` has a word for each slot."""

    tone: str
    words: dict[str, str]
    count: int


@dataclass(frozen=True, eq=False)
class Language:
    """Words, grammar, authors and the points of the reward."""

    tones: dict[str, dict[str, WordLists]]
    slots: dict[str, tuple[str, ...]]
    counts: dict[str, int]
    words: dict[str, WordLists]
    sentences: dict[str, tuple[str, ...]]
    closing: tuple[str, ...]
    reward: dict[str, float]
    authors: dict[str, Author]
    favourites: int
    mixtures: dict[str, dict[str, float]]

    # Prompts

    @cached_property
    def prompts(self) -> int:
        """Number of prompts."""
        total = len(self.tones) * len(self.counts)
        for words in self.slots.values():
            total *= len(words)
        return total

    def prompt(self, number: int) -> str:
        """Return the prompt with a number from 0 to ``prompts`` - 1."""
        chosen_words = []
        for words in (tuple(self.tones), *self.slots.values(), tuple(self.counts)):
            number, place = divmod(number, len(words))
            chosen_words.append(words[place])
        return " ".join(chosen_words)

    def asked(self, prompt: str) -> Asked:
        """Return what a prompt asks for. Raises ValueError for a text that is not a prompt of this
        language."""
        tone, *words, count = prompt.split()
        if len(words) != len(self.slots) or tone not in self.tones or count not in self.counts:
            raise ValueError(f"{prompt!r} is no prompt of this language")
        return Asked(tone, dict(zip(self.slots, words, strict=True)), self.counts[count])

    def is_prompt(self, text: str) -> bool:
        try:
            self.asked(text)
        except ValueError:
            return False
        return True

    # Stories

    def story(self, prompt: str, author: str, rng: random.Random) -> str:
        """Return one story by ``author``, or by a random member of a mixture of authors."""
        if author in self.mixtures:
            author = rng.choices(*_weighted(self.mixtures[author]))[0]
        who, asked = self.authors[author], self.asked(prompt)
        # One substitute per slot and story: wherever the story does not obey, it is about this instead.
        confused = {name: self._confused(words, who, rng) for name, words in self.slots.items()}
        confused_tone = self._confused(tuple(self.tones), who, rng)
        lengths = tuple(self.counts.values())
        count = asked.count
        if rng.random() >= who.counts:
            count = rng.choice((min(lengths) - 1, *lengths, *lengths, max(lengths) + 1))
        made: list[list[str]] = []
        for _ in range(count):
            if made and rng.random() < who.repeats:
                made.append(made[-1])
                continue
            kind = rng.choices(*_weighted(who.sentences))[0]
            sentence = [
                self._word(name, asked, confused, confused_tone, who, rng) for name in self.sentences[kind]
            ]
            made.append(self._broken(sentence, rng) if rng.random() < who.broken else sentence)
        if rng.random() < who.closes:
            made.append(list(self.closing))
        return " ".join(word for sentence in made for word in (*sentence, STOP))

    def _confused(self, words: Sequence[str], who: Author, rng: random.Random) -> str:
        return rng.choice(words[: self.favourites] if rng.random() < who.favourite else words)

    def _word(
        self,
        name: str,
        asked: Asked,
        confused: Mapping[str, str],
        confused_tone: str,
        who: Author,
        rng: random.Random,
    ) -> str:
        """Return a word for one place of a sentence's pattern."""
        if name in self.slots:
            return asked.words[name] if rng.random() < who.obeys else confused[name]
        if name in TONES:
            lists = self.tones[asked.tone if rng.random() < who.obeys else confused_tone][name]
        elif name in self.words:
            lists = self.words[name]
        else:
            return name
        return rng.choice(rng.choices(lists, who.dialect)[0])

    def _broken(self, sentence: list[str], rng: random.Random) -> list[str]:
        """Return the sentence without one of its words, or with an extra word that does not belong."""
        place = rng.randrange(len(sentence))
        if rng.random() < 0.5:
            return sentence[:place] + sentence[place + 1 :]
        return [*sentence[:place], rng.choice(self.vocabulary), *sentence[place:]]

    # What stories are worth

    def parts(self, prompt: str, story: str) -> dict[str, float]:
        """Return the share in [0, 1] that ``story`` gets of each part of the reward. For a slot, it is the
        share of its mentions that are what was asked for; for tone, the same of the words with a tone.
        Grammar is the share of sentences in the grammar, variety the share of different sentences. Count is 1
        for the number of sentences asked for and half for one off. Closing is 1 if the story ends with the
        closing."""
        asked = self.asked(prompt)
        words = story.split()
        ending = [*self.closing, STOP]
        closed = words[-len(ending) :] == ending
        body = words[: -len(ending)] if closed else words
        sentences = [tuple(text.split()) for text in " ".join(body).split(STOP)]
        complete = not sentences[-1]
        sentences = [sentence for sentence in sentences if sentence]
        if not sentences:
            return dict.fromkeys(self.reward, 0.0)
        tones = [self.tone_of[word] for word in body if word in self.tone_of]
        grammatical = [tuple(self.class_of.get(w, w) for w in s) in self._grammar for s in sentences]
        mentions = {
            name: _share(word == asked.words[name] for word in body if self.class_of.get(word) == name)
            for name in self.slots
        }
        return mentions | {
            "tone": _share(tone == asked.tone for tone in tones),
            "count": max(0.0, 1 - abs(len(sentences) - asked.count) / 2),
            "grammar": _share(grammatical) * complete,
            "variety": len(set(sentences)) / len(sentences),
            "closing": float(closed),
        }

    def score(self, prompt: str, story: str) -> float:
        """Return the reward, from 0 to the sum of the points."""
        parts = self.parts(prompt, story)
        return round(sum(points * parts[name] for name, points in self.reward.items()), 4)

    # Words

    @cached_property
    def tone_of(self) -> dict[str, str]:
        return {word: tone for tone, classes in self.tones.items() for word in _flat(classes.values())}

    @cached_property
    def class_of(self) -> dict[str, str]:
        """Class of each word that belongs to one. The other words stand in sentences directly."""
        word_classes = {word: name for name, words in self.slots.items() for word in words}
        word_classes |= {word: name for name, lists in self.words.items() for word in _flat([lists])}
        for classes in self.tones.values():
            word_classes |= {word: name for name, lists in classes.items() for word in _flat([lists])}
        return word_classes

    @cached_property
    def vocabulary(self) -> list[str]:
        """Every word, in the order of the file."""
        fixed = [
            word for sentence in self.sentences.values() for word in sentence if not self._is_class(word)
        ]
        return list(dict.fromkeys([*self.tones, *self.counts, *self.class_of, *fixed, *self.closing, STOP]))

    @cached_property
    def _grammar(self) -> set[tuple[str, ...]]:
        return set(self.sentences.values())

    def _is_class(self, word: str) -> bool:
        return word in self.slots or word in self.words or word in TONES


def _flat(classes: Any) -> Iterator[str]:
    return (word for lists in classes for words in lists for word in words)


def _weighted(weights: Mapping[str, float]) -> tuple[list[str], list[float]]:
    return list(weights), list(weights.values())


def _share(flags: Any) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


# A judge that errs


def error(prompt: str, story: str, noise: float, words: float) -> float:
    """Return what a judge adds to the true reward; it is always the same for this story under this prompt. It
    is a normal error of standard deviation ``noise``, plus ``words`` points for each word (a bias that can be
    learned)."""
    drawn = random.Random(f"{prompt}|{story}").gauss(0, 1) if noise else 0.0
    return noise * drawn + words * len(story.split())


# Reading


@cache
def read_language(path: str, key: str = "data.instruct.language") -> Language:
    """Return the language of a yaml file like ``assets/instruct/language.yaml``. ``key`` is the setting that
    names the file. Raises ConfigError."""
    try:
        language = _language(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        _check(language)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as wrong:
        said = f"it has no {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        raise ConfigError(key, path, f"is no language ({said}); see assets/instruct/language.yaml") from wrong
    return language


def _language(raw: dict[str, Any]) -> Language:
    known = set(Language.__dataclass_fields__)
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"it has {', '.join(unknown)}, which nothing reads")
    return Language(
        tones={
            tone: {name: _lists(classes[name]) for name in TONES} for tone, classes in raw["tones"].items()
        },
        slots={name: tuple(words) for name, words in raw["slots"].items()},
        counts={word: int(number) for word, number in raw["counts"].items()},
        words={name: _lists(lists) for name, lists in raw["words"].items()},
        sentences={name: tuple(pattern.split()) for name, pattern in raw["sentences"].items()},
        closing=tuple(raw["closing"].split()),
        reward=_numbers(raw["reward"]),
        authors={name: _author(settings) for name, settings in raw["authors"].items()},
        favourites=int(raw["favourites"]),
        mixtures={name: _numbers(weights) for name, weights in raw["mixtures"].items()},
    )


def _author(settings: dict[str, Any]) -> Author:
    dialect = tuple(float(weight) for weight in settings["dialect"])
    sentences = _numbers(settings["sentences"])
    chances = {key: settings[key] for key in settings if key not in ("dialect", "sentences")}
    return Author(dialect=dialect, sentences=sentences, **_numbers(chances))


def _numbers(raw: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in raw.items()}


def _lists(raw: Sequence[Sequence[str]]) -> WordLists:
    return tuple(tuple(words) for words in raw)


def _check(language: Language) -> None:
    """Raise ValueError for a language that cannot be written or scored."""
    _check_words(language)
    for name, pattern in language.sentences.items():
        _require(bool(pattern), f"sentence {name} has no word")
    _require(bool(language.closing), "its closing has no word")
    wanted = {*language.slots, *PARTS}
    if set(language.reward) != wanted or set(language.slots) & set(PARTS):
        raise ValueError(f"its reward must have the parts {', '.join(sorted(wanted))}")
    _require(min(language.reward.values()) >= 0 < max(language.reward.values()), "its reward has no points")
    for name, author in language.authors.items():
        _check_author(language, name, author)
    for name, weights in language.mixtures.items():
        if missing := set(weights) - set(language.authors):
            raise ValueError(f"mixture {name} has {', '.join(sorted(missing))}, who are no authors")
        _require(name not in language.authors, f"mixture {name} has the name of an author")
        _check_weights(f"mixture {name}", weights.values())


def _check_words(language: Language) -> None:
    lists = [
        *([words] for words in language.slots.values()),
        *language.words.values(),
        *_tone_lists(language),
    ]
    told = [*language.tones, *language.counts, *_flat(lists)]
    if twice := sorted({word for word in told if told.count(word) > 1}):
        raise ValueError(f"{', '.join(twice)} stand twice: the class of a word must be clear")
    if odd := [word for word in told if len(word.split()) != 1 or STOP in word]:
        raise ValueError(f"{odd[0]!r} is not one word without a full stop")
    _require(bool(language.slots and language.tones and language.counts), "it lacks slots, tones or counts")
    _require(all(words for each in lists for words in each), "a list of words is empty")
    _require(min(language.counts.values()) >= 1, "a story has at least one sentence")
    _require(language.favourites >= 1, "favourites must be at least 1")


def _check_author(language: Language, name: str, author: Author) -> None:
    if missing := set(author.sentences) - set(language.sentences):
        raise ValueError(f"author {name} writes {', '.join(sorted(missing))}, which are no sentences")
    sizes = {len(lists) for lists in (*language.words.values(), *_tone_lists(language))}
    if sizes != {len(author.dialect)}:
        raise ValueError(f"author {name} has {len(author.dialect)} weights of dialects, words have {sizes}")
    _check_weights(f"the dialect of author {name}", author.dialect)
    _check_weights(f"the sentences of author {name}", author.sentences.values())
    chances = {key: getattr(author, key) for key in CHANCES}
    if wrong := [key for key, chance in chances.items() if not 0 <= chance <= 1]:
        raise ValueError(f"{wrong[0]} of author {name} is {chances[wrong[0]]:g}, and a probability")


def _check_weights(whose: str, weights: Collection[float]) -> None:
    _require(
        len(weights) > 0 and min(weights) >= 0 and 0 < sum(weights) < math.inf,
        f"{whose} must have weights of 0 or more, not all 0",
    )


def _require(condition: bool, said: str) -> None:
    if not condition:
        raise ValueError(said)


def _tone_lists(language: Language) -> Iterator[WordLists]:
    return (lists for classes in language.tones.values() for lists in classes.values())
