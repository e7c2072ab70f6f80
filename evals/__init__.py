"""Evaluation of what was trained: ``python eval.py run=runs/x kind=accuracy``.

A *kind* is a module of this package, imported when ``kind`` names it (``config.schema_eval.KINDS``). It has
two functions:

    def check(target: Target, stage: EvalStage) -> None
        Raises ConfigError for whatever of the kind's settings, files and packages cannot be honoured.
        Called for every target before anything is loaded, sampled or paid for.

    def evaluate(target: Target, stage: EvalStage, world: World) -> Evaluation
        Measures one target. Every rank calls it; what rank 0 returns is written and printed.

``Target`` (evals.base) says which model: ``target.config`` is the checked Config, whose
``model.name_or_path`` is a folder or hub name ready to be loaded, and whose ``data``, ``sampler`` and
``reward`` are those of the run, with the command line's changes. ``stage`` (config.schema_eval.EvalStage) has
the command line's other keys, among them the section of the kind's own name (``stage.alpacaeval``,
``stage.lm_eval``; the dataclasses of these two are in config/schema_benchmarks.py, their commented defaults
in config/eval.yaml). The helpers, of ``evals.answers``: ``check_answering`` gives the target's renderer,
``prompts`` what is to be answered, ``sample`` the answers, by the sampler that the settings name and with a
progress bar, ``described`` the settings that they depend on. ``Target.model_folder()`` is the model as a
folder on disk; ``evals.base.fingerprints`` says what was evaluated.

``Evaluation`` is what comes back: ``values`` (numbers by name, nested as they should read; lists are no
results for launch.results), ``rows`` (one JSON object an answer), ``table`` (what is printed, heading first),
``settings`` and ``fingerprints``. ``evals.running`` writes ``<target.out>/<name>.json`` and ``<name>.jsonl``,
mirrors the numbers to the run's wandb run, and prints.

A kind may also have ``pool(parts: list[Evaluation], stage: EvalStage) -> Evaluation``: several runs (seeds)
as one result.
"""
