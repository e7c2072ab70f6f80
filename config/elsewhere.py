"""The table of the settings of TRL and HALOs and their names here.

The table of the guide (docs/from-halos-and-trl.md) is made from it, and a command line that uses a name of
one of these projects is answered from it.
"""

from __future__ import annotations

import os
import shlex
from typing import NamedTuple

SAME = (
    "the same names",
    "the same names; `n_examples` and `eval_every` count the loss's own unit (pairs, or sequences)",
)
"""Notes of rows whose names are the same here, so that no message is needed."""
DIFFERENT = ("gradient_accumulation_steps",)
"""Names that a setting here ends in as well, with another meaning."""


class Row(NamedTuple):
    """Settings of the other project, and the settings here that say the same."""

    there: tuple[str, ...]
    """As one types them in the other project; with a value if the row is about that value alone"""
    here: tuple[str, ...]
    """As one types it here; several are alternatives. Empty: there is no such setting."""
    note: str = ""
    """What else to know; if ``here`` is empty, what happens instead"""
    own: bool = True
    """Whether the value that was typed there is the one to type here"""

    @property
    def names(self) -> list[str]:
        """The settings' names without values."""
        return [name.partition("=")[0] for name in self.there]

    def answer(self, value: str) -> str:
        """Return the row as a remedy for a user who typed ``value``. A single setting without a note has the
        same values in both projects, so the remedy repeats the value."""
        if not self.here:
            return self.note
        typed = self.typed(value)
        here = " ".join(typed) if typed and value else ", or ".join(self.here)
        return f"{here}{f' ({self.note})' if self.note else ''}"

    def typed(self, value: str) -> list[str]:
        """Return the words to type here for ``value``, which has the place of the example's; nothing where
        units or names of values differ (``own``) or the choice is the user's."""
        if not self.here or (not self.own and not any("=" in name for name in self.there)):
            return []
        local = value.endswith((".json", ".jsonl", ".csv", ".parquet", ".gz")) or os.path.exists(value)
        fitting = [way for way in self.here if "=local" in way] if local else []
        value = value.strip("[]") if "," not in value else value
        *words, last = shlex.split((fitting or self.here)[0])
        key, _, example = last.partition("=")
        keeps = not self.own or "," in value or not value or any("=" in name for name in self.there)
        return [*words, f"{key}={example if keeps else value}"]


def _row(there: str, here: str = "", note: str = "", own: bool = True) -> Row:
    """Return a row. ``there`` has names separated by spaces, ``here`` has alternatives separated by ``|``."""
    return Row(tuple(there.split()), tuple(part.strip() for part in here.split("|") if part), note, own)


HALOS = (
    _row(
        "seed exp_name lr n_epochs n_examples n_eval_examples eval_every optimizer beta1 beta2 eps "
        "weight_decay",
        note=SAME[1],
    ),
    _row("datasets train_datasets test_datasets", "data=shp", "several: data=mix data.mix=[…]"),
    _row('datasets="[ultrabin]" train_datasets="[ultrabin]"', "data=ultrafeedback_binarized"),
    _row("debug", "dry_run=true"),
    _row("wandb.enabled wandb.entity wandb.project", note=SAME[0]),
    _row(
        "cache_dir local_run_dir", "runs_dir=runs cache_dir=.cache", "runs; scores and token ids", own=False
    ),
    _row("do_first_eval", note="always: the first evaluation is the zero point of the others"),
    _row("minimum_log_interval_secs", note="none: every step has its line in `metrics.jsonl`"),
    _row("intermediate_checkpoints", "save_every=1024", "examples between checkpoints"),
    _row("warmup=0.1 warmup_steps=150", "warmup=0.1", "a share of the run"),
    _row(
        "cache_reference_logprobs load_reference_logprobs",
        note="always cached, in `cache_dir`, under everything that they depend on",
    ),
    _row("humanline=true", "humanline=true"),
    _row(
        "log_epsilon_P=-1.0 log_epsilon_R=1.0",
        "log_epsilon_P=-1.5 log_epsilon_R=1.5",
        "the paper's range is the default",
    ),
    _row(
        "sync_reference",
        "humanline=true log_epsilon_P=-.inf log_epsilon_R=.inf",
        "syncs without clipping",
        own=False,
    ),
    _row(
        "humanline_gamma_P humanline_beta_P humanline_gamma_R humanline_beta_R",
        "humanline=true humanline_mode=sample humanline_sampling.gamma_P=2 humanline_sampling.beta_P=90",
        "`gamma_R`, `beta_R`, `M_P`, `M_R` alike",
        own=False,
    ),
    _row("frac_unique_desirable", "loss=kto data.frac_unique_desirable=0.8"),
    _row("frac_unique_undesirable", "loss=kto data.frac_unique_undesirable=0.8"),
    _row("trainer dataloader", note="the loss's file chooses"),
    _row("loss.control_tokens.chosen", "loss=csft", "from `model.control_tokens`, or the same name"),
    _row("loss.ppo_epochs", note="one: a step is one update on one batch"),
    _row(
        "model.load_from model.from_checkpoint",
        "model=hub model.name_or_path=runs/my-sft",
        "to go on with a run: resume=true",
    ),
    _row(
        "model.tokenizer_name_or_path model.max_length model.max_prompt_length model.max_grad_norm "
        "model.batch_size model.gradient_accumulation_steps model.eval_batch_size "
        "model.activation_checkpointing model.attn_implementation model.use_peft model.peft.lora_r "
        "model.peft.lora_alpha model.peft.target_modules",
        note=SAME[0],
    ),
    _row(
        "model.microbatch_size",
        "model.gradient_accumulation_steps=2",
        "batch size over ranks and these is the microbatch",
        own=False,
    ),
    _row("model.block_name", note="none: found by itself"),
    _row(
        "model.policy_dtype model.reference_dtype",
        "model.dtype=bfloat16",
        "computes; the trained weights are float32; the reference has none",
        own=False,
    ),
    _row("model.v_head_max_grad_norm", note="none: one norm over all gradients"),
    _row(
        "model.peft.lora_dropout",
        note="none: the reference is scored by the policy itself, which must not be random",
    ),
    _row("model.load_lora_from", note="none: an exported model has its adapters merged; start from that"),
    _row(
        "model.reward_model.path", "online=true reward=classifier reward.classifier.name_or_path=org/reward"
    ),
)
"""HALOs, in the order of its config.yaml."""

SERVERS = "online=true reward=adder sampler=vllm 'sampler.urls=[http://host:8000]'"
TRL = (
    _row("model_name_or_path", "model=hub model.name_or_path=org/name"),
    _row("dataset_name", "data=hub data.path=org/name | data=local data.path=pairs.jsonl"),
    _row("dataset_config", "data.subset=main", "the hub's sets alone"),
    _row("dataset_train_split", "data.split=train"),
    _row("dataset_test_split", "data.eval_split=test", "data=local has data.eval_path"),
    _row("dataset_text_field", "'data.columns={prompt: text}'"),
    _row("learning_rate", "lr=1e-6"),
    _row("num_train_epochs", "n_epochs=1"),
    _row("max_steps", "n_examples=320", "steps times batch size", own=False),
    _row("warmup_ratio", "warmup=0.1"),
    _row("warmup_steps", "warmup=0.1", "a share of the run", own=False),
    _row(
        "lr_scheduler_kwargs",
        "scheduler=cosine min_lr_ratio=0.1",
        "the last rate, as a share of lr",
        own=False,
    ),
    _row("data_seed full_determinism", note="none: seed decides all, and a run resumes to the bit"),
    _row("lr_scheduler_type", "scheduler=cosine"),
    _row("optim", "optimizer=AdamW | optimizer=Muon | optimizer=AdamW8bit", own=False),
    _row("adam_beta1", "beta1=0.9"),
    _row("adam_beta2", "beta2=0.999"),
    _row("adam_epsilon", "eps=1e-8"),
    _row("max_grad_norm", "model.max_grad_norm=1.0"),
    _row("output_dir logging_dir", "runs_dir=runs exp_name=mine", "the run lies in runs/mine", own=False),
    _row("run_name", "exp_name=mine"),
    _row("overwrite_output_dir", "overwrite=true"),
    _row("resume_from_checkpoint", "resume=true", "goes on from the run's newest checkpoint", own=False),
    _row("save_total_limit", "keep_checkpoints=2"),
    _row("hub_model_id", "push_to_hub=org/name"),
    _row(
        "hub_always_push hub_strategy hub_revision hub_token",
        note="none: the model is uploaded once, when the run ends, with the token of `hf auth login`",
    ),
    _row("hub_private_repo", "hub_private=true"),
    _row("save_steps save_strategy", "save_every=1024", "examples, in the loss's own unit", own=False),
    _row("eval_steps eval_strategy", "eval_every=1024", "examples, in the loss's own unit", own=False),
    _row("load_best_model_at_end=True metric_for_best_model", "keep_best=eval_reward_margin"),
    _row("greater_is_better", note="none: keep_best knows which way its number is better"),
    _row(
        "do_train do_eval do_predict eval_on_start",
        note="none: a run trains, and is evaluated from step 0 on",
    ),
    _row(
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object batch_eval_metrics "
        "include_for_metrics prediction_loss_only label_names use_cache",
        note="none: an evaluation adds up over batches and ranks",
    ),
    _row(
        "ignore_data_skip restore_callback_states_from_checkpoint save_on_each_node save_only_model "
        "enable_jit_checkpoint",
        note="none: a checkpoint has all that resume=true needs to go on, and a stopped run writes one",
    ),
    _row(
        "early_stopping_patience",
        "patience=3 keep_best=eval_reward_margin eval_every=1024",
        "evaluations in a row without a better one",
        own=False,
    ),
    _row(
        "logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_level "
        "log_level_replica log_on_each_node disable_tqdm include_num_input_tokens_seen skip_memory_metrics",
        note="none: every step has its line in `metrics.jsonl`",
    ),
    _row(
        "report_to",
        "wandb.enabled=false | 'trackers=[]'",
        "wandb is on unless told; trackers=[tensorboard,trackio] are others",
        own=False,
    ),
    _row(
        "per_device_train_batch_size train_batch_size",
        "model.batch_size=32",
        "the global batch, over all ranks",
    ),
    _row(
        "gradient_accumulation_steps",
        "model.batch_size=128 model.gradient_accumulation_steps=4",
        "there it makes the batch of an update larger: per_device_train_batch_size x ranks x this, which is "
        "model.batch_size here; here it says in how many passes a rank computes that batch, and changes no "
        "result",
        own=False,
    ),
    _row("per_device_eval_batch_size", "model.eval_batch_size=64", "over all ranks"),
    _row(
        "bf16 fp16 torch_dtype",
        "model.dtype=bfloat16",
        "computes; the trained weights are float32",
        own=False,
    ),
    _row("max_length max_seq_length", "model.max_length=64", "of a prompt and its completion"),
    _row("max_prompt_length", "model.max_prompt_length=16"),
    _row("packing padding_free", "model.packing=false", "true wherever the architecture can, for every loss"),
    _row("gradient_checkpointing", "model.activation_checkpointing=true"),
    _row(
        "use_liger_kernel liger_kernel_config",
        note="none: logits are made in recomputed chunks for every model",
    ),
    _row(
        "fsdp deepspeed fsdp_config accelerator_config parallelism_config ddp_backend ddp_broadcast_buffers "
        "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph local_rank",
        note="none: weights are always sharded over the ranks (FSDP2)",
    ),
    _row("average_tokens_across_devices", note="none: every mean is over the global batch"),
    _row("torch_compile torch_compile_backend torch_compile_mode", "model.compile=true", own=False),
    _row(
        "auto_find_batch_size torch_empty_cache_steps",
        note="none: on a GPU the memory plan chooses model.microbatch_tokens",
    ),
    _row("use_cpu", note="none: a GPU is used where CUDA_VISIBLE_DEVICES shows one"),
    _row("bf16_full_eval fp16_full_eval tf32", note="none: model.dtype is that of training and evaluation"),
    _row(
        "optim_args optim_target_modules", note="none: beta1, beta2, eps and muon have settings of their own"
    ),
    _row("neftune_noise_alpha", note="none: noise would make the policy differ from itself as its reference"),
    _row("project", "wandb.project=mine"),
    _row(
        "trackio_bucket_id trackio_space_id trackio_static_space_id",
        "'trackers=[trackio]'",
        "whose file in config/trackers has the space",
        own=False,
    ),
    _row("ddp_timeout", "watchdog_seconds=300", "says which ranks the others wait for"),
    _row("remove_unused_columns", note="none: the data report names the columns that nothing reads"),
    _row(
        "dataloader_num_workers dataset_num_proc dataloader_drop_last dataloader_in_order "
        "dataloader_multiprocessing_context dataloader_persistent_workers dataloader_pin_memory "
        "dataloader_prefetch_factor",
        note="none: rows are tokenised once, on all cores",
    ),
    _row("chat_template_path", "model.chat_template=config/templates/default.jinja"),
    _row(
        "chat_template_kwargs",
        "'model.chat_template_kwargs={enable_thinking: false}'",
        "also the exported model's",
    ),
    _row(
        "peft_config=LoraConfig(r=64) lora_dropout",
        "model.use_peft=true model.peft.lora_r=64 model.peft.lora_alpha=256",
        "no dropout: the reference is scored by the policy itself",
        own=False,
    ),
    _row(
        "lora_target_modules", "model.use_peft=true 'model.peft.target_modules=[q_proj, v_proj]'", own=False
    ),
    _row(
        "load_in_4bit bnb_4bit_quant_type BitsAndBytesConfig",
        "model.use_peft=true model.quantization=nf4",
        "by torchao, the scales in 8 bits too; exported as dense weights",
    ),
    _row(
        "load_in_8bit", note="none: the base is kept in model.dtype, or in 4 bits with model.quantization=nf4"
    ),
    _row(
        "ref_model precompute_ref_log_probs",
        note="always: the policy scores its own reference, no second model is loaded",
    ),
    _row(
        "sync_ref_model ref_model_sync_steps=512 ref_model_mixup_alpha=0.6",
        "sync_mode=trust_region sync_freq=512 sync_alpha=0.6",
        "also with LoRA",
        own=False,
    ),
    _row('loss_type="sigmoid"', "loss=dpo"),
    _row('loss_type="kto"', "loss=kto"),
    _row('loss_type="bco"', "loss=bco"),
    _row('loss_type="simpo"', "loss=simpo"),
    _row('loss_type="sppo_hard"', "loss=sppo"),
    _row(
        'loss_type="bnpo"',
        "loss=grpo",
        "its mean is over the tokens of the global batch, not of a microbatch",
    ),
    _row('loss_type="sigmoid_norm"', "loss=dpo loss.length_normalized=true"),
    _row('loss_type="sft"', "loss=sft", "beside DPO: loss=dpo loss.nll_weight=1.0"),
    _row('loss_type="robust"', "loss=cdpo", "which smooths labels and does not divide by 1 - 2 epsilon"),
    _row('loss_type="bco_pair"', "loss=bco", "trains single examples"),
    _row('loss_type="exo_pair"', note="none: nearest is loss=dpo loss.divergence=forward_kl"),
    _row('loss_type="nca_pair"', note="none: nearest is loss=kto"),
    _row('loss_type="aot"', note="none: nearest is loss=dpo"),
    _row('loss_type="aot_unpaired"', note="none: nearest is loss=kto"),
    _row('loss_type="apo_zero"', note="none: nearest is loss=kto, or loss=dpo loss.nll_weight=1.0"),
    _row('loss_type="apo_down"', note="none: nearest is loss=dpo"),
    _row('loss_type="apo_zero_unpaired"', note="none: nearest is loss=kto"),
    _row('loss_type="discopop"', note="none: nearest is loss=dpo"),
    _row('loss_type="vespo"', note="none: nearest is loss=grpo loss.shape=sapo"),
    _row('loss_type="luspo"', note="none: nearest is loss=grpo loss.importance=sequence"),
    _row('loss_type="ipo"', "loss=ipo"),
    _row('loss_type="hinge"', "loss=slic"),
    _row("label_smoothing", "loss=cdpo loss.epsilon=0.2"),
    _row("label_smoothing_factor", note="none: loss=cdpo smooths the labels of pairs"),
    _row("simpo_gamma", "loss=simpo loss.gamma_beta_ratio=0.5", "over beta", own=False),
    _row("rpo_alpha", "loss=dpo loss.nll_weight=1.0"),
    _row("desirable_weight", "loss=kto loss.desirable_weight=1.1"),
    _row("undesirable_weight", "loss=kto loss.undesirable_weight=1.0"),
    _row(
        "num_generations",
        "rounds.samples=8",
        "for loss=grpo online=true reward=… rounds.feedback=group",
    ),
    _row("num_iterations", "rounds.passes=1", "of online=true"),
    _row("temperature", "sampler.temperature=0.7"),
    _row("top_p", "sampler.top_p=0.95"),
    _row("max_completion_length max_new_tokens", "sampler.max_tokens=48"),
    _row(
        "beta epsilon epsilon_high",
        "loss=grpo loss.beta=0.0 loss.epsilon=0.2 loss.epsilon_high=0.28",
        own=False,
    ),
    _row('loss_type="dapo"', "loss=grpo"),
    _row('loss_type="grpo"', "loss=grpo loss.normalization=sequence"),
    _row('loss_type="dr_grpo"', "loss=dr_grpo"),
    _row("importance_sampling_level", "loss=grpo loss.importance=sequence"),
    _row('loss_type="cispo"', "loss=grpo loss.shape=cispo"),
    _row('loss_type="sapo"', "loss=grpo loss.shape=sapo"),
    _row("delta", "loss=grpo loss.shape=dual loss.dual_clip=3.0"),
    _row(
        "scale_rewards=False",
        "loss=grpo loss.advantage=group_mean | loss=dr_grpo",
        "the latter divides by a constant",
    ),
    _row(
        "reward_funcs",
        "online=true reward=function reward.function.path=my_rewards.f",
        "with TRL's signature",
        own=False,
    ),
    _row("reward_model_path", "online=true reward=classifier reward.classifier.name_or_path=org/reward"),
    _row("use_vllm=True vllm_mode", "sampler=vllm", "without it: sampler=embedded"),
    _row("vllm_gpu_memory_utilization", "sampler=vllm sampler.gpu_memory_utilization=0.4"),
    _row("vllm_tensor_parallel_size", "sampler=vllm sampler.tensor_parallel=1"),
    _row("use_peft", "model.use_peft=true"),
    _row("lora_r", "model.use_peft=true model.peft.lora_r=64"),
    _row("lora_alpha", "model.use_peft=true model.peft.lora_alpha=256"),
    _row("dtype", "model.dtype=bfloat16", "computes; the trained weights are float32"),
    _row("attn_implementation", "model.attn_implementation=sdpa"),
    _row("model_revision", "model.revision=main"),
    _row("trust_remote_code", "model.trust_remote_code=true"),
    _row("router_aux_loss_coef", "model.router_aux_loss_coef=0.001"),
    _row("precompute_ref_batch_size", "reference_batch_size=64"),
    _row(
        "f_divergence_type", "loss=dpo loss.divergence=js", "reverse_kl, forward_kl, js or alpha", own=False
    ),
    _row("f_alpha_divergence_coef", "loss=dpo loss.divergence=alpha loss.divergence_alpha=0.5"),
    _row("loss_weights", "loss=dpo loss.nll_weight=1.0", "of the chosen answer's own likelihood", own=False),
    _row("sapo_temperature_pos", "loss=grpo loss.shape=sapo loss.tau_positive=1.0"),
    _row("sapo_temperature_neg", "loss=grpo loss.shape=sapo loss.tau_negative=1.05"),
    _row("num_generations_eval", "n_eval_samples=4"),
    _row(
        "reward_weights",
        "online=true reward=weighted 'reward.weighted.parts={adder: {weight: 1}}'",
        own=False,
    ),
    _row(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "loss=grpo correction=truncated",
        "or masked, sequence_masked",
        own=False,
    ),
    _row(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
        "loss=grpo correction=truncated correction.high=2.0",
    ),
    _row("vllm_importance_sampling_clip_min", "loss=grpo correction=truncated correction.low=0.5"),
    _row("off_policy_mask_threshold", "loss=grpo correction=negative_masked correction.delta=0.1"),
    _row("vllm_max_model_length", "model.max_length=64"),
    _row(
        "vllm_server_base_url",
        SERVERS,
        own=False,
    ),
    _row(
        "vllm_server_host vllm_server_port",
        SERVERS,
        own=False,
    ),
    _row("vllm_server_timeout", "online=true reward=adder sampler=vllm sampler.start_timeout=900"),
    _row("generation_batch_size", "rounds.contexts_per_round=256", "prompts, not samples", own=False),
    _row("steps_per_generation", "rounds.contexts_per_round=256", "prompts sampled at once", own=False),
    _row("truncation_mode", note="none: a long prompt loses its oldest turns, a completion its end"),
    _row("reference_free", note="none: loss=simpo, orpo and sft have no reference"),
    _row("ld_alpha", note="none: loss=dpo loss.length_normalized=true takes means of tokens"),
    _row("use_weighting", note="none: correction=weighted_pairs is WPO's weighting"),
    _row("ref_adapter_name model_adapter_name", note="none: the policy scores its own reference"),
    _row("disable_dropout", note="none: dropout is always off"),
    _row("activation_offloading", note="none: model.activation_checkpointing=true saves memory"),
    _row("pad_token pad_to_multiple_of", note="none: padding is never seen by the model"),
    _row(
        "discopop_tau entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target "
        "use_adaptive_entropy",
        note="none: this term of the loss is not here",
    ),
    _row("entropy_coef", "loss=grpo loss.entropy_bonus=0.001"),
    _row("top_entropy_quantile", "loss=grpo loss.entropy_share=0.2"),
    _row("use_bias_correction_kl", note="none: nearest is loss.kl_estimator=k2"),
    _row(
        "mask_truncated_completions=True",
        "loss=grpo online=true reward=adder rounds.feedback=group rounds.truncated=mask",
    ),
    _row(
        'multi_objective_aggregation="normalize_then_sum"',
        "online=true reward=weighted 'reward.weighted.parts={adder: {weight: 1}}' "
        "reward.weighted.normalize=group",
    ),
    _row(
        "vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
        note="none: loss.shape has ppo, dual, cispo, reinforce, sapo, gmpo, dppo and m2po",
    ),
    _row(
        "top_k min_p repetition_penalty generation_kwargs",
        note="none: samples are drawn by sampler.temperature and sampler.top_p, whose probabilities "
        "are known",
    ),
    _row(
        "cache_implementation use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config",
        note="none: sampler=embedded chooses, or use sampler=vllm",
    ),
    _row(
        "ds3_gather_for_generation cast_lm_head_to_fp32 vllm_enable_sleep_mode vllm_group_port "
        "vllm_model_impl",
        note="none: done as the machine needs it",
    ),
    _row(
        "vllm_structured_outputs_regex",
        note="none: samples are never constrained: the policy would not have drawn them",
    ),
    _row(
        "log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print",
        note="none: every sample of a round is in its folder, rounds/N/samples.jsonl",
    ),
    _row("max_tool_calling_iterations", note="none: environment.max_turns limits a conversation"),
    _row(
        "shuffle_dataset train_sampling_strategy group_by_length length_column_name",
        note="none: groups are shuffled by seed, and balanced over ranks",
    ),
    _row(
        "lora_modules_to_save lora_target_parameters lora_task_type use_dora use_rslora",
        note="none: LoRA has lora_r, lora_alpha and target_modules",
    ),
    _row(
        "bnb_4bit_quant_storage use_bnb_nested_quant model_init_kwargs dataset_streaming ignore_bias_buffers "
        "gradient_checkpointing_kwargs",
        note="none: there is nothing to choose",
    ),
)
"""The arguments of TRL's trainers and scripts: model and data, the run, the objective."""

SOURCES = (("TRL", TRL), ("HALOs", HALOS))


def known_elsewhere(name: str, value: str) -> tuple[str, Row] | None:
    """Return (the project, its row) for the name of a setting in another project; None if neither project has
    it.

    If a name has several rows, one for each value, return the row of ``value``; otherwise return all of them
    as one.
    """
    rows = ((whose, row) for whose, rows in SOURCES for row in rows if row.here or row.note not in SAME)
    found = [(whose, row) for whose, row in rows if name in row.names]
    if not found:
        return None
    bare = value.strip("\"'")  # as a shell would strip them
    asked = [(whose, row) for whose, row in found if f'{name}="{bare}"' in row.there]
    if asked or len(found) == 1 or name in found[0][1].there:
        return (asked or found)[0]
    whose = found[0][0]
    here = tuple(
        f"{row.here[0]} for {row.there[0].partition('=')[2]}" for by, row in found if by == whose and row.here
    )
    return whose, Row((name,), here, own=False)


def guide_table(rows: tuple[Row, ...]) -> str:
    """Return the rows as a markdown table for the guide."""
    lines = ["| there | here |", "|---|---|"]
    for row in rows:
        there = ", ".join(f"`{name}`" for name in row.there)
        here = ", or ".join(f"`{setting}`" for setting in row.here)
        lines.append(f"| {there} | {': '.join(part for part in (here, row.note) if part)} |")
    return "\n".join(lines) + "\n"
