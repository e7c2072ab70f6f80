"""What the fullest rank of a run holds, by formulas from the shapes of its model and of its batches alone.

Weights, gradients and moments are exact. What a layer keeps of a token is the sum of what torch's autograd
saves for the decoders of transformers. A step is as large as the largest of a few moments of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn
from transformers import PretrainedConfig

from config.schema import Config
from config.schema_model import SELECTIVE, ModelConfig
from models.attention import GROUPED, heads_of, packable
from models.logprobs import BUDGET, keeps_logits
from models.policy import causal_lm, decoder_blocks
from models.pretrained import empty_model
from models.shapes import count_weights

MARGIN = 1.02
"""Factor for what the formulas of a layer leave out: statistics of norms, indices, a few small tensors."""


@dataclass(frozen=True)
class Load:
    """What a rank computes in one pass, padding included."""

    tokens: int
    counted: int
    """Completion tokens, which logits are computed for."""
    longest: int
    """Tokens of the longest row."""
    several: bool = False
    """Whether a step has further passes, whose gradients are kept."""
    packed: bool = True

    def cut(self, tokens: int) -> Load:
        """Return it with at most so many tokens."""
        if self.tokens <= tokens:
            return self
        counted = round(self.counted * tokens / self.tokens)
        return replace(self, tokens=tokens, counted=counted, several=True)


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Sizes of a decoder layer, in numbers for a token where nothing else is said."""

    hidden: int
    heads: int
    queries: int
    keys: int
    inner: int
    """Of the MLP, for all experts of a token together."""
    products: int
    """Matrices of the MLP: 3 of a gated one, else 2."""
    experts: int
    """Of a token; 0 in a dense layer."""
    norms: tuple[tuple[int, int], ...]
    """For each norm, its size and how many copies of it are float32: 0 of a LayerNorm, 2 of a Gemma's."""
    adapted: int
    """Numbers between the two matrices of all adapters."""

    @classmethod
    def of(cls, block: nn.Module, hf_config: PretrainedConfig) -> Layer:
        """Return the sizes of ``block``, whose weights may lie on the meta device."""
        text = hf_config.get_text_config()
        heads, key_heads, size = heads_of(hf_config)
        hidden, queries, keys = text.hidden_size, heads * size, key_heads * size
        inner = getattr(text, "intermediate_size", None) or 4 * hidden
        experts, every, shared = getattr(text, "num_experts_per_tok", None) or 0, 1, 0
        if experts:
            inner = getattr(text, "moe_intermediate_size", None) or inner
            every = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or experts
            shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        adapters = {name: p for name, p in block.named_parameters() if ".lora_" in name}
        adapted = sum(p.shape[0] for name, p in adapters.items() if ".lora_A." in name)
        numbers = count_weights(block) - sum(p.numel() for p in adapters.values())
        gated = numbers - 2 * hidden * (queries + keys) > 2.5 * every * hidden * inner
        norms = []
        for name, module in block.named_modules():
            kind = type(module).__name__
            if "Norm" in kind:
                width = queries if name.endswith("q_norm") else keys if name.endswith("k_norm") else hidden
                norms.append((width, 0 if isinstance(module, nn.LayerNorm) else 1 + ("Gemma" in kind)))
        inner = max(experts, 1) * inner + shared
        return cls(hidden, heads, queries, keys, inner, 2 + gated, experts, tuple(norms), adapted)

    def kept(self, width: int, scores: float) -> float:
        """Return the bytes of a token's activations until the layer's backward. ``width``: bytes of a number;
        ``scores``: of what attention keeps of the token's scores."""
        norms = sum(size * (4 * copies + width * (2 - copies // 2)) for size, copies in self.norms)
        if width == 4:  # a copy in float32 is the tensor itself
            norms = 12 * sum(size for size, _ in self.norms)
        if self.adapted:  # of a frozen norm
            norms -= width * sum(size for size, copies in self.norms if copies < 2)
        attention = width * (2 * self.queries + 2 * self.keys) + 4 * self.heads + scores
        mlp = width * (2 * (self.products - 1) * self.inner + self.adapted)
        routing = self.experts * (2 * width * self.hidden + 64)
        return MARGIN * (norms + attention + mlp + routing)

    def kept_selectively(self, width: int) -> float:
        """Return the same where the results of attention and of every second product alone are kept."""
        return MARGIN * (
            width * (3 * self.hidden + self.queries + self.keys + self.adapted)
            + width * (self.products - 1) * self.inner / 2
            + 4 * self.heads
            + self.experts * (2 * width * self.hidden + 64)
        )

    def in_forward(self, width: int, scores: float) -> float:
        """Return the bytes of a token that a layer's forward takes at once. ``scores``: as ``kept``."""
        inner = (self.products + (self.adapted > 0)) * self.inner
        mlp = inner + (5 * self.experts + 4) * self.hidden
        attention = 3.3 * (self.queries + 2 * self.keys) + 3 * self.hidden
        return MARGIN * (width * max(mlp, attention) + scores)

    def in_backward(self, width: int, scores: float, again: bool) -> float:
        """Return the bytes of a token that a layer's backward takes at once besides what is kept. ``again``:
        where that is computed again, it goes as the backward goes on."""
        mlp = (self.products - again) * self.inner + (7 * self.experts + 2) * self.hidden
        attention = (1.8 if again else 3.3) * (self.queries + 2 * self.keys) + 3 * self.hidden
        return MARGIN * (width * max(mlp, attention) + 0.7 * scores)


@dataclass(frozen=True)
class Size:
    """Sizes of some weights, in bytes."""

    kept: int
    """As masters: trained weights in float32, frozen ones in the dtype of the computation, or packed."""
    gathered: int
    trained: int
    """float32"""

    @classmethod
    def of(cls, weights: Iterable[nn.Parameter], width: int) -> Size:
        trained = frozen = gathered = 0
        for p in weights:
            size = p.numel() * (1 if p.dtype == torch.uint8 else width)  # packed weights are bytes
            gathered += size
            trained += 4 * p.numel() * p.requires_grad
            frozen += size * (not p.requires_grad)
        return cls(trained + frozen, gathered, trained)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model with its adapters."""

    parameters: int
    """Number of them, of packed weights those that they stand for."""
    every: Size
    root: Size
    """What is in no layer: embedding, head and last norm."""
    block: Size
    """The largest layer."""
    layers: int
    layer: Layer
    layer_numbers: int
    largest: int
    """Numbers of the largest layer and of the largest weight."""
    vocabulary: int
    tied: bool
    head: int
    """Bytes of the gradient of the head's weight; 0 of a frozen one."""

    @classmethod
    def of(cls, config: ModelConfig, hf_config: PretrainedConfig) -> Shape:
        """Raises ConfigError where there is no model of this architecture."""
        width, text = getattr(torch, config.dtype).itemsize, hf_config.get_text_config()
        model = empty_model(replace(config, attn_implementation="eager"), hf_config)
        causal_lm(model).tie_weights()
        every, blocks = list(model.parameters()), decoder_blocks(model)
        inside = {id(p) for block in blocks for p in block.parameters()}
        largest = max(blocks, key=count_weights)
        scores = config.head == "reward"
        return cls(
            parameters=count_weights(model),
            every=Size.of(every, width),
            root=Size.of((p for p in every if id(p) not in inside), width),
            block=Size.of(largest.parameters(), width),
            layers=len(blocks),
            layer=Layer.of(largest, hf_config),
            layer_numbers=count_weights(largest),
            largest=max(p.numel() for p in every),
            vocabulary=1 if scores else text.vocab_size,
            tied=bool(getattr(text, "tie_word_embeddings", False)) and not scores,
            head=0 if config.use_peft or scores else width * text.vocab_size * text.hidden_size,
        )


# -- what a rank holds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """The tensors of the fullest of ``ranks`` ranks, in bytes; the settings have no ``auto`` left."""

    config: Config
    hf_config: PretrainedConfig
    shape: Shape
    ranks: int
    gpu: bool

    def with_model(self, **changes: Any) -> Self:
        """Return the estimate with other settings of the model."""
        return replace(self, config=replace(self.config, model=replace(self.config.model, **changes)))

    @property
    def width(self) -> int:
        """Bytes of a number in the dtype of the computation."""
        return int(getattr(torch, self.config.model.dtype).itemsize)

    @property
    def shards(self) -> int:
        return self.ranks // self.config.replicas

    @cached_property
    def resident(self) -> dict[str, float]:
        """What lies there between two steps, in bytes."""
        config, mine = self.config, self.shape.every.trained / self.shards
        anchored = config.loss.get("kl_anchor") == "initial" and not config.stays_initial
        copies = (config.sync_alpha < 1 or config.keeps_reference) + (anchored and config.online)
        parts = {"weights": self.shape.every.kept / self.shards}
        return parts | ({"reference": copies * mine} if copies else {}) | {"optimizer": 2 * mine}

    @property
    def root(self) -> int:
        """Bytes of what is in no layer, gathered; tied weights that ranks share have two copies."""
        return self.shape.root.gathered * (2 if self.shape.tied and self.shards > 1 else 1)

    def gathered(self, blocks: int) -> float:
        """Return the bytes of gathered weights while ``blocks`` layers are whole, or all, if they stay so."""
        again = self.config.model.reshard_after_forward
        return self.root + self.shape.block.gathered * (blocks if again else self.shape.layers)

    @property
    def ahead(self) -> int:
        """Bytes of the layer that is on its way from the other ranks in a step."""
        waits = self.shards == 1 or not self.config.model.reshard_after_forward
        return 0 if waits else self.shape.block.gathered

    # -- a training step ---------------------------------------------------------------------------

    def scores(self, load: Load) -> float:
        """Return the bytes that attention keeps of a token's scores and of what it makes to compute them."""
        layer, model, width = self.shape.layer, self.config.model, self.width
        repeated = 2 * width * (layer.queries - layer.keys)
        text = self.hf_config.get_text_config()
        if model.attn_implementation == "eager":
            softcap = getattr(text, "attn_logit_softcapping", None) is not None
            return repeated + layer.heads * load.longest * (4 + (2 + softcap) * width)
        if load.packed and packable(self.hf_config, model.attn_implementation):
            if not self.gpu:
                return width * layer.queries
            return 0 if GROUPED else repeated
        masked = load.packed or getattr(text, "sliding_window", None)
        flash = "flash" in model.attn_implementation
        mask = width * (load.tokens if load.packed else load.longest)
        return repeated + mask if masked and not flash else 0.0

    def logits(self, counted: int, trained: bool) -> float:
        """Return the bytes that the head takes for ``counted`` completion tokens, but for its gradient."""
        if self.config.model.head == "reward" or not counted:
            return 0
        shape, hidden, width, gpu = self.shape, self.shape.layer.hidden, self.width, self.gpu
        budget = BUDGET["cuda" if gpu else "cpu"]
        columns = min(shape.vocabulary, max(budget // counted, 64) // 64 * 64)
        capped = getattr(self.hf_config.get_text_config(), "final_logit_softcapping", None) is not None
        of_slice = 4 * counted * columns
        if trained and not gpu and keeps_logits(counted, shape.vocabulary):
            return 4 * counted * (shape.vocabulary + 4 * hidden)
        before = of_slice * (columns < shape.vocabulary)  # a slice goes once the next one is there
        rounded = of_slice // 2 * (gpu and trained and width < 4) + of_slice * (trained and capped)
        copies = 4 * columns * hidden * ((trained and shape.head > 0) if gpu else width < 4)
        return of_slice + max(before, rounded + copies) + counted * hidden * (8 + 2 * width)

    def layer_bytes(self, load: Load) -> tuple[float, float]:
        """Return (what a layer keeps of the microbatch until its backward; what its backward takes besides,
        with what it computes again)."""
        layer, width, scores = self.shape.layer, self.width, self.scores(load)
        way = self.config.model.activation_checkpointing
        every = kept = layer.kept(width, scores)
        if way is not False:
            kept = layer.kept_selectively(width) if way == SELECTIVE else float(width * layer.hidden)
        back = every - kept + layer.in_backward(width, scores, again=way is not False)
        return load.tokens * kept, load.tokens * back

    def step(self, load: Load) -> dict[str, float]:
        """Return the bytes by part at the fullest moment of a training step."""
        shape, shards, layers = self.shape, self.shards, self.shape.layers
        kept, back = self.layer_bytes(load)
        width, hidden = self.width, shape.layer.hidden
        last = load.tokens * hidden * (4 + 4 * width) + 128.0 * load.counted  # last norm, loss
        back += last + shape.head
        # One rank keeps the gradients of several passes whole.
        before = shape.every.trained / (1 if self.ranks == 1 else shards) if load.several else 0.0
        of_block, of_root = shape.block.trained, float(shape.root.trained)
        of_layers = layers * of_block / shards
        reduced = self.ahead + of_block * (1 if load.several else 1 + 1 / shards)
        one, first, sent, input_ = self.gathered(1), *self.begins(load)
        head = shape.head + self.logits(load.counted, True)
        heads = shape.head * (1 if shape.tied else 2)
        every, late = kept * layers, before or of_layers * (1 - 2 / layers)
        names = ("gradients", "gathered blocks", "communication", "activations", "work", "logits")
        moments = {
            "first layer's forward": (before, first, sent, 0.0, input_, 0.0),
            "head": (before, self.gathered(0), self.ahead, every, last, head),
            "last layer's backward": (before, one, self.ahead, every, back, 0.0),
            "the backward before it": (before, one, reduced, every - kept, back, 0.0),
            "first layer's backward": (late, first, reduced, kept, back, 0.0),
            "root's backward": (before or of_layers, 0.0, of_root, 0.0, input_, heads),
        }
        return self.resident | dict(zip(names, max(moments.values(), key=sum), strict=True))

    def begins(self, load: Load) -> tuple[float, float, float]:
        """Return the gathered bytes where a forward begins, those on their way from the other ranks, and its
        input's."""
        first = float(self.root + self.shape.block.gathered)
        return first, first * (self.shards > 1), 1.2 * self.width * self.shape.layer.hidden * load.tokens

    def evaluation(self, load: Load) -> dict[str, float]:
        """Return the bytes by part at the fullest moment of an evaluation."""
        layer, width = self.shape.layer, self.width
        in_layer = load.tokens * layer.in_forward(width, self.scores(load))
        in_head = load.tokens * 2 * width * layer.hidden + self.logits(load.counted, False)
        work, sent = (
            max(in_layer, in_head) + 128.0 * load.tokens,
            self.shape.block.gathered * (self.shards > 1),
        )
        most = max((self.gathered(1), float(sent), work), self.begins(load), key=sum)
        return self.resident | dict(
            zip(("gathered blocks", "communication", "evaluation"), most, strict=True)
        )
