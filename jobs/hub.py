"""Upload a run's exported model to the Hugging Face hub (``push_to_hub``) with the hub's own client."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from common.errors import ConfigError, StoppedError, require
from common.secrets import scrub_text
from reports.provenance import git_commit

ROOT = Path(__file__).parents[1]


def check_push(repository: str) -> None:
    """Raise ConfigError where ``push_to_hub`` could not be honoured: invalid id, no token, offline mode.

    The hub itself is not contacted, because it may be unreachable until the end of the run."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(
            "push_to_hub", repository, f"is no id of a repository, as org/name is: {error}"
        ) from error
    require(repository.count("/") == 1, "push_to_hub", repository, "names no owner: write it as org/name")
    offline = "nothing is uploaded with HF_HUB_OFFLINE=1: unset it"
    require(not constants.HF_HUB_OFFLINE, "push_to_hub", repository, offline)
    token = "needs a token that may write: `hf auth login` once, or HF_TOKEN in the environment"
    require(get_token() is not None, "push_to_hub", repository, token)


def push(model_dir: Path, repository: str, private: bool) -> str:
    """Upload an exported model with its card in one commit and return its address.

    An existing repository keeps its visibility. Raises StoppedError."""
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=model_dir,
            commit_message=f"Trained with humanline {git_commit(ROOT) or ''}".strip(),
        )
    except Exception as error:  # the client's libraries raise many kinds of errors
        text = " ".join(str(error).split()) or type(error).__name__
        raise StoppedError(scrub_text(f"the model could not be uploaded to {repository} ({text})")) from error
    return str(commit.repo_url)


def push_or_say(run_dir: Path, repository: str, private: bool) -> None:
    """Upload a run's model/ with ``push``.

    The run is done by then, so a failure only prints a warning with the command that tries again."""
    try:
        print(f"uploaded to {push(run_dir / 'model', repository, private)}", flush=True)
    except StoppedError as error:
        public = "" if private else " --public"
        again = f"python export.py {quote(str(run_dir))} --push-to-hub {repository}{public}"
        print(f"warning: {error}; the run is done, {again} tries again", file=sys.stderr, flush=True)
