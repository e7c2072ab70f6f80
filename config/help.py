"""What ``python train.py --help`` prints: usage, examples, where settings are explained, and the choices."""

from __future__ import annotations

from config.files import FOLDER, files_of, section
from config.schema_eval import READ
from config.unread import ELSEWHERE

EXAMPLES = {
    "train": (
        "loss=dpo humanline=true",
        "loss=dpo data=local data.path=pairs.jsonl model=hub model.name_or_path=org/model",
        "loss=grpo online=true reward=function reward.function.path=my_rewards.score",
        "experiment=dpo-offline-humanline dry_run=true",
        "loss=dpo exp_name=mine resume=true",
    ),
    "sample": (
        "run=runs/mine split=eval rounds.samples=1 out=answers.jsonl",
        "model=hub model.name_or_path=org/name data=local data.path=prompts.jsonl out=samples.jsonl",
    ),
    "label": ("in=samples.jsonl reward=adder out=feedback.jsonl",),
    "eval": ("run=runs/mine", "run=runs/mine kind=compare against=runs/other reward=armorm data=alpacaeval"),
}


def help_on(program: str) -> str:
    """Return the help of a program."""
    title = (FOLDER.parent / f"{program}.py").read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
    python = f"python {program}.py"
    examples = "\n".join(f"  {python} {words}" for words in EXAMPLES[program])
    reads = _read_by(program)
    folders = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    choices = "\n".join(
        f"  {f'{name}=':13}{', '.join(files)}"
        for name in folders
        if (not reads or name in reads) and (files := [file for file in files_of(name) if file != "base"])
    )
    own = "\ndry_run=true: what a run would do; -m does several, as in -m seed=1,2"
    if reads:
        own = f"\nIts own settings: config/{program}.yaml. Of a run's it reads {', '.join(reads)}."
    return f"""{title}

usage: {python} [SETTING=VALUE ...]     (--setting value is understood too)

{examples}

Each setting is explained where its default stands, in config/, and in docs/settings.md. Names of TRL and
HALOs are answered with those here (docs/from-halos-and-trl.md). --cfg job: every setting with its value
{own}

files to choose from:
{choices}"""


def _read_by(program: str) -> list[str]:
    """Return the settings of a run that a program reads; [] if it reads all of them."""
    of_stage = section("reads.yaml")["programs"].get(program, {}).get("reads", {})
    named = READ if program == "eval" else [key for key, when in of_stage.items() if when != ELSEWHERE]
    return list(dict.fromkeys(named))
