"""What every program of this project does with its command line: settings in, one message out when they
cannot be used.

Exit codes: 0 done; 1 stopped, the message says why; 2 a setting or the data cannot be used; 75 interrupted
and saved, start again.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from common.errors import ConfigError, StoppedError, UserError, require
from common.output import no_room
from common.secrets import scrub_text
from config.load import load, run_name
from config.schema import Config

REFUSED, STOPPED = 2, 1
CONFIG = Path(__file__).parent


def settings(cfg: DictConfig) -> tuple[Config, str]:
    """The checked configuration of what Hydra composed, and the run's name. Raises ConfigError."""
    config = load(cfg)
    return config, run_name(config, list(HydraConfig.get().overrides.task))


def say_what_is_idle(inert: Mapping[str, Sequence[str]]) -> None:
    """Print, once whatever the number of ranks, what the command line sets although nothing will read it with
    the other settings as they are: said, not refused, so that a sweep may cross such settings.

    ``inert``: a setting -> the keys that nothing reads because of it.
    """
    if os.environ.get("RANK", "0") != "0" or not HydraConfig.initialized():
        return
    given = [override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task]
    for because, keys in inert.items():
        for key in given:
            if any(key == name or key.startswith(f"{name}.") for name in keys):
                print(f"note: {key} has no effect with {because}", file=sys.stderr, flush=True)


def idle(config: Config) -> dict[str, list[str]]:
    """What nothing will read, as far as the settings themselves say it; a trainer knows more of its loss
    (``BasicTrainer.unread``)."""
    return {
        "humanline=false": []
        if config.humanline
        else ["log_epsilon_P", "log_epsilon_R", "humanline_mode", "humanline_sampling"],
        "humanline=false (or sync_mode=never)": ["sync_freq"] if config.syncing == "never" else [],
        f"sync_mode={config.syncing}": ["sync_kl"] if config.syncing != "kl" else [],
        "online=false": [] if config.online else ["rounds", "sampler", "reward"],
        "online=true (rounds.contexts says how long)": ["n_epochs", "n_examples"] if config.online else [],
        "model.use_peft=false": [] if config.model.use_peft else ["model.peft"],
        "correction=none": ["correction.low", "correction.high", "correction.delta", "correction.mismatch"]
        if config.correction._target_ is None
        else [],
        "scheduler=constant": ["min_lr_ratio"] if config.scheduler == "constant" else [],
    }


def guarded(work: Callable[[], object]) -> None:
    """Do ``work``; what a user can mend ends the program with one message instead of a traceback."""
    try:
        work()
    except StoppedError as error:
        sys.exit(complain(str(error), STOPPED))
    except UserError as error:
        sys.exit(complain(str(error), REFUSED))
    except OSError as error:
        if not no_room(error):
            raise
        sys.exit(
            complain(f"{error}; make room and start the same command again (a run with resume=true)", STOPPED)
        )


def cli(main: Callable[[], object]) -> None:
    """Run a ``hydra.main`` program: what Hydra refuses of the command line is one message too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # or Hydra would print its own and leave with 1
    guarded(lambda: refuse_choices(sys.argv[1:]))
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(complain(_in_our_words(error), REFUSED))


def complain(message: str, code: int) -> int:
    """Print the message once, whatever the number of ranks, without a secret that it may quote; returns
    ``code``."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {scrub_text(message)}", file=sys.stderr, flush=True)
    return code


def refuse_choices(arguments: list[str]) -> None:
    """Raise ConfigError for a choice among the files of a folder (``loss=…``) that is not one: null, a
    number, nothing, or a reward that is not there. Hydra ends with a traceback at the first two, and leaves
    out an optional file that is not there without a word."""
    folders = [CONFIG, *_folders_given(arguments)]
    for override in filter(None, map(_override, arguments)):
        key = override.key_or_group
        require(key != "", key, override.value(), "has no setting before the =; write it as key=value")
        if override.is_delete() or not any((folder / key).is_dir() for folder in folders):
            continue
        files = sorted({path.stem for folder in folders for path in (folder / key).glob("*.yaml")})
        there = ", ".join(name for name in files if not name.startswith("_"))
        none = {"reward": "; for none write ~reward", "experiment": "; for none leave it out"}.get(key, "")
        for value in _choices(override):
            require(
                isinstance(value, str) and value != "",
                key,
                "null" if value is None else value,
                f"choose a file of config/{key}: {there}{none}",
            )
            require(
                key != "reward" or value in files,
                key,
                value,
                f"there is no such file in config/{key}; there are {there}{none}",
            )


def _override(argument: str) -> Override | None:
    """The argument as Hydra reads it; None for an option, and for what Hydra will refuse itself."""
    try:
        return None if argument.startswith("-") else OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def _choices(override: Override) -> list[object]:
    """The file names of an override: one, a list of them, or those of a sweep. A mapping is no choice but
    settings."""
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_choice_sweep() else []
    value = override.value()
    return [] if isinstance(value, dict) else list(value) if isinstance(value, list) else [value]


def _folders_given(arguments: list[str]) -> list[Path]:
    """Further folders of settings, which Hydra takes as --config-dir."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    given = parser.parse_known_args(arguments)[0].config_dir
    return [] if given is None else [given]


def _in_our_words(error: Exception) -> str:
    """Key, value and remedy of what Hydra refused."""
    text = str(error)
    if found := re.match(r"Could not override '([^']+)'", text):
        key = found[1]
        value = next((o.partition("=")[2] for o in sys.argv[1:] if o.partition("=")[0] == key), "?")
        near = difflib.get_close_matches(key, list(names(Config)), n=1)
        return str(
            ConfigError(
                key,
                value,
                "is not a setting, nothing would read it"
                + (f"; did you mean {near[0]}?" if near else "; python train.py --cfg job shows all of them"),
            )
        )
    if found := re.search(r"Could not find '(\w+)/([^']+)'", text):
        options = re.findall(r"^\t(\S+)$", text.split("Config search path")[0], re.MULTILINE)
        return str(
            ConfigError(
                found[1],
                found[2],
                f"there is no such file in config/{found[1]}; there are {', '.join(options)}",
            )
        )
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def names(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted setting of a dataclass."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        yield prefix + item.name
        if is_dataclass(hints[item.name]):
            yield from names(hints[item.name], f"{prefix}{item.name}.")
