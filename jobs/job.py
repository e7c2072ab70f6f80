"""A training job, which builds the parts of a run in the order in which they can be checked, trains, and
writes the results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from common.errors import Requeue, StoppedError, UserError
from common.files import on_disk, read_sealed, write_whole
from common.imports import import_function
from common.progress import phase
from common.secrets import scrub, scrub_text, scrub_words
from config.record import MARKER
from config.schema import Config
from data.batches import Segment
from data.chat import make_renderer
from data.quality import DataReport
from data.views import prompts_of
from data.vocabulary import limit_tokens
from jobs import idle_humanline
from jobs.diagnostics import Diagnostics
from jobs.evaluation import Evaluator
from jobs.evaluation_sets import EvaluationSet, load_evaluation_sets
from jobs.hub import check_push, push_or_say
from jobs.initial_scores import initial_scores, scored_with
from jobs.likelihood import choose_groups, clippable_share, completion_means
from jobs.observers import Observers
from jobs.online import Online, make_online_plan, round_steps
from jobs.plan import first_example, make_plan, training_segment, without_texts
from jobs.ranking import EnoughError
from jobs.retention import InitialKL
from jobs.row_scores import CompletionSums, OfRows, PlannedBatches
from jobs.run_folder import RunFolder
from jobs.same_data import WEIGHTS, check_inputs, check_names, data_inputs, hub_commits
from jobs.same_data import note as note_in_run
from jobs.signals import Signals
from jobs.watch import RunWatch
from memory.decisions import PlannedSettings, describe_memory, measured
from models.attention import packs_rows, shares_prompts, why_not_shared
from models.distributed import World, ended_together, on_main, stop
from models.export import export, full_state, remove_unfinished
from models.loading import load_sharded
from models.policy import Policy
from models.pretrained import check_model, check_weights, export_dtype, load_tokenizer
from models.reference import Reference
from models.routing import routing_notice
from reports.answers import example_lines
from reports.data_tables import page as data_page
from reports.model_card import write_model_card
from reports.outcome import outcome
from reports.report import final_table, write_report
from reports.trackers import check_trackers
from reports.tracking import Tracker
from rollouts.stop_strings import StopStrings, stop_strings_of
from rollouts.verify import Accuracy, Shown, embedded_sampler, make_accuracy
from trainers.assembly import Offline, check_budget, make_loss, trainer_class
from trainers.basic import BasicTrainer
from trainers.corrections import check_correction
from trainers.humanline import Humanline
from trainers.optimizer import optimizer_class


class Job:
    """Builds the parts of a run and runs it.

    ``__init__`` finds everything a user can get wrong, before weights are loaded."""

    def __init__(
        self, config: Config, folder: RunFolder, world: World, observers: Sequence[Any] = ()
    ) -> None:
        """``folder``: the run's folder, already claimed unless this is a dry run. ``observers``: observers in
        addition to the ones that ``callbacks`` names."""
        self.config, self.folder, self.world = config, folder, world
        self.online: Online | None = None
        self.stops: StopStrings | None = None
        self.own: list[float] = []
        """Mean token log-probability of each of the initial weights' own answers, nats."""
        disable_progress_bar()  # transformers draws a bar for every file; the run has its own bar
        self.say(f"{folder.name}: {config.variant} {config.loss['name']}, {world.size} x {world.device.type}")
        check_trackers(config.trackers)
        optimizer_class(config.optimizer)  # refuses what is no optimizer
        on_main(lambda: check_push(config.push_to_hub))
        self.observers = Observers.of(config.callbacks, observers, world, make=not config.dry_run)
        self.loss, self.trainer_class = make_loss(config), trainer_class(config)
        Humanline.from_config(config)  # refuses a rule that cannot be called
        hf_config = check_model(config.model)
        for note in on_main(lambda: check_weights(config.model, hf_config)):
            self.say(note)
        if (notice := routing_notice(config.model, hf_config)) is not None:
            self.say(notice)
        packing, why = packs_rows(config.model, hf_config)
        self.say(f"rows of a microbatch {'end to end' if packing else 'padded to the longest'}: {why}")
        if shares_prompts(config.model, hf_config, packing):
            self.say("prompts that rows of a microbatch share are computed once")
        elif config.model.share_prompts is None:
            self.say(f"no prompt is shared: {why_not_shared(config.model, hf_config, packing)}")
        self.tokenizer = load_tokenizer(config.model)
        self.renderer = make_renderer(self.tokenizer, config.model, config.data)
        limit_tokens(self.tokenizer, hf_config.get_text_config().vocab_size, self.renderer.stop_token_ids)
        if self.renderer.template is not None:
            # The exported model uses the template it was trained with.
            self.tokenizer.chat_template = self.renderer.template
        self.plan = (make_online_plan if config.online else make_plan)(
            config, self.trainer_class, self.renderer
        )
        # Not online: a round may end with a one-prompt batch, which has no mismatched row, and then z0 is 0.
        if not config.online:
            self.trainer_class.check(config, self.plan.train)
            check_correction(config, self.plan.train)
        check_budget(config, self.plan.train, packing)
        if config.data.verifier is not None:
            import_function("data.verifier", config.data.verifier)
            self.stops = stop_strings_of(config, self.renderer)
        self.evaluation_sets = load_evaluation_sets(
            config, self.trainer_class, self.renderer, self.plan.loaded.groups
        )
        plan, labelled = self.plan, config.accepts.labelled_examples
        report = DataReport.of(plan.loaded, plan.evaluation, plan.examples, plan.cuts, labelled)
        self.report = report.with_example(first_example(plan, self.renderer))
        for line in [*self.report.beginning(), *(one.about for one in self.evaluation_sets)]:
            self.say(line)
        self.online = Online(config, self.plan, self.renderer, world, folder.path) if config.online else None
        self.plan = self.plan if config.online else without_texts(self.plan)
        self.say_plan()

    def say_plan(self) -> None:
        """Print how long the run will be."""
        if self.online is not None:
            self.say(self.online.describe(self.plan, self.trainer_class.counts))
        else:
            kept = (
                f", of which {share} will be kept (data.logprob_range)"
                if (share := self.config.data.logprob_range)
                else ""
            )
            self.say(
                f"{self.plan.examples.count} {self.trainer_class.counts} to train on{kept}, "
                f"{self.plan.train.n_examples} in all, "
                f"{self.plan.steps} steps of {self.config.model.batch_size}"
            )

        if (said := self.idle_humanline()) is not None:
            self.say(said)

    def idle_humanline(self) -> str | None:
        """Return the notice that humanline changes nothing in this run, or None (``jobs.idle_humanline``)."""
        if self.online is not None:
            return idle_humanline.notice(self.config, *round_steps(self.config, self.trainer_class))
        return idle_humanline.notice(self.config, [self.plan.steps], exact=True)

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    # -- running -----------------------------------------------------------------------------------

    def run(self, signals: Signals) -> dict[str, Any]:
        """Train, export and report; return the summary."""
        world, folder = self.world, self.folder.path
        prompts = None if self.online is None else self.online.contexts
        of_data = (self.config, self.plan, prompts, self.evaluation_sets)
        inputs = on_main(lambda: data_inputs(*of_data))
        on_main(lambda: check_inputs(folder, self.config, inputs))
        planned_settings = PlannedSettings(
            self.config, self.plan.train, self.held_out(), self.trainer_class, world
        )
        policy, fingerprint = load_sharded(self.config.model, world, self.config.seed)
        with phase("plan the memory", "model.microbatch_tokens"):
            config = self.config = planned_settings.apply(policy, self.say)
        inputs |= {WEIGHTS: fingerprint}
        on_main(lambda: self.check_initial_weights(inputs))
        exists = on_main(lambda: self.folder.prepare())
        if config.resume and not exists:
            self.say(f"resume=true: there is no run in {folder} to go on with, so a new one begins")
        self.memory = planned_settings.record
        on_main(lambda: self.folder.note("memory", self.memory))
        trainer = self.trainer_class(config, policy, self.loss, world)
        parts = scored_with(config.model, fingerprint, self.renderer.fingerprint, world)
        evaluator = self.make_evaluator(trainer, policy)
        evaluator.prepare(parts)
        if evaluator.initial_kl is not None:
            self.own = evaluator.initial_kl.likelihoods
        if config.data.logprob_range is not None:
            self.choose_groups(trainer, parts, folder)
        self.score_training_rows(trainer, parts)
        watch_arguments = (self.plan.steps, signals, self.make_diagnostics(trainer), self.observers, inputs)
        run = RunWatch(config, folder, trainer, evaluator, *watch_arguments)
        state = run.resume() if exists else None
        if exists:
            self.say(
                f"resumed before step {trainer.progress.step}"
                if state
                else "no checkpoint to resume from: starting afresh"
            )
        if world.is_main:
            run.tracker = Tracker(
                folder, asdict(config), config.wandb, bool(state), state["wandb_id"] if state else None
            )
        self.observers.start(folder, asdict(config), trainer.progress.step)
        self.train(trainer, policy, run)
        return self.finish(run, folder, policy)

    def check_initial_weights(self, inputs: dict[str, str]) -> None:
        """Check what is known once the weights are loaded, and note the commits of names on the hub; called
        on rank 0 alone. Raises ConfigError."""
        folder, commits = self.folder.path, hub_commits(self.config)
        check_names(self.config, inputs | commits)
        check_inputs(folder, self.config, {WEIGHTS: inputs[WEIGHTS]} | commits)
        if commits:
            note_in_run(folder, "hub_commits", commits)

    def train(self, trainer: BasicTrainer, policy: Policy, run: RunWatch) -> None:
        """Train all planned steps, or fewer if ``patience`` or an observer ends the run early.

        Raises StoppedError if training ended with too few steps."""
        online = None if self.online is None else self.online.source(trainer, policy, run)
        try:
            with ended_together(alike=(UserError, EnoughError)):
                trainer.train(online or Offline(self.plan.train), run)
        except EnoughError as why:
            run.stop_early(str(why))
            return
        except Requeue:
            run.interrupted()
            raise
        step = trainer.progress.step
        if step == 0 or (self.online is None and step != self.plan.steps):
            done = f"{step} of {self.plan.steps} planned steps were done"
            if self.online is None:
                raise StoppedError(done)
            raise UserError(done + self.online.why_nothing())  # the same command would do no better

    def make_evaluator(self, trainer: BasicTrainer, policy: Policy) -> Evaluator:
        config, held_out = self.config, self.plan.evaluation.groups
        accuracy = make_accuracy(config, policy, self.renderer, held_out, self.world, stops=self.stops)
        initial_kl = shown = None
        if held_out and config.model.head != "reward":
            prompts, tokens = on_main(self.own_counts)
            tokens = min(tokens, config.model.max_length - config.model.max_prompt_length)
            sampler_arguments = (config, policy, self.renderer, self.world)
            if config.retention.kl:
                sampler = embedded_sampler(
                    *sampler_arguments, "initial answers (retention.prompts, retention.tokens)"
                )
                initial_kl = InitialKL(trainer, sampler, held_out, self.renderer, (prompts, tokens))
            if accuracy is None:
                sampler = embedded_sampler(*sampler_arguments, "answers to read (retention.tokens)")
                shown = Shown(sampler, prompts_of(held_out), self.renderer, self.world, tokens)
        dtype = export_dtype(config.model)
        named = {
            one.name: Evaluator(trainer, one.held_out, self.accuracy_on(one, policy), dtype)
            for one in self.evaluation_sets
        }
        return Evaluator(trainer, self.plan.held_out, accuracy, dtype, initial_kl, named, shown)

    def own_counts(self) -> tuple[int, int]:
        """Return how many prompts the initial weights answer, and by how many tokens, at most: as the run was
        started, if it is resumed elsewhere. Called on rank 0 alone."""
        folder, given = self.folder.path, asdict(self.config.retention)
        before = (read_sealed(folder / MARKER).get("own_answers") or [{}])[-1] if self.config.resume else {}
        names = ("prompts", "tokens")
        here = dict(zip(names, self.config.retention.counts(self.world.device.type), strict=True))
        before = {key: n for key, n in before.items() if type(n) is int}
        used = {key: given[key] or before.get(key) or here[key] for key in names}
        note_in_run(folder, "own_answers", used)
        return used["prompts"], used["tokens"]

    def accuracy_on(self, one: EvaluationSet, policy: Policy) -> Accuracy | None:
        """Return the accuracy of answers to a further evaluation set's prompts.

        None where the answers cannot be checked."""
        if not one.checkable:
            return None
        stops = self.stops if one.data.source == self.config.data.source else None
        accuracy_arguments = (self.config, policy, self.renderer, one.checkable, self.world, one.data, stops)
        return make_accuracy(*accuracy_arguments, section=f"evaluations.{one.name}")

    def make_diagnostics(self, trainer: BasicTrainer) -> Diagnostics | None:
        """Return the diagnostics of the run; None if they are off or the loss has no reference."""
        if not (self.config.diagnostics and self.config.has_reference):
            return None
        sample = self.plan.held_out or (None if self.config.online else self.plan.train)
        return Diagnostics(trainer, [] if sample is None else sample.batch(0), self.plan.steps)

    def choose_groups(self, trainer: BasicTrainer, parts: dict[str, str], folder: Path) -> None:
        """Restrict training to the groups that ``data.logprob_range`` keeps.

        Raises ConfigError where the loss cannot be trained on them."""
        examples, selection, scores = choose_groups(trainer, self.plan.examples, parts, folder)
        self.plan = replace(
            self.plan, examples=examples, train=training_segment(self.config, examples.groups)
        )
        self.trainer_class.check(self.config, self.plan.train)
        self.report = self.report.with_selection(selection, examples)
        self.report_logprobs(
            {
                row.key: scores[row.key]
                for group in examples.groups
                for example in group
                for row in example.rows
            }
        )
        self.say(
            f"{len(selection.kept)} of {selection.all.count} groups kept, by mean token log-probability in "
            f"[{selection.lowest:.3f}, {selection.highest:.3f}] nats: {self.plan.train.n_examples} "
            f"{self.trainer_class.counts} in all, "
            f"{self.plan.steps} steps"
        )

    def held_out(self) -> list[Segment]:
        """Return everything that is evaluated."""
        sets = [self.plan.held_out, *(one.held_out for one in self.evaluation_sets)]
        return [part for part in sets if part is not None]

    def report_logprobs(self, scores: Mapping[str, Tensor]) -> None:
        """Add log-probabilities of the training rows to the data report.

        ``scores``: row key -> [C] log-probabilities under the initial weights, nats."""
        config = self.config
        clips = config.humanline and config.humanline_mode == "clip"
        self.report = self.report.with_logprobs(
            completion_means(self.plan.train.groups, scores),
            clippable_share(scores.values(), config.log_epsilon_R) if clips else None,
            self.own,
        )

    def score_training_rows(self, trainer: BasicTrainer, parts: dict[str, str]) -> None:
        """Score training rows under the initial weights, and write the data report.

        All rows are scored where an offline run compares with the initial weights at every step, as its
        reference or as the anchor of its KL term. Otherwise only the rows of one batch in n are scored, if
        ``drift`` is logged."""
        config, plan = self.config, self.plan.train
        fixed = trainer.fixed_reference or trainer.anchor is not None
        if config.has_reference and not config.online and (fixed or config.log_drift):
            reference = Reference(by_row=trainer.reference.by_row or not fixed)
            size = (
                trainer.micro_size
                if not reference.by_row
                else config.reference_batch_size or config.model.eval_batch_size
            )
            every = 1 if fixed else max(1, plan.n_examples // (config.drift_examples or plan.n_examples))
            batches = PlannedBatches(self.plan, range(0, self.plan.steps, every))
            known = initial_scores(
                trainer, batches, size, reference, parts, "score training rows (n_examples)"
            )
            scores = OfRows(known, batches, reference)
            trainer.use_initial_scores(CompletionSums(scores), known)
            if (
                config.data.logprob_range is None
            ):  # otherwise choose_groups has already reported every row that is kept
                self.report_logprobs(scores)
        on_main(self.write_data_report)
        for warning in self.report.warnings():
            self.say(f"warning: {warning} (docs/symptoms.md)")

    def write_data_report(self) -> None:
        """Write the data report to the run's folder; called on rank 0 alone. Raises ConfigError."""
        self.folder.write("data_report.json", json.dumps(scrub(self.report.to_dict()), indent=2))
        self.folder.write("data_report.md", scrub_text(data_page(self.report.to_dict())))

    def finish(self, run: RunWatch, folder: Path, policy: Policy) -> dict[str, Any]:
        """Write the export, summary, model card and report, print the final table; return the summary."""
        memory = self.memory | measured(self.world, self.memory["predicted_gib"])
        with phase("gather the weights"):
            state = full_state(policy)
        seconds, at = max(run.seconds, 1e-9), run.trainer.progress
        summary: dict[str, Any] = {
            "before": run.before,
            "after": run.after,
            "steps": at.step,
            **outcome(at.step, at.skipped_steps, at.silent_steps, run.stopped_why),
            "examples": at.examples,
            "tokens_per_second": run.tokens_timed / seconds,
            "seconds": seconds,
            "wall_seconds": run.wall,
            "checkpoint_seconds": run.saving_seconds,
            "memory": memory,
            "run_dir": str(folder),
            "loads_as": "AutoModelForSequenceClassification"
            if self.config.model.head == "reward"
            else "AutoModelForCausalLM",
            "command": shlex.join(["python", *scrub_words(sys.argv)]),
        }
        with phase("export the model, write the report"):
            on_main(lambda: self.leave(run, folder, policy, state, summary))
        return summary

    def leave(
        self, run: RunWatch, folder: Path, policy: Policy, state: dict[str, Tensor], summary: dict[str, Any]
    ) -> None:
        """Write the results of the run on rank 0. ``state`` is the model's full state.

        Raises StoppedError where they cannot be written, for example on a full disk."""
        try:
            run.tracker.settle()
            note_in_run(folder, "memory", summary["memory"])
            remove_unfinished(folder / "model")
            export_arguments = (export_dtype(self.config.model), self.renderer.stop_token_ids)
            export(state, policy, self.tokenizer, folder / "model", *export_arguments)
            write_model_card(folder / "model", asdict(self.config), summary)
            write_whole(folder / "summary.json", json.dumps(summary, indent=2))
            if self.config.report:
                write_report(folder)
        except OSError as error:
            raise StoppedError(
                f"the run is trained, but what it leaves could not be written ({error}) {on_disk(folder)}; "
                "make room: the same command with resume=true goes on from the last checkpoint"
            ) from error
        run.tracker.summary(summary["after"])
        run.tracker.close()
        self.observers.end(summary)
        if self.config.push_to_hub is not None:
            push_or_say(folder, self.config.push_to_hub, self.config.hub_private)
        self.say("\n" + "\n".join([final_table(summary), "", *example_lines(folder)]))

    def close(self) -> None:
        """End the processes that rounds have started."""
        if self.online is not None:
            self.online.close()

    # -- dry run -----------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Number of tokens of all steps, those of the prompts included. Rows are as long as the data's in the
        mean; with rounds, as long as they may be."""
        rows = self.plan.train.n_examples * self.trainer_class.rows_per_example
        if self.online is not None:
            return rows * (self.config.model.max_prompt_length + self.config.max_tokens)
        prompt, completion = self.report.prompt_tokens, self.report.completion_tokens
        assert prompt is not None and completion is not None
        return round(rows * (prompt.mean + completion.mean))

    def describe(self) -> dict[str, Any]:
        """Print what the run would do and return its size, without writing files or loading weights."""
        self.say(data_page(self.report.to_dict()))
        self.say(f"{'at most ' * (self.online is not None)}{self.tokens:,} tokens to train on")
        plan, ranks = self.plan, self.config.plan.ranks or self.world.size
        memory_arguments = (self.config, plan.train, self.held_out(), self.trainer_class, ranks)
        with phase("plan the memory", "plan"):
            if self.world.size == 1 and self.world.device.type == "cpu":
                stop()  # the plan's simulation makes a process group of its own
                said = describe_memory(*memory_arguments, here=True)
            else:
                said = on_main(lambda: describe_memory(*memory_arguments))
        self.say(said)
        return {"steps": self.plan.steps, "examples": self.plan.train.n_examples}
