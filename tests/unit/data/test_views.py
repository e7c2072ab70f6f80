"""Views: pure functions from a group's feedback to examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import views
from data.quality import kind_of
from data.types import Completion, Example, Group, Prompt, Sequence, Turn


def group(*rewards: float) -> Group:
    return Group(Prompt((Turn("user", "q"),)), (Completion("a"),) * len(rewards), rewards)


def example(prompt: str, tokens: int = 3) -> Example:
    completion = np.arange(tokens, dtype=np.int32) + ord(prompt[0])
    return Example(prompt, (Sequence(np.arange(len(prompt) + 1, dtype=np.int32), completion),), 1.0)


@pytest.mark.parametrize(
    ("view", "rewards", "wanted"),
    [
        (views.pairs, (1.0, -1.0), [((0, 1), 1.0)]),
        (views.labelled, (1.0, -1.0), [((0,), 1.0), ((1,), -1.0)]),
        (views.group_advantages, (1.0, -1.0), [((0,), 1.0), ((1,), -1.0)]),
        (views.demonstrations, (1.0, -1.0), [((0,), 1.0)]),
        *((views.labelled, (alone,), [((0,), 1.0 if alone > 0 else -1.0)]) for alone in (1.0, -1.0, 0.0)),
        (views.pairs, (1.0,), []),
    ],
)
def test_a_groups_rewards_give_each_loss_its_rows(view, rewards, wanted):
    found = view(group(*rewards))
    assert [want.completions for want in found] == [rows for rows, _ in wanted]
    if view in (views.labelled, views.group_advantages):
        assert [want.label for want in found] == [label for _, label in wanted]


def test_threshold_is_inclusive_beyond_rounding():
    assert 0.06 - 0.05 < 0.01 and views.best_and_worst(group(0.05, 0.06), threshold=0.01) == (1, 0)
    assert views.best_and_worst(group(0.0, 0.009), threshold=0.01) is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.integers(2, 8), st.randoms())
def test_rewards_that_differ_by_the_order_of_a_sum_are_one_value(parts, n, random):
    """No advantage of any kind, no pair, and the first completion is the demonstration."""
    same = group(*(sum(random.sample(parts, len(parts)), start=0.0) for _ in range(n)))
    for name, view in views.ADVANTAGES.items():
        assert view(same) == [] and {w.label for w in view(same, keep_zero_variance=True)} == {0.0}, name
    assert views.advantages(same.rewards) == [0.0] * n
    assert views.pairs(same) == views.labelled(same) == [] and kind_of([same]).endswith("are all equal")
    assert views.demonstrations(same)[0].completions == (0,)
    batch = labelled_examples(same.rewards, [1] * n)
    assert [example.label for example in views.normalised(batch)] == [0.0] * n


SCORES = st.lists(st.sampled_from([0.0, 0.25, 1.0, -3.0]), min_size=2, max_size=57)


@given(SCORES)
def test_each_advantage_by_its_formula(rewards):
    R = np.array(rewards)
    n, spread = len(R), bool(R.std())
    expected = {
        "group": (R - R.mean()) / R.std() if spread else R * 0,
        "group_mean": R - R.mean(),
        "rloo": np.array([R[i] - np.delete(R, i).mean() for i in range(n)]),
        "batch": R - R.mean(),
    }
    assert set(views.ADVANTAGES) == {*expected}
    for name in expected:
        view = views.ADVANTAGES[name]
        wanted = view(group(*rewards), keep_zero_variance=True)
        assert [want.completions for want in wanted] == [(i,) for i in range(n)]
        np.testing.assert_allclose([want.label for want in wanted], expected[name], atol=1e-12, err_msg=name)
        assert view(group(*rewards)) == (wanted if spread else [])
        assert view(group(1.0)) == []
    if spread:
        slower = (R - R.mean()) / (R.std() + 0.5)
        np.testing.assert_allclose(views.advantages(rewards, epsilon=0.5), slower, atol=1e-12)
        assert sorted(views.advantages([min(rewards), max(rewards)])) == [-1.0, 1.0], "exactly"


def labelled_examples(labels, lengths):
    """Examples of so many tokens that count, and more that do not."""
    prompt, made = np.ones(1, np.int32), []
    for i, (label, n) in enumerate(zip(labels, lengths, strict=True)):
        row = Sequence(prompt, np.full(2 * n + i, 5, np.int32), loss_mask=np.arange(2 * n + i) < n)
        made.append(Example(f"p{i}", (row,), label))
    return made


@given(
    st.lists(st.tuples(st.sampled_from([0.1, -0.7, 0.5, 2.0]), st.integers(1, 9)), min_size=1, max_size=12)
)
def test_the_batchs_advantages_are_normalised_over_its_tokens(drawn):
    labels, lengths = map(list, zip(*drawn, strict=True))
    batch = labelled_examples(labels, lengths)
    made = views.normalised(batch)
    tokens = np.repeat(labels, lengths)
    spread = tokens.std() if len(set(labels)) > 1 else np.inf
    expected = (np.array(labels) - tokens.mean()) / spread
    np.testing.assert_allclose([example.label for example in made], expected, atol=1e-9)
    assert [e.rows for e in made] == [e.rows for e in batch] and [e.label for e in batch] == labels
    assert views.normalised([]) == []


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=12))
def test_mismatched_rows_never_meet_their_own_prompt(prompts):
    """Nor the halves of split pairs each other; and the rotation is fixed."""
    batch = [example(p) for p in prompts]
    out = views.mismatched(batch, max_length=64)
    if len(set(prompts)) == 1:
        assert all(e.mismatched is None for e in out)
        return
    for before, after in zip(batch, out, strict=True):
        assert np.array_equal(after.mismatched.prompt_ids, before.rows[0].prompt_ids)
        assert after.mismatched.completion_ids[0] != ord(before.prompt_id)
        assert before.mismatched is None  # nothing is changed in place
    out = views.mismatched([example(p) for p in "aabbccdd"], max_length=64)
    assert [int(e.mismatched.completion_ids[0]) for e in out] == [ord(c) for c in "bbccddaa"]


def test_mismatched_rows_are_truncated_like_any_other():
    """With what of them counts."""
    counts = np.arange(9) % 3 > 0
    rows = [example(name, 9).rows[0] for name in ("aaaa", "b")]
    masked = [replace(row, loss_mask=mask) for row, mask in zip(rows, (counts, ~counts), strict=True)]
    out = views.mismatched([Example(name, (row,)) for name, row in zip("ab", masked, strict=True)], 8)
    assert [len(e.mismatched) for e in out] == [8, 8]
    assert [e.mismatched.loss_mask.tolist() for e in out] == [(~counts)[:3].tolist(), counts[:6].tolist()]
