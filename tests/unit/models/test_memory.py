"""The memory of the head, measured from outside in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

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
