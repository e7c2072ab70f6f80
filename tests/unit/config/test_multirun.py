"""Jobs of one multirun."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from config.composing import check_jobs


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "-m loss=dpo,kto exp_name=same overwrite=true",
            r"\(loss=dpo and loss=kto\) would both write to runs/same; name each by what differs, as in ",
        ),
        ("--multirun seed=1,2 exp_name=a,a-${loss.name},a resume=true", r"\(seed=1 and .*exp_name=mine-s"),
        ("-m loss=dpo,kto lr=1e-5,-1", r"lr=-1.0: must be above 0"),
        (
            "-m wandb.tags=[a],[b]",
            r"would both write to runs/dpo-adder",
        ),
        ("-m model.name_or_path=a/b,c/d model=hub data=hh exp_name=x", "to runs/x; name"),
        ("-m loss=dpo,kto +callbacks.c.token=plain7", r"^callbacks\.c\.token=\[removed\]: has a secret"),
        ("-m seed=1,2 reward.http.base_url=http://me:pw7@host", r"^reward\.http\.base_url=\[removed\]"),
        ("-m loss=dpo seed=range(1,3) exp_name=x-${loss.name}", r"\(seed=1 and seed=2\)"),
    ],
)
def test_two_jobs_never_write_to_one_place_and_each_has_settings_that_work(line, said):
    with pytest.raises(ConfigError, match=said):
        check_jobs(line.split(), "train")


@pytest.mark.parametrize("program", ["sample", "label"])
def test_other_programs_files_are_not_overwritten_either(program):
    words = ["-m", "seed=1,2", "out=x.json", "overwrite_out=true", *(["in=y"] if program == "label" else [])]
    with pytest.raises(ConfigError, match=r"out=x\.json: two jobs .*, as in 'out="):
        check_jobs(words, program)


@pytest.mark.parametrize(
    "line",
    [
        "-m loss=dpo,kto seed=1,2",
        "-m loss=dpo,kto exp_name=a-${loss.name}",
        "loss=dpo exp_name=a",
        "-m seed=1,2 exp_name=a,b --cfg job",
    ],
)
def test_jobs_with_names_of_their_own_pass(line):
    check_jobs(line.split(), "train")
