"""The doctor: each check finds what it is there for, and says what to do."""

from __future__ import annotations

import http.server
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from launch import doctor
from launch.composing import compose_config
from launch.doctor import BAD, OK, Finding, disk, hub, last, reach, run, talk

pytestmark = pytest.mark.usefixtures("quick_python")


def test_ranks_reach_each_other() -> None:
    finding = talk(2, "gloo")
    assert finding.level == OK, finding


def test_ranks_that_do_not_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RANKS", "raise RuntimeError('no route')")
    finding = talk(2, "gloo")
    assert finding.level == BAD and "no route" in finding.text and "SOCKET_IFNAME" in finding.remedy


def test_disk(tmp_path: Path) -> None:
    config = compose_config([f"runs_dir={tmp_path}/not/yet/there", "keep_checkpoints=2"])
    assert disk(config, 1e6).level == OK
    full = disk(config, 8e15)
    assert full.level == BAD and "keep_checkpoints" in full.remedy
    assert "320.0" in disk(config, 8e9).text, (
        "8B: three checkpoints of weights and two moments, and the model: 8 x (3 x 12 + 4) GB"
    )


def test_reaching_an_address() -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(403)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert reach(url) is None, "a refusal is an answer: somebody is there"
    server.shutdown()
    server.server_close()
    assert "not reached" in str(reach(url))


def test_the_hub_matters_only_where_something_comes_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "reach", lambda url: f"{url} is not reached (down)")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    here = compose_config([])
    assert [f.level for f in hub(here)] == [OK]
    remote = replace(here, model=replace(here.model, name_or_path="org/model"))
    (found,) = hub(remote)
    assert found.level == BAD and "org/model" in found.text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,) = hub(remote)
    assert found.level == BAD and "model.name_or_path=org/model" in found.text


class Hub(http.server.BaseHTTPRequestHandler):
    """Has the models and the data set of these names, and answers as the hub does."""

    names = ("/api/models/org/there", "/api/datasets/org/data")

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        there = self.path in self.names
        self.send_response(200 if there else 404)
        if not there:
            self.send_header("X-Error-Code", "RepoNotFound")
        text = b'{"id": "org/there", "tags": []}' if there else b'{"error": "Repository not found"}'
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_reward_model_and_data_that_are_not_on_the_hub_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def findings(*overrides: str) -> list[Finding]:
        config = compose_config(["online=true", "rounds.contexts_per_round=2", *overrides])
        return list(hub(config))

    def classifier(name: object) -> tuple[str, str]:
        return "reward=classifier", f"reward.classifier.name_or_path={name}"

    (good,) = findings(*classifier("org/there"))
    assert good.level == OK and "org/there" in good.text
    for name in ("org/nothing", tmp_path / "no" / "folder"):
        (bad,) = findings(*classifier(name))
        assert bad.level == BAD and f"reward.classifier.name_or_path={name} cannot be had" in bad.text
        assert "spelling" in bad.remedy
    (bad,) = findings("reward=armorm")
    assert bad.level == BAD and "reward.armorm.name_or_path=RLHFlow/ArmoRM" in bad.text
    (here,) = findings(*classifier(tmp_path))
    assert here.level == OK and "files of this machine" in here.text
    (good,) = findings("reward=adder", "data=local", "data.path=org/data")
    assert good.level == OK
    found = findings(*classifier("org/nothing"), "data=local", "data.path=org/there")
    assert [f.level for f in found] == [BAD, BAD] and "data.path=org/there" in found[1].text
    server.shutdown()
    server.server_close()
    (bad,) = findings(*classifier("org/there"))
    assert bad.level == BAD and "not reached" in bad.text


def test_what_a_process_said_last() -> None:
    assert last("a\nTraceback\n[rank1]: ValueError: this\nChildFailedError:\n=====\n") == "ValueError: this"
    assert last("x\n----\n") == "x" and last("") == "no output"
    assert run("x", ["sleep", "5"], 1) == (124, "no end after 1 seconds")


def test_settings_that_cannot_be_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["lr=-1"]) == 2
    assert "lr=-1" in capsys.readouterr().err
