"""What a copy of the repository needs for the commands of the docs: small models and data under the names
that the docs give, a Slurm. ``python -m tests.docs_workspace`` writes the files into the working
directory, and does the runs that a file lists.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.docs import ROOT, write_examples

ENDS = 0.3
"""How likely the small model ends its answer at any token: its answers are short whatever they may be."""
MODELS = (
    "org/name",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "assets/smollm2/model",
    "CKPT",
)
Rows = list[dict[str, Any]]


def copy_of_the_repository(to: Path) -> Path:
    """The files that git knows or would take, but for the study's figures, in a folder of their own."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    named = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in named:
        source = ROOT / name
        if source.is_file() and not source.match("docs/study/*.svg"):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to / name)
    return to


def installed(here: Path, python: Path) -> None:
    """Mark what the Makefile installs as installed: the environment is the one that runs the tests, and a
    cluster with an empty queue."""
    programs = here / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "squeue").write_text("#!/bin/bash\n")
    (programs / "python").write_text(f'#!/bin/bash\nexec {python} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    for name in re.findall(r"requirements[\w/-]*\.txt", (ROOT / "Makefile").read_text()):
        (here / ".venv" / f".installed-{name.replace('/', '-')}").touch()


# -- files, written by a process that has imported what they need ----------------------------------


def write_all(here: Path) -> None:
    models(here)
    sets(here)
    constrained(here)
    (here / "my.yaml").write_text("partition: gpu\naccount: lab\ntime: '12:00:00'\n")
    write_examples("extend.md")


def train_all(listed: Path) -> None:
    """Do each run of a file of lists of settings, and note in its place what went wrong, or nothing. Of those
    that only prepare, the ones with the embedded data are only composed: others have prepared it."""
    from tests.quick_start import prepare_once
    from train import compose, train

    prepare_once()
    said = []
    for words in json.loads(listed.read_text()):
        try:
            config, name = compose(*words)
            embedded = not any(re.match(r"data(?!=adder)|evaluations|plan", word) for word in words)
            if not config.dry_run or not embedded:
                train(config, name)
            said.append("")
        except BaseException:
            said.append(traceback.format_exc())
    listed.write_text(json.dumps(said))


def models(here: Path) -> None:
    """The small model under every name, its weights such that answers end soon."""
    import math

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny import TINY
    from tests.tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer("qwen2")
    torch.manual_seed(0)
    own = {"max_position_embeddings": 8192, "initializer_range": 0.02}
    config = LlamaConfig(**(TINY | own), eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # every hidden state points along the first dimension, as the end's row of the head
        model.model.embed_tokens.weight[:, 0] = 1.0
        logit = math.log(ENDS / (1 - ENDS) * (config.vocab_size - 1))
        model.lm_head.weight[tokenizer.eos_token_id, 0] = logit / math.sqrt(config.hidden_size)
    for name in MODELS:
        model.save_pretrained(here / name)
        tokenizer.save_pretrained(here / name)


def sets(here: Path) -> None:
    """Data under the names of files and hub sets: sums, right and wrong."""
    import pyarrow
    import pyarrow.parquet

    sums = [(a, b) for a in range(10) for b in range(10)]
    right = [{"chosen": f"\\boxed{{{a + b}}}", "reference": str(a + b)} for a, b in sums]
    asked = [{"prompt": f"What is {a} and {b}?", "rejected": "no"} for a, b in sums]
    pairs = [one | other for one, other in zip(asked, right, strict=True)]
    lines(here / "pairs.jsonl", pairs)
    embedded = (here / "assets" / "adder" / "pairs.jsonl").read_text()
    (here / "groups.jsonl").write_text(embedded)
    lines(here / "rated.jsonl", ({"margin": 2} | json.loads(row) for row in embedded.splitlines()))
    for name, rows in (("pairs", pairs), ("held_out", pairs[:8])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), here / f"{name}.parquet")
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    faq = [{theirs: pair[ours] for ours, theirs in columns.items()} for pair in pairs]
    (here / "faq.json").write_text(json.dumps(faq))
    said = [{"instruction": f"Say {a}.", "output": str(a), "generator": "base"} for a in range(12)]
    (here / "alpaca_eval.json").write_text(json.dumps(said))
    hub_set(here / "org" / "name", "default", pairs)
    scores = {"all_generated_responses": [r"\boxed{1}", "no"], "all_rm_scores": [0.2, 0.1]}
    scored = [pair | scores for pair in pairs]
    hub_set(here / "princeton-nlp" / "llama3-ultrafeedback-armorm", "default", scored)


def constrained(here: Path) -> None:
    """Answers under constraints, scored, and a prompt of IFEval's kind."""
    from data.constraints import prompts
    from data.groups import write_groups
    from data.types import Completion, Group

    two = (Completion(text="Once, in the light"), Completion(text="No."))
    groups = [Group(prompt, two, (8.0, 4.0)) for prompt in prompts("train")[:8]]
    for name in ("constrained.jsonl", "labelled.jsonl"):
        write_groups(here / name, groups)


def hub_set(folder: Path, subset: str, rows: Rows) -> None:
    """A data set as it lies on the hub, with a training and a test split; its folder may hold a model too."""
    folder.mkdir(parents=True, exist_ok=True)
    lines(folder / "train.jsonl", rows)
    lines(folder / "test.jsonl", rows[:8])
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n{files}---\n")


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_all(Path.cwd())
    train_all(Path(sys.argv[1]))
