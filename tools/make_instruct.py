"""Commands for the files that the embedded instructions need beside training (tools/make_instruct.sh).

The script makes all of the embedded files.

python -m tools.make_instruct blank FOLDER              # architecture, tokenizer and chat template of the embedded model, no weights
python -m tools.make_instruct answers AUTHOR FILE       # an author's stories for the held-out prompts, to compare a model's with (eval.py)
python -m tools.make_instruct texts GROUPS FILE         # the same groups without tokens, gzipped: assets/instruct/own.jsonl.gz

--language FILE takes another language than assets/instruct/language.yaml.
"""  # noqa: E501

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from tokenizers import pre_tokenizers

from common.errors import UserError, one_of
from common.options import options_of
from data.groups import read_groups, to_dict, write_groups
from data.instruct import HALVES, candidates, prompts, text_of
from data.stories import Language, read_language
from data.types import Completion, Group
from tools.blank_model import tokenizer, write_blank

LANGUAGE = "assets/instruct/language.yaml"
CONTROL_WORDS = ("good", "poor")
"""Words of loss=csft that no story has (config/model/instruct.yaml)."""


def blank(language: Language, folder: Path) -> None:
    """Write the blank model, whose tokenizer has one token per word."""
    words = [*language.vocabulary, *CONTROL_WORDS]
    write_blank(folder, tokenizer(words, pre_tokenizers.WhitespaceSplit(), None))


def answers(language: Language, author: str, split: str, path: Path) -> None:
    """Write one story by ``author`` for each prompt of ``split``, with its true reward. Raises
    ConfigError."""
    one_of("AUTHOR", author, (*language.authors, *language.mixtures))
    groups = []
    for prompt in prompts(language, split):
        (story,) = candidates(language, prompt, [author])
        groups.append(Group(prompt, (story,), (language.score(text_of(prompt), story.text or ""),)))
    write_groups(path, groups)
    print(f"{path}: {len(groups)} stories by {author}, mean reward {fmean(g.rewards[0] for g in groups):.2f}")


def texts(labelled: Path, path: Path) -> None:
    """Write a groups file with its answers as texts alone, a fortieth of its size. The same groups give the
    same bytes. Raises DataError."""
    groups = read_groups(labelled)
    bare = [replace(g, completions=tuple(Completion(text=c.text) for c in g.completions)) for g in groups]
    lines = "".join(json.dumps(to_dict(group)) + "\n" for group in bare)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    print(f"{path}: the answers to {len(groups)} prompts")


def main() -> int:
    parser = options_of("python -m tools.make_instruct", __doc__)
    parser.add_argument("--language", default=LANGUAGE, metavar="FILE")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("blank").add_argument("folder", type=Path)
    step = steps.add_parser("answers")
    step.add_argument("author")
    step.add_argument("path", type=Path)
    step.add_argument("--split", choices=("train", "eval", *HALVES), default="eval")
    step = steps.add_parser("texts")
    step.add_argument("groups", type=Path)
    step.add_argument("path", type=Path)
    given = parser.parse_args()
    try:
        language = read_language(given.language, "--language")
        if given.step == "blank":
            blank(language, given.folder)
        elif given.step == "answers":
            answers(language, given.author, given.split, given.path)
        else:
            texts(given.groups, given.path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
