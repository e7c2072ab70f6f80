"""Rounds whose weights were kept, checked by what they left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from config.load import load_run
from jobs.audit import audit, main
from tests import programs
from tests.integration.online import assert_same, cut_off, lines, rounds, run_online

ROUNDS = ("online=true", "loss=dpo", "humanline=true", "lr=1e-3", "model.batch_size=4")
REPLAYED = (*ROUNDS, "rounds.replay=0.25")
KEPT = (*ROUNDS, "rounds.compress=true", "rounds.keep_weights=true")


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return run_online(tmp_path_factory.mktemp("kept"), "r", *KEPT)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> Path:
    return run_online(tmp_path_factory.mktemp("replayed"), "r", *REPLAYED)


@pytest.fixture
def copied(kept, tmp_path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "r"))


def test_the_kept_weights_say_of_the_samples_what_the_sampler_did(kept):
    found = list(audit(kept, load_run(kept, trust_remote_code=False)))
    assert [one.index for one in found] == [0, 1]
    for one, folder in zip(found, rounds(kept), strict=True):
        own = sum(len(c["token_ids"]) for line in folder.read("samples") for c in line["completions"])
        assert (one.faults, one.tokens) == ((), own)
        assert one.largest < 1e-4
    (one,) = audit(kept, load_run(kept, trust_remote_code=False), chosen=[1], prompts=2)
    assert one.index == 1 and one.tokens < found[1].tokens


def test_how_a_round_is_kept_changes_nothing_of_the_run(kept, tmp_path):
    plain = run_online(tmp_path, "r", *ROUNDS)
    assert_same(plain, kept)
    for one, other in zip(rounds(plain), rounds(kept), strict=True):
        for stage in ("samples", "scores", "groups"):
            assert one.file(stage).name == f"{stage}.jsonl" and other.file(stage).name == f"{stage}.jsonl.gz"
            assert one.read(stage) == other.read(stage)
        assert not one.weights.exists()
    assert all("weights" not in line for line in lines(plain))


def test_a_run_that_was_cut_off_keeps_the_same(kept, tmp_path):
    with cut_off(at=4):
        run_online(tmp_path, "r", *KEPT)
    run = run_online(tmp_path, "r", *KEPT, "resume=true")
    assert_same(run, kept)
    for path in kept.glob("rounds/*/weights/model.safetensors"):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()
    for path in kept.glob("rounds/*/*.gz"):
        assert (run / path.relative_to(kept)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("before", [False, True], ids=["plain first", "kept first"])
def test_a_run_goes_on_with_rounds_that_are_kept_otherwise(tmp_path, replayed, before, capsys):
    """Round 0 is found, trained on and replayed from as it is; those after it are written the other way."""

    def kept_so(on: bool) -> tuple[str, ...]:
        return (f"rounds.compress={str(on).lower()}", f"rounds.keep_weights={str(on).lower()}")

    with cut_off(at=2):
        run_online(tmp_path, "r", *REPLAYED, *kept_so(before))
    files = {path: path.read_bytes() for path in (tmp_path / "r" / "rounds" / "000").glob("*.jsonl*")}
    run = run_online(tmp_path, "r", *REPLAYED, *kept_so(not before), "resume=true")
    assert_same(run, replayed)
    assert len(files) == 3 and all(path.read_bytes() == content for path, content in files.items())
    ways = (before, not before, not before)
    for one, other, on in zip(rounds(run), rounds(replayed), ways, strict=True):
        for stage in ("samples", "scores", "groups"):
            assert one.file(stage).suffix == (".gz" if on else ".jsonl")
            assert one.read(stage) == other.read(stage)
        assert one.weights.is_dir() is on
    assert rounds(run)[1].record["replayed"] > 0
    main([str(run)])
    assert capsys.readouterr().out.count("tokens scored") == sum(ways)


def test_what_is_not_as_it_was_is_named(copied, capsys):
    first, second = (folder.path for folder in rounds(copied))
    for name in ("model.safetensors", "config.json"):  # those of the other round
        shutil.copy(second / "weights" / name, first / "weights" / name)
    scores = second / "scores.jsonl.gz"
    content = bytearray(scores.read_bytes())
    content[20] ^= 1
    scores.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main([str(copied)])
    assert ended.value.code == 1
    said = capsys.readouterr().out.splitlines()
    assert "round 0" in said[0] and "did not write these samples" in said[0]
    assert "round 1" in said[1] and f"{scores} is not as it was written" in said[1]


def weights_of(round_: Path) -> Path:
    return round_ / "weights" / "model.safetensors"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def not_numbers(path: Path) -> None:
    """The last of the tensors' bytes are no numbers."""
    content = path.read_bytes()
    path.write_bytes(content[:-4000] + b"\xff" * 4000)


def other_shapes(path: Path) -> None:
    path.write_text(path.read_text().replace('"hidden_size": 128', '"hidden_size": 64'))


def no_number(path: Path) -> None:
    path.write_text(path.read_text().replace('"hidden_size": 128', '"hidden_size": "wide"'))


NAMED = "is not as it was written"


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (Path.unlink, "weights/model.safetensors", f"/weights {NAMED}"),
        (cut, "weights/model.safetensors", f"/weights/model.safetensors {NAMED}"),
        (not_numbers, "weights/model.safetensors", "did not write these samples"),
        (Path.unlink, "weights/config.json", f"/weights {NAMED}"),
        (cut, "weights/config.json", f"/weights {NAMED}"),
        (other_shapes, "weights/config.json", f"/weights {NAMED}"),
        (no_number, "weights/config.json", f"/weights {NAMED}"),
        (cut, "round.json", f"/round.json {NAMED}"),
        (Path.unlink, "round.json", f"/round.json {NAMED}"),
        (cut, "samples.jsonl.gz", f"/samples.jsonl.gz {NAMED}"),
        (Path.unlink, "samples.jsonl.gz", f"/samples.jsonl.gz {NAMED}"),
        (Path.unlink, "groups.jsonl.gz", f"/groups.jsonl.gz {NAMED}"),
    ],
)
def test_a_damaged_file_is_a_fault_of_its_round_alone(copied, capsys, damage, name, says):
    first = rounds(copied)[0].path
    damage(first / name)
    with pytest.raises(SystemExit) as ended:
        main([str(copied)])
    out, err = capsys.readouterr()
    here, after = out.splitlines()
    assert ended.value.code == 1 and "Traceback" not in err
    assert here.startswith("round 0: ") and says in here
    assert NAMED not in here or (str(first) in here and "put it back from a copy" in here)
    assert after.startswith("round 1: ") and "tokens scored" in after and NAMED not in after


def test_what_is_no_rounds_folder_is_named(copied, capsys):
    for name in ("000.bak", "0", "old"):
        shutil.copytree(rounds(copied)[0].path, copied / "rounds" / name)
    with pytest.raises(SystemExit) as ended:
        main([str(copied)])
    said = capsys.readouterr().out
    assert ended.value.code == 1 and said.count("tokens scored") == 2
    for name in ("000.bak", "0", "old"):
        assert f"{copied / 'rounds' / name} is no round's folder; move it" in said
    main([str(copied), "--rounds", "0"])
    assert "no round's folder" not in capsys.readouterr().out


def test_a_round_without_kept_weights_is_sound(copied, capsys):
    for folder in rounds(copied):
        shutil.rmtree(folder.weights)
    main([str(copied)])
    assert capsys.readouterr().out.count("nothing to score") == 2


def test_compressed_groups_train_offline(kept, tmp_path):
    path = rounds(kept)[0].file("groups")
    words = ["loss=dpo", "data=local", f"data.path={path}", "data.eval_fraction=0", "model.batch_size=4"]
    words += [f"runs_dir={tmp_path}", "exp_name=offline", "wandb.enabled=false", "report=false"]
    done = programs.run("train.py", *words)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "offline")) == -(-len(rounds(kept)[0].groups()) // 4)


def test_code_that_comes_with_a_model_is_not_run_unasked(copied, capsys):
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    with pytest.raises(SystemExit) as ended:
        main([str(copied)])
    assert ended.value.code == 2 and "--trust-remote-code" in capsys.readouterr().err
    main([str(copied), "--trust-remote-code", "--rounds", "0"])
    assert "round 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "has no config.yaml"), (["--rounds", "7"], "rounds 0 to 1"), (["--rounds", "x"], "as in 0,7")],
)
def test_what_cannot_be_audited_is_refused(kept, tmp_path, capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        main([str(kept if words else tmp_path), *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err
