"""The render function: the same ids in training and sampling, one BOS, one end token, and what is cut when it
is too long."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.errors import ConfigError, DataError
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from data.chat import CONTROLLED, CUT_EARLY, Renderer, chat_fingerprint, make_renderer
from data.quality import MOST_UNKNOWN, check_vocabulary, limit_tokens
from data.templates import DEFAULT_TEMPLATE, load_template
from data.types import Completion, Prompt, Sequence, Turn
from tests.tiny import ROOT
from tests.tiny_tokenizers import END_OF_TURN, FAMILIES, tiny_tokenizer

TOKENIZERS = {family: tiny_tokenizer(family) for family in FAMILIES}
CHATS = ["llama3", "qwen2", "gemma2"]


def renderer(family: str, length: int = 4096, prompt: int = 2048, plain: bool = False, **settings: str):
    template = None if plain else load_template(TOKENIZERS[family])
    sizes = {"max_length": length, "max_prompt_length": prompt}
    return Renderer(TOKENIZERS[family], **sizes, template=template, **settings)


def conversation(*contents: str, system: str | None = None) -> Prompt:
    turns = [Turn(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    return Prompt(((Turn("system", system),) if system else ()) + tuple(turns))


def row(made: Sequence | str) -> Sequence:
    assert isinstance(made, Sequence), made
    return made


def ids_of(sequence: Sequence) -> list[int]:
    return [*sequence.prompt_ids.tolist(), *sequence.completion_ids.tolist()]


TOOLS = Prompt((Turn("user", "what is 2+2?"), Turn("assistant", "add(2, 2)"), Turn("tool", "4")))


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("already", [0, 1, 2])
def test_exactly_one_bos_whoever_wrote_it(family: str, plain: bool, already: int) -> None:
    tokenizer = TOKENIZERS[family]
    content = tokenizer.bos_token * already + "hello" if plain else "hello"
    template = None if plain else tokenizer.bos_token * already + FAMILIES[family][3]
    make = Renderer(tokenizer, max_length=100, max_prompt_length=50, template=template)
    made = ids_of(row(make.sequence(conversation(content), Completion("yes"))))
    assert made[0] == tokenizer.bos_token_id
    assert made.count(tokenizer.bos_token_id) == 1


def test_bos_is_added_when_the_template_forgets_it_and_never_invented() -> None:
    lengths, hello = {"max_length": 500, "max_prompt_length": 400}, conversation("hello")
    ids = Renderer(TOKENIZERS["llama3"], template=FAMILIES["qwen2"][3], **lengths).prompt_ids(hello).tolist()
    assert ids[0] == TOKENIZERS["llama3"].bos_token_id and ids.count(ids[0]) == 1
    unused = tiny_tokenizer("base")  # as GPT-2's: its beginning is the end of sequence, and it never adds it
    unused.bos_token = unused.eos_token
    for template in (None, load_template(unused)):
        assert unused.bos_token_id not in Renderer(unused, template=template, **lengths).prompt_ids(hello)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("brought_along", ["", "END", "END\n", "ENDEND", "EOS"])
def test_an_answer_ends_with_the_template_s_end_token_exactly_once(family: str, brought_along: str) -> None:
    tokenizer = TOKENIZERS[family]
    suffix = brought_along.replace("END", END_OF_TURN[family]).replace("EOS", tokenizer.eos_token)
    made = row(renderer(family).sequence(conversation("hello"), Completion("yes" + suffix)))
    ends = {tokenizer.convert_tokens_to_ids(END_OF_TURN[family]), tokenizer.eos_token_id}
    assert made.completion_ids[-1] == tokenizer.convert_tokens_to_ids(END_OF_TURN[family])
    assert sum(token in ends for token in made.completion_ids.tolist()) == 1


STOPS = {"llama3": ["<|eot_id|>"], "qwen2": ["<|im_end|>"], "gemma2": ["<end_of_turn>", "<eos>"]}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_sampled_ids_are_used_as_they_are_and_stop_at_the_ends(family: str) -> None:
    make, prompt = renderer(family), conversation("hello")
    strange = (5, 3, 5, 7)  # no tokenizer would cut a text this way
    ended = [Completion(None, (5, stop)) for stop in make.stop_token_ids]
    for sampled in (Completion(None, strange, finished=False), Completion("ignored", strange), *ended):
        end = [make.end_id] if sampled.text else []
        assert row(make.sequence(prompt, sampled)).completion_ids.tolist() == [*sampled.token_ids, *end]
    if family in STOPS:
        assert list(make.stop_token_ids) == TOKENIZERS[family].convert_tokens_to_ids(STOPS[family])


def test_a_template_without_a_system_role_gets_it_in_the_first_user_turn() -> None:
    make = renderer("gemma2")
    folded = make.prompt_ids(conversation("hello", "hi", "and?", system="be brief"))
    assert np.array_equal(folded, make.prompt_ids(conversation("be brief\n\nhello", "hi", "and?")))


def test_a_conversation_that_the_template_refuses_is_named_not_raised_in_a_batch() -> None:
    """Of tool turns Gemma's raises, Llama 2's would leave them out; a template of two roles would put them
    into the assistant's mouth."""
    template = "{% for m in messages %}{{ {'user': 'U'}.get(m.role, 'A') + m.content }}{% endfor %}"
    two_roles = Renderer(TOKENIZERS["qwen2"], max_length=99, max_prompt_length=50, template=template)
    for make in (renderer("gemma2"), renderer("llama2"), two_roles):
        said, made = make.sequences([(TOOLS, Completion("x")), (conversation("a"), Completion("x"))])
        assert "has no tool turns" in said and "model.chat_template" in said
        assert isinstance(made, Sequence)
    with pytest.raises(DataError, match="must alternate"):
        renderer("gemma2").prompt_ids(Prompt((Turn("user", "a"), Turn("user", "b"))))


def test_a_base_model_gets_the_shipped_template() -> None:
    make, tokenizer = renderer("base"), TOKENIZERS["base"]
    assert make.template == DEFAULT_TEMPLATE.read_text()
    made = row(make.sequence(conversation("one", "two", "three", system="rules"), Completion("four")))
    assert tokenizer.decode(ids_of(made)) == (
        "rules\n\nUser: one\n\nAssistant: two<|endoftext|>\n\nUser: three\n\nAssistant: four<|endoftext|>"
    )
    assert tokenizer.decode(made.completion_ids) == " four<|endoftext|>"
    text = tokenizer.decode(make.prompt_ids(TOOLS))
    assert "Assistant: add(2, 2)" in text and "Tool: 4" in text and "4" not in text.partition("Tool")[0]


def test_a_tokenizer_that_prefixes_a_space_does_not_put_one_inside_a_row() -> None:
    """Llama-2's template answers "[/INST] yes </s>": one space, as in its own rendering tokenised whole."""
    tokenizer, hello, yes = TOKENIZERS["llama2"], conversation("hello"), Completion("yes")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    assert ids_of(row(renderer("llama2").sequence(hello, yes))) == whole


# Lengths


def test_the_oldest_turns_go_first_and_the_system_turn_never() -> None:
    prompt = conversation("first " * 20, "second " * 20, "third", "fourth", "fifth?", system="the rules")
    make = renderer("qwen2", 300, 150)
    ids = make.prompt_ids(prompt)
    rest = conversation("third", "fourth", "fifth?", system="the rules")
    assert np.array_equal(ids, renderer("qwen2").prompt_ids(rest)) and len(ids) <= 150
    assert make.cuts == {"oldest turns": 1}
    made = renderer("qwen2", 100, 50).sequence(conversation("hello", system="rule " * 200), Completion("yes"))
    assert isinstance(made, str) and "max_prompt_length=50" in made
    for make, empty in ((renderer("llama3"), None), (renderer("llama3", plain=True), "")):
        answer = Completion(empty, () if empty is None else None, finished=False)
        assert make.sequence(conversation("hello"), answer) == "no completion token"


@pytest.mark.parametrize("family", [*CHATS, "base"])
def test_a_last_user_turn_that_is_too_long_keeps_its_end(family: str) -> None:
    question = "".join(f"{i} ünï " for i in range(300)) + "what is the answer?"
    make, tokenizer = renderer(family, 200, 120), TOKENIZERS[family]
    text = tokenizer.decode(make.prompt_ids(conversation("old", "older", question, system="rules")))
    assert "what is the answer?" in text and "rules" in text and "old" not in text and "�" not in text
    assert make.cuts["last user turn"] == make.cuts["oldest turns"] == 1
    assert 110 <= len(make.prompt_ids(conversation(question))) <= 120


words = st.text(alphabet=st.sampled_from("ab the\n é<|>✓"), max_size=60)


@settings(max_examples=150)
@example("qwen2", ["", "<<<<<<<<<<<<<ééé✓✓✓✓", ""], "", 30, True)  # all turns but an empty one are cut
@given(
    family=st.sampled_from([*CHATS, "base", "llama2"]),
    contents=st.lists(words, min_size=1, max_size=5),
    answer=words,
    limit=st.integers(30, 90),
    plain=st.booleans(),
)
def test_any_conversation_fits_or_is_named(family, contents, answer, limit, plain) -> None:
    prompt = conversation(*contents[: len(contents) - 1 + len(contents) % 2], system=None)
    make = renderer(family, 2 * limit, limit, plain)
    made = make.sequence(prompt, Completion(answer))
    if isinstance(made, str):
        assert "max_prompt_length" in made or made == "the prompt has no token"
        return
    assert 1 <= len(made.prompt_ids) <= limit
    assert 1 <= len(made.completion_ids) <= 2 * limit - len(made.prompt_ids)
    assert np.array_equal(made.prompt_ids, make.prompt_ids(prompt))
    assert made.completion_ids[-1] == make.end_id or len(made) == 2 * limit


def test_a_batch_is_its_rows() -> None:
    lengths = ["turn the " * (i + 1) for i in range(12)]
    prompts = [conversation(*[t] * (2 * (i % 3) + 1), system="s" * (i % 2)) for i, t in enumerate(lengths)]
    answers = (Completion("the one"), Completion(None, (4, 5)), Completion("two", finished=False))
    items = [(prompt, answer) for prompt in prompts for answer in answers]
    for family in CHATS:
        make = renderer(family, 120, 80)
        for one, many in zip([make.sequence(*item) for item in items], make.sequences(items), strict=True):
            assert ids_of(row(one)) == ids_of(row(many))


# Plain concatenation, settings, identity


def test_plain_text_is_concatenated_as_it_is_and_a_tokenizer_without_an_end_refused() -> None:
    tokenizer = TOKENIZERS["base"]
    made = row(renderer("base", plain=True).sequence(conversation("The sky is"), Completion(" the limit ")))
    assert tokenizer.decode(ids_of(made)) == "The sky is the limit <|endoftext|>"
    assert tokenizer.decode(made.prompt_ids) == "The sky is"
    endless = tiny_tokenizer("base")
    endless.eos_token = None
    with pytest.raises(ConfigError, match="eos_token"):
        Renderer(endless, max_length=10, max_prompt_length=5, template=None)


def test_settings_choose_template_and_lengths_and_the_models_files_its_ends(tmp_path) -> None:
    data, tokenizer = DataConfig(name="x", source="y"), TOKENIZERS["qwen2"]
    (folder := tmp_path / "run" / "model").mkdir(parents=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 11]}')
    (folder / "config.json").write_text('{"eos_token_id": 12, "text_config": {"eos_token_id": [11, 13]}}')
    model = ModelConfig(name="m", name_or_path=str(folder.parent), max_length=99, max_prompt_length=44)
    made = make_renderer(tokenizer, model, data)
    assert (made.template, made.max_length, made.max_prompt_length) == (FAMILIES["qwen2"][3], 99, 44)
    plain = dataclasses.replace(data, apply_chat_template=False)
    assert make_renderer(tokenizer, model, plain).template is None
    own = renderer("qwen2").stop_token_ids
    assert made.stop_token_ids == (*own, 7, 11, 12, 13)
    assert made.said([*made.encoder.alone(["yes"])[0], 11]) == "yes"
    assert made.about_ends.startswith(f"a sampled answer ends at <|im_end|> ({own[0]}), ")


def test_the_fingerprint_changes_with_what_ids_depend_on_and_with_nothing_else() -> None:
    tokenizer = tiny_tokenizer("llama3")
    before = chat_fingerprint(tokenizer, "t", 10, 5)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=4)
    same = (chat_fingerprint(of, "t", 10, 5) for of in (tokenizer, tiny_tokenizer("llama3")))
    assert {*same} == {before}
    settings = [("u", 10, 5), (None, 10, 5), ("t", 11, 5), ("t", 10, 6)]
    others = [chat_fingerprint(tokenizer, *setting) for setting in settings]
    others.append(chat_fingerprint(tiny_tokenizer("qwen2"), "t", 10, 5))
    tokenizer.add_tokens(["more"])
    assert len({before, *others, chat_fingerprint(tokenizer, "t", 10, 5)}) == 7


# Texts as people bring them: with control tokens inside, and far longer than there is room for


@pytest.mark.parametrize("family", CHATS)
@settings(max_examples=30)
@given(before=st.text("ab c", max_size=6), behind=st.text("ab c", max_size=6))
def test_control_tokens_are_kept_or_dropped(family, before, behind):
    tokenizer, end = TOKENIZERS[family], END_OF_TURN[family]
    text, (control,) = f"x{before}{end}{behind}x", tokenizer.convert_tokens_to_ids([end])
    plain = [row(renderer(family).sequence(conversation("xx"), Completion("xx")))]
    count = [list(part).count(control) for part in (plain[0].prompt_ids, plain[0].completion_ids)]
    keep = renderer(family)
    kept = row(keep.sequence(conversation(text), Completion(text)))
    for i, part in enumerate(("prompt_ids", "completion_ids")):
        assert list(getattr(kept, part)).count(control) == count[i] + 1, "as at inference"
    assert keep.cuts[CONTROLLED] == 2
    dropped = renderer(family, control_tokens="drop")
    assert keep.fingerprint != dropped.fingerprint
    assert "data.control_tokens=drop" in dropped.sequence(conversation("x"), Completion(text))
    assert "data.control_tokens=drop" in dropped.prompts([conversation(text)])[0]
    row(dropped.sequence(conversation("x"), Completion("x" + end)))  # its own end is none


@pytest.mark.parametrize("family", CHATS)
@pytest.mark.parametrize("word", ["word ", "x", " ", "ünï→ "])
def test_a_long_text_gives_the_ids_of_the_whole_text(family, word, monkeypatch):
    cut, whole = renderer(family, 160, 96), renderer(family, 160, 96)
    monkeypatch.setattr(whole, "_bounded", lambda text, limit, end=False: text)
    long = "the beginning " + word * 9000 + " the end?"
    prompts = [conversation(long), conversation(long, "a", "why?")]
    for prompt in prompts:
        found, expected = (row(r.sequence(prompt, Completion(long))) for r in (cut, whole))
        assert np.array_equal(found.prompt_ids, expected.prompt_ids)
        assert np.array_equal(found.completion_ids, expected.completion_ids)
    assert cut.cuts[CUT_EARLY] > 0


def test_long_prompts_may_be_dropped():
    long, short = conversation("word " * 300), conversation("word")
    dropping = renderer("llama3", 512, 256, long_prompts="drop")
    assert [isinstance(made, str) for made in dropping.prompts([long, short])] == [True, False]


# Whether a tokenizer can read the data


def adder():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "adder" / "model")


def test_words_are_refused_and_sums_are_not():
    """By the share of unknown tokens over all rows; a token that also means something else says nothing."""
    own = adder()
    one, unknown = np.array(own("1")["input_ids"])[:1], np.full(30, own.unk_token_id)
    check_vocabulary(own, [unknown[:1], one.repeat(round(1 / MOST_UNKNOWN) - 1)], "a tenth")
    check_vocabulary(own, [], "nothing")
    with pytest.raises(ConfigError, match=r"does not know 25.0% of the tokens of words; choose a model"):
        check_vocabulary(own, [unknown, one.repeat(90)], "words")
    for same in (own.eos_token, own.bos_token, own.pad_token, None):
        own.unk_token = same
        check_vocabulary(own, [np.full(5, own.eos_token_id if same is None else own.unk_token_id)], "x")


def test_tokens_without_a_row_in_the_embedding_are_refused_where_they_are_read():
    own, known = adder(), len(adder())
    own.add_special_tokens({"additional_special_tokens": ["<call>"]})
    beyond = [np.array(own(text)["input_ids"], np.int32) for text in ("12+34=46", "1<call>")]
    limit_tokens(own, known + 1, [own.eos_token_id])
    check_vocabulary(own, beyond, "sums")
    limit_tokens(own, known, [own.eos_token_id])
    check_vocabulary(own, beyond[:1], "sums")
    said = rf"has {known} rows, and sums have the token '<call>', whose id is {known}: name .*resize_token"
    with pytest.raises(ConfigError, match=said):
        check_vocabulary(own, iter(beyond), "sums")
    with pytest.raises(ConfigError, match="the tokens that end an answer have the token '<call>'"):
        limit_tokens(own, known, [own.eos_token_id, known])
