"""vLLM's engines on two nodes of two ranks: who is asked for what, and what becomes of a node whose engine is
killed."""

from __future__ import annotations

import json

from rollouts.vllm.sampler import sample_seed
from tests.distributed import nodes
from tests.distributed.nodes import FAILURES, PROMPTS, RENDERER
from tests.programs import in_ranks


def test_a_node_whose_engine_is_killed_alone_gets_the_weights_and_draws_again(tmp_path):
    in_ranks(nodes.live, (4, str(tmp_path / "store"), str(tmp_path)), 4)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["nodes"] == [0, 0, 1, 1] and found["left"] == [[]] * 4
    facts = found["facts"]
    assert (facts["sampler_nodes"], facts["sampler_engines"], facts["weight_transfer"]) == (2, 2, "ipc")
    cut, processes = len(PROMPTS) // 2, []
    for drawn in found["drawn"]:
        wanted = [[*RENDERER.prompt_ids(p).tolist(), sample_seed(1, p.id, 0) % 1000] for p in PROMPTS]
        assert [row[:-1] for row in drawn] == wanted
        first, second = ({row[-1] for row in part} for part in (drawn[:cut], drawn[cut:]))
        assert len(first) == len(second) == 1 and first != second
        processes.append((first.pop(), second.pop()))
    assert len({first for first, _ in processes}) == 1 and len({second for _, second in processes}) == 4
    dealt = found["dealt"]["nodes"]
    assert [node["requests"] for node in dealt] == [4 * cut, 4 * (len(PROMPTS) - cut)]
    assert sum(node["tokens"] for node in dealt) == sum(len(row) for drawn in found["drawn"] for row in drawn)


def test_a_node_that_differs_ends_all_ranks_with_one_message(tmp_path):
    in_ranks(nodes.fail, (4, str(tmp_path / "store"), str(tmp_path)), 4)
    for how, begin in FAILURES.items():
        messages = {(tmp_path / f"{how}-{rank}").read_text() for rank in range(4)}
        assert len(messages) == 1 and messages.pop().startswith(begin)
