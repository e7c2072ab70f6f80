"""What every program of this project does with its command line: settings in, one message out when they
cannot be used.

Exit codes: 0 done; 1 stopped, the message says why; 2 a setting or the data cannot be used; 75 interrupted
and saved, start again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import ConfigError, StoppedError, UserError, require
from common.output import no_room
from common.secrets import scrub_text
from config.arguments import as_settings, choices_of, given_twice, refuse_choices
from config.files import FOLDER
from config.load import load, run_name
from config.schema import Config
from config.unknown import NOTHING, names, names_of, remedy

REFUSED, STOPPED = 2, 1

EMBEDDED = ("adder", "instruct")
"""The embedded tasks, the first of which is the default: files of config/data and of config/model begin with
these names."""


def settings(cfg: DictConfig) -> tuple[Config, str]:
    """The checked configuration of what Hydra composed, and the run's name. Raises ConfigError."""
    config = load(cfg)
    overrides = list(HydraConfig.get().overrides.task)
    refuse_default_data(config, overrides)
    return config, run_name(config, overrides)


def refuse_default_data(config: Config, overrides: Sequence[str]) -> None:
    """Raise ConfigError for another model on the default task's data, unless these were asked for: nobody
    wants it trained on sums because ``data=`` was forgotten; and for the default model on another task's."""
    chosen = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    model, data = chosen.get("model", EMBEDDED[0]), config.data.name
    own = next((task for task in EMBEDDED if model.startswith(task)), None)
    remedy = (
        "give data=local data.path=FILE, data=hub data.path=org/name or a published set, or type data=adder"
        if own is None
        else f"give data={own}, which is that model's, or another set"
    )
    require(
        "data" in chosen or data != EMBEDDED[0] or own == data,
        "data",
        data,
        f"is the default, the sums of the embedded task, and model={model} is another model; {remedy}",
    )
    task = next((task for task in EMBEDDED[1:] if data.startswith(task)), None)
    require(
        task is None or "model" in chosen or config.model.name != EMBEDDED[0],
        "model",
        config.model.name,
        f"is the default and reads sums alone; type model={task}, or a model of your own",
    )


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
        "dry_run=false": [] if config.dry_run else ["plan"],
        "online=false": [] if config.online else ["rounds", "sampler", "reward"],
        "online=false and data.verifier=null": []
        if config.online or config.data.verifier is not None
        else ["environment"],
        "online=true (rounds.contexts says how long)": ["n_epochs", "n_examples"] if config.online else [],
        "model.use_peft=false": [] if config.model.use_peft else ["model.peft"],
        "correction=none": ["correction.low", "correction.high", "correction.delta", "correction.mismatch"]
        if config.correction._target_ is None
        else [],
        f"optimizer={config.optimizer}": ["muon"] if config.optimizer != "Muon" else [],
        "push_to_hub=null": ["hub_private"] if config.push_to_hub is None else [],
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
    sys.argv[1:] = as_settings(sys.argv[1:])
    guarded(lambda: refuse_choices(sys.argv[1:]))
    for sentence in given_twice(sys.argv[1:]) if os.environ.get("RANK", "0") == "0" else ():
        print(f"note: {sentence}", file=sys.stderr, flush=True)
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(complain(_in_our_words(error, sys.argv[1:]), REFUSED))


def complain(message: str, code: int) -> int:
    """Print the message once, whatever the number of ranks, without a secret that it may quote; returns
    ``code``."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {scrub_text(message)}", file=sys.stderr, flush=True)
    return code


def compose(*words: str) -> tuple[Config, str]:
    """The checked settings of what would be typed behind ``python train.py``, and the run's name: for
    notebooks and programs of one's own. Raises UserError, as ConfigError where one setting is to blame."""
    overrides = as_settings(list(words))
    refuse_choices(overrides)
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            config = load(hydra_compose("config", overrides=overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_in_our_words(error, overrides)) from None
    refuse_default_data(config, overrides)
    return config, run_name(config, overrides)


def _in_our_words(error: Exception, overrides: Sequence[str]) -> str:
    """Key, value and remedy of what Hydra refused of ``overrides``."""
    text = str(error)
    if found := re.match(r"Could not override '([^']+)'", text):
        key = found[1]
        given = (word.lstrip("+").partition("=") for word in overrides)
        value = next((value for name, _, value in given if name == key), "?")
        said = remedy(key, value, _settings_there(overrides))
        shows = f"; python {program()}.py --cfg job shows all of them" if said == NOTHING else ""
        return str(ConfigError(key, value, said + shows))
    if found := re.search(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{found[1]}: is a setting already; write {found[1]}=value, without the +"
    if isinstance(error, OverrideParseException):
        key, sign, value = error.override.partition("=")
        if not sign:
            return f"{key}: settings are written as key=value; python {program()}.py --help shows the options"
        why = re.split(r"\n| expecting", error.message)[0]
        quoted = f"a text with a space or one of = , ( ) [ ] {{ }} is quoted twice, as in '{key}=\"a=b\"'"
        return str(ConfigError(key, value, f"{why}; {quoted}"))
    if found := re.search(r"Could not find '(\w+)/([^']+)'", text):
        listed = re.findall(r"^\t(\S+)$", text.split("Config search path")[0], re.MULTILINE)
        options = [name for name in listed if not name.startswith("_")]
        return str(
            ConfigError(
                found[1],
                found[2],
                f"there is no such file in config/{found[1]}; there are {', '.join(options)}",
            )
        )
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def program() -> str:
    """The name of the program that runs: train, sample, label or eval."""
    name = Path(sys.argv[0]).stem
    return name if (FOLDER / f"{name}.yaml").is_file() else "train"


def _settings_there(overrides: Sequence[str]) -> list[str]:
    """Every setting of the program with the files that the command line chooses; where these cannot be
    composed, those of every run."""
    name = program()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            composed = hydra_compose(
                "config" if name == "train" else name, overrides=choices_of(list(overrides))
            )
        return list(names_of(OmegaConf.to_container(composed, resolve=False)))
    except (HydraException, OmegaConfBaseException, ValueError):
        return list(names(Config))
