"""Conversations with an environment: whose tokens they are, what they depend on, and what is refused."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common.errors import ConfigError
from common.worker_process import WorkerError
from config.idle import why_idle
from config.schema_environment import EnvironmentConfig
from config.schema_model import ModelConfig
from data import adder
from data.batches import collate
from data.chat import Renderer
from data.types import Prompt, Sequence, Turn
from models.distributed import start
from models.policy import Policy
from models.pretrained import load_policy
from models.reference import score
from rollouts.conversations import Conversations
from rollouts.environments.calculator import calculate
from rollouts.environments.guessing import play, reward
from rollouts.environments.process import check
from rollouts.rounds import asked_and_answered
from rollouts.samplers import Continuation, EmbeddedSampler, Sample, SamplingSettings
from tests.tiny import ROOT, make_config
from tests.tiny_tokenizers import tiny_tokenizer

MODEL = ROOT / "assets" / "adder" / "model"
HERE = "tests.unit.rollouts.environment_functions"
SAMPLED = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=48)
PROMPTS = list(adder.prompts("eval")[:6])


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation that begins with a question."""
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, ("?", *texts), strict=False)]


# -- the two that come with the project ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 boxes of 7 are <<12*7>>", "84"),
        ("<<1+1>> and then <<(2+3)*4-1/2>>", "19.5"),
        ("<<-007+10>>", "3"),
        ("<<1,200/7>>", "171.428571"),
        ("<<$3.10+$0.20>>", "3.3"),
        ("<<1/0>>", "error"),
        ("<<9**9**9**9>>", "error"),
        ("<<__import__('os').getcwd()>>", "error"),
        ("<<a+1>>", "error"),
        ("<<1e300*1e300/3>>", "error"),
        (f"<<{'(' * 90}1{')' * 90}>>", "1"),
        (f"<<{'1+' * 200}1>>", "error"),
        ("<<1_000*2+012_004>>", "14004"),
        ("<<1__000>>", "error"),
        ("<<1,5*2>>", "error"),
        ("<<0,125*2>>", "error"),
        ("<<1.5,000>>", "error"),
        ("<<1_1,000>>", "error"),
        ("<<5$3>>", "error"),
        ("<<12#34>>", "error"),
        ("<<2<3>> <<1+1>> << 4", "2"),
        ("so it is 84", None),
        ("<<>>", None),
    ],
)
def test_the_calculator(text: str, answer: str | None) -> None:
    assert calculate(said("<<1+2>>", "3", text)) == answer


def test_marks_without_an_end_cost_the_calculator_no_time() -> None:
    start = time.process_time()
    assert calculate(said("<<" * 100_000)) is None
    assert calculate(said("<<" * 100_000 + "\n<<1+1>>" + "\n" + "<<" * 100_000)) == "2"
    assert time.process_time() - start < 2, "quadratic: minutes"


def test_the_guessing_game() -> None:
    assert play(said("is it 41?"), "42") == "higher"
    assert play(said("41?", "higher", "or 43"), "42", lower=";") == ";"
    assert play(said("no idea"), "42") == "a number"
    assert play(said("41?", "higher", "42"), "42") is None
    with pytest.raises(ValueError, match="not a whole number"):
        play(said("1"), None)
    answers = [[{"role": "assistant", "content": text}] for text in ("42", "it is 42", "41", "?")]
    before = [said(), said("41", "higher"), said(), said()]
    assert reward(answers, before, ["42", "42", "42", None]) == [1.0, 0.5, 0.0, None]
    # As in the game, it is the number that counts, and a reference without one is never met.
    assert play(said("it is 42"), " 042") is None
    assert reward(answers, before, [" 042", "042", "-42", "?"]) == [1.0, 0.5, 0.0, 0.0]


# -- conversations of a scripted policy --------------------------------------------------------------


class Script:
    """Draws what is written down: the k-th turn of every conversation is the k-th text."""

    def __init__(self, renderer: Renderer, *texts: str) -> None:
        self.renderer, self.texts, self.asked = renderer, texts, []

    def __call__(
        self, rows: list[Continuation], settings: SamplingSettings, seed: int, stops: tuple[int, ...]
    ) -> list[Sample]:
        self.asked.append([row.ids.tolist() for row in rows])
        text = self.texts[len(self.asked) - 1]
        ids = [*self.renderer.encode_inside([text])[0], self.renderer.end_id]
        cut = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        return [
            Sample(tuple(kept := ids[: min(cut, row.max_tokens)]), kept[-1] in stops, (-0.5,) * len(kept))
            for row in rows
        ]


CHAT = tiny_tokenizer("qwen2")
CHAT_RENDERER = Renderer(CHAT, max_length=400, max_prompt_length=200, template=CHAT.chat_template)
QUESTION = Prompt((Turn("user", "how many?"),), "84")


@pytest.fixture
def conversations(tmp_path: Path) -> Iterator[object]:
    made: list[Conversations] = []

    def make(*overrides: str, renderer: Renderer = CHAT_RENDERER) -> Conversations:
        config = make_config("loss=dpo", *overrides).environment
        made.append(Conversations(config, renderer, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_calculator_of_a_chat_model(conversations) -> None:
    script = Script(CHAT_RENDERER, "12 boxes: <<12*7>>", "and one: <<84+1>>", "85")
    playing = conversations("environment=calculator")
    settings = SamplingSettings(1.0, 1.0, 300)
    [[sample]] = playing.play(script, [QUESTION], 1, settings, seed=1, synced=False)
    roles = [(turn.role, turn.content) for turn in sample.turns]
    assert roles == [
        ("assistant", "12 boxes: <<12*7>>"),
        ("tool", "84"),
        ("assistant", "and one: <<84+1>>"),
        ("tool", "85"),
        ("assistant", "85"),
    ]
    whole = CHAT_RENDERER.chat.apply([*QUESTION.turns, *sample.turns], add_generation_prompt=False)
    prompt = CHAT_RENDERER.prompt_ids(QUESTION).tolist()
    assert whole.startswith(CHAT.decode([*prompt, *sample.token_ids])), "as the template writes the whole"
    for before, later in pairwise(script.asked):
        assert later[0][: len(before[0])] == before[0], "behind the very tokens that were there"
    own = [i for i, counts in zip(sample.token_ids, sample.loss_mask, strict=True) if counts]
    assert CHAT.decode(own) == "".join(f"{text}<|im_end|>" for text in script.texts)
    known = [not math.isnan(value) for value in sample.logprobs]
    assert known == list(sample.loss_mask), "log mu of the policy's tokens alone"
    assert sample.finished and sample.own_tokens == len(own)
    prompt, answer = asked_and_answered(QUESTION, sample.completion(CHAT_RENDERER))
    assert answer == "85" and prompt.turns == (*QUESTION.turns, *sample.turns[:-1])
    assert prompt.reference_answer == "84"


def test_one_turn_is_a_sample_like_any_other(conversations) -> None:
    [[sample]] = conversations("environment=calculator").play(
        Script(CHAT_RENDERER, "84"), [QUESTION], 1, SamplingSettings(1.0, 1.0, 99), seed=1, synced=False
    )
    assert (sample.loss_mask, sample.turns, sample.finished) == (None, (), True)


def test_a_turn_is_interrupted_by_a_marker_and_closed_for_the_tool(conversations) -> None:
    playing = conversations(
        "environment=calculator", "environment.stops=['>']", "environment.options.call='<(.*)>'"
    )
    script = Script(CHAT_RENDERER, "<2*3> and this is not said", "6")
    [[sample]] = playing.play(script, [QUESTION], 1, SamplingSettings(1.0, 1.0, 99), seed=1, synced=False)
    assert CHAT.decode(list(sample.token_ids)).startswith("<2*3><|im_end|>\n<|im_start|>tool\n6<|im_end|>")


def test_what_passes_a_limit_is_cut_and_says_so(conversations) -> None:
    texts = ["<<1+1>>"] * 9
    for overrides, most in (((), 40), (("environment.max_turns=3",), 300)):
        playing = conversations("environment=calculator", *overrides)
        [[sample]] = playing.play(
            Script(CHAT_RENDERER, *texts), [QUESTION], 1, SamplingSettings(1.0, 1.0, most), 1, False
        )
        assert len(sample.token_ids) <= most and sample.turns[-1].role == "assistant"
        assert sample.finished == bool(overrides), "three turns are its end; no room for more is none"
        assert sum(turn.role == "assistant" for turn in sample.turns) <= 3
        assert sample.loss_mask[-1], "no turn of the environment that nobody answers"
    playing = conversations("environment=calculator", "environment.max_turn_tokens=4")
    [[sample]] = playing.play(
        Script(CHAT_RENDERER, "<<1+1>>"), [QUESTION], 1, SamplingSettings(1.0, 1.0, 99), 1, False
    )
    assert (len(sample.token_ids), sample.finished) == (4, False)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("broken", "KeyError: 'nothing here'"),
        ("hanging", "took longer than 1 s and was killed"),
        ("dying", "ended its process"),
        ("number", "it returned a int: give a text"),
        ("half_a_letter", "UnicodeEncodeError: .*surrogates not allowed"),
    ],
)
def test_an_environment_that_fails_stops_the_round_with_one_message(conversations, path, says) -> None:
    playing = conversations(
        "environment=function", f"environment.path={HERE}.{path}", "environment.timeout=1"
    )
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"{path} failed on a conversation: .*{says}"):
        playing.play(
            Script(CHAT_RENDERER, "1"), [QUESTION], 40, SamplingSettings(1.0, 1.0, 99), seed=1, synced=False
        )
    assert time.monotonic() - began < 20, "the others are not asked for"


def test_a_class_is_made_once_with_its_options(conversations) -> None:
    playing = conversations(
        "environment=function", f"environment.path={HERE}.Counting", "+environment.options.most=2"
    )
    script = Script(CHAT_RENDERER, "a", "b", "c", "d")
    [[sample]] = playing.play(script, [QUESTION], 1, SamplingSettings(1.0, 1.0, 300), seed=1, synced=False)
    assert [turn.content for turn in sample.turns] == ["a", "1", "b", "2", "c"]


# -- refusals ----------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_any_weights(conversations) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    adders = Renderer(tokenizer, max_length=64, max_prompt_length=16, template=tokenizer.chat_template)
    for overrides, renderer, key in (
        (("environment=calculator",), adders, "environment.role"),
        (("environment=calculator", "environment.stops=[two words]"), CHAT_RENDERER, "environment.stops"),
        (("environment=function", "environment.path=no.such"), CHAT_RENDERER, "environment.path"),
        (("environment=guessing", "+environment.options.x=1"), CHAT_RENDERER, "environment.options.x"),
    ):
        with pytest.raises(ConfigError) as refused:
            conversations(*overrides, renderer=renderer)
        assert refused.value.key == key
    for overrides, key in (
        (("environment=function",), "environment.path"),
        (("environment=calculator", "environment.role=system"), "environment.role"),
        (("environment=calculator", "environment.role=assistant"), "environment.stops"),
        (("environment=calculator", "environment.max_turns=1"), "environment.max_turns"),
        (("environment=calculator", "environment.max_turn_tokens=0"), "environment.max_turn_tokens"),
    ):
        with pytest.raises(ConfigError) as refused:
            make_config("loss=dpo", *overrides)
        assert refused.value.key == key


def test_every_environment_of_the_project_takes_its_options() -> None:
    for path in sorted((ROOT / "config" / "environment").glob("*.yaml")):
        given = ("environment.path=tests.unit.rollouts.environment_functions.twice",)
        config = make_config("loss=dpo", f"environment={path.stem}", *(given * (path.stem == "function")))
        assert isinstance(config.environment, EnvironmentConfig)
        if config.environment.path is not None:
            check(config.environment.path, config.environment.options)


# -- the embedded sampler ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> Policy:
    start()
    config = ModelConfig(
        name="adder", name_or_path=str(MODEL), dtype="float32", max_length=96, max_prompt_length=16
    )
    return load_policy(config, torch.device("cpu"))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return Renderer(tokenizer, max_length=96, max_prompt_length=16, template=tokenizer.chat_template)


GAMES = ("adder_calculator", "adder_guessing")


@pytest.fixture(scope="module", params=GAMES)
def game(request, renderer, tmp_path_factory) -> Iterator[Conversations]:
    config = make_config("loss=dpo", f"environment={request.param}").environment
    made = Conversations(config, renderer, tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


def sampler(
    policy: Policy, renderer: Renderer, game: Conversations | None, rows: int = 64
) -> EmbeddedSampler:
    cpu = torch.device("cpu")
    return EmbeddedSampler(policy, renderer, cpu, batch_size=rows, synced=False, player=game)


def test_log_probabilities_are_those_of_the_whole_conversation(policy, renderer, game) -> None:
    drawn = sampler(policy, renderer, game).sample(PROMPTS, 4, SAMPLED, seed=3)
    several = 0
    for prompt, samples in zip(PROMPTS, drawn, strict=True):
        for sample in samples:
            mask = sample.loss_mask or (True,) * len(sample.token_ids)
            several += not all(mask)
            row = Sequence(renderer.prompt_ids(prompt), np.array(sample.token_ids, np.int32))
            found = score(policy, collate([row], torch.device("cpu")))[0].tolist()
            for value, mu, own in zip(found, sample.logprobs, mask, strict=True):
                assert math.isnan(mu) if not own else abs(value - mu) < 1e-4
            assert len(sample.token_ids) <= SAMPLED.max_tokens
    assert several > 5, "conversations, not answers"


def test_a_conversation_depends_on_its_prompt_and_the_seed_alone(policy, renderer, game) -> None:
    whole = sampler(policy, renderer, game).sample(PROMPTS, 3, SAMPLED, seed=3)
    alone = sampler(policy, renderer, game, rows=2).sample(PROMPTS[2:4], 3, SAMPLED, seed=3)
    assert alone == whole[2:4]
    plain = sampler(policy, renderer, None).sample(PROMPTS, 3, SAMPLED, seed=3)
    for with_it, without in zip(chain(*whole), chain(*plain), strict=True):
        mask = with_it.loss_mask or (True,) * len(with_it.token_ids)
        first = mask.index(False) if not all(mask) else len(mask)
        first = min(first, len(without.token_ids))
        assert with_it.token_ids[:first] == without.token_ids[:first], "the first turn is that of no game"


def test_what_the_calculator_fills_in_is_right(policy, renderer, tmp_path) -> None:
    game = Conversations(
        make_config("loss=dpo", "environment=adder_calculator").environment, renderer, tmp_path
    )
    drawn = sampler(policy, renderer, game).sample(PROMPTS, 4, SAMPLED, seed=3)
    game.close()
    steps = [
        step
        for samples in drawn
        for s in samples
        for step in renderer.tokenizer.decode(list(s.token_ids), skip_special_tokens=True).split(";")
        if "=" in step
    ]
    assert len(steps) > 30
    for step in steps:
        asked, _, answer = step.partition("=")
        assert answer.startswith(str(sum(map(int, asked.split("+")))))


def test_equal_calls_of_a_seeded_environment_get_equal_fields(policy, renderer, tmp_path) -> None:
    config = make_config(
        "loss=dpo", "environment=function", f"environment.path={HERE}.forever", "environment.max_turns=3"
    ).environment
    game = Conversations(config, renderer, tmp_path)
    one, other = (sampler(policy, renderer, game).sample(PROMPTS[:2], 2, SAMPLED, seed=s) for s in (3, 4))
    game.close()
    said = [[s.turns[1].content for s in of_prompt if len(s.turns) > 1] for of_prompt in one]
    assert all(len(set(contents)) == 1 for contents in said), "a prompt's samples play the same game"
    assert one != other


def test_an_environment_that_nobody_meets_is_said_to_have_no_effect() -> None:
    def read(*words: str) -> bool:
        return why_idle(make_config("loss=dpo", "environment=adder_guessing", *words), "environment") is None

    assert not read("data.verifier=null") and read() and read("online=true", "data.verifier=null")
