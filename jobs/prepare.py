"""Everything that a run has before its weights are loaded. What a user can get wrong is found here, or before
(``jobs.preflight``). Nothing is started, and nothing printed: the result has the messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.imports import import_function
from common.progress import phase
from config.schema import Config
from data.chat import Renderer, make_renderer
from data.quality import DataReport, limit_tokens
from jobs.memory import MemoryPlan, plan_run
from jobs.online import Online, longest_round, make_online_plan
from jobs.plan import EvaluationSet, Plan, first_example, load_evaluation_sets, make_plan
from jobs.preflight import LoadedData
from jobs.run_folder import RunFolder
from models.attention import packs_rows, shares_prompts, why_not_shared
from models.checks import routing_notice
from models.distributed import World, on_main
from models.pretrained import check_model, check_weights, load_tokenizer
from reports.data_tables import page as data_page
from rollouts.stop_strings import StopStrings, stop_strings_of
from rollouts.verify import checked_prompts
from trainers.assembly import Loss, check_budget, check_correction, trainer_class
from trainers.basic import BasicTrainer


@dataclass(frozen=True)
class Prepared:
    """A run before its weights are loaded."""

    config: Config
    loss: Loss
    trainer_class: type[BasicTrainer]
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    plan: Plan
    evaluation_sets: list[EvaluationSet]
    stops: StopStrings | None
    """What ends an answer that a verifier judges, besides an end token."""
    online: Online | None
    report: DataReport
    messages: list[str]

    def plan_memory(self, ranks: int) -> MemoryPlan:
        """Return what the fullest of ``ranks`` holds; a collective."""
        config, groups = self.config, self.plan.evaluation.groups
        named = ((one.held_out, one.checkable, one.data) for one in self.evaluation_sets)
        sets = [(self.plan.held_out, groups, config.data), *named]
        held_out = [part for part, *_ in sets if part is not None]
        checked = config.n_eval_samples * max(len(checked_prompts(config, of, task)) for _, of, task in sets)
        answered = {"asked": len(groups), "checked": checked}
        with phase("plan the memory", "model.microbatch_tokens"):
            return on_main(lambda: plan_run(config, self.plan.train, held_out, ranks, **answered))


def prepare(config: Config, data: LoadedData, loss: Loss, folder: RunFolder, world: World) -> Prepared:
    """Return the run in ``folder``, which ``data`` were read for. Every rank calls it. Raises ConfigError and
    DataError."""
    disable_progress_bar()  # transformers draws a bar for every file; the run has its own bar
    cls = trainer_class(config)
    hf_config = check_model(config.model)
    weights_notes = on_main(lambda: check_weights(config.model, hf_config))
    packing, why = packs_rows(config.model, hf_config)
    tokenizer = load_tokenizer(config.model)
    renderer = make_renderer(tokenizer, config.model, config.data)
    limit_tokens(tokenizer, hf_config.get_text_config().vocab_size, renderer.stop_token_ids)
    if renderer.template is not None:
        # The exported model uses the template it was trained with.
        tokenizer.chat_template = renderer.template
    plan = (make_online_plan if config.online else make_plan)(config, cls, renderer, data)
    # Not online: a round may end with a one-prompt batch, which has no mismatched row, and then z0 is 0.
    if not config.online:
        cls.check(config, plan.train)
        check_correction(config, plan.train)
    check_budget(config, plan.train, packing)
    stops = None
    if config.data.verifier is not None:
        import_function("data.verifier", config.data.verifier)
        stops = stop_strings_of(config, renderer)
    sets = load_evaluation_sets(config, cls, renderer, plan.loaded.groups, data.sets)
    labelled = config.accepts.labelled_examples
    report = DataReport.of(plan.loaded, plan.evaluation, plan.examples, plan.cuts, labelled)
    report = replace(report, example=tuple(first_example(plan, renderer)))
    online = Online(config, plan, renderer, world, folder.path) if config.online else None
    messages = [
        f"{folder.name}: {config.variant} {config.loss['name']}, {world.size} x {world.device.type}",
        *weights_notes,
        renderer.about_ends,
        *_about_rows(config, hf_config, packing, why),
        *report.beginning(),
        *(one.about for one in sets),
        *_about_length(config, plan, cls, online),
    ]
    # The texts, a temporary file if they are many, are in the report and are token ids now.
    plan = replace(plan, loaded=replace(plan.loaded, groups=()))
    return Prepared(config, loss, cls, tokenizer, renderer, plan, sets, stops, online, report, messages)


def _about_rows(config: Config, hf_config: PretrainedConfig, packing: bool, why: str) -> Iterator[str]:
    """Yield how the model computes the rows of a microbatch."""
    if (notice := routing_notice(config.model, hf_config)) is not None:
        yield notice
    yield f"rows of a microbatch {'end to end' if packing else 'padded to the longest'}: {why}"
    if shares_prompts(config.model, hf_config, packing):
        yield "prompts that rows of a microbatch share are computed once"
    elif config.model.share_prompts is None:
        yield f"no prompt is shared: {why_not_shared(config.model, hf_config, packing)}"


def _about_length(
    config: Config, plan: Plan, trainer: type[BasicTrainer], online: Online | None
) -> Iterator[str]:
    """Yield how long the run will be, and whether humanline changes nothing in it."""
    if online is not None:
        yield online.describe(plan, trainer.counts)
    else:
        share = config.data.logprob_range
        kept = f", of which {share} will be kept (data.logprob_range)" if share else ""
        yield (
            f"{plan.examples.count} {trainer.counts} to train on{kept}, {plan.train.n_examples} in all, "
            f"{plan.steps} steps of {config.model.batch_size}"
        )
    renews = config.online and not config.keeps_reference
    longest = min(longest_round(config, trainer), plan.steps) if renews else plan.steps
    if (notice := idle_humanline(config, longest, plan.steps)) is not None:
        yield notice


def idle_humanline(config: Config, longest: int, planned: int) -> str | None:
    """Return a notice for a run in which humanline changes nothing, or clips while its syncing changes
    nothing; None for any other run. ``longest``: the most steps that begin with one reference; ``planned``:
    the run's steps.

    The sync at step t (0, k, 2k …) changes the reference of later steps, and only if the policy has moved
    since the reference was it: not within two steps, and not before step k + 1."""
    by_itself = config.syncing == "humanline"
    if not config.humanline or (by_itself and longest > 2 and planned > config.sync_freq + 1):
        return None
    bounds = (config.log_epsilon_P, config.log_epsilon_R)
    clips = config.humanline_mode != "clip" or (longest > 1 and any(map(math.isfinite, bounds)))
    if clips and not by_itself:
        return None
    syncs = (
        f"with sync_freq={config.sync_freq} all of at most {longest} steps have the reference of the first"
    )
    idle = syncs if by_itself else f"sync_mode={config.syncing} syncs without it too"
    if clips:
        return f"note: humanline=true only clips in this run, its syncing changes nothing: {idle}"
    beyond = f"no log-ratio is beyond log_epsilon_P={bounds[0]:g} or log_epsilon_R={bounds[1]:g}"
    return f"note: humanline=true can change nothing in this run: {idle}, and {beyond}"


def describe(prepared: Prepared, world: World) -> dict[str, Any]:
    """Print, on rank 0, what a dry run would do and return its size, without writing files or loading
    weights. Raises ConfigError for a run that no cut makes fit."""
    plan, config, report = prepared.plan, prepared.config, prepared.report
    ranks, most = config.plan.ranks or world.size, ""
    if prepared.online is not None:  # rows as long as they may be, else as the data's in the mean
        most, length = "at most ", float(config.model.max_prompt_length + config.max_tokens)
    else:
        assert report.prompt_tokens is not None and report.completion_tokens is not None
        length = report.prompt_tokens.mean + report.completion_tokens.mean
    tokens = round(plan.train.n_examples * prepared.trainer_class.rows_per_example * length)
    if world.is_main:
        print(data_page(report.to_dict()), f"{most}{tokens:,} tokens to train on", sep="\n")
    memory = prepared.plan_memory(ranks)
    if world.is_main:
        print(memory.text, flush=True)
    if memory.refusal is not None:
        raise memory.refusal
    return {"steps": plan.steps, "examples": plan.train.n_examples}
