"""Humanline for users of TRL 1.16: copy this one file beside your training script.

    from humanline_trl import HumanlineDPOTrainer  # and HumanlineKTOTrainer, HumanlineGRPOTrainer

    HumanlineDPOTrainer("org/model", args=DPOConfig(...), train_dataset=rows,
                        log_epsilon_P=-1.5, log_epsilon_R=1.5, sync_freq=1).train()

Each is TRL's trainer with the two parts of "Humanline: Online Alignment as Perceptual Loss" (§5.1):

clip: the log-ratio of each token, log pi_theta - log pi_ref, is clamped to [log_epsilon_P, log_epsilon_R]
before the loss sees it, and a clamped token has no gradient. In GRPO the ratio is to the reference instead of
the policy that sampled; the KL term compares with the same reference, and is not clamped.

sync: just before the update of steps 0, k, 2k ... (k = ``sync_freq``) the reference becomes the policy. With
k = 1 it is one step behind.

TRL subtracts the reference's log-probability from the policy's. Where the difference is out of bounds, this
file replaces the reference's by ``policy - bound``, with the policy's gradient: the difference is then the
bound, and has none. Within the bounds no bit changes.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments
from trl import DPOTrainer, GRPOTrainer, KTOTrainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import use_adapter


class SyncBeforeUpdate(TrainerCallback):
    """Moves the trainer's reference to the policy before the update of every ``every``-th step, the first
    included, and where a run is resumed: TRL's checkpoints have no reference."""

    def __init__(self, trainer: Any, every: int) -> None:
        self.trainer, self.every = trainer, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            self.trainer.move_reference()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.trainer.move_reference()


def refuse(args: TrainingArguments) -> None:
    """Raise ValueError for settings under which TRL asks another reference, or none token by token."""
    for setting in ("precompute_ref_log_probs", "sync_ref_model"):
        if getattr(args, setting, False):
            raise ValueError(f"{setting}=True: sync_freq says when the reference moves; set it to False")
    losses = getattr(args, "loss_type", [])
    if isinstance(losses, list) and {"aot", "aot_unpaired"} & {*losses}:
        raise ValueError(f"loss_type={losses}: aot compares sorted sums, not ratios; use another loss")


class Humanline:
    """The base of the three trainers. Raises ValueError for impossible bounds and as ``refuse`` does."""

    accelerator: Any
    add_callback: Any
    model: Any
    ref_model: Any
    _metrics: Any

    def __init__(
        self,
        *args: Any,
        log_epsilon_P: float = -1.5,
        log_epsilon_R: float = 1.5,
        sync_freq: int = 1,
        **kwargs: Any,
    ) -> None:
        if not log_epsilon_P < 0 < log_epsilon_R or sync_freq < 1:
            raise ValueError(
                f"log_epsilon_P={log_epsilon_P}, log_epsilon_R={log_epsilon_R}, sync_freq={sync_freq}: use "
                "log_epsilon_P < 0 < log_epsilon_R (nats) and sync_freq of at least 1"
            )
        self.bounds = (log_epsilon_P, log_epsilon_R)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, TrainingArguments):
                refuse(argument)
        super().__init__(*args, **kwargs)
        self.policy = self.accelerator.unwrap_model(self.model)
        if is_peft_model(self.policy):
            self._add_reference_adapter()
        self.add_callback(SyncBeforeUpdate(self, sync_freq))

    def _add_reference_adapter(self) -> None:
        """Give a model with an adapter a second one, "ref", which TRL takes as the reference."""
        if self.ref_model is not None:
            raise ValueError("ref_model with an adapter: leave it out; the reference is an adapter as well")
        if "ref" not in self.policy.peft_config:
            self.policy.add_adapter("ref", self.policy.peft_config["default"])
            self.move_reference()

    @torch.no_grad()
    def move_reference(self) -> None:
        """Make the reference the policy, by copying."""
        if not is_peft_model(self.policy):
            SyncRefModelCallback.sync_target_model(self.policy, self.ref_model, 1.0)
            return
        for name, parameter in self.policy.named_parameters():
            if ".default." in name:
                self.policy.get_parameter(name.replace(".default.", ".ref.")).copy_(parameter)

    def reference_for(self, policy: Tensor, reference: Tensor) -> Tensor:
        """Return what the loss subtracts from ``policy``, and log the share of tokens beyond each bound. All
        are [B, T], in nats, and 0 where there is no token."""
        low, high = self.bounds
        with torch.enable_grad():  # TRL asks the reference without gradient
            ratio = (policy - reference).detach()
            inside = (low <= ratio) & (ratio <= high)
            mixed = torch.where(inside, reference, policy - ratio.clamp(low, high))
        training = self.model.training
        if training and not policy.requires_grad:  # KTO's mismatched rows
            return mixed
        metrics = self._metrics["train" if training else "eval"]
        tokens = (policy != 0).sum().clamp(min=1)
        metrics["humanline/clipped_low"].append(((ratio < low).sum() / tokens).item())
        metrics["humanline/clipped_high"].append(((ratio > high).sum() / tokens).item())
        return mixed


class HumanlineOffline(Humanline):
    """DPO and KTO, which ask the policy for log-probabilities, and then the reference for those of the same
    rows in the same order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy_log_probs: deque[Tensor] = deque()
        for model in {self.policy, self.accelerator.unwrap_model(self.ref_model or self.policy)}:
            model.register_forward_hook(self._answered)

    def _answered(self, model: Any, _: Any, output: Any) -> None:
        if getattr(output, "log_probs", None) is None:
            return
        adapter = is_peft_model(model)
        if model.active_adapter == "ref" if adapter else model is not self.policy:
            output.log_probs = self.reference_for(self.policy_log_probs.popleft(), output.log_probs)
        else:
            self.policy_log_probs.append(output.log_probs)


class HumanlineDPOTrainer(HumanlineOffline, DPOTrainer):
    """TRL's DPOTrainer with humanline; every ``loss_type`` but aot."""


class HumanlineKTOTrainer(HumanlineOffline, KTOTrainer):
    """TRL's KTOTrainer with humanline; the rows of its KL estimate are clamped as well."""


class HumanlineGRPOTrainer(Humanline, GRPOTrainer):
    """TRL's GRPOTrainer with humanline. A reference is held for ``beta=0`` too."""

    def __init__(self, model: Any, reward_funcs: Any, args: Any, *others: Any, **kwargs: Any) -> None:
        self.scored: dict[str, Any] | None = None
        beta = args.beta
        args.beta = beta or 1.0  # TRL makes a reference only for a KL term
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        self.beta = args.beta = beta

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.scored = dict(inputs)
        try:
            return super()._compute_loss(model, self.scored)
        finally:
            self.scored = None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Score a loss's rows with the reference too, which may have moved since they were sampled."""
        score = super()._get_per_token_logps_and_entropies
        answer = score(model, *args, **kwargs)
        if self.scored is not None:
            plain = kwargs | {"compute_entropy": False, "compute_aux_loss": False}
            adapter = use_adapter(self.policy, "ref") if self.ref_model is None else nullcontext()
            with torch.no_grad(), adapter:
                reference = score(self.ref_model or self.model, *args, **plain)[0]
            self.scored["ref_per_token_logps"] = reference
            self.scored["old_per_token_logps"] = self.reference_for(answer[0], reference)
        return answer
