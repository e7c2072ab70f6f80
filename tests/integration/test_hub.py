"""Uploading to the hub: by the hub's own client, to a server that speaks as the hub does."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from config.cli import compose
from export import main as export_main
from tests import http_server
from train import train

TOKEN = "hf_" + "t" * 20


class Hub(http_server.Server):
    """What the hub's client is told: the files of each repository, and which are private."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.refuses = 0


class Handler(http_server.Handler):
    server: Hub

    def post(self) -> None:
        said = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or self.server.refuses:
            self._answer(self.server.refuses or 401, {"error": "You may not write here"})
        elif self.path == "/api/repos/create":
            asked = json.loads(said)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            private = asked.get("private", asked.get("visibility") == "private")
            self.server.private.setdefault(name, private)
            self._answer(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "1"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(said)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self._answer(200, {"files": modes})
        else:
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, said.splitlines()):
                if line["key"] == "header":
                    self.server.messages.append(line["value"]["summary"])
                else:
                    content = base64.b64decode(line["value"]["content"])
                    self.server.files.setdefault(repository, {})[line["value"]["path"]] = content
            url = f"{self.server.url}/{repository}"
            self._answer(200, {"commitOid": "a" * 40, "commitUrl": f"{url}/commit/{'a' * 40}"})

    def get(self) -> None:
        name = self.path.removeprefix("/api/models/")
        repository, _, file = self.path[1:].partition("/resolve/main/")
        held = self.server.files.get(repository, {}).get(file)
        if held is not None:
            self._answer(200, held)
        else:
            self._answer(200 if name in self.server.files else 404, {"id": name, "error": "Entry not found"})

    def _answer(self, status: int, content: dict | bytes) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        about = [("ETag", f'"{hash(body)}"'), ("X-Repo-Commit", "b" * 40)]
        self.send(status, body, [*about, *([("X-Error-Code", "EntryNotFound")] if status == 404 else [])])


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


def trained(folder: Path, *more: str) -> tuple[dict, Path]:
    words = ("loss=dpo", "n_examples=32", "n_eval_examples=4", "data.verifier=null", "wandb.enabled=false")
    places = (f"runs_dir='{folder}'", f"cache_dir='{folder}/cache'", "diagnostics=false", "report=false")
    config, _ = compose(*words, *places, *more)
    return train(config, "run"), folder / "run"


def test_the_model_goes_up_private_with_its_card_only_when_asked_for(tmp_path, hub, capsys):
    trained(tmp_path / "plain")
    assert hub.private == {} and hub.files == {}
    _, run = trained(tmp_path, "push_to_hub=org/name")
    sent = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert hub.files == {"org/name": sent} and hub.private == {"org/name": True}
    assert b"Trained with the humanline framework" in sent["README.md"] and "model.safetensors" in sent
    assert hub.messages[0].startswith("Trained with humanline")
    assert f"{hub.url}/org/name" in capsys.readouterr().out
    trained(tmp_path / "public", "push_to_hub=org/open", "hub_private=false")
    assert hub.private["org/open"] is False


def test_a_failed_upload_costs_no_run_and_the_command_that_is_named_tries_again(tmp_path, hub, capsys):
    hub.refuses = 403
    summary, run = trained(tmp_path / "my runs", "push_to_hub=org/name")
    said = capsys.readouterr()
    again = f"python export.py '{run}' --push-to-hub org/name"
    assert summary["examples"] == 32 and (run / "summary.json").is_file()
    assert "could not be uploaded to org/name" in said.err and "You may not write here" in said.err
    assert again in said.err and TOKEN not in said.err + said.out
    with pytest.raises(SystemExit) as ended:
        export_main(shlex.split(again)[2:])
    assert ended.value.code == 1
    hub.refuses = 0
    export_main(shlex.split(again)[2:])
    assert set(hub.files["org/name"]) == {path.name for path in (run / "model").iterdir()}
    assert hub.private == {"org/name": True}
