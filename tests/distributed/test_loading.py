"""A model in shards: its weights are those of its files."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.distributed.loading import spread
from tests.programs import in_ranks
from tests.unit.models.test_weight_files import FILE, model


def test_two_matrices_that_the_config_ties_stay_two_on_several_ranks(tmp_path):
    folder = model(tmp_path / "model", tie_word_embeddings=True)
    in_ranks(spread, (2, str(tmp_path / "store"), str(folder)), 2)
    given, found = load_file(folder / FILE), torch.load(folder / "state.pt")
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)
