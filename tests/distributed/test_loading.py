"""A model in shards: its weights are those of its files."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from models import distributed
from models.distributed import World
from models.export import full_state
from models.fingerprint import weights_fingerprint
from models.loading import load_sharded
from models.policy import causal_lm
from models.pretrained import load_policy
from tests.distributed.joining import in_world
from tests.unit.models.test_policy import CPU, settings, tokenizer
from tests.unit.models.test_weight_files import FILE, model


def spread(world: World, folder: Path) -> None:
    """Load the model in ``folder``; rank 0 writes the weights of all shards to ``folder``/state.pt."""
    policy, _ = load_sharded(settings(folder), world)
    assert causal_lm(policy.model).config.tie_word_embeddings is False
    state = full_state(policy)
    if world.is_main:
        torch.save(state, folder / "state.pt")


def parts(world: World, folder: Path) -> None:
    """Load the model in ``folder``, and write to ``folder``/RANK.json its fingerprint, the peak of this
    process's memory above what it had before, in bytes, and how many tensors were sent."""
    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    sent, broadcast = [], distributed.dist.broadcast
    distributed.dist.broadcast = lambda tensor, src: (sent.append(src), broadcast(tensor, src=src))
    load_sharded(settings(folder), world)  # imports what is needed
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    _, fingerprint = load_sharded(settings(folder), world)
    said = {"fingerprint": fingerprint, "bytes": peak() - before, "sent": len(sent)}
    (folder / f"{world.rank}.json").write_text(json.dumps(said))


def peak() -> int:
    """The most memory that this process had, mapped files included, in bytes."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def test_two_matrices_that_the_config_ties_stay_two_on_several_ranks(tmp_path):
    folder = model(tmp_path / "model", tie_word_embeddings=True)
    in_world(spread, 2, folder)
    given, found = load_file(folder / FILE), torch.load(folder / "state.pt")
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


def test_every_rank_reads_its_part_of_the_files_alone(tmp_path):
    """The whole takes 4 bytes a weight. A rank has 4 of its third, and 2 of it in the mapped file."""
    shape = LlamaConfig(vocab_size=1024, hidden_size=512, intermediate_size=2048, num_hidden_layers=9)
    shape.num_attention_heads = shape.num_key_value_heads = 8
    made = LlamaForCausalLM(shape).bfloat16()
    made.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    in_world(parts, 3, tmp_path / "model")
    said = [json.loads((tmp_path / "model" / f"{rank}.json").read_text()) for rank in range(3)]
    policy = load_policy(settings(tmp_path / "model"), CPU)
    assert {one["fingerprint"] for one in said} == {weights_fingerprint(policy.named_parameters())}
    assert all(one["sent"] == 0 for one in said)
    whole = sum(p.numel() for p in policy.parameters()) * 4
    assert max(one["bytes"] for one in said) < 0.75 * whole, (said, whole)
