"""A checkpoint of a run as one Hugging Face folder.

python export.py runs/NAME                      # the newest sound checkpoint, to runs/NAME/model
python export.py runs/NAME --step 80 --to DIR   # another one, elsewhere
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common.errors import ConfigError, StoppedError, require
from config.cli import guarded
from config.load import load_saved


def export_run(run: Path, step: int | None, to: Path | None, trust_remote_code: bool = True) -> Path:
    """Write the model of the checkpoint before ``step`` (None: of the newest sound one); returns its folder.

    ``to``: where to write, None: the run's model/, which is replaced. ``trust_remote_code`` False: refuse a
    run whose settings would run code that comes with a model. Raises ConfigError, StoppedError.
    """
    record = run / "config.yaml"
    require(record.is_file(), "run", run, "is not the folder of a run: it has no config.yaml")
    require(
        to is None
        or not os.path.lexists(to)
        or (to.is_dir() and not to.is_symlink() and not any(to.iterdir())),
        "to",
        to,
        "is there already, and an export replaces its folder whole; delete it by hand, or name another",
    )
    config = load_saved(record.read_text())
    require(
        trust_remote_code or not config.model.trust_remote_code,
        "model.trust_remote_code",
        "true",
        f"{record} would run code that comes with {config.model.name_or_path}; --trust-remote-code lets it",
    )
    from data.chat import load_template
    from models.checkpoint import Checkpoints
    from models.distributed import start, stop
    from models.export import export, full_state
    from models.loading import load_sharded
    from models.pretrained import export_dtype, load_tokenizer

    world = start()
    try:
        checkpoints = Checkpoints(run / "checkpoints", world, config.keep_checkpoints)
        path = checkpoints.newest_sound() if step is None else checkpoints.path(step)
        if path is None or not path.is_dir():
            there = ", ".join(str(int(p.name.removeprefix("step_"))) for p in checkpoints.all()) or "none"
            raise ConfigError(
                "step", step, f"there is no such sound checkpoint in {checkpoints.folder}; there are: {there}"
            )
        if checkpoints.problem(path):
            raise StoppedError(f"{path} is damaged: {checkpoints.problem(path)}")
        policy, _ = load_sharded(config.model, world)
        checkpoints.load_weights(path, policy)
        tokenizer = load_tokenizer(config.model)
        if config.data.apply_chat_template:
            tokenizer.chat_template = load_template(tokenizer, config.model.chat_template)
        folder = to or run / "model"
        export(full_state(policy), policy, tokenizer, folder, export_dtype(config.model))
    finally:
        stop()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument(
        "--step", type=int, help="the checkpoint before this step; default: the newest sound one"
    )
    parser.add_argument("--to", type=Path, help="where to write; default: the run's model/")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with the run's model, if it has any",
    )
    given = parser.parse_args()
    guarded(
        lambda: print(
            '{0}: AutoModelForCausalLM.from_pretrained("{0}")'.format(
                export_run(given.run, given.step, given.to, given.trust_remote_code)
            )
        )
    )
