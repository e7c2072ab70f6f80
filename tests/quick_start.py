"""What every program works out again when it starts, worked out once or faster, with the same result."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import yaml
from hydra._internal.hydra import Hydra

if TYPE_CHECKING:
    import numpy as np

    from data.chat import Renderer
    from data.types import Prompt

LEFT_THREADS = {"python", "python3", "jemalloc_bg_thd"}
"""Threads of a process that may be forked: its own, and one of an allocator that looks after itself."""
MANY, MOST = 2_000, 900_000
"""The least rows whose tokens are kept, since fewer are soon tokenised, and the most bytes of them: those of
the embedded task's pairs are two thirds of a million."""
SETTINGS = (
    "loss=dpo humanline=true n_examples=4 model.batch_size=2 n_eval_examples=2 n_eval_prompts=1 "
    "wandb.enabled=false"
)


@functools.cache
def warm_up() -> None:
    """All of it, unless this process was forked from one that has."""
    compose_quickly()
    prepare_once()
    train_once()


def compose_quickly() -> None:
    """From now on Hydra reads yaml with libyaml, where PyYAML has it, and composes the settings once: it does
    so once more to find out in which mode, which only its own settings (``hydra.…``) say."""
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
    found = Hydra.get_mode

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        said = any("hydra" in override for override in overrides)
        return found(self, config_name, overrides) if said else None

    Hydra.get_mode = mode  # type: ignore[method-assign]


def prepare_once() -> None:
    """From now on what every run makes of the embedded task's data is made once."""
    read_once()
    tokenise_once()
    render_once()


def read_once() -> None:
    """From now on a file of the embedded task's pairs is read once for as long as it stays the same."""
    from data import adder
    from data.types import Group

    real = adder.read_groups
    kept: dict[tuple[Path, int, int], list[Group]] = {}

    def read(path: Path, setting: str = "data.path") -> list[Group]:
        if not path.is_file():
            return real(path, setting)
        about = path.stat()
        key = path.resolve(), about.st_mtime_ns, about.st_size
        if key not in kept:
            kept[key] = real(path, setting)
        return list(kept[key])

    adder.read_groups = read


def tokenise_once() -> None:
    """From now on the same rows are tokenised once: their next file, of the same name, gets the bytes of the
    first. Its name is a digest of everything that they depend on."""
    from data import token_cache

    real = token_cache._write
    kept: dict[str, tuple[bytes, dict[str, int]]] = {}

    @functools.wraps(real)
    def write(path: Path, key: str, renderer: Renderer, make: token_cache.Make) -> None:
        if key in kept:
            content, cuts = kept[key]
            path.write_bytes(content)
            renderer.cuts.update(cuts)
            return
        before = dict(renderer.cuts)
        real(path, key, renderer, make)
        if key and path.stat().st_size < MOST:
            cuts = {what: n - before.get(what, 0) for what, n in renderer.cuts.items()}
            kept[key] = path.read_bytes(), cuts

    token_cache._write = write


def render_once() -> None:
    """From now on the same many prompts, which ``read_once`` gives as the same objects, are rendered once."""
    from data.chat import Renderer

    real = Renderer.prompts
    kept: dict[tuple[str, tuple[Prompt, ...]], tuple[list[np.ndarray | str], dict[str, int]]] = {}

    def prompts(self: Renderer, given: Iterable[Prompt]) -> list[np.ndarray | str]:
        asked = tuple(given)
        if not MANY <= len(asked) <= 2 * MANY:
            return real(self, asked)
        key = self.fingerprint, asked
        if key not in kept:
            before = dict(self.cuts)
            found = real(self, asked)
            kept[key] = found, {what: n - before.get(what, 0) for what, n in self.cuts.items()}
            return list(found)
        found, cuts = kept[key]
        self.cuts.update(cuts)
        return list(found)

    Renderer.prompts = prompts  # type: ignore[method-assign]


def train_once() -> None:
    """A run of two steps: what libraries import, compile and remember at the first one is there for those
    that are forked from this process. No thread is left of it, nor anything else that a run could see."""
    import torch

    from tests.tiny import make_config
    from train import train

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    state = torch.get_rng_state()
    said = io.StringIO()
    with _alone(), tempfile.TemporaryDirectory() as folder:
        places = f"runs_dir={folder}/runs cache_dir={folder}/cache"
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            train(make_config(*SETTINGS.split(), *places.split()), "first")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_rng_state(state)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) <= len(LEFT_THREADS) and set(threads) <= LEFT_THREADS, threads


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Processes speak to nobody, tokenizers and progress bars do their work alone, charts are blank, and no
    temporary file gets a random name (all that are forked would go on from the same state of chance)."""
    import safetensors.numpy
    import safetensors.torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from tqdm import tqdm

    from tests.blank_charts import blank_charts

    def write(tensors: Any, path: str | Path, metadata: Any = None) -> None:
        Path(path).write_bytes(safetensors.serialize(tensors, metadata))

    start, group = dist.init_process_group, dist.new_group
    alone = {"store": FakeStore(), "rank": 0, "world_size": 1}
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (dist, "init_process_group", lambda *_, **__: start("fake", **alone)),
            (dist, "new_group", lambda *_, **__: group(backend="fake")),
            (tqdm, "monitor_interval", 0),
            (safetensors.torch, "serialize_file", write),
            (safetensors.numpy, "serialize_file", write),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"))
        blank_charts(lambda owner, name, value: stack.enter_context(patch.object(owner, name, value)))
        yield
