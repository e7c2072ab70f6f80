"""Evaluation of trained models.

The command is ``python eval.py run=runs/x kind=accuracy``.

A *kind* is a module of this package, imported when ``kind`` names it (``config.schema_stages.Kind``). Its
settings, if it has any, are a field of its name in ``EvalStage`` and a section of config/eval.yaml. It has
two functions:

    def check(target: Target, stage: EvalStage) -> None
        Raises ConfigError for any of the kind's settings, files and packages that cannot be honoured.
        Called for every target before anything is sampled or paid for (a checkpoint, ``step``, is exported).

    def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation
        Measures one target. Every rank calls it; the result of rank 0 is written and printed.

``Target`` (evals.base) names the model. ``target.config`` is the checked Config: its ``model.name_or_path``
is a folder or hub name ready to be loaded, and its ``data``, ``sampler`` and ``reward`` are those of the run
with the command line's changes. ``stage`` (config.schema_stages.EvalStage) has the command line's other keys,
among them the section with the kind's own name (``stage.alpacaeval``, ``stage.lm_eval``; the dataclasses of
these two are in config/schema_stages.py, their commented defaults in config/eval.yaml).

The helpers are in ``evals.answers``: ``check_answering`` returns the target's renderer, ``prompts`` the
prompts to answer, ``sample`` the answers, drawn by the sampler of the settings with a progress bar, and
``described`` the settings that they depend on. ``rollouts.weights.model_folder(target.config)`` is the model
as a folder on disk; ``evals.base.fingerprints`` identifies what was evaluated.

``Evaluation`` is the result: ``values`` (numbers by name, nested as they should read; launch.results skips
lists), ``rows`` (one JSON object per answer), ``table`` (the printed table, heading first), ``settings``,
``fingerprints``, and ``items`` (values by metric and prompt id, for ``pool``). ``evals.running`` writes
``<target.out>/<name>.json`` and ``<name>.jsonl``, and prints.

A kind may also have ``pool(parts: list[Evaluation], stage: EvalStage) -> Evaluation``, which combines several
runs (seeds) into one result.
"""
