"""What a record says of the machine is what torch sees of it."""

from __future__ import annotations

import pytest
import torch

from reports.provenance import machine


def test_a_record_names_the_instructions_that_bits_depend_on():
    there = torch.cpu.get_capabilities()
    if there["architecture"] != "x86_64":
        pytest.skip("other processors have none of these")
    said = machine()["cpu"].rpartition("(")[2].rstrip(")").split(", ")
    for ours, theirs in (("avx512_bf16", "avx512_bf16"), ("amx_bf16", "amx_bf16"), ("avx512f", "avx512_f")):
        assert (ours in said) == there[theirs], ours
