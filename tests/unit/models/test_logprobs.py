"""Token log-probabilities and entropies from hidden states: against float64 and whole logits, at a
temperature, and in the memory that they take."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import models.logprobs as module
from common.errors import ConfigError
from data.batches import collate
from models.logprobs import chunked_entropies, chunked_logprobs
from tests.engine import engine_config, make_segment, make_trainer, run
from tests.integration.online import run_online
from tests.tiny import ROOT, make_config, random_groups, tiny_policy

D, V = 24, 391  # V is no multiple of any slice


def case(
    m: int = 37, dtype: torch.dtype = torch.float64, spread: float = 30.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets whose logits reach about +-``spread``."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=g, dtype=torch.float64) for n in ((m, D), (V, D), (V,)))
    weight *= spread / (hidden @ weight.T).abs().max()
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), torch.randint(V, (m,), generator=g)


def whole(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, in float64 and all at once."""
    logits = (hidden.double() @ weight.double().T + (0 if bias is None else bias.double())) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return by_hand(logits / temperature, targets)


def by_hand(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = logits.log_softmax(-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("budget", [1, 64 * 37, 1 << 20])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"scale": 0.0625},
        {"softcap": 30.0},
        {"temperature": 0.7},
        {"temperature": 1.6, "scale": 1.5, "softcap": 20.0},
    ],
)
def test_values_and_gradients_equal_float64_autograd(form, with_bias, budget):
    """Whatever slices the vocabulary is walked in."""
    hidden, weight, bias, targets = case()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    grad = torch.randn(len(targets), dtype=torch.float64)

    def found(function) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        values = function(*leaves[:2], leaves[2] if with_bias else None)
        return [values, *torch.autograd.grad(values, leaves, grad)]

    ours = (
        lambda *of: chunked_logprobs(*of, targets, budget=budget, **form),
        lambda *of: chunked_entropies(*of, budget=budget, **form),
    )
    for i, function in enumerate(ours):
        wanted = found(lambda *of, i=i: whole(*of, targets, **form)[i])
        for one, other in zip(found(function), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=(1e-11, 1e-9)[i], atol=(1e-12, 1e-11)[i])


def test_bfloat16_inputs_give_logits_of_float32_precision():
    hidden, weight, bias, targets = case(512, torch.bfloat16)
    want, _ = whole(hidden, weight, bias, targets)
    got = chunked_logprobs(hidden, weight, bias, targets)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 1e-4
    rounded = (hidden @ weight.T + bias).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (rounded - want).abs().max() > 1e-2, "the test could not tell a product rounded to bfloat16"


def test_extreme_logits_stay_finite():
    hidden, weight, _, targets = case(dtype=torch.float32, spread=3e4)
    hidden.requires_grad_()
    values = chunked_logprobs(hidden, weight, None, targets, budget=64 * len(targets))
    values.sum().backward()
    assert values.isfinite().all() and (values <= 0).all() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("kept", [True, False])
def test_a_frozen_head_gets_no_product(monkeypatch, kept):
    """LoRA: the [V, D] gradient of a frozen head would be thrown away. Logits that are kept are computed
    once."""
    monkeypatch.setattr(module, "KEPT", 2 if kept else 0)
    hidden, weight, _, targets = case(dtype=torch.float32)
    shapes = []
    product = module._product

    def counted(a, b, *bias, **to):
        shapes.append((len(a), len(b)))
        return product(a, b, *bias, **to)

    monkeypatch.setattr(module, "_product", counted)
    logits = [(37, V)] * (1 if kept else 2)
    chunked_logprobs(hidden.requires_grad_(), weight, None, targets, budget=1 << 30).sum().backward()
    assert shapes == [*logits, (37, D)]
    shapes.clear()
    chunked_logprobs(hidden, weight.requires_grad_(), None, targets, budget=1 << 30).sum().backward()
    assert shapes == [*logits, (37, D), (V, D)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [{}, {"temperature": 1.6, "scale": 1.5, "softcap": 20.0}])
@pytest.mark.parametrize(("m", "threads"), [(1, 1), (37, 2)])
def test_kept_logits_give_the_same_bits(monkeypatch, m, threads, form, dtype):
    """As computed again, and as without gradient; in one slice and in several, in blocks of rows of any
    number. A second backward, which finds no logits, gives the same too."""
    before, found = torch.get_num_threads(), []
    *given, targets = case(m, dtype)
    grad = torch.randn(m, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(threads)
    try:
        for budget in (1 << 20, 64 * 2 * m):
            results = []
            for kept, block in ((0, 1), (100, 1), (100, 5 * V), (100, 1 << 18)):
                monkeypatch.setattr(module, "KEPT", kept)
                monkeypatch.setattr(module, "BLOCK", block)
                leaves = [x.clone().requires_grad_() for x in given]
                values = chunked_logprobs(*leaves, targets, budget=budget, **form)
                grads = torch.autograd.grad(values, leaves, grad, retain_graph=True)
                again = torch.autograd.grad(values, leaves, grad)
                with torch.no_grad():
                    scored = chunked_logprobs(*given, targets, budget=budget, **form)
                assert torch.equal(values, scored) and all(map(torch.equal, grads, again))
                results.append([values.detach(), *grads])
            found.append(results)
    finally:
        torch.set_num_threads(before)
    for first, *others in found:
        assert all(all(map(torch.equal, one, first)) for one in others)


# -- the policy's ----------------------------------------------------------------------------------


def sequences(pack: bool = False):
    rows = [row for group in random_groups(4) for row in group[0].rows]
    return collate(rows, torch.device("cpu"), pack)


def tempered(temperature: float):
    """A policy with ``model.logit_temperature``."""
    policy = tiny_policy()
    policy.temperature = temperature
    return policy


@pytest.mark.parametrize(("pack", "temperature"), [(False, 1.0), (False, 0.6), (True, 0.6)])
def test_both_are_those_of_the_models_own_divided_logits(pack, temperature):
    """With the gradients, at each completion token, and 0 elsewhere."""
    policy, plain, given = tempered(temperature).double(), tiny_policy().double(), sequences(pack)
    values, entropies = policy(given, entropy=True)
    assert values.shape == given.mask.shape and not (
        values[~given.mask].any() or entropies[~given.mask].any()
    )
    (values.sum() + entropies.sum()).backward()
    for r, row in enumerate(given.rows):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.completion_ids.tolist()])
        logits = plain.model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
        wanted, theirs = by_hand(logits, torch.tensor(row.completion_ids).long())
        torch.testing.assert_close(values[r, : len(wanted)], wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(entropies[r, : len(wanted)], theirs, rtol=1e-9, atol=1e-10)
        (wanted.sum() + theirs.sum()).backward()
    for (name, mine), other in zip(policy.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-8, atol=1e-9, msg=name)


def test_a_temperature_of_one_changes_no_bit():
    given, logits = sequences(), tiny_policy()
    assert torch.equal(tempered(1.0)(given), logits(given))
    with logits.at_temperature(0.5):
        assert not torch.equal(logits(given), tempered(1.0)(given))
    assert logits.temperature == 1.0


def test_policy_and_reference_agree_before_the_first_update(tmp_path):
    """The reference is scored at the same temperature: DPO begins at ln 2, and then leaves the run at 1."""
    lines = []
    for temperature in (1.0, 0.7):
        config = engine_config(tmp_path / f"{temperature}", "dpo", "model.batch_size=4", "humanline=true")
        trainer = make_trainer(config, tempered(temperature))
        lines.append(run(config, make_segment(config, pairs=8), trainer)[1])
    assert lines[1][0]["loss"] == pytest.approx(lines[0][0]["loss"], abs=1e-6)
    assert lines[1][0]["grad_norm"] != lines[0][0]["grad_norm"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.logit_temperature=0", "model.logit_temperature=0.0: divides the logits: must be above 0"),
        ("loss=bradley_terry model.logit_temperature=2", "a reward model has none"),
        (
            "loss=grpo online=true correction=masked sampler.temperature=1 sampler.top_p=1 "
            "model.logit_temperature=0.7",
            "sampler.temperature=1 and sampler.top_p=1; set sampler.temperature=0.7 sampler.top_p=1, or",
        ),
    ],
)
def test_a_temperature_that_means_nothing_is_refused(words, said):
    with pytest.raises(ConfigError) as caught:
        make_config(*words.split())
    assert said in str(caught.value)


def test_an_online_run_records_its_temperature_and_trains_at_it(tmp_path):
    """On the command line: what the sampler noted is what the trainer finds before the first update."""
    words = ["online=true", "loss=grpo", "rounds.feedback=group", "correction=truncated", "humanline=true"]
    words += ["model.logit_temperature=0.7", "sampler.temperature=0.7", "sampler.top_p=1"]
    words += ["rounds.contexts=8", "rounds.contexts_per_round=8", "rounds.zero_variance=keep", "seed=2"]
    folder = run_online(tmp_path, "r", *words)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["behavior_kl"] < 1e-6 and first["correction_weight"] == pytest.approx(1, abs=1e-3)
    line = json.loads((folder / "rounds" / "000" / "samples.jsonl").read_text().splitlines()[0])
    assert line["completions"][0]["behavior_temperature"] == 0.7
    offline = ["data=local", f"data.path={folder}/rounds/000/groups.jsonl", "data.eval_fraction=0"]
    with pytest.raises(ConfigError, match=r"row 1: its behavior_logprobs are at temperature 0\.7, and"):
        run_online(tmp_path, "s", "loss=grpo", "correction=truncated", *offline)


# -- memory ----------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from pathlib import Path
from models.logprobs import chunked_logprobs

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

def added(V, M=1024, D=8, whole=False):
    # MB that one forward and backward add to the peak of the process
    hidden, targets = torch.randn(M, D, requires_grad=True), torch.randint(V, (M,))
    weight = torch.randn(V, D, requires_grad=True)
    chunked_logprobs(hidden[:64], weight, None, targets[:64]).sum().backward()   # what torch allocates once, the gradients among it
    Path("/proc/self/clear_refs").write_text("5")   # the peak starts again from what is held now
    before = status("VmRSS")
    if whole:
        (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    else:
        chunked_logprobs(hidden, weight, None, targets).sum().backward()
    return status("VmHWM") - before

print(added(32_768), added(65_536), added(32_768, whole=True))
"""  # noqa: E501


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_is_flat_in_the_vocabulary():
    """The float32 logits of 1,024 tokens are 128 MB at a vocabulary of 32k, 256 MB at 64k; only the weight's
    gradient may grow."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=environment)
    small, large, whole = map(float, done.stdout.split())
    assert whole > 250, "the measure sees no logits"
    assert small < 125
    assert large - small < 40
