"""The policy, a causal language model whose forward returns token log-probabilities, with the checks that
refuse models it does not support.

The policy always stays in eval mode: it scores its own reference, and these scores must not be random. Rows
are padded on the right, and no attention mask is passed: under a causal mask no completion token can see the
padding after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from common.errors import ConfigError
from config.schema_model import SELECTIVE
from data.types import Sequences
from models.attention import DECODING, PACKED, packable, row_limits
from models.logprobs import chunked_entropies, chunked_logprobs

if TYPE_CHECKING:
    from peft import PeftModel


class Policy(nn.Module):
    """The model that is trained. ``policy(sequences)`` is the only forward, for training, scoring and
    evaluation alike."""

    model: PreTrainedModel | PeftModel

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        config = causal_lm(model).config.get_text_config()
        # Between hidden state and logit Cohere multiplies, Granite divides and Gemma-2 caps. check_head finds
        # anything else.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.temperature = 1.0
        """Divisor of the logits in every forward (``model.logit_temperature``)."""
        self.packs = False
        self.compiled = False
        """Whether torch.compile has the decoder's layers."""
        self._routed: list[tuple[Tensor, ...]] | None = None
        self.train(False)

    def train(self, mode: bool = True) -> Policy:
        """Stay in eval mode whatever ``mode`` is: dropout would make the policy differ from itself as its
        reference."""
        return super().train(False)

    def forward(self, sequences: Sequences, entropy: bool = False) -> Tensor:
        """Return [R, T] float32, log p(token | preceding tokens) at completion cells, in nats, with p =
        softmax(logits / ``temperature``); 0 where the mask is False. With ``entropy``, return [2, R, T]: the
        log-probabilities, and the entropies of the distributions that the tokens are drawn from, in nats.

        Without a completion token (rows that only fill up the batch) the result is zeros that still depend on
        every trained weight, so that a sharded backward runs on every rank.
        """
        before = self.hidden(sequences).index_select(0, sequences.predict)
        logprobs = self.logprobs(sequences, before)
        return torch.stack([logprobs, self.entropies(sequences, before)]) if entropy else logprobs

    def hidden(self, sequences: Sequences) -> Tensor:
        """Return [B L, D], the last hidden state at every position, with B and L flattened."""
        arguments: dict[str, Any] = {}
        if sequences.position_ids is not None:  # a recurrent model takes no such argument, not even None
            arguments["position_ids"] = sequences.position_ids
            packed = sequences.packed
            assert packed is not None and (self.packs or not packed.shares), (
                "a mask knows of no shared prompt"
            )
            if self.packs:
                arguments |= row_limits(packed, sequences.input_ids.device)
        if self._routed is not None:
            arguments["output_router_logits"] = True
        out = causal_lm(self.model).base_model(input_ids=sequences.input_ids, use_cache=False, **arguments)
        if self._routed is not None:
            self._routed.append(out.router_logits)
        return out.last_hidden_state.flatten(0, 1)

    @contextmanager
    def routed(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """Yield a list to which every forward in the context appends its routers' logits: a [B L, experts]
        tensor for each mixture layer, with gradient."""
        self._routed = []
        try:
            yield self._routed
        finally:
            self._routed = None

    def logprobs(self, sequences: Sequences, before: Tensor) -> Tensor:
        """Return [R, T], log-probabilities in nats of the completion tokens from the hidden states [M, D]
        that predict them."""
        # The head's weight is read here, not in __init__: once sharded it is whole only inside this forward.
        head = output_head(self.model)
        values = chunked_logprobs(before, head.weight, head.bias, sequences.targets, **self.form)
        return on_grid(sequences, values)

    @property
    def form(self) -> dict[str, Any]:
        """Arguments for ``models.logprobs`` that say how the head's product becomes logits."""
        return {"scale": self.scale, "softcap": self.softcap, "temperature": self.temperature}

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Divide logits by ``temperature`` instead of the policy's own, for as long as the context lasts."""
        previous, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = previous

    def entropies(self, sequences: Sequences, before: Tensor) -> Tensor:
        """Return [R, T], the entropies in nats of the distributions that the hidden states [M, D] give."""
        head = output_head(self.model)
        return on_grid(sequences, chunked_entropies(before, head.weight, head.bias, **self.form))

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        synced_gpus: bool = False,
        **more: Any,
    ) -> Tensor:
        """Return [B, P + new] token ids, by transformers' generate with a KV cache. input_ids [B, P] are
        padded on the left; attention_mask [B, P] marks the padding. ``synced_gpus``: weights are sharded, so
        all ranks run as many forwards as the slowest. ``more``: further arguments of generate. Layers
        run uncompiled."""
        generate, config = cast(Callable[..., Tensor], self.model.generate), causal_lm(self.model).config
        if self.packs:  # that kernel supports neither a cache nor padding on the left
            config._attn_implementation = DECODING
        # A cache would make dynamo compile the layers again for each of them. At its limit it would leave
        # them uncompiled, in training too.
        stance = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        try:
            with torch.no_grad(), stance:
                return generate(
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=generation_config,
                    logits_processor=logits_processor,
                    synced_gpus=synced_gpus,
                    **more,
                )
        finally:
            if self.packs:
                config._attn_implementation = PACKED

    def use_packed_attention(self) -> None:
        """Use the attention of models.attention where this model supports it. Then a packed row attends to
        itself alone, and transformers does not search padded rows for packed ones, which would make the host
        wait. For other models transformers does search, and masks packed rows."""
        model = causal_lm(self.model)
        self.packs = packable(model.config, model.config._attn_implementation)
        if self.packs:
            model.config._attn_implementation = PACKED

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise ConfigError if the model does more between hidden state and logits than ``forward`` accounts
        for.

        The model's own head is run on random hidden states (its body is left out) and the results are
        compared. Call it before sharding.
        """
        model, head = causal_lm(self.model), output_head(self.model)
        weight, name = head.weight, type(model).__name__
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 4, weight.shape[1], generator=generator).to(weight)
        targets = torch.randint(weight.shape[0], (4,), generator=generator).to(weight.device)
        with _left_out(bodies(model), HiddenState(hidden)):
            ids = torch.zeros(1, 4, dtype=torch.int64, device=weight.device)
            try:
                logits = model(input_ids=ids, use_cache=False).logits[0]
            except Exception as error:  # the model's own code, which may raise anything
                raise ConfigError(
                    "model.name_or_path",
                    model.config.name_or_path or name,
                    f"{name} cannot be asked for logits of a hidden state, so its log-probabilities cannot "
                    f"be checked ({type(error).__name__}: {error}); use another architecture",
                ) from error
        theirs = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        ours = chunked_logprobs(hidden[0], weight, head.bias, targets, scale=self.scale, softcap=self.softcap)
        # Their logits are rounded to the model's dtype; ours are not.
        allowed = 4 * torch.finfo(weight.dtype).eps * (1 + logits.abs().max().item()) + 1e-4
        difference = (theirs - ours).abs().max().item()
        if not (difference <= allowed):
            raise ConfigError(
                "model.name_or_path",
                model.config.name_or_path or name,
                f"{name} does something to its logits that is not known here (log-probabilities differ by "
                f"{difference:.2g} nats)",
            )


class HiddenState:
    """Stand-in for a body's output when its layers are left out: the last hidden state, and None for
    everything else that a model's own forward may read from it (router logits, a recurrence's cache,
    attentions)."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index] if isinstance(index, slice) or index == 0 else None


def bodies(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that a causal language model may call for hidden states: its body, and the decoder
    within it (OPT)."""
    body = cast(nn.Module, model.base_model)
    inner = getattr(body, "decoder", None)
    return [body, inner] if isinstance(inner, nn.Module) else [body]


@contextmanager
def _left_out(modules: list[nn.Module], output: object) -> Iterator[None]:
    """Make ``modules`` return ``output`` without computing anything, for as long as the context lasts."""
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.__dict__["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward


def on_grid(sequences: Sequences, values: Tensor) -> Tensor:
    """Return [R, T] with the ``values`` [M] of completion tokens in their cells and 0 elsewhere."""
    grid, width = (
        torch.zeros(sequences.mask.shape, device=values.device, dtype=values.dtype),
        sequences.mask.shape[1],
    )
    # This is not a view of a flat tensor because FSDP2 attaches its pre-backward hook to the returned tensor.
    return grid.index_put((sequences.cells // width, sequences.cells % width), values)


def causal_lm(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the transformers model, without the adapters that may be around it."""
    return cast(PreTrainedModel, model.get_base_model() if is_adapted(model) else model)


def is_adapted(model: nn.Module) -> TypeGuard[PeftModel]:
    """Return whether there are adapters around a model. peft takes a second to import, and a run without
    adapters needs none of it."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def output_head(model: PreTrainedModel | PeftModel) -> nn.Linear:
    """Return the head that makes logits. Raises ConfigError unless it is a plain linear layer (adapters on it
    are not supported)."""
    head = causal_lm(model).get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            "model.name_or_path",
            type(head).__name__,
            "the output head must be a plain linear layer, without "
            "adapters (model.peft.target_modules=all-linear leaves it alone)",
        )
    return head


def decoder_blocks(model: Policy | PreTrainedModel | PeftModel) -> list[nn.Module]:
    """Return the decoder layers of a model (or of a Policy), in order. They are the units of sharding and of
    activation checkpointing.

    Raises ConfigError for a model that has no list of them as long as its config's num_hidden_layers.
    """
    inner = causal_lm(model.model if isinstance(model, Policy) else model)
    layers = inner.config.get_text_config().num_hidden_layers
    for module in inner.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ConfigError(
        "model.name_or_path", type(inner).__name__, f"no list of its {layers} decoder layers was found"
    )


def set_up_layers(policy: Policy, checkpointing: bool | str, compiled: bool) -> None:
    """Make every layer's forward what ``model.activation_checkpointing`` and ``model.compile`` ask for, in
    the place of what was set up before.

    A compiled layer is checkpointed as a whole, so that its input alone is kept. What ``selective`` keeps are
    operations, which the compiler must see."""
    blocks = decoder_blocks(policy)
    for block in blocks:
        vars(block).pop("forward", None)
    if checkpointing == SELECTIVE:
        checkpoint_activations(blocks, selective=True)
    for block in blocks if compiled else []:
        block.forward = torch.compile(block.forward, dynamic=True)
    if checkpointing is True:
        checkpoint_activations(blocks)
    policy.compiled = compiled


def checkpoint_activations(blocks: list[nn.Module], selective: bool = False) -> None:
    """Keep only each block's input for the backward and recompute the rest. With ``selective``, also keep
    results that are expensive to recompute (``keep_expensive``). Call it before sharding, whose hooks must
    lie outside.

    transformers' own switch does nothing in eval mode; a wrapper module would change the names of the
    weights.
    """
    more: dict[str, Any] = {"context_fn": keep_expensive} if selective else {}
    for block in blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more
        )


def keep_expensive() -> Any:
    """Return contexts of a block's forward and of its recomputation. The results of attention and of every
    second matrix product are kept, as torchtitan does; everything else is recomputed."""
    products = {False: 0, True: 0}
    """Whether it is the recomputation -> the products seen so far. Some releases of torch (2.11) ask again in
    the recomputation, where the same product has to get the same answer."""

    def policy(context: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        name = str(op)
        if "attention" in name or "attn" in name:
            return CheckpointPolicy.MUST_SAVE
        if any(f".{product}." in name for product in PRODUCTS):
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
"""Names of torch's matrix products, as they appear in ``aten.mm.default``."""
