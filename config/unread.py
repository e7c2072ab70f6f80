"""Settings that were typed and that nothing will read, by the table config/reads.yaml."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from common.errors import ConfigError, UserError
from common.secrets import scrub_text
from config.arguments import override_in
from config.files import section, walk
from config.schema import Config
from config.sections import word_of

NOTE = "note"
"""The value of ``idle_settings`` with which nothing is refused."""
ABSENT = object()
ELSEWHERE = "program=train"
"""The condition of a setting that only training reads."""
Settings = Config | Mapping[str, Any]


@cache
def conditions() -> dict[str, str]:
    """Return setting, or section of settings, -> the condition under which it is read; "" where it always
    is."""
    table = section("reads.yaml")
    return table["when"] | {key: "" for line in table["always"] for key in line.split()}


def why_idle(config: Settings, key: str, program: str = "train") -> str | None:
    """Return what would have to hold for setting ``key`` to be read by ``program``; None if it is read."""
    reads = section("reads.yaml")["programs"].get(program, {}).get("reads", {})
    listed = any(_within(place, key.partition(".")[0]) for place in conditions())  # not the program's own
    if reads and listed and not any(_within(key, place) for place in reads):
        return ELSEWHERE
    rules = {
        p: rule for p, rule in conditions().items() if not any(_within(place, p) for place in reads)
    } | reads
    for place, condition in rules.items():
        if condition and _within(key, place) and not _holds(config, condition):
            return condition
    return None


def check_idle(
    config: Config, overrides: Sequence[str], crossed: bool = False, program: str = "train", stage: Any = None
) -> list[str]:
    """Return a note for each setting that was typed and that ``program`` does not read, in a sweep
    (``crossed``), with ``idle_settings=note``, or of what only the other programs of a pipeline read.
    ``stage``: the settings of sample.py or label.py alone.

    Raises UserError for those among ``overrides``, as typed. A value of false or null (or its word) asks for
    nothing, so nothing is ignored.
    """
    facts = config if stage is None else vars(config) | vars(stage) | {"program": program}
    typed = dict(_typed(overrides))
    idle = {key: why for key in typed if (why := unread(facts, key, program)) is not None}
    carried = section("reads.yaml")["programs"].get(program, {}).get("carries", ())
    refused = [key for key in idle if not any(_within(key, place) for place in carried)]
    if refused and not crossed and config.idle_settings != NOTE:
        lines = [ConfigError(key, typed[key], f"the same: {idle[key]}") for key in refused]
        says = f"nothing would read it: {idle[refused[0]]}; leave it out, or idle_settings=note"
        lines[0] = ConfigError(refused[0], typed[refused[0]], says)
        raise UserError("\n       ".join(map(str, lines)))
    return [f"{key} has no effect: {why}" for key, why in idle.items()]


def say(notes: Iterable[str]) -> None:
    """Print each note on the console."""
    for note in notes:
        print(f"note: {scrub_text(note)}", file=sys.stderr, flush=True)


def unread(config: Settings, key: str, program: str = "train") -> str | None:
    """Return what a setting that nothing reads would need, and what is there instead; None if it is read."""
    condition = why_idle(config, key, program)
    if condition is None:
        return None
    if condition == ELSEWHERE:
        reads = section("reads.yaml")["programs"][program]["reads"]
        return f"{program}.py reads {', '.join(place for place in reads if reads[place] != ELSEWHERE)}"
    terms = [term for way in condition.split(" or ") for term in way.split(" and ")]
    needs = condition.replace(" and ", " with ").replace(" or ", ", or ").replace("|", "/")
    here = dict.fromkeys(_shown(config, term) for term in terms if not _term_holds(config, term))
    return f"it needs {needs}, and here {', '.join(here)}"


def _within(key: str, place: str) -> bool:
    return key == place or key.startswith(f"{place}.")


def _holds(config: Settings, condition: str) -> bool:
    ways = condition.split(" or ")
    return any(all(_term_holds(config, term) for term in way.split(" and ")) for way in ways)


def _term_holds(config: Settings, term: str) -> bool:
    key, _, wanted = term.partition("=")
    value = _value(config, key.removesuffix("!"))
    return value is ABSENT or (_text(key, value) in wanted.split("|")) != key.endswith("!")


def _shown(config: Settings, term: str) -> str:
    key = term.partition("=")[0].removesuffix("!")
    return f"{key}={_text(key, _value(config, key))}"


def _value(config: Settings, key: str) -> Any:
    """Return the value of a dotted setting; ABSENT if this run has none of this name."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else getattr(value, part, ABSENT)
    return value


def _text(key: str, value: Any) -> str:
    """Return the value of a setting as one types it."""
    if value is None:
        return word_of(Config, key.removesuffix("!")) or "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (setting, value) for what the command line sets, except values that ask for nothing."""
    for override in filter(None, map(override_in, overrides)):
        if not override.is_delete() and override.key_or_group != "experiment":
            yield from leaves(override.key_or_group.replace("/", "."), override.value())


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (setting, value) of a setting, or of what is in it, but for values that ask for nothing."""
    for name, item in walk({key: value}):
        if not isinstance(item, dict) and item not in (None, word_of(Config, name), []) and item is not False:
            yield name, item
