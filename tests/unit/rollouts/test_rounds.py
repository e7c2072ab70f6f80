"""Which prompts a round takes, what becomes of scored samples, which stages a killed round has behind it, and
samples and feedback as other people's files."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, DataError
from config.schema_data import DataConfig
from config.schema_sampler import RoundsConfig
from data.groups import answered_dict, from_dict, to_dict, to_line
from data.sources import load_groups
from data.types import Completion, Group, Prompt, Turn
from data.views import group_advantages
from jobs.online import view_of_rounds
from rollouts.files import read_samples, refuse_existing, write_feedback, write_samples
from rollouts.ledger import RoundFolder, sampled_line, sampled_of
from rollouts.round_builder import samples_table
from rollouts.rounds import (
    EQUAL,
    SILENT,
    TOO_EQUAL,
    TOO_FEW,
    PromptSchedule,
    SampledPrompt,
    feedback,
    overlong_penalties,
    replayed,
    with_threshold,
)
from tests.tiny import make_config


def prompt(i: int) -> Prompt:
    return Prompt((Turn("user", f"question {i}"),), reference_answer=str(i))


def sampled(n: int) -> SampledPrompt:
    return SampledPrompt(
        prompt(0), tuple(Completion(f"answer {i}", (i, 1), finished=i % 2 == 0) for i in range(n))
    )


scores = st.lists(st.one_of(st.none(), st.integers(-3, 3).map(float)), min_size=1, max_size=8)


@given(length=st.integers(0, 20), cache=st.integers(1, 20))
def test_long_samples_lose_score_as_dapo_says(length, cache):
    """Equation 13, with L_max = 20."""
    one = SampledPrompt(prompt(0), (Completion("", tuple(range(length))),))
    wanted = 0 if length <= 20 - cache else ((20 - cache) - length) / cache
    config = RoundsConfig(overlong=cache, overlong_penalty=0.5)
    assert overlong_penalties(one, config, 20) == pytest.approx([-0.5 * wanted])
    assert overlong_penalties(one, RoundsConfig(), 20) == [0.0]


# -- contexts --------------------------------------------------------------------------------------


@given(n=st.integers(1, 30), planned=st.integers(1, 90), size=st.integers(1, 40), seed=st.integers(0, 5))
def test_no_context_comes_again_before_all_have_come(n, planned, size, seed):
    contexts = PromptSchedule([prompt(i) for i in range(n)], planned, seed)
    rounds = (contexts.take(first, min(first + size, planned)) for first in range(0, planned, size))
    taken = [p.id for parts in rounds for _, part in parts for p in part]
    assert len(taken) == planned
    for first in range(0, planned, n):
        assert len(set(taken[first : first + n])) == len(taken[first : first + n])


def test_the_order_is_the_seeds_and_not_the_rounds():
    """What comes again is sampled with other random numbers."""

    def taken(seed: int, size: int) -> list[tuple[int, str]]:
        schedule = PromptSchedule([prompt(i) for i in range(20)], 50, seed)
        parts = [part for first in range(0, 50, size) for part in schedule.take(first, first + size)]
        return [(sampling, p.id) for sampling, part in parts for p in part]

    whole = taken(1, 50)
    ids, others = ([name for _, name in found] for found in (whole, taken(2, 50)))
    assert taken(1, 5) == whole and others != ids
    assert ids[:20] != ids[20:40] and len({seed for seed, _ in whole}) == 3, "each pass has its own"


def test_what_is_replayed_is_drawn_without_replacement_and_favours_nobody():
    earlier, draws = [["a", "b", "c"], [], ["a", "d"]], Counter()
    for seed in range(600):
        again = replayed(earlier, 2, 3, seed)
        assert again == replayed(earlier, 2, 3, seed)
        draws.update((r, prompt) for r, chosen in enumerate(again) for prompt in chosen)
    assert sorted(draws) == [(r, prompt) for r, own in enumerate(earlier) for prompt in own]
    assert draws.total() == 1200 and all(180 < count < 300 for count in draws.values())
    assert replayed(earlier, 9, 1, seed=7) == earlier
    assert len({str(replayed(earlier, 2, index, seed=7)) for index in range(9)}) > 1
    words = ("rounds.contexts=48", "rounds.contexts_per_round=12")
    plain, rounds = (make_config("online=true", *words, f"rounds.replay={n}").rounds for n in (0, 0.4))
    assert [(rounds.sampled(i), rounds.replayed(i)) for i in range(3)] == [(12, 0), (7, 5), (7, 5)]
    assert rounds.most_contexts == 48 + 6 * 5 and plain.most_contexts == plain.contexts == 48


# -- feedback --------------------------------------------------------------------------------------


@given(scores, st.sampled_from([0.0, 0.01, 1.0, 2.5]), st.integers(0, 50))
def test_best_against_worst_or_two_at_random_if_they_differ_by_tau(values, tau, seed):
    """Algorithm 1, lines 8 to 10, told once more."""
    given_, one = [v for v in values if v is not None], sampled(len(values))
    made, drawn = (feedback(one, values, RoundsConfig(tau=tau, feedback=how), seed) for how in BOTH)
    if len(given_) < 2:
        assert made == drawn == TOO_FEW
    elif max(given_) == min(given_) or max(given_) - min(given_) < tau:
        assert made == drawn == TOO_EQUAL
    else:
        assert made[0].rewards == (max(given_), min(given_))
        assert made[0].completions == tuple(one.completions[values.index(v)] for v in made[0].rewards)
        better, worse = drawn[0].rewards
        assert better > worse and better - worse >= tau


BOTH = ("pair", "random")
GROUP, THRESHOLD = {"feedback": "group"}, {"feedback": "threshold"}
NEAR = [0.1 + 0.2, 0.3, 0.3, 0.3]  # equal but for rounding


@pytest.mark.parametrize(
    ("settings", "scores", "wanted"),
    [
        ({}, [2.0, None, 5.0], [(5.0, 2.0)]),  # no verdict is not a bad score
        ({}, [0.5, 0.5099, 0.5], TOO_EQUAL),  # by the paper's tau
        ({}, [0.5, 0.5101, 0.5], [(0.5101, 0.5)]),
        ({"tau": 0.0}, NEAR, TOO_EQUAL),
        ({"feedback": "random", "tau": 0.0}, NEAR, TOO_EQUAL),
        (GROUP, [2.0, None, 5.0], [(2.0, 5.0)]),
        (GROUP, [1.0, 1.0, 1.0], [(1.0, 1.0, 1.0)]),
        (GROUP | {"zero_variance": "drop"}, [1.0, 1.0, 1.0], EQUAL),
        (GROUP | {"zero_variance": "drop"}, NEAR, EQUAL),
        (THRESHOLD, [None, None], SILENT),
        (THRESHOLD | {"threshold": 0.5}, [0.2, None, 0.5, 0.9], [(-1.0,), (1.0,), (1.0,)]),
        ({"feedback": "min", "tau": 0.5}, [0.0, 0.4, None, 1.0, 3.0], [(1.0, 0.4)]),  # 0.4 and 0.0: too near
        ({"feedback": "min", "tau": 0.5}, [0.0, 0.4, 0.2], TOO_EQUAL),
    ],
)
def test_what_becomes_of_scores(settings, scores, wanted):
    made = feedback(sampled(len(scores)), scores, RoundsConfig(**settings), 0)
    assert (made if isinstance(made, str) else [group.rewards for group in made]) == wanted


def test_random_pairs_are_all_drawn():
    """By the seeds of runs, and by the prompts of one run."""
    config, four = RoundsConfig(feedback="random"), [1.0, 2.0, 3.0, 4.0]
    by_seed = {feedback(sampled(4), four, config, i)[0].rewards for i in range(200)}
    others = [replace(sampled(4), prompt=prompt(i)) for i in range(200)]
    assert by_seed == {feedback(one, four, config, 0)[0].rewards for one in others}
    assert by_seed == {(float(a), float(b)) for a, b in itertools.product(range(1, 5), repeat=2) if a > b}


@pytest.mark.parametrize(("word", "labels"), [("mean", [-1, -1, -1, 1]), ("median", [-1, 1, 1, 1])])
def test_the_threshold_may_be_the_centre_of_all_scores(word, labels):
    """Of 0, 1, 1 and 6 the mean is 2 and the median 1, over prompts and without those that have no score."""
    scores = [[0.0, 1.0], [1.0, None, 6.0]]
    config = with_threshold(RoundsConfig(feedback="threshold", threshold=word), scores)
    made = [group for values in scores for group in feedback(sampled(len(values)), values, config, 0)]
    assert [group.rewards[0] for group in made] == labels


# -- the ledger ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_a_stage_is_done_for_the_inputs_it_was_made_from_and_either_kind_of_file_is_read(tmp_path, compress):
    """The same lines give the same file."""
    lines, inputs = [{"text": "a\u2028b\x85c\n", "x": 0.1 + i} for i in range(100)], {"weights": "a"}
    folders = [RoundFolder(tmp_path / name, compress) for name in "ab"]
    for folder in folders:
        assert not folder.done("samples", inputs)
        folder.write("samples", lines, inputs, {"seconds": 1.0})
        assert folder.done("samples", inputs) and folder.done("samples")
        assert not folder.done("samples", {"weights": "b"})
        assert folder.lines("samples", {"weights": "b"}) is None
        assert folder.read("samples") == folder.lines("samples", inputs) == lines
        assert folder.first("samples", 1) == lines[:1] and folder.first("samples", 999) == lines
    first, second = (folder.file("samples") for folder in folders)
    assert first.read_bytes() == second.read_bytes() and first.suffix == (".gz" if compress else ".jsonl")
    assert folders[0].checksum("samples") == hashlib.sha256(first.read_bytes()).hexdigest()
    other = RoundFolder(first.parent, not compress)  # of a run that went on with the other setting
    assert other.read("samples") == lines
    other.write("samples", lines, {}, {})
    assert other.read("samples") == lines and not first.exists()


@pytest.mark.parametrize("compress", [False, True])
def test_what_is_looked_at_is_said_where_it_is_damaged(tmp_path, compress):
    """Also what a round says of itself."""
    folder = RoundFolder(tmp_path / "000", compress)
    answered = [replace(sampled(2), prompt=prompt(i)) for i in range(8)]
    folder.write("samples", map(sampled_line, answered), {}, {})
    folder.write("scores", ({"id": one.prompt.id, "scores": [1.0, None]} for one in answered), {}, {})
    folder.write("groups", [], {}, {})
    assert len(samples_table(folder)) == 16
    folder.check(folder.seal)
    content = bytearray(folder.file("samples").read_bytes())
    content[len(content) // 3] ^= 255
    folder.file("samples").write_bytes(content)
    folder.file("scores").unlink()  # killed between the promise and the rename
    for stage in ("samples", "scores"):
        with pytest.raises(DataError, match=rf"{stage}\S+ is not as it was written.*overwrite=true"):
            folder.read(stage)
        assert not folder.done(stage)
    with pytest.raises(DataError, match=r"samples\S+ is not as it was written"):
        folder.check(folder.seal)
    for content in (b'{"stages": {"sam', b"[]", b'{"stages": {"samples": {"lines": 2}}}'):
        (folder.path / "round.json").write_bytes(content)
        for asked in (folder.groups, lambda: folder.done("samples"), lambda: folder.check(None)):
            with pytest.raises(DataError, match=r"round\.json is not as it was written.*overwrite=true"):
                asked()


text = st.text(max_size=4).map("x".__add__)
question = st.builds(Turn, st.just("user"), text)
completions = st.builds(
    Completion,
    text=text,
    token_ids=st.tuples(st.integers(0, 2**31)),
    finished=st.booleans(),
    behavior_logprobs=st.none() | st.tuples(st.just(math.nan) | st.floats(-9, 0)),
    loss_mask=st.none() | st.tuples(st.booleans()),
    stopped=st.just("") | text,
)
columns = st.sampled_from(["", '{"a": 1}'])


@given(
    prompt=st.builds(Prompt, st.tuples(question), text, columns=columns),
    of=st.lists(completions, min_size=1, max_size=3),
)
def test_a_line_is_the_groups_object_and_comes_back_as_it_was(prompt, of):
    """Rank 0 goes on with the samples that it wrote, and after a kill with those that it reads."""
    group = Group(prompt, tuple(of), (0.5,) * len(of))
    assert repr(from_dict(json.loads(to_line(to_dict(group))))) == repr(group)
    one = SampledPrompt(prompt, group.completions)
    line = to_line(answered_dict(one.prompt, one.completions) | {"sampling": {}})
    assert repr(sampled_of(json.loads(line))) == repr(one)


# -- other people's files --------------------------------------------------------------------------

SAMPLES = [
    SampledPrompt(prompt(i), tuple(Completion(f"änswer {i} {k}", (i, k), k < 3) for k in range(4)))
    for i in range(3)
]
SCORES: list[list[float | None]] = [[1.0, 4.0, None, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 3.0, 2.0]]


def test_samples_come_back(tmp_path):
    wanted = [(one.prompt.turns, [c.text for c in one.completions]) for one in SAMPLES]
    for form in ("groups", "halos", "alpacaeval"):
        path = tmp_path / ("samples.jsonl" if form == "groups" else f"{form}.json")
        write_samples(path, SAMPLES, form, "someone/model", "task_train")
        back = read_samples(path)
        assert [(one.prompt.turns, [c.text for c in one.completions]) for one in back] == wanted
        assert form != "groups" or back == SAMPLES
    rows = json.loads(path.read_text())
    assert len(rows) == 12 and rows[0].keys() == {"instruction", "output", "generator"}


@pytest.mark.parametrize(
    ("form", "entries"), [("groups", 2), ("pairwise", 2), ("binary", 11), ("scalar", 11)]
)
def test_feedback_is_read_as_data(tmp_path, form, entries):
    path = tmp_path / "feedback.jsonl" if form == "groups" else tmp_path / "feedback.json"
    assert write_feedback(path, SAMPLES, SCORES, form, RoundsConfig(threshold=2.0), 0) == entries
    config = DataConfig(name="local", source="data.sources.local", path=str(path), eval_fraction=0.0)
    groups = load_groups(config, "train").groups
    if form in ("groups", "pairwise"):
        best = [[c.text for c in group.completions] for group in groups]
        assert best == [["änswer 0 1", "änswer 0 0"], ["änswer 2 0", "änswer 2 1"]]
        assert all(group.prompt.reference_answer is not None for group in groups)
    elif form == "binary":
        labels = "-++----+-++"
        assert [group.rewards[0] for group in groups] == [1.0 if sign == "+" else -1.0 for sign in labels]
    else:
        assert [group.rewards for group in groups] == [(1.0, 4.0, 2.0), (0.0,) * 4, (3.0, 1.0, 3.0, 2.0)]


def test_a_path_that_cannot_be_written_is_refused_before_work(tmp_path):
    """Whether or not a file there may be written over; nothing is made."""
    file = tmp_path / "afile"
    file.write_text("x")
    for path, overwrite, said in (
        (file / "deep" / "fb.jsonl", False, "is no folder"),
        (file, False, "overwrite_out=true"),
        (tmp_path, True, "is a folder: name a file in it"),
        (tmp_path / (252 * "n"), False, r"cannot be written: .*File name too long"),  # with a part's ending
    ):
        with pytest.raises(ConfigError, match=rf"^out={path}: .*{said}"):
            refuse_existing(path, overwrite)
    refuse_existing(file, overwrite=True)
    refuse_existing(tmp_path / "new" / "folders" / "fb.jsonl", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data=local data.path=x.jsonl", "reward"),
        ("sampler.max_tokens=49", "sampler.max_tokens"),
        ("n_examples=100", "n_examples"),
        ("loss=dpo rounds.feedback=threshold", "rounds.feedback"),
        ("loss=kto rounds.feedback=group", "rounds.feedback"),
        ("rounds.contexts_per_round=2000", "rounds.contexts_per_round"),
        ("rounds.tau=-1", "rounds.tau"),
        ("sampler.temperature=0", "sampler.temperature"),
        ("+sampler.data_parallel=2", "sampler.data_parallel"),
        ("sampler=vllm sampler.devices=[0,0]", "sampler.devices"),
        ("rounds.zero_variance=keep", "rounds.zero_variance"),
        ("rounds.replay=1", "rounds.replay"),
        *((f"rounds.replay={share} rounds.contexts_per_round=12", "rounds.replay") for share in (0.99, 0.01)),
        ("rounds.lag=1 sampler=vllm rounds.examples=64", "rounds.examples"),
    ],
)
def test_what_cannot_be_honoured_is_refused(words, key):
    with pytest.raises(ConfigError) as error:
        make_config("online=true", *words.split())
    assert error.value.key == key


def test_what_is_done_with_samples_that_were_cut():
    """Dropped, they are not compared; masked, they count in the advantages and are not trained on."""
    one, found = sampled(3), {}  # the second was cut
    words = ("loss=grpo", "online=true", "reward=adder", "rounds.feedback=group")
    for how in ("keep", "drop", "mask"):
        (group,) = feedback(one, [1.0, 4.0, 4.0], RoundsConfig(feedback="group", truncated=how), 0)
        view = view_of_rounds(make_config(f"rounds.truncated={how}", *words), group_advantages)
        found[how] = {group.completions[want.completions[0]]: want.label for want in view(group)}
    (first, cut, last), a, b = one.completions, -(2**0.5), 0.5**0.5
    assert found["keep"] == pytest.approx({first: a, cut: b, last: b})
    assert found["drop"] == {first: -1.0, last: 1.0}
    assert found["mask"] == pytest.approx({first: a, last: b})
    (pair,) = feedback(one, [1.0, 4.0, 2.0], RoundsConfig(truncated="drop"), 0)
    assert pair.rewards == (2.0, 1.0)
    with pytest.raises(ConfigError, match=r"rounds\.truncated=mask: needs"):
        RoundsConfig(truncated="mask")
