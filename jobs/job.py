"""A training job, which trains what is prepared and writes the results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor

from common.errors import Requeue, StoppedError, UserError
from common.files import on_disk, write_whole
from common.progress import phase
from common.secrets import scrub, scrub_words
from data.batches import token_count
from jobs.diagnostics import Diagnostics
from jobs.evaluation import make_evaluator
from jobs.initial_scores import ready_rows, scored_with
from jobs.memory import measured, short_of_memory
from jobs.observers import Observers
from jobs.plan import Plan
from jobs.prepare import Prepared
from jobs.run_folder import RunFolder, note, run_id
from jobs.same_data import WEIGHTS, check_inputs, check_names, check_origin, inputs_of
from jobs.saving import EnoughError
from jobs.signals import Signals
from jobs.watch import RunWatch
from models.distributed import World, ended_together, explained, on_main
from models.export import export, full_state
from models.loading import load_sharded
from models.policy import Policy
from models.pretrained import export_dtype
from reports.answers import example_lines
from reports.metrics import plain
from reports.model_card import write_model_card
from reports.outcome import outcome
from reports.report import final_table, write_report
from reports.tracking import Tracker
from trainers.assembly import Offline
from trainers.basic import BasicTrainer


class Job:
    """Trains what is prepared. ``close`` must be called at the end."""

    def __init__(
        self, prepared: Prepared, folder: RunFolder, world: World, observers: Sequence[Any] = ()
    ) -> None:
        """``folder``: the run's, already claimed. ``observers``: observers in addition to the ones that
        ``callbacks`` names."""
        self.prepared, self.folder, self.world = prepared, folder, world
        self.further_observers = observers

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def start(self) -> None:
        """Plan the memory, and start the processes that rounds need. Raises ConfigError, also for a run that
        no cut makes fit."""
        prepared = self.prepared
        if not prepared.config.dry_run:
            self.memory = prepared.plan_memory(self.world.size)
            if self.memory.refusal is not None:
                raise self.memory.refusal
            self.say(f"memory: {self.memory.text}")
        if prepared.online is not None:
            prepared.online.start()

    def run(self, signals: Signals) -> dict[str, Any]:
        """Train, export and report; return the summary. What fails on one of several ranks ends all of them;
        where memory was short, the message has the numbers to type."""
        remedy = partial(short_of_memory, self.memory, self.prepared.config)
        with ended_together(alike=(UserError,)), explained(remedy):
            return self.results(signals)

    def results(self, signals: Signals) -> dict[str, Any]:
        """Do what ``run`` does, on this rank."""
        prepared, world, folder = self.prepared, self.world, self.folder.path
        observers = Observers.of(prepared.config.callbacks, self.further_observers, world)
        inputs = on_main(self.check_data)
        decided = self.memory.applied(prepared.config)
        policy, fingerprint = load_sharded(decided.model, world, prepared.config.seed)
        on_main(lambda: check_inputs(self.folder.path, prepared.config, {WEIGHTS: fingerprint}))
        exists = on_main(self.folder.prepare)
        inputs |= {WEIGHTS: fingerprint, "run": on_main(lambda: run_id(folder))}
        if prepared.config.resume and not exists:
            self.say(f"resume=true: there is no run in {folder} to go on with, so a new one begins")
        on_main(lambda: note(folder, "memory", self.memory.record))
        trainer = prepared.trainer_class(decided, policy, prepared.loss, world)
        parts = scored_with(decided.model, fingerprint, prepared.renderer.fingerprint, world)
        judged = (prepared.evaluation_sets, prepared.renderer, prepared.stops)
        evaluator = make_evaluator(trainer, prepared.plan, *judged)
        evaluator.prepare(parts | {"ends": str(prepared.renderer.stop_token_ids)})
        likelihoods = [] if evaluator.initial_kl is None else evaluator.initial_kl.likelihoods
        ready = ready_rows(prepared.plan, prepared.report, trainer, parts, self.folder, likelihoods, self.say)
        diagnostics = Diagnostics.of_run(trainer, ready)
        watch = RunWatch(folder, trainer, evaluator, ready.steps, signals, diagnostics, observers, inputs)
        if prepared.online is None:
            # a step's line, at which the bar moves, is read at the next step
            later = (token_count(ready.train.batch(i)) for i in range(1, ready.train.steps))
            watch.log.bar.weigh([*later, 0.0])
        watch.log.memory = self.memory
        self.begin(watch, exists)
        self.train(trainer, policy, ready, watch)
        return self.finish(watch, policy)

    def check_data(self) -> dict[str, Any]:
        """Return the fingerprints of what the run reads besides its weights; called on rank 0 alone. Raises
        ConfigError for a run that was started with others."""
        prepared = self.prepared
        with phase("compare what the run reads", "model.name_or_path"):
            inputs = inputs_of(prepared.config, prepared.plan, prepared.renderer, prepared.evaluation_sets)
        check_names(prepared.config, inputs.keys() | {WEIGHTS})
        if prepared.config.resume:
            check_origin(self.folder.path)
        check_inputs(self.folder.path, prepared.config, inputs)
        return inputs

    def begin(self, watch: RunWatch, exists: bool) -> None:
        """Go on from the newest checkpoint if the run ``exists`` and has one; open its tracker, and tell its
        observers."""
        folder, trainer = self.folder.path, watch.trainer
        state = watch.saver.resume() if exists else None
        if exists:
            resumed = f"resumed before step {trainer.progress.step}"
            self.say(resumed if state else "no checkpoint to resume from: starting afresh")
        settings = asdict(trainer.config)
        if self.world.is_main:
            wandb_id = state["wandb_id"] if state else None
            watch.log.tracker = Tracker(folder, settings, trainer.config.wandb, bool(state), wandb_id)
        watch.log.observers.tell("on_start", folder, scrub(settings), trainer.progress.step)

    def train(self, trainer: BasicTrainer, policy: Policy, plan: Plan, watch: RunWatch) -> None:
        """Train all planned steps, or fewer if ``patience`` or an observer ends the run early.

        Raises StoppedError if training ended with too few steps."""
        online = self.prepared.online
        source = Offline(plan.train) if online is None else online.source(trainer, policy, watch)
        try:
            trainer.train(source, watch)
        except EnoughError as why:
            watch.stop_early(str(why))
            return
        except Requeue:
            watch.saver.close()
            raise
        step = trainer.progress.step
        if step == 0 or (online is None and step != plan.steps):
            if online is None:
                raise StoppedError(f"{step} of {plan.steps} planned steps were done")
            raise UserError(online.why_nothing())  # the same command would do no better

    def finish(self, watch: RunWatch, policy: Policy) -> dict[str, Any]:
        """Write the export, summary, model card and report, print the final table; return the summary."""
        memory = self.memory.record | measured(self.world, self.memory)
        with phase("gather the weights"):
            state = full_state(policy)
        seconds, at = max(watch.state.seconds, 1e-9), watch.trainer.progress
        reward = self.prepared.config.model.head == "reward"
        summary: dict[str, Any] = {
            "before": watch.state.before,
            "after": watch.after,
            "steps": at.step,
            **outcome(at.step, at.skipped_steps, at.silent_steps, watch.stopped_why),
            "examples": at.examples,
            "tokens_per_second": watch.state.tokens_timed / seconds,
            "seconds": seconds,
            "wall_seconds": watch.state.wall,
            "checkpoint_seconds": watch.state.saving_seconds,
            "memory": memory,
            "run_dir": str(self.folder.path),
            "loads_as": "AutoModelForSequenceClassification" if reward else "AutoModelForCausalLM",
            "command": shlex.join(["python", *scrub_words(sys.argv)]),
        }
        with phase("export the model, write the report"):
            on_main(lambda: self.leave(watch, policy, state, summary))
        return summary

    def leave(
        self, watch: RunWatch, policy: Policy, state: dict[str, Tensor], summary: dict[str, Any]
    ) -> None:
        """Write the results of the run on rank 0. ``state`` is the model's full state.

        Raises StoppedError where they cannot be written, for example on a full disk."""
        folder, settings, prepared = self.folder.path, watch.trainer.config, self.prepared
        try:
            watch.log.tracker.settle()
            note(folder, "memory", summary["memory"])
            export_arguments = (export_dtype(settings.model), prepared.renderer.stop_token_ids)
            export(state, policy, prepared.tokenizer, folder / "model", *export_arguments)
            write_model_card(folder / "model", asdict(settings), summary)
            write_whole(folder / "summary.json", json.dumps(summary, indent=2))
            if settings.report:
                write_report(folder)
        except OSError as error:
            raise StoppedError(
                f"the run is trained, but what it leaves could not be written ({error}) {on_disk(folder)}; "
                "make room: the same command with resume=true goes on from the last checkpoint"
            ) from error
        watch.log.tracker.summary(summary["after"])
        watch.log.tracker.close()
        watch.log.observers.tell("on_end", plain(summary))
        self.say("\n" + "\n".join([final_table(summary), "", *example_lines(folder)]))

    def close(self) -> None:
        """End the processes that rounds have started."""
        if self.prepared.online is not None:
            self.prepared.online.close()
