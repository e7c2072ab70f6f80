"""Models, trainers and data of the benchmarks, with random weights in the shape of a model and rows of real
or drawn lengths."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from config.files import FOLDER
from config.schema import Config, WandbConfig
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from config.schema_trainer import TrainerConfig
from config.typed import with_defaults
from data.batches import Segment
from data.chat import Renderer
from data.sources import load_groups
from data.types import Completion, Example, Microbatch, Prompt, Sequence
from models.distributed import World, shard, start
from models.policy import Policy, decoder_blocks, set_up_layers
from trainers.assembly import Offline, make_loss, trainer_class
from trainers.basic import BasicTrainer, StepRecord
from trainers.losses.base import TokenScores

SHARED = Path(__file__).parents[2] / "shared" / "data"
KNOWN = {
    "hh": (SHARED / "hh_harmless_test.jsonl.gz", "hh"),
    "gsm8k": (SHARED / "gsm8k_train.jsonl", "gsm8k"),
}
"""Real data by name -> (path of its file, which may not exist; its format)."""
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("paired", {"beta": 0.1}),
    "kto": ("unpaired", {"beta": 0.25, "desirable_weight": 1.1, "undesirable_weight": 1.0}),
    "grpo": ("grpo", {"advantage": "group", "beta": 0.01, "epsilon": 0.15}),
}
"""loss -> (its trainer, the hyperparameters of Table 3)."""

Pair = tuple[Sequence, Sequence]


# -- models ----------------------------------------------------------------------------------------


def llama(
    vocabulary: int,
    width: int,
    layers: int,
    heads: int,
    key_heads: int,
    inner: int,
    positions: int = 8192,
    tied: bool = False,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
    )


def shape(name: str, vocabulary: int | None = None) -> PretrainedConfig:
    """Return the architecture of that name: ``tiny``, ``small`` (4.8 M weights) and SmolLM2's for a CPU,
    the other published shapes for a GPU."""
    shapes: dict[str, PretrainedConfig] = {
        "tiny": llama(512, 64, 2, 4, 2, 128),
        "small": llama(8192, 192, 4, 6, 3, 512),
        "smollm2-135m": llama(49152, 576, 30, 9, 3, 1536, tied=True),
        "qwen2.5-1.5b": Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            intermediate_size=8960,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        "llama-3-8b": llama(128256, 4096, 32, 32, 8, 14336),
    }
    hf_config = shapes[name]
    hf_config.vocab_size = vocabulary or hf_config.vocab_size
    return hf_config


def random_policy(config: PretrainedConfig, device: torch.device, seed: int = 0) -> Policy:
    """Return a policy with random float32 weights of this architecture, made on the device."""
    torch.manual_seed(seed)
    with device:
        return Policy(
            AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        )


# -- trainers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of a run that the benchmarks vary."""

    loss: str = "dpo"
    batch_size: int = 8
    """Units of the loss: pairs (dpo) or sequences."""
    micro_size: int = 4
    humanline: bool = False
    sync_freq: int = 1
    packing: bool | None = None
    """model.packing; None: its default, rows end to end wherever they can be."""
    share_prompts: bool = False
    dtype: str = "float32"
    max_length: int = 2048
    checkpointing: bool | str = False
    compile: bool = False
    microbatch_tokens: int | None = None
    """model.microbatch_tokens, in place of ``micro_size``."""

    def config(self) -> Config:
        trainer, numbers = LOSSES[self.loss]
        model = with_defaults(
            ModelConfig,
            name="random",
            name_or_path="random",
            dtype=self.dtype,
            batch_size=self.batch_size,
            packing=self.packing,
            share_prompts=self.share_prompts,
            microbatch_tokens=self.microbatch_tokens,
            microbatches=self.batch_size // self.micro_size,
            max_length=self.max_length,
            max_prompt_length=self.max_length - 1,
            activation_checkpointing=self.checkpointing,
            compile=self.compile,
        )
        loss = {
            "name": self.loss,
            "_target_": f"trainers.losses.{self.loss}.{self.loss}",
            **numbers,
        }
        return with_defaults(
            Config,
            model=model,
            data=with_defaults(DataConfig, name="random", source="none"),
            loss=loss,
            trainer=TrainerConfig(**yaml.safe_load((FOLDER / "trainer" / f"{trainer}.yaml").read_text())),
            wandb=with_defaults(WandbConfig, enabled=False),
            lr=1e-5,
            warmup=0.0,
            humanline=self.humanline,
            sync_freq=self.sync_freq,
        )


def make_trainer(settings: Settings, policy: Policy, world: World | None = None) -> BasicTrainer:
    """Return a trainer on ``policy`` itself, which is sharded here; copy the policy first to train it
    again."""
    world, config = world or start(), settings.config()
    policy.use_packed_attention()
    set_up_layers(policy, settings.checkpointing, settings.compile)
    shard(policy, decoder_blocks(policy), world, getattr(torch, settings.dtype))
    return trainer_class(config)(config, policy, make_loss(config), world)


@dataclass
class Quiet:
    """A Watch that reads each step's numbers a step late, as a run does, and keeps the losses."""

    losses: list[float | None] = field(default_factory=list)
    waiting: StepRecord | None = None

    def before_step(self, segment: Segment) -> None: ...

    def before_first_step(self, segment: Segment) -> None: ...

    def observe(self, micro: Microbatch, scores: TokenScores) -> None: ...

    def after_step(self, record: StepRecord) -> None:
        self.done()
        self.waiting = record

    def done(self) -> None:
        if self.waiting is not None:
            self.losses.append(self.waiting.pending.read()["loss"])
            self.waiting = None


def train(trainer: BasicTrainer, segment: Segment) -> list[float | None]:
    """Train on all of ``segment`` and return the loss of each step."""
    watch = Quiet()
    trainer.train(Offline(segment), watch)
    return watch.losses


def score_all(trainer: BasicTrainer, segment: Segment) -> None:
    """Score every row of the plan under the current weights, as the reference of offline training."""
    trainer.reference.refresh(trainer.policy, 0, trainer.upcoming(segment, 0, 0))


class Stepper:
    """A callable that does one step of ``segment`` for timing, as ``train`` does but without the check before
    step 0."""

    def __init__(self, trainer: BasicTrainer, segment: Segment) -> None:
        self.trainer, self.segment, self.watch = trainer, segment, Quiet()

    def __call__(self) -> list[float | None]:
        """Do one step and return the losses of the steps read so far."""
        self.watch.after_step(self.trainer.step(self.segment))
        if self.trainer.progress.position == self.segment.steps:
            self.watch.done()
        return self.watch.losses


def fresh(policy: Policy) -> Policy:
    """Return a copy that may be sharded and trained."""
    return copy.deepcopy(policy)


# -- data ------------------------------------------------------------------------------------------


def segment(settings: Settings, pairs: list[Pair], steps: int | None = None) -> Segment:
    """Return one epoch over ``pairs``, or its first ``steps``, in the unit of the loss (a pair is two
    sequences for KTO and GRPO)."""
    groups: list[tuple[Example, ...]] = []
    for i, (chosen, rejected) in enumerate(pairs):
        if settings.loss == "dpo":
            groups.append((Example(f"p{i}", (chosen, rejected)),))
        else:
            groups.append((Example(f"p{i}", (chosen,), 1.0), Example(f"p{i}", (rejected,), -1.0)))
    units = sum(map(len, groups))
    return Segment(
        tuple(groups),
        settings.batch_size,
        min(units, steps * settings.batch_size) if steps else units,
        seed=1,
    )


def rows_of(segment: Segment) -> Iterator[Sequence]:
    for i in range(segment.steps):
        yield from (row for example in segment.batch(i) for row in example.rows)


def drawn_pairs(
    count: int,
    vocabulary: int,
    prompt: float = 110.0,
    completion: float = 60.0,
    longest: int = 512,
    seed: int = 0,
) -> list[Pair]:
    """Return pairs of random tokens with log-normal lengths (medians in tokens; about those of the preference
    data)."""
    rng = np.random.default_rng(seed)

    def some(median: float, most: int) -> np.ndarray:
        n = int(np.clip(median * np.exp(0.7 * rng.standard_normal()), 1, most))
        return rng.integers(3, vocabulary, n).astype(np.int32)

    pairs = []
    for _ in range(count):
        asked = some(prompt, longest // 2)
        pairs.append(
            (
                Sequence(asked, some(completion, longest - len(asked))),
                Sequence(asked, some(completion, longest - len(asked))),
            )
        )
    return pairs


def trained_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on these texts, which gives real text realistic lengths without a file
    from the network."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<pad>", "<s>", "</s>"]
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def real_rows(path: Path, format_: str) -> list[tuple[Prompt, Completion, Completion]]:
    """Return (prompt, better, worse) for each row of a local file; in a set with one answer per prompt, the
    worse one is the next prompt's answer."""
    config = with_defaults(
        DataConfig,
        name="file",
        source="data.sources.local",
        path=str(path),
        format=format_,
        eval_fraction=0.0,
    )
    groups = load_groups(config, "train").groups
    return [
        (
            g.prompt,
            g.completions[0],
            g.completions[1] if len(g.completions) > 1 else groups[(i + 1) % len(groups)].completions[0],
        )
        for i, g in enumerate(groups)
    ]


def real_pairs(path: Path, format_: str, count: int, vocabulary: int, longest: int) -> list[Pair]:
    """Return the first ``count`` pairs of a file, tokenised by a tokenizer trained on them."""
    rows = real_rows(path, format_)[:count]
    texts = [turn.content for prompt, _, _ in rows for turn in prompt.turns] + [
        c.text or "" for _, c, _ in rows
    ]
    renderer = Renderer(
        trained_tokenizer(texts, vocabulary),
        max_length=longest,
        max_prompt_length=longest // 2,
        template=None,
    )
    made = renderer.sequences([(prompt, c) for prompt, *both in rows for c in both])
    return [
        (a, b)
        for a, b in zip(made[::2], made[1::2], strict=True)
        if isinstance(a, Sequence) and isinstance(b, Sequence)
    ]


def benchmark_pairs(data: str, count: int, vocabulary: int, longest: int = 512) -> list[Pair]:
    """Return ``count`` pairs of ``data``: ``PATH:FORMAT`` of a local file, a name of KNOWN whose file exists,
    or ``drawn``."""
    path, format_ = KNOWN.get(data) or (Path(data.rpartition(":")[0]), data.rpartition(":")[2])
    if data == "drawn" or (data in KNOWN and not path.exists()):
        print(f"lengths: drawn{'' if data == 'drawn' else f' ({path.name} is not here)'}")
        return drawn_pairs(count, vocabulary, longest=longest)
    return real_pairs(path, format_, count, vocabulary, longest)
