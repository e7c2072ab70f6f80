"""Uploading to the hub: what its client is given, and what a refusal costs."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi, constants

from config.cli import compose
from export import main as export_main
from train import train

TOKEN = "hf_" + "t" * 20


class Hub:
    """Stands behind the hub's client, which is called as the real one or fails."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.refuses = False
        self.client = create_autospec(HfApi, instance=True)
        self.client.create_repo.side_effect = self._create
        self.client.upload_folder.side_effect = self._upload

    def _create(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.refuses:
            raise ConnectionError(f"You may not write here with {TOKEN}")
        assert exist_ok
        self.private.setdefault(repo_id, private)

    def _upload(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self.files[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        self.messages.append(commit_message)
        return SimpleNamespace(repo_url=f"https://hub.test/{repo_id}")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("jobs.hub.HfApi", lambda: hub.client)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def trained(folder: Path, *more: str) -> tuple[dict, Path]:
    words = ("loss=dpo", "n_examples=4", "model.batch_size=2", "n_eval_examples=4", "data.verifier=null")
    places = (f"runs_dir='{folder}'", f"cache_dir='{folder}/cache'", "diagnostics=false", "report=false")
    config, _ = compose(*words, *places, "wandb.enabled=false", *more)
    return train(config, "run"), folder / "run"


def test_the_model_goes_up_private_with_its_card_only_when_asked_for(tmp_path, hub, capsys):
    trained(tmp_path / "plain")
    assert hub.private == {} and hub.files == {}
    _, run = trained(tmp_path, "push_to_hub=org/name")
    sent = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert hub.files == {"org/name": sent} and hub.private == {"org/name": True}
    assert b"Trained with the humanline framework" in sent["README.md"] and "model.safetensors" in sent
    assert hub.messages[0].startswith("Trained with humanline")
    assert "https://hub.test/org/name" in capsys.readouterr().out
    trained(tmp_path / "public", "push_to_hub=org/open", "hub_private=false")
    assert hub.private["org/open"] is False


def test_a_failed_upload_costs_no_run_and_the_command_that_is_named_tries_again(tmp_path, hub, capsys):
    hub.refuses = True
    summary, run = trained(tmp_path / "my runs", "push_to_hub=org/name")
    said = capsys.readouterr()
    again = f"python export.py '{run}' --push-to-hub org/name"
    assert summary["examples"] == 4 and (run / "summary.json").is_file()
    assert "could not be uploaded to org/name" in said.err and "You may not write here" in said.err
    assert again in said.err and TOKEN not in said.err + said.out
    with pytest.raises(SystemExit) as ended:
        export_main(shlex.split(again)[2:])
    assert ended.value.code == 1
    hub.refuses = False
    export_main(shlex.split(again)[2:])
    assert set(hub.files["org/name"]) == {path.name for path in (run / "model").iterdir()}
    assert hub.private == {"org/name": True}
