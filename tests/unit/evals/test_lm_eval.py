"""kind=lm_eval: the harness's own library on a local task file and the embedded model, against the project's
own sampler and verifier."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from common.errors import ConfigError
from config.schema_stages import EvalStage
from config.sections import typed
from data import adder
from data.chat import make_renderer
from evals import lm_eval
from evals.base import Target
from evals.running import evaluate
from models.distributed import start
from models.pretrained import load_policy, load_tokenizer
from rollouts.embedded import EmbeddedSampler
from rollouts.samplers import SamplingSettings
from tests.tiny import make_config
from tests.unit.data.people import lines

pytest.importorskip("lm_eval", reason="make eval-tools installs it")
PROMPTS = adder.prompts("eval")[:24]


@pytest.fixture(autouse=True)
def here_alone(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task: generate the answer and extract the sum."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = [{"question": p.turns[0].content, "answer": p.reference_answer} for p in PROMPTS]
    lines(folder / "docs.jsonl", docs)
    regex = {"function": "regex", "regex_pattern": r";(\d+)$"}
    mean = {"aggregation": "mean", "higher_is_better": True}
    generates = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "task": "sums",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<user>"], "do_sample": False, "max_gen_toks": 40},
        "filter_list": [{"name": "sum", "filter": [regex, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(generates, sort_keys=False))
    return folder


def stage(folder, limit=None, **own):
    asked = {"tasks": ["sums"], "include_path": str(folder)} | own
    return typed(OmegaConf.create({"kind": "lm_eval", "limit": limit, "lm_eval": asked}), EvalStage)


def test_the_harness_counts_what_our_sampler_and_verifier_count(tmp_path, tasks):
    """Greedy answers by another generate, another prompt builder and another metric: the same accuracy,
    answer by answer. Limit and chat template are what the model sees."""
    one = Target("adder", make_config("sampler.max_tokens=40"), tmp_path / "out")
    [found] = evaluate([one], stage(tasks), start())
    renderer = make_renderer(load_tokenizer(one.config.model), one.config.model, one.config.data)
    policy = load_policy(one.config.model, torch.device("cpu"))
    sampler = EmbeddedSampler(policy, renderer, start(), batch_size=24)
    drawn = sampler.sample(list(PROMPTS), 1, SamplingSettings(0.0, 1.0, 40), 0)
    texts = [sample.completion(renderer).text for [sample] in drawn]
    right = adder.accuracy(texts, [p.reference_answer for p in PROMPTS])
    assert 0 < sum(right) < len(right)
    assert found.values["sums"]["exact_match_sum"] == pytest.approx(sum(right) / len(right))
    assert [row["resps"][0][0] for row in found.rows] == texts
    assert [row["exact_match"] for row in found.rows] == right
    assert found.values["counts"] == {"prompts": {"sums": 24}}
    written = json.loads((tmp_path / "out" / "lm_eval.json").read_text())
    assert written["sums"] == found.values["sums"] and written["settings"]["lm_eval"]
    assert found.rows[0]["arguments"][0][0] == renderer.tokenizer.decode(renderer.prompt_ids(PROMPTS[0]))
    bare = lm_eval.evaluate(one, stage(tasks, limit=3, chat_template=False), start())
    assert bare.values["counts"]["prompts"] == {"sums": 3}
    assert bare.rows[0]["arguments"][0][0] == PROMPTS[0].turns[0].content


def test_a_task_that_there_is_not_is_refused(tmp_path, tasks, monkeypatch):
    mine = lm_eval._manager(str(tasks), ("sums",))
    monkeypatch.setattr(lm_eval, "_manager", lambda *_: mine)  # the harness's own list takes half a minute
    with pytest.raises(ConfigError, match=r"lm_eval.tasks=\['summs'\]: cannot be loaded \(KeyError.*summs"):
        lm_eval.check(Target("adder", make_config(), tmp_path), stage(tasks, tasks=["summs"]))
