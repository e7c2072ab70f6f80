"""Export a checkpoint of a run as one Hugging Face folder.

python export.py runs/NAME                      # the newest sound checkpoint, to runs/NAME/model
python export.py runs/NAME --step 80 --to DIR   # another one, elsewhere
python export.py runs/NAME --push-to-hub org/name   # to the hub, with its card
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, StoppedError, require
from common.imports import importing
from common.options import options_of, run_folder
from common.secrets import scrub_text
from config.cli import guarded
from config.load import load_run, settings_of
from reports.provenance import git_commit

ROOT = Path(__file__).parent


def export_run(run: Path, step: int | None, to: Path | None, trust_remote_code: bool = True) -> Path:
    """Write the model of the checkpoint saved before ``step``, with its card, and return its folder.

    ``step`` None selects the newest sound checkpoint. ``to`` is the folder to write; None means the run's
    model/, which is replaced. With ``trust_remote_code`` False, a run whose settings would execute code that
    comes with a model is refused. Raises ConfigError, StoppedError.
    """
    config = load_run(run, trust_remote_code)
    require(
        to is None
        or not os.path.lexists(to)
        or (to.is_dir() and not to.is_symlink() and not any(to.iterdir())),
        "to",
        to,
        "is there already, and an export replaces its folder whole; delete it by hand, or name another",
    )
    with importing("torch"):
        from data.chat import make_renderer
        from models.checkpoint import Checkpoints
        from models.distributed import started
        from models.export import export, full_state
        from models.loading import load_sharded
        from models.pretrained import export_dtype, load_tokenizer
        from reports.model_card import write_model_card

    with started() as world:
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
        renderer = make_renderer(tokenizer, config.model, config.data)
        if renderer.template is not None:
            tokenizer.chat_template = renderer.template
        folder = to or run / "model"
        export_arguments = (export_dtype(config.model), renderer.stop_token_ids)
        export(full_state(policy), policy, tokenizer, folder, *export_arguments)
        if world.is_main:
            outcome = {"checkpoint": f"before step {int(path.name.removeprefix('step_'))}"}
            write_model_card(folder, settings_of((run / "config.yaml").read_text("utf-8")), outcome)
    return folder


def check_push(repository: str) -> None:
    """Raise ConfigError where ``--push-to-hub`` could not be honoured: invalid id, no token, offline mode."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    option = "--push-to-hub"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        invalid = f"is no id of a repository, as org/name is: {error}"
        raise ConfigError(option, repository, invalid) from error
    require(repository.count("/") == 1, option, repository, "names no owner: write it as org/name")
    offline = "nothing is uploaded with HF_HUB_OFFLINE=1: unset it"
    require(not constants.HF_HUB_OFFLINE, option, repository, offline)
    token = "needs a token that may write: `hf auth login` once, or HF_TOKEN in the environment"
    require(get_token() is not None, option, repository, token)


def push(run: Path, exported: Path | None, repository: str, private: bool) -> str:
    """Upload the model of a run with its model card in one commit and return its address on the hub.

    The model is the folder ``exported``, or the run's model/ where ``exported`` is None. An existing
    repository keeps its visibility. Raises StoppedError."""
    import huggingface_hub

    from reports.model_card import write_model_card

    folder = exported or run / "model"
    if not (folder / "README.md").is_file():
        summary = run / "summary.json"
        outcome = json.loads(summary.read_text()) if summary.is_file() and exported is None else {}
        write_model_card(folder, settings_of((run / "config.yaml").read_text("utf-8")), outcome)
    api = huggingface_hub.HfApi()
    message = f"Trained with humanline {git_commit(ROOT) or ''}".strip()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except Exception as error:  # the client's libraries raise many kinds of errors
        text = " ".join(str(error).split()) or type(error).__name__
        raise StoppedError(scrub_text(f"the model could not be uploaded to {repository} ({text})")) from error
    return str(commit.repo_url)


def main(words: Sequence[str] | None = None) -> None:
    parser = options_of("python export.py", __doc__)
    parser.add_argument("run", type=run_folder, help="the folder of a run")
    parser.add_argument("--step", type=int, help="the checkpoint before this step, else the newest sound one")
    parser.add_argument("--to", type=Path, help="where to write; default: the run's model/")
    trust = "run code that comes with the run's model, if it has any"
    parser.add_argument("--trust-remote-code", action="store_true", help=trust)
    parser.add_argument("--push-to-hub", metavar="ORG/NAME", help="upload it; a model/ that is there stays")
    parser.add_argument("--public", action="store_true", help="a new repository on the hub is public")
    options = parser.parse_args(words)

    def work() -> None:
        pushed = options.push_to_hub is not None
        require(pushed or not options.public, "--public", True, "is a part of --push-to-hub")
        done = (
            options.step is None and options.to is None and (options.run / "model" / "config.json").is_file()
        )
        exported = None
        if pushed:
            check_push(options.push_to_hub)
        if not (pushed and done):
            exported = export_run(options.run, options.step, options.to, options.trust_remote_code)
            kind = json.loads((exported / "config.json").read_text())["architectures"][0].partition("For")[2]
            print(f'{exported}: AutoModelFor{kind}.from_pretrained("{exported}")')
        if pushed:
            print(push(options.run, exported, options.push_to_hub, not options.public))

    guarded(work)


if __name__ == "__main__":
    main()
