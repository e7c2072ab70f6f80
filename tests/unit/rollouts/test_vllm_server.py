"""Servers that cannot be used, by their addresses: what they say of themselves is answered here, by HTTP."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from common.worker_process import WorkerError
from rollouts.vllm.messages import EngineOptions, Generated, GenerateRequest, ended_by_itself
from rollouts.vllm.options import WITHOUT_GPU
from rollouts.vllm.sampler import VllmSampler
from rollouts.vllm.server import (
    EXTENSION,
    AnswerError,
    ServerEngine,
    check_servers,
    serve_command,
    without_adapters,
)
from tests import http_server

OPTIONS = EngineOptions(
    dtype="float32",
    max_length=64,
    tensor_parallel=1,
    gpu_memory_utilization=0.4,
    max_sequences=None,
    enforce_eager=True,
    sleeps=False,
    temperature=1.0,
)
SHAPE = {"vocab_size": 19}
MODEL = {"model": "m", "dtype": "torch.float32", "logprobs_mode": "raw_logprobs", "max_model_len": 64}


def said(extension: str = EXTENSION, backend: str = "shared_memory", **model: Any) -> dict[str, Any]:
    """What ``/server_info`` answers."""
    config = {
        "model_config": MODEL | model,
        "parallel_config": {"worker_extension_cls": extension},
        "weight_transfer_config": {"backend": backend},
    }
    return {"vllm_config": config}


def saying(lora: dict[str, Any] | None, updates: bool = True) -> dict[str, Any]:
    """What ``/server_info`` answers of adapters."""
    config = said()["vllm_config"] | {"lora_config": lora}
    return {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": updates}}


@dataclass
class Stand:
    """A server that says what it is told to: path -> JSON."""

    url: str = ""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """path and body of every POST"""
    says: dict[str, Any] = field(
        default_factory=lambda: {
            "version": {"version": "0.32.0"},
            "server_info": said(),
            "collective_rpc": {"results": [SHAPE]},
            "inference/v1/generate": {},
            "get_world_size": {"world_size": 2},
        }
    )


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(made.says[self.path.strip("/").partition("?")[0]]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            made.asked.append((self.path.strip("/"), json.loads(body or b"null")))
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


def check(stand: Stand) -> list[int]:
    return check_servers([stand.url], OPTIONS, "shared_memory", SHAPE, lambda url: ["serve", "this"])


@pytest.mark.parametrize(("version", "warned"), [("0.32.1", False), ("0.31.1", True)])
def test_a_server_that_would_do_says_how_many_workers_it_has(stand, capsys, version, warned):
    stand.says["version"] = {"version": version}
    assert check(stand) == [2]
    assert (f"vllm {version} is accepted, but the tests" in capsys.readouterr().out) == warned


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (
            "version",
            {"version": "0.33.0"},
            r"is vllm 0\.33\.0; accepted is .*: install vllm==0\.32",
        ),
        ("server_info", said(extension=""), r"without --worker-extension-cls .*: serve this"),
        ("server_info", said(backend="nccl"), r"with --weight-transfer-config nccl, not shared_memory"),
        ("server_info", said(dtype="torch.bfloat16"), r"with --dtype bfloat16, not float32"),
        (
            "server_info",
            said(logprobs_mode="raw_logits"),
            r"with --logprobs-mode raw_logits, not raw_logprobs",
        ),
        ("server_info", said(max_model_len=32), r"--max-model-len 32, and model.max_length is 64"),
        ("collective_rpc", {"results": [{"vocab_size": 7}]}, r"another model, m: vocab_size 7, not 19"),
        ("version", [1], r"with something that is no JSON object"),
    ],
)
def test_a_server_that_would_not_do_is_refused_with_key_address_and_remedy(stand, path, answer, message):
    stand.says[path] = answer
    with pytest.raises(ConfigError, match=message) as refused:
        check(stand)
    assert (refused.value.key, refused.value.value) == ("sampler.urls", stand.url)


def test_with_no_server_left_the_addresses_are_named():
    sampler = SimpleNamespace(_urls=["http://127.0.0.1:9", "http://127.0.0.1:1"], _sizes=[1, 1])
    with pytest.raises(
        WorkerError, match=r"none of sampler.urls=http://127.0.0.1:9,http://127.0.0.1:1 answers"
    ):
        VllmSampler._leave_the_dead(sampler)


ADAPTERS = replace(OPTIONS, lora_rank=8, lora_modules=("q_proj", "v_proj"))
PLACES = {"max_lora_rank": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (saying(PLACES), None),
        (saying(PLACES | {"target_modules": None, "max_lora_rank": 64}), None),
        (said(), "without --enable-lora"),
        (saying(None), "without --enable-lora"),
        (saying(PLACES, updates=False), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (saying(PLACES | {"max_lora_rank": 1}), "--max-lora-rank 1, not 8"),
        (saying(PLACES | {"target_modules": ["q_proj"]}), "--lora-target-modules q_proj: no v_proj"),
    ],
)
def test_a_server_says_whether_it_takes_adapters_alone(stand, answer, message):
    stand.says["server_info"] = answer
    found = without_adapters([stand.url], ADAPTERS, lambda url: ["serve", "this"])
    assert found is None if message is None else found and message in found and stand.url in found


def command_for(options: EngineOptions, cpu: bool) -> list[str]:
    return serve_command("http://node:8000", "m", options, "disk", cpu, "/key")


def test_the_command_for_a_server_gives_it_places_for_adapters_where_they_are_wanted():
    plain, wanted = (command_for(options, True) for options in (OPTIONS, ADAPTERS))
    assert "--enable-lora" not in plain and not any("LORA" in word for word in plain)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in wanted[: wanted.index("python")]
    assert "TRITON_F32_DEFAULT=ieee" in plain[: plain.index("python")], "the probe knows no TF32"
    text = " ".join(wanted)
    assert "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --enforce" in text


def test_without_a_gpu_the_command_leaves_out_what_only_costs_there():
    small = replace(OPTIONS, cpu_kv_cache_gb=0.125)
    cpu, gpu = (command_for(small, without) for without in (True, False))
    own = {f"{name}={value}" for name, value in WITHOUT_GPU.items()}
    assert own <= set(cpu[: cpu.index("python")]) and own.isdisjoint(gpu)
    assert cpu[-2:] == ["--kv-cache-memory-bytes", str(2**27)]
    assert {"--enforce-eager", "--kv-cache-memory-bytes"}.isdisjoint(gpu)


def drawn_by(stand: Stand, reason: str | None, tokens: Any = (5,), logprob: Any = -0.5) -> Generated:
    """Return what the sampler is given of a sample that the server ended for this reason."""
    said = {"content": [{"token_id": token, "logprob": logprob} for token in tokens]}
    choice = {"token_ids": list(tokens), "logprobs": said, "finish_reason": reason}
    stand.says |= {"inference/v1/generate": {"choices": [choice]}, "weight_info": {"weight_version": "3"}}
    parts: list[Any] = []
    engine = ServerEngine(stand.url, vocabulary=19)
    try:
        engine.send("generate", [GenerateRequest([1, 2], 1.0, 1.0, 8, (2, 5), 7)])
        assert engine.ready(10.0, parts.append)
        assert engine.receive(10.0) == ("3", None)
    finally:
        engine.close()
    return parts[0][0][1]


@pytest.mark.parametrize(("reason", "finished"), [("stop", True), ("length", False)])
def test_a_sample_ends_at_a_stop_token_or_at_its_limit(stand, reason, finished):
    assert drawn_by(stand, reason) == Generated((5,), finished, (-0.5,))
    assert ended_by_itself(reason) is finished


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_sample_that_was_aborted_is_not_taken_for_one_that_was_cut(stand, reason):
    with pytest.raises(WorkerError, match=f"finish_reason={reason}.*aborted") as failed:
        drawn_by(stand, reason)
    assert stand.url in str(failed.value)


@pytest.mark.parametrize("tokens", [(19,), (99999,), (-1,), (5.0,), (True,), ("5",), (), (5,) * 9, (5, 3)])
def test_tokens_that_the_model_cannot_have_drawn_are_refused(stand, tokens):
    with pytest.raises(AnswerError, match=f"{stand.url} answered with what its model cannot have drawn"):
        drawn_by(stand, "stop", tokens)


@pytest.mark.parametrize("logprob", [5.0, 0.01, float("nan"), float("-inf"), -1e30, "-1.0", None, True, [1]])
def test_what_is_no_log_probability_is_refused(stand, logprob):
    with pytest.raises(AnswerError, match=f"{stand.url} answered with.* the log-probability"):
        drawn_by(stand, "length", (5,), logprob)
    rows = [None, {"5": {"logprob": logprob}}]
    stand.says["inference/v1/generate"] = {"prompt_logprobs": rows}
    with pytest.raises(AnswerError, match=f"{stand.url} answered with the log-probability"):
        asked(stand.url, "logprobs", [[1, 5]])
    assert drawn_by(stand, "length", (5,), 1e-6).logprobs == (1e-6,), "rounding"


def asked(url: str, method: str, *arguments: Any) -> Any:
    engine = ServerEngine(url)
    try:
        engine.send(method, *arguments)
        return engine.receive(30.0)
    finally:
        engine.close()


class Losing(http_server.Server):
    """Closes every third connection on which a sample is asked for, without an answer. It is well until
    ``ill``. A prompt's first token is drawn."""

    request_queue_size = 512

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Losing)
        self.url, self.seen, self.ill = f"http://127.0.0.1:{self.server_address[1]}", Counter(), False
        self.waits = 0.0


class _Losing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Losing

    def do_GET(self) -> None:
        self.answer({"weight_version": "3"}, 503 if self.server.ill and self.path == "/health" else 200)

    def do_POST(self) -> None:
        token = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["token_ids"][0]
        self.server.seen[token] += 1
        time.sleep(self.server.waits)
        if self.server.seen.total() % 3 == 0:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        said = {"content": [{"token_id": token, "logprob": -0.5}]}
        self.answer({"choices": [{"token_ids": [token], "logprobs": said, "finish_reason": "length"}]})

    def answer(self, content: Any, code: int = 200) -> None:
        said = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def losing() -> Iterator[Losing]:
    with Losing() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def test_a_lost_connection_loses_one_request_which_is_sent_again(losing):
    requests = [GenerateRequest([i], 1.0, 1.0, 8, (2,), i) for i in range(200)]
    parts: list[Any] = []
    engine = ServerEngine(losing.url)
    engine.send("generate", requests)
    while not engine.ready(1.0, parts.extend):
        pass
    assert engine.receive(1.0) == ("3", None)
    engine.close()
    assert {place: one.token_ids for place, one in parts} == {i: (i,) for i in range(200)}
    assert 250 < losing.seen.total() < 400, "the others are sent once"


def test_a_connection_to_a_server_that_is_not_well_is_not_tried_again(losing):
    losing.ill = True
    with pytest.raises(WorkerError, match=f"{losing.url}: .*(reset|disconnected|closed)"):
        asked(losing.url, "generate", [GenerateRequest([i], 1.0, 1.0, 8, (2,), i) for i in range(20)])
    assert losing.seen.total() <= 20


def test_a_server_whose_engine_died_is_not_waited_for(losing, monkeypatch):
    monkeypatch.setattr("rollouts.vllm.server.WATCH_S", 0.05)
    losing.waits, request = 1.0, [GenerateRequest([1], 1.0, 1.0, 8, (2,), 0)]
    assert asked(losing.url, "generate", request) == ("3", None), "this one is slow"
    losing.waits, losing.ill, start = 20.0, True, time.monotonic()
    with pytest.raises(WorkerError, match=f"{losing.url}: its engine died in generate"):
        asked(losing.url, "generate", request)
    assert time.monotonic() - start < 10


def test_a_server_without_a_key_is_named(stand, capsys):
    assert check_servers([stand.url], OPTIONS, "shared_memory", SHAPE, lambda url: ["serve"], "k" * 16) == [2]
    assert f"warning: {stand.url} answers without a key" in capsys.readouterr().out


@pytest.mark.parametrize("folder", [None, "/weights"])
def test_an_update_that_another_trainer_left_unfinished_is_dropped_at_the_start(stand, folder):
    """Before anything else is loaded: vLLM would refuse the next one, or mix the two."""
    stand.says |= {"update_weight_version": {}, "abort_requests": {}, "reset_prefix_cache": {"success": True}}
    engine = ServerEngine(stand.url)
    try:
        engine.send("start", OPTIONS, folder, "5")
        assert engine.receive(10.0) == ("5" if folder else "", None)
    finally:
        engine.close()
    methods = [body["method"] for path, body in stand.asked if path == "collective_rpc"]
    assert methods == ["drop_weight_update", *(["read_weights"] if folder else [])]
    assert [path for path, _ in stand.asked][1] == "abort_requests"
    assert stand.asked[0] == ("update_weight_version", {"new_version": ""}), "nothing is sampled meanwhile"
