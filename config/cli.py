"""Command-line handling shared by all programs of this project: settings are read and checked, and unusable
ones end the program with one message.

Exit codes: 0 done; 1 stopped, the message says why; 2 a setting or the data cannot be used, or nothing was
learnt from them or nothing came of them, and the same command would do no better; 75 interrupted and saved,
start again.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from common.errors import ConfigError, StoppedError, UserError, require
from common.files import on_disk
from common.progress import guard_output, no_room, phase, pulse
from common.secrets import scrub_text, scrub_words
from config.arguments import (
    DATA_FILES,
    FREE,
    apart,
    as_settings,
    further_folders,
    override_in,
    wrong_choices,
)
from config.composing import check_jobs, check_loss_file, composed
from config.files import FOLDER, not_utf8, walk, wrong_line
from config.load import for_a_cpu, load, run_name
from config.machine import refuse_left_over, speaks
from config.removed import refuse_removed
from config.schema import Config
from config.unknown_keys import NOTHING, names, no_file, remedy
from config.unread import check_idle, say

REFUSED, STOPPED = 2, 1

FOLLOWS = {"max_length": "max_prompt_length", "contexts": "contexts_per_round"}
"""A limit -> the one of the same section that must not exceed it."""
OPEN = ("evaluations", "callbacks", "humanline_rule", "trackers", "reward", "hydra")
"""Sections whose settings the user or a chosen file defines."""
SHOWS_ALL = "python {}.py --cfg job shows all settings"
PAST = ("--config-name", "-cn", "--config-path", "-cp")
"""Options of Hydra that name another first file of settings."""
LINES = "\n       "
"""What separates the lines of one message."""
UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)
"""What Hydra raises for words and files that it cannot compose."""
TYPOGRAPHIC = str.maketrans("−–—‐‑‒“”„‘’\xa0", '------"""\'\' ')
"""Signs of word processors -> those that are meant."""
OTHER_THING = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
OTHER_THING |= {errno.EINVAL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO}
"""Errors of a file that may not be read or written, or in whose place something else stands (a folder)."""
INTERRUPTED = "interrupted; what is done is kept, the same command goes on"
EMBEDDED = "adder"
"""The embedded task, which is the default. The names of its files in config/data and config/model begin with
this word."""


def settings(cfg: DictConfig, stage: object = None) -> tuple[Config, str]:
    """Return the checked configuration that Hydra composed, and the run's name. ``stage``: the settings of
    sample.py or label.py alone. Raises ConfigError."""
    hydra = HydraConfig.get()
    overrides = list(hydra.overrides.task)
    check_loss_file(cfg, hydra.runtime.choices)
    config = _loaded(cfg, [*apart(sys.argv[1:])[0], *overrides])
    refuse_default_data(config, overrides)
    crossed = hydra.mode == RunMode.MULTIRUN
    notes = check_idle(config, overrides, crossed, program() if stage else "train", stage)
    notes += [] if stage else for_a_cpu(cfg)
    say(notes if speaks(os.environ) else ())
    return config, run_name(config, overrides)


def _loaded(cfg: DictConfig, overrides: Sequence[str]) -> Config:
    """Return the checked configuration. A limit that was not typed follows the one that was: a prompt has at
    most half of ``max_length``, and a round at most all ``contexts``. Raises ConfigError."""
    typed = {
        o.key_or_group: o.value() for o in filter(None, map(override_in, overrides)) if not o.is_delete()
    }
    for key, value in typed.items():
        head, _, last = key.rpartition(".")
        name = f"{head}.{FOLLOWS.get(last)}"
        current_limit = OmegaConf.select(cfg, name, throw_on_missing=False) if last in FOLLOWS else None
        if name not in typed and type(current_limit) is int and type(value) is int and current_limit >= value:
            limit = value if last == "contexts" else max(1, value // 2)
            OmegaConf.update(cfg, name, limit)
            say([f"{name}={limit}, because {key}={value} was typed"] if speaks(os.environ) else ())
    try:
        return load(cfg)
    except ConfigError as error:
        raise all_unknown(error, overrides) from error


def refuse_default_data(config: Config, overrides: Sequence[str]) -> None:
    """Raise ConfigError if another model or a file is chosen with the default task's data and ``data=`` was
    not given: a forgotten ``data=`` must not train that model on sums."""
    chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    path = chosen.get("data.path")
    source = "local" if path is None or os.path.exists(path) or path.endswith(DATA_FILES) else "hub"
    without_source = path is not None and "data" not in chosen and config.data.name == EMBEDDED
    why = f"would be read as sums of the embedded task; type data={source} data.path={path}"
    require(not without_source, "data.path", path, why)
    model, data = chosen.get("model", EMBEDDED), config.data.name
    require(
        "data" in chosen or data != EMBEDDED or model.startswith(EMBEDDED),
        "data",
        data,
        f"is the default, the sums of the embedded task, and model={model} is another model; give data=local "
        "data.path=FILE, data=hub data.path=org/name or a published set, or type data=adder",
    )


def answered(work: Callable[[], int | None]) -> int:
    """Call ``work`` and return the program's exit code: its own (None is 0), or that of an error which the
    user can correct, or of Ctrl-C, with one message instead of a traceback."""
    guard_output()
    try:
        return work() or 0
    except KeyboardInterrupt:
        return complain(INTERRUPTED, 130)
    except StoppedError as error:
        return complain(str(error), STOPPED)
    except UserError as error:
        return complain(str(error), REFUSED)
    except OSError as error:
        if error.errno in OTHER_THING and isinstance(error.filename, str | Path):
            message = f"{error.filename}: {error.strerror}; put back what was there, or move it away"
            return complain(message, REFUSED)
        if not no_room(error):
            raise
        disk = f" {on_disk(error.filename)}" if isinstance(error.filename, str | Path) else ""
        message = f"{error}{disk}; make room and start the same command again (a run with resume=true)"
        return complain(message, STOPPED)


def guarded(work: Callable[[], object]) -> None:
    """Call ``work``, and end the program where it is not done (``answered``)."""

    def done() -> None:
        work()

    if code := answered(done):
        sys.exit(code)


def cli(main: Callable[[], object]) -> None:
    """Run a ``hydra.main`` program. An error of Hydra about the command line also becomes one message."""
    scrub_words(sys.argv[1:], show=False)  # their secrets are removed from messages from now on
    guard_output()
    atexit.register(_leave)
    # Threads that spin while they wait take a core from whoever computes; read once, when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra prints its own message and exits with 1
    sys.argv[1:] = as_settings(sys.argv[1:], names_run=program() in ("eval", "sample"))
    guarded(lambda: refuse_left_over(os.environ))
    guarded(lambda: refuse_foreign(sys.argv[1:]))
    if speaks(os.environ):
        pulse()

    def work() -> None:
        with reworded(sys.argv[1:]):
            check_jobs(sys.argv[1:], program())
            with phase(f"{program()}.py"):  # shown where nothing within says what is under way
                main()

    guarded(work)


@contextmanager
def reworded(overrides: Sequence[str]) -> Iterator[None]:
    """Raise UserError, in our words, for what Hydra cannot compose within."""
    try:
        yield
    except UNREADABLE as error:
        raise UserError(in_our_words(error, overrides)) from None


def _leave() -> None:
    """Called when all is done and every other handler of the end has run. Python would search what is left
    for garbage, for one or two seconds; libraries in C++ would complain on the terminal that it did not."""
    gc.freeze()
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def complain(message: str, code: int) -> int:
    """Print the message on rank 0 only, without any secret that it may quote, and return ``code``."""
    if speaks(os.environ):
        print(f"error: {scrub_text(message)}", file=sys.stderr, flush=True)
    return code


def compose(*words: str) -> tuple[Config, str]:
    """Return the checked settings for ``words``, the arguments that one would type after ``python train.py``,
    and the run's name. It serves notebooks and the user's own programs. Raises UserError, which is a
    ConfigError if one setting is to blame."""
    typed = as_settings(list(words))
    refuse_foreign(typed)
    with reworded(typed):
        config = _loaded(cfg := composed(typed), typed)
    _, overrides = apart(typed)
    refuse_default_data(config, overrides)
    say([*check_idle(config, overrides), *for_a_cpu(cfg)])
    return config, run_name(config, overrides)


def compose_config(overrides: list[str]) -> Config:
    """Return the settings that ``python train.py <overrides>`` would have. Raises UserError."""
    typed = as_settings(overrides)
    with reworded(typed):
        return load(composed(typed))


def in_our_words(error: Exception, overrides: Sequence[str]) -> str:
    """Return the key, the value and the remedy for an override that Hydra refused, or the line of a file that
    it could not read. Raises ``error`` itself where no file of settings is the cause."""
    if isinstance(error, YAMLError):
        return wrong_line(error)
    if isinstance(error, UnicodeDecodeError):
        if not (files := not_utf8((FOLDER, *further_folders(overrides)))):
            raise error  # of something else that the program read
        return f"{', '.join(files)}: {error}; save it as UTF-8"
    if isinstance(error, OverrideParseException):
        return str(_unparsed(error, list(overrides)))
    text = str(error)
    if match := re.search(r"Ambiguous value for argument '([^=']+)=([^']*)'", text):
        key, value = match.groups()
        return str(ConfigError(key, value, f"several values need -m, and a list brackets: [{value}]"))
    if match := re.match(r"Could not override '([^']+)'", text):
        value = dict(_typed_settings(overrides)).get(match[1], "?")
        message = remedy(match[1], value, _settings_there(overrides))
        return str(all_unknown(ConfigError(match[1], value, message), overrides))
    if match := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{match[1]}: is a setting already; write {match[1]}=value, without the +"
    if match := re.search(r"Could not find '(\w+)/([^']+)'", text):
        listed = re.findall(r"^\t([^_\s]\S*)$", text.split("Config search path")[0], re.MULTILINE)
        return str(ConfigError(match[1], match[2], no_file(match[1], match[2], listed)))
    return " ".join(f"{text} {error.__cause__ or ''}".split())


def _unparsed(error: OverrideParseException, overrides: list[str]) -> UserError:
    """Return the refusal of an argument that Hydra's grammar does not have; ``overrides`` are all arguments,
    as the pieces of one that the shell has split stand in a row."""
    word = error.override
    key, sign, value = word.partition("=")
    if not sign:
        how = "settings are written as lr=1e-6"
        return UserError(f"{word}: {how}; python {program()}.py --help shows the options")
    rest = overrides[overrides.index(word) :] if word in overrides else [word]
    if value.startswith("~/"):
        advice = f"the shell leaves ~ as it is here; type {key}=$HOME{value[1:]}"
    elif (plain := word.translate(TYPOGRAPHIC)) != word:
        advice = f"has a sign that a word processor wrote; type {shlex.quote(plain)}"
    elif value.endswith(","):
        advice = f"ends in a comma; settings stand apart by spaces alone: type {word.rstrip(',')}"
    elif value.startswith(("{", "[", '"', "'")) and (whole := _whole(rest)):
        advice = f"the shell took it apart at its spaces; type it in quotes: '{whole}'"
    elif re.search(r"\s[+~]*[\w.]+=", value) and '"' not in value:
        advice = f"several settings within one pair of quotes; type each as a word: {word}"
    else:
        why = re.split(r"\n| expecting", error.message)[0]
        why = "cannot be read" if "Exception" in why or "override" in why else why
        signs = "a space, a letter outside ASCII or one of = , ( ) [ ] { } ~ # !"
        advice = f"{why}; a text with {signs} is quoted twice, as in '{key}=\"a=b\"'"
    return ConfigError(key, value, advice)


def _whole(words: Sequence[str]) -> str | None:
    """Return the setting that the first of ``words`` begins and that ends where its brackets are closed; None
    where they never are."""
    for end in range(1, len(words) + 1):
        whole = " ".join(words[:end])
        if end > 1 and override_in(whole) is not None:
            return whole
    return None


def all_unknown(error: ConfigError, overrides: Sequence[str]) -> UserError:
    """Return ``error``; where it is about a key that was typed and is no setting, one message about all such
    keys of the command line."""
    unknown = _unknown(overrides, OPEN)
    about = any(f"{key}.".startswith(f"{error.key}.") for key in unknown)
    return UserError(LINES.join(_lines(unknown))) if about else error


def _lines(unknown: Mapping[str, ConfigError]) -> list[str]:
    """Return a line for each refusal of a key that is no setting."""
    more = f"; {SHOWS_ALL.format(program())}"
    return [f"{error}{more if error.remedy == NOTHING else ''}" for error in unknown.values()]


def _unknown(overrides: Sequence[str], but: Collection[str]) -> dict[str, ConfigError]:
    """Return key -> its refusal for the keys that are typed and no settings; none of the sections ``but``."""
    there = _settings_there(overrides)
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir()}
    lines = {}
    for key, value in _typed_settings(overrides):
        known = key in {*there, *folders} or FREE.match(f"{key}=") is not None
        # trainer is typed by who comes from HALOs; here it is a section
        if key.split(".")[0] not in but and (key == "trainer" or not known):
            lines[key] = ConfigError(key, value, remedy(key, value, there))
    return lines


def refuse_foreign(overrides: Sequence[str]) -> None:
    """Raise UserError, a ConfigError if one setting alone is to blame, for what is gone, for options of Hydra
    that would lead past config.yaml, and for choices of files that do not exist; with these it names the keys
    that are no settings."""
    for option in apart(overrides)[0]:
        name, _, value = option.partition("=")
        setting = option.lstrip("-")
        require(not re.fullmatch(r"-[A-Za-z_.]{2,}=.*", option), name, value, f"is no option; type {setting}")
        why = "settings begin with config.yaml; a file of your own is config/experiment/mine.yaml, chosen by"
        require(name not in PAST, name, value, f"{why} experiment=mine (elsewhere: --config-dir FOLDER)")
    refuse_removed(_typed_settings(overrides))
    for key in (word[1:].partition("=")[0] for word in overrides if word.startswith("~")):
        instead = "wandb.enabled=false" if key == "wandb" else f"{key}=VALUE"
        gone = f"takes away no setting, its default would count; type {instead}"
        require(key.split(".")[0] in OPEN, f"~{key}", "", gone)
    if wrong := wrong_choices(overrides):
        right = [word for word in overrides if word not in wrong]
        unknown = _unknown(right, [*OPEN, *(error.key for error in wrong.values())])
        if len(wrong) == 1 and not unknown:
            raise next(iter(wrong.values()))
        raise UserError(LINES.join([*map(str, wrong.values()), *_lines(unknown)]))


def _typed_settings(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return (key, value) of each setting that is typed."""
    words = (word.lstrip("+").partition("=") for word in apart(overrides)[1] if word[:1] not in ("-", "~"))
    return [(key, value) for key, _, value in words]


def _settings_there(overrides: Sequence[str]) -> list[str]:
    """Return every setting of the program with the files that the command line chooses. If these files cannot
    be composed, return the settings that every run has."""
    GlobalHydra.instance().clear()  # that of the command line, whose settings were refused
    options, words = apart(overrides)
    typed = ((word, override) for word in words if (override := override_in(word)) is not None)
    choices = [word for word, o in typed if (FOLDER / o.key_or_group).is_dir() and not o.is_sweep_override()]
    try:
        there = composed([*options, *choices], program())
        return [key for key, _ in walk(OmegaConf.to_container(there, resolve=False))]
    except (*UNREADABLE, ValueError):
        return list(names(Config))


def program() -> str:
    """Return the name of the running program: train, sample, label or eval."""
    name = Path(sys.argv[0]).stem
    return name if (FOLDER / f"{name}.yaml").is_file() else "train"
