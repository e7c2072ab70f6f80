"""Tied weights in uneven shards, trained for several steps from files: the forward, the export, a resumed
run, a slow reference and an engine have one and the same model."""

from __future__ import annotations

import pytest

from tests.distributed.views import tie_late, train
from tests.programs import in_ranks
from tests.tiny import tiny_llama
from tests.unit.models.test_policy import tokenizer


@pytest.mark.parametrize(
    ("ranks", "replicas", "overrides"),
    [
        (2, 1, ['model.new_tokens=["a","b"]']),
        (3, 1, ["sync_mode=ema", "sync_alpha=0.5"]),
        (5, 1, ["model.use_peft=true", "model.peft.lora_r=4"]),
        (4, 2, []),
    ],
    ids=["new tokens on 2", "slow reference on 3", "LoRA on 5", "2 copies of 2"],
)
def test_every_view_of_tied_weights_is_the_model_that_is_trained(tmp_path, ranks, replicas, overrides):
    tiny_llama(tied=True).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    in_ranks(train, (ranks, replicas, str(tmp_path / "store"), str(tmp_path), *overrides), ranks)


def test_a_weight_that_the_forward_gathers_from_elsewhere_is_named(tmp_path):
    tiny_llama(tied=True).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    in_ranks(tie_late, (2, str(tmp_path / "store"), str(tmp_path)), 2)
