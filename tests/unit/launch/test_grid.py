"""Sweep files: what they expand to, and what is refused. The runs of a sweep have the settings, and the
refusals, that each would have by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, UserError
from config.cli import compose_config
from config.schema import Config
from launch.grid import Run, override, parse_overrides, read_sweep
from launch.state import Composer

SWEEPS = sorted((Path(__file__).parents[3] / "sweeps").glob("*.yaml"))


def sweep(tmp_path: Path, extra: dict[str, Any] | None = None, **parts: Any):
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(parts, sort_keys=False))
    return read_sweep(path, extra)


def test_product_seeds_skip_and_tied_keys(tmp_path: Path) -> None:
    grid = {"loss": ["dpo", "sft"], "humanline": [False, True]}
    made = sweep(tmp_path, grid=grid, seeds=[1, 7], skip=[{"loss": "sft", "humanline": True}])
    cells = ("dpo-no_humanline", "dpo-humanline", "sft-no_humanline")
    assert [run.name for run in made.runs()] == [f"s-{cell}-s{seed}" for cell in cells for seed in (1, 7)]
    skip = [{"online": True, "sync_freq": [1, 2]}]  # it sees what the base says
    made = sweep(tmp_path, base={"online": True}, grid={"sync_freq": [1, 4]}, skip=skip)
    assert [run.settings["sync_freq"] for run in made.runs()] == [4]
    tied = {"log_epsilon_P, log_epsilon_R": [[-2.0, 1.5], [-1.0, 3.0]], "lr": [1e-5, 1e-6]}
    made = sweep(tmp_path, grid=tied)
    keys = ("log_epsilon_P", "log_epsilon_R", "lr")
    points = [tuple(run.settings[key] for key in keys) for run in made.runs()]
    assert points == [(-2.0, 1.5, 1e-5), (-2.0, 1.5, 1e-6), (-1.0, 3.0, 1e-5), (-1.0, 3.0, 1e-6)]


def test_ranges_have_both_ends(tmp_path: Path) -> None:
    for spec, values in (
        ({"from": 1, "to": 64, "times": 4}, [1, 4, 16, 64]),
        ({"from": 1, "to": 63, "times": 4}, [1, 4, 16]),
        ({"from": 0.1, "to": 0.5, "plus": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"from": 1e-6, "to": 1e-4, "times": 10.0}, [1e-6, 1e-5, 1e-4]),
    ):
        assert [run.settings["lr"] for run in sweep(tmp_path, grid={"lr": spec}).runs()] == values


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"base": {"seed": 3}}, "seeds:"),
        ({"seeds": [1, 1]}, "different"),
        ({"grid": {"lr": [1], "lr, eps": [[1, 2]]}}, "two parts"),
        ({"select": ["lr"]}, "not a key"),
        ({"grid": {"data.path": ["a/b", "a_b"]}}, "two runs"),
        ({"grid": {"lr": [1]}, "skip": [{"lr": 1}]}, "nothing to run"),
        ({"hours": -1}, r"hours=-1: .*number"),
        ({"cells": {"x" * 70: {}}}, "longer than 64"),
        ({"cells": {"a$(touch x)": {}}}, r"cells=a\$\(touch x\): .*letters"),
        ({"grid": {"lr": [1]}, "skip": [{"lrr": 1}]}, "skip=.*fits no run"),
        ({"grid": {"lr": {"from": 1e-12, "to": 1, "plus": 1e-12}}}, "1,000,000,000,000 values"),
        ({"grid": {"lr": {"from": 1, "to": 101, "plus": 1}}, "seeds": 100}, "10100: are the combinations"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep(tmp_path, **parts).runs()


LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)


@settings(max_examples=50)
@given(st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3), max_leaves=4))
def test_hydra_reads_back_what_is_written(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(override("key", value)).value()
    plain = _plain(parsed)
    assert plain == value and type(plain) is type(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value.text) if hasattr(value, "text") else value


def test_parse_overrides() -> None:
    read = parse_overrides(["lr=1e-5", "loss=dpo", "online=true", "wandb.entity=null", "a=[1,2]", "x=a=b"])
    assert read == {"lr": 1e-5, "loss": "dpo", "online": True, "wandb.entity": None, "a": [1, 2], "x": "a=b"}
    for words, said in ((["lr"], "NAME=VALUE"), (["lr=1", "lr=2"], "lr=2: is given twice")):
        with pytest.raises(ConfigError, match=said):
            parse_overrides(words)
    for word in ("data.logprob_range=[0.1,1", "x={a: 1", "lr='1", "a=b: c: d"):
        with pytest.raises(ConfigError, match=f"^{re.escape(word)}: is no value that yaml can"):
            parse_overrides([word])


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_shipped_sweep_is_valid(path: Path) -> None:
    """Each cell composes to a valid configuration, and no two cells compute the same."""
    made = read_sweep(path)
    cells = {run.cell: run for run in made.runs()}
    configs, composer = [], Composer()
    for run in cells.values():
        config = composer.config(run)
        assert config.resume and (config.exp_name, config.seed) == (run.name, run.seed)
        assert config.wandb.tags == [made.name, run.cell]
        configs.append(repr(replace(config, exp_name=None, wandb=replace(config.wandb, tags=[]))))
    assert len(set(configs)) == len(cells)


def test_the_papers_sweeps_have_the_papers_settings() -> None:
    by_name = {path.stem: read_sweep(path).runs() for path in SWEEPS}
    assert len({run.settings["experiment"] for run in by_name["table3"]}) == 12
    clips = [(run.settings["log_epsilon_P"], run.settings["log_epsilon_R"]) for run in by_name["table6"]]
    assert clips == [(-2.0, 1.5), (-1.5, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)]
    assert [run.settings["sync_freq"] for run in by_name["figure8"]][:3] == [1, 4, 16]
    larger = {run.cell: compose_config(run.overrides()) for run in by_name["table5"]}
    assert {(c.lr, c.model.name, c.data.name) for c in larger.values()} == {
        (2.5e-6, "gemma2-27b-instruct", f"ultrafeedback_armorm{of}") for of in ("", "_gemma2")
    }
    assert {(c.data.name[-6:], c.loss["beta"], c.humanline, c.online) for c in larger.values()} == {
        ("armorm", 0.3, False, False),
        ("armorm", 0.3, True, False),
        ("gemma2", 0.1, False, False),
        ("gemma2", 0.1, True, False),
        ("gemma2", 0.1, False, True),
    }
    trust = next(run for run in by_name["figure10"] if "trust" in run.cell and "dpo" in run.cell)
    config = compose_config(trust.overrides())
    assert (config.syncing, config.sync_freq, config.n_examples) == ("trust_region", 1024, None)


@pytest.mark.parametrize("secret", [("callbacks.c.token", "plain text"), ("x.base_url", "http://me:pw@host")])
def test_a_sweep_keeps_no_secret_in_its_files(tmp_path: Path, secret: tuple[str, str]) -> None:
    key, value = secret
    places = ({"base": {key: value}}, {"cells": {"a": {key: value}}}, {"grid": {key: [value]}}, {})
    for tree in places:
        (file := tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": {"loss": "kto"}} | tree))
        with pytest.raises(ConfigError, match="has a secret") as refused:
            read_sweep(file, {} if tree else {key: value}).runs()
        assert value not in str(refused.value)
    file.write_text(yaml.safe_dump({"base": {key: "\\${oc.env:A_KEY}"}}))
    assert f"{key}='${{oc.env:A_KEY}}'" in read_sweep(file).runs()[0].overrides()


def outcome(made: Any, *arguments: Any) -> Config | str:
    try:
        return made(*arguments)
    except UserError as error:
        return str(error)


SETTINGS: list[dict[str, Any]] = [
    {"lr": 1, "model.batch_size": 64, "loss.beta": 0.3, "log_epsilon_P": "-.inf"},
    {"runs_dir": "${seed}/${exp_name}", "wandb.entity": None, "humanline": 1},
    {"loss": "csft", "model.control_tokens": ["<a>", "<b>"]},  # config/loss/csft.yaml refers to it
    {"loss": "dpo", "model.peft": {"r": 4}, "+loss.extra": 1},
    {"evaluations.held.path": "held.jsonl", "callbacks.mine._target_": "my.Observer"},
    {"loss.betta": 1},
    {"hydra.run.dir": "elsewhere"},
    {"lr": -1.0},
    {"loss": "nope"},
    {"~reward": None},
]


def test_composed_with_others_or_alone_is_the_same() -> None:
    composer = Composer()
    runs = [Run("s", f"s-c{i}", i, one, None) for i, one in enumerate(SETTINGS)]
    assert composer.config(runs[4]).evaluations == {"held": {"path": "held.jsonl"}}
    for run in [*runs, *(replace(run, seed=seed) for run in runs[:2] for seed in (7, -1))]:
        assert outcome(composer.config, run) == outcome(compose_config, run.overrides()), run.settings
