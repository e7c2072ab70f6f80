"""Any number of ranks, any number of microbatches: the same losses, gradient norms and weights as one
process."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest

from models.distributed import start
from tests.distributed.cells import CELLS, configs, policy_of, run_cells, worker
from tests.programs import in_ranks


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    start()
    run_cells(configs(folder, accumulation=2), folder / "out.npz")
    return np.load(folder / "out.npz")


@pytest.fixture(scope="module", params=[(2, 1, 2), (4, 2, 1)], ids=["2 ranks x 2", "2 copies of 2 ranks x 1"])
def several(request, tmp_path_factory):
    ranks, replicas, accumulation = request.param
    folder = tmp_path_factory.mktemp("several")
    (folder / "configs").write_bytes(pickle.dumps(configs(folder, accumulation)))
    in_ranks(worker, (ranks, replicas, str(folder / "store"), str(folder)), ranks)
    return np.load(folder / "out.npz")


@pytest.mark.parametrize(("loss", "k"), CELLS)
def test_ranks_change_nothing(single, several, loss, k):
    name = f"{loss}-{k}"
    begin = np.concatenate([p.detach().numpy().ravel() for p in policy_of(loss).parameters()])
    one, many = single[f"{name}/weights"].astype(float), several[f"{name}/weights"].astype(float)
    way = np.linalg.norm(one - begin)
    assert way > 0.05
    assert np.linalg.norm(many - one) < 1e-3 * way
    keys = [key.partition("/")[2] for key in single if key.startswith(f"{name}/") and "weights" not in key]
    assert {"loss", "grad_norm", "kl"} < set(keys) and ("eval_loss" in keys) == (k == 1)
    assert ("router_aux_loss" in keys) == ("mixture" in loss)
    assert "batch" not in loss or single[f"{name}/tokens_masked"].max() > 0
    if "distance" in loss:  # it moved by its distance, and by its age
        assert {b - a for a, b in pairwise(single[f"{name}/reference_step"])} >= {0, 2}
    for key in keys:
        assert len(single[f"{name}/{key}"]) == (1 if key.startswith("eval_") else 6)
        np.testing.assert_allclose(
            several[f"{name}/{key}"], single[f"{name}/{key}"], rtol=1e-3, atol=1e-4, err_msg=key
        )
