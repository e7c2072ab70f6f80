"""The one place where a conversation becomes token ids, for training, scoring and sampling alike.

Prompt and completion are tokenised separately, split at the point where sampling starts. So the prompt's ids
are the same whether an answer follows or not. Which tokens count follows from the span and is never guessed
from the ids, so a pad token that is also the end of sequence causes no error. An answer is what the chat
template writes behind the prompt once the conversation goes on with it, up to one end-of-turn token. A row
whose answer it writes in another way than behind the prompt is refused.

Lengths: a prompt that is too long loses its oldest turns, then the beginning of its last user turn, never its
system turn. Then the completion loses its end and its end-of-turn token. ``Renderer.cuts`` counts the cuts.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from common.errors import ConfigError, DataError
from common.files import read_json
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from data.templates import DATE, THINKS, ChatTemplate, RenderError, is_mark, load_template
from data.types import Completion, Prompt, Sequence, Turn, split_system

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CUT = "cut"
"""What is done with a prompt that is too long, unless it is dropped: see ``data.long_prompts``."""
CONTROLLED = "texts with control tokens"
CUT_EARLY = "long texts, before they were tokenised"
_FAR, _MORE = 16, 64
"""A text of more than _FAR characters for each token that there is room for is shortened before it is
tokenised, to more tokens than that by _MORE: next to the cut they may be others."""


def make_renderer(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: DataConfig) -> Renderer:
    """Return the renderer that a configuration asks for; ``tokenizer`` has the template that ``model`` names
    (``models.pretrained.load_tokenizer``). Raises ConfigError."""
    return Renderer(
        tokenizer,
        max_length=model.max_length,
        max_prompt_length=model.max_prompt_length,
        template=load_template(tokenizer) if data.apply_chat_template else None,
        control_tokens=data.control_tokens,
        long_prompts=data.long_prompts,
        ends=model_ends(model),
    )


def model_ends(model: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that the model's own files (generation_config.json, config.json) list as ends."""
    from huggingface_hub.errors import HTTPError

    listed: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        fields: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError, HTTPError):  # what is wrong, the model's loading says
            fields |= read_json(_model_file(model, name))
        for part in (fields, fields.get("text_config") or {}):
            ends = part.get("eos_token_id")
            listed += ends if isinstance(ends, list) else [ends]
    return tuple(end for end in dict.fromkeys(listed) if type(end) is int and end >= 0)


def _model_file(model: ModelConfig, name: str) -> Path:
    """Return a file of the model, which may be missing. The hub is asked for one that its cache lacks. Raises
    OSError, HTTPError."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    path, revision = model.path, model.revision
    if Path(path).is_dir():
        return Path(path) / name
    found = try_to_load_from_cache(path, name, revision=revision)
    if found is None:
        found = hf_hub_download(path, name, revision=revision)
    return Path(found) if isinstance(found, str) else Path(path) / name


KEEP, DROP = "keep", "drop"
"""What is done with control tokens: see ``data.control_tokens``."""
T = TypeVar("T")
Encode = Callable[[list[str]], list[list[int]]]


def control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the control tokens that texts of people may hold, such as an end of turn within a
    question: those that the tokenizer marks as special, but for the tags of thoughts. It makes the token
    itself of such a text, in training as at inference, so a text can close its turn and open another."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    tokens = sorted((t for t in tokens if t.strip() and not THINKS.fullmatch(t)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


@dataclass(frozen=True)
class _Opened:
    """A prompt as an answer follows it."""

    prompt: Prompt
    """with the turns that were left of it"""
    text: str
    ids: np.ndarray
    """[P] int32"""


class TextEncoder:
    """Token ids of texts in which the special tokens are written out, as a template writes them. Raises
    ConfigError for a tokenizer that is not fast, or that ends nothing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        key, name = "model.tokenizer_name_or_path", tokenizer.name_or_path
        if not tokenizer.is_fast:
            raise ConfigError(key, name, "has no fast tokenizer (tokenizer.json); use one that has")
        if tokenizer.eos_token_id is None:
            raise ConfigError(key, name, "has no end-of-sequence token; set its eos_token")
        self.tokenizer, bos = tokenizer, tokenizer.bos_token_id
        self._adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        self._anchor = ""
        alone, behind_eos = (self.alone([text])[0] for text in ("a", tokenizer.eos_token + "a"))
        if behind_eos[0] == tokenizer.eos_token_id and behind_eos[1:] != alone:
            # this tokenizer puts a space before a text, which is wrong in the middle of one
            self._anchor = tokenizer.eos_token

    def alone(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text by itself."""
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def inside(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts that continue a sequence of tokens."""
        skip = 1 if self._anchor else 0
        return [ids[skip:] for ids in self.alone([self._anchor + text for text in texts])]

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return ``ids`` with exactly one beginning-of-sequence token if the model expects one, whether the
        template, the data or neither wrote it."""
        bos = self.tokenizer.bos_token_id
        if bos is None or not (self._adds_bos or ids[:1] == [bos]):
            return ids
        start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        return [bos, *ids[start:]]


class Renderer:
    """Conversion of conversations to token ids, by a chat template or, with ``template=None``, concatenation.

    Except for the count of ``cuts``, it is a pure function of text, tokenizer, template and lengths
    (``fingerprint`` identifies the last three).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        max_prompt_length: int,
        template: str | None,
        control_tokens: str = KEEP,
        long_prompts: str = CUT,
        ends: tuple[int, ...] = (),
    ) -> None:
        """``control_tokens``, ``long_prompts``: the settings of these names in ``data``. ``ends``: further
        tokens that end a sampled answer."""
        self._ends = ends
        self.encoder = TextEncoder(tokenizer)
        self.tokenizer, self.template = tokenizer, template
        self.max_length, self.max_prompt_length = max_length, max_prompt_length
        self.cuts: Counter[str] = Counter()
        """Number of cuts of each kind: "oldest turns", "last user turn", "completion end"; of texts with
        control tokens (CONTROLLED); and of texts that were cut before they were tokenised."""
        self.control_tokens, self.long_prompts = control_tokens, long_prompts
        self.controls = control_pattern(tokenizer)
        self.chat = None if template is None else ChatTemplate(tokenizer, template)
        self.end_text, self.end_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
        """Text up to the end of the token that closes an answer, and the token's id."""
        if self.chat is not None:
            self.end_text, self.end_id = self.chat.end_text, self.chat.end_id
        self._end_token = str(tokenizer.decode([self.end_id]))
        marks = [token for token in self.encoder.alone([self.end_text])[0] if is_mark(tokenizer, token)]
        self._closing = {*marks, *self.stop_token_ids, tokenizer.pad_token_id}

    # Properties that other modules use

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sampled answer: the template's end of turn, the tokenizer's end of sequence, and
        the ends that the model's files list."""
        return tuple(dict.fromkeys((self.end_id, self.tokenizer.eos_token_id, *self._ends)))

    @property
    def about_ends(self) -> str:
        """A sentence for the start of a program: the tokens that end a sampled answer, with their ids."""
        texts = self.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
        named = (f"{text} ({i})" for text, i in zip(texts, self.stop_token_ids, strict=True))
        return f"a sampled answer ends at {', '.join(named)}"

    @cached_property
    def fingerprint(self) -> str:
        """``chat_fingerprint`` of this renderer, for the keys of caches of token ids or scores."""
        how = [one for one in (self.control_tokens, self.long_prompts) if one not in (KEEP, CUT)]
        lengths = self.max_length, self.max_prompt_length
        return chat_fingerprint(self.tokenizer, self.template, *lengths, how)

    def said(self, ids: Iterable[int]) -> str:
        """Return the text of sampled ids without the tokens that close a turn. Special tokens within it are
        part of what was said."""
        kept = list(ids)
        while kept and kept[-1] in self._closing:
            kept.pop()
        # transformers looks at each id of a list in turn, and at an array as a whole
        return str(self.tokenizer.decode(np.asarray(kept, dtype=np.int64), skip_special_tokens=False))

    # Rendering

    def prompt_ids(self, prompt: Prompt) -> np.ndarray:
        """Return the token ids of ``prompt`` up to the point where a sampler continues, with the generation
        prompt at the end: [P] int32, 1 <= P <= max_prompt_length.

        Raises DataError for a prompt that the template refuses or that cannot be shortened enough.
        """
        ids = self.prompts([prompt])[0]
        if isinstance(ids, str):
            raise DataError(f"prompt {prompt.id}: {ids}")
        return ids

    def sequence(self, prompt: Prompt, completion: Completion) -> Sequence | str:
        """Return one row of training, or the reason why there is none: it cannot be rendered, or it has no
        completion token."""
        return self.sequences([(prompt, completion)])[0]

    def prompts(self, prompts: Iterable[Prompt]) -> list[np.ndarray | str]:
        """Return ``prompt_ids`` of many, batch-encoded, or the reason for a prompt that cannot be
        rendered."""
        return [str(one) if isinstance(one, RenderError) else one.ids for one in self._opened(prompts)]

    def sequences(self, rows: Iterable[tuple[Prompt, Completion]]) -> list[Sequence | str]:
        """Return ``sequence`` of many rows in their order, batch-encoded. A prompt that several rows share is
        tokenised once."""
        rows = list(rows)
        distinct = list(dict.fromkeys(prompt for prompt, _ in rows))
        opened = dict(zip(distinct, self._opened(distinct), strict=True))
        texts = [_or_reason(self._answer_text, opened[p], c) for p, c in rows if c.token_ids is None]
        answers = iter(_encoded(self.encoder.inside, texts))
        return [
            self._sequence(opened[prompt], next(answers) if c.token_ids is None else self._sampled(c))
            for prompt, c in rows
        ]

    def _opened(self, prompts: Iterable[Prompt]) -> list[_Opened | RenderError]:
        """Return each prompt as an answer follows it, or the reason why it cannot be rendered."""
        prepared = [_or_reason(self._prepared, prompt) for prompt in prompts]
        texts = [_or_reason(self._render, one) for one in prepared]
        encoded = _encoded(self.encoder.alone, texts)
        return [_or_reason(self._fitted, *row) for row in zip(encoded, prepared, texts, strict=True)]

    def _sequence(self, opened: _Opened | RenderError, answer: list[int] | RenderError) -> Sequence | str:
        if isinstance(opened, RenderError) or isinstance(answer, RenderError):
            return str(opened if isinstance(opened, RenderError) else answer)
        room = self.max_length - len(opened.ids)
        if len(answer) > room:
            self.cuts["completion end"] += 1
            answer = answer[:room]
        if not answer:
            return "no completion token"
        return Sequence(opened.ids, np.array(answer, dtype=np.int32))

    # Answers

    def _answer_text(self, opened: _Opened, completion: Completion) -> str:
        """Return the completion as the template writes it, closed once even if the text has its own end
        token. Raises RenderError."""
        text = completion.text or ""
        ends = (self._end_token, str(self.tokenizer.eos_token))
        while (bare := text.rstrip()).endswith(ends):
            text = bare.removesuffix(ends[0]).removesuffix(ends[1])
        text = self._bounded(text, self.max_length)
        if self.chat is not None:
            text = self._checked(text)
        # A text that was cut is a sample: a think block may be open in it, which the template would close.
        ended = completion.finished and not completion.stopped
        if self.chat is not None and (ended or not self.chat.thinks):
            turn = replace(completion, text=text).turn
            text = self.chat.answer(opened.prompt, opened.text, turn)
        return text + (self.end_text if ended else "")

    def _sampled(self, completion: Completion) -> list[int]:
        """Return sampled ids unchanged, plus the end token if the policy ended its answer and the sampler
        left it out."""
        assert completion.token_ids is not None
        ids = list(completion.token_ids)
        ended = completion.stopped or (ids and ids[-1] in self.stop_token_ids)
        missing = completion.finished and not ended
        return [*ids, self.end_id] if missing else ids

    # Prompts

    def _fitted(self, ids: list[int], prompt: Prompt, text: str) -> _Opened:
        """Return the prompt, whose text has these ids, within max_prompt_length. Raises RenderError."""
        opened = _Opened(prompt, text, np.array(self.encoder.with_bos(ids), dtype=np.int32))
        if len(opened.ids) > self.max_prompt_length:
            if self.long_prompts == DROP:
                limit = f"model.max_prompt_length={self.max_prompt_length}"
                raise RenderError(f"the prompt has more than {limit} tokens")
            opened = self._shortened(opened)
        if not len(opened.ids):
            raise RenderError("the prompt has no token")
        return opened

    def _shortened(self, opened: _Opened) -> _Opened:
        """Return the prompt without its oldest turns, then without the beginning of its last user turn."""
        system, rest = split_system(turns := opened.prompt.turns)
        starts = [i for i, turn in enumerate(rest) if i > 0 and turn.role == "user"]
        shorter = {}

        def fits(start: int) -> bool:
            shorter[start] = self._open(replace(opened.prompt, turns=system + rest[start:]))
            return len(shorter[start].ids) <= self.max_prompt_length

        if starts:
            start = starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)]
            opened = shorter[start]
        self.cuts["oldest turns"] += len(opened.prompt.turns) < len(turns)
        return opened if len(opened.ids) <= self.max_prompt_length else self._cut_user_turn(opened)

    def _cut_user_turn(self, opened: _Opened) -> _Opened:
        """Cut the start of the only user turn left; its end, which asks the question, stays."""
        system, (user, *rest) = split_system(opened.prompt.turns)
        content = user.content
        tokens = self.tokenizer(content, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in tokens["offset_mapping"]]
        cut = 0
        while len(opened.ids) > self.max_prompt_length:
            cut += len(opened.ids) - self.max_prompt_length
            if cut >= len(starts):
                limit = f"model.max_prompt_length={self.max_prompt_length}"
                raise RenderError(f"system turn and template alone exceed {limit}")
            turns = (*system, Turn(user.role, content[starts[cut] :]), *rest)
            opened = self._open(replace(opened.prompt, turns=turns))
        self.cuts["last user turn"] += 1
        return opened

    def _open(self, prompt: Prompt) -> _Opened:
        text = self._render(prompt)
        ids = self.encoder.with_bos(self.encoder.alone([text])[0])
        return _Opened(prompt, text, np.array(ids, dtype=np.int32))

    def _render(self, prompt: Prompt) -> str:
        """Return the prompt's text up to the point where the answer begins. Raises RenderError."""
        if self.chat is None:
            return "".join(turn.content for turn in prompt.turns)
        return self.chat.opened(prompt)

    # Texts as they are given

    def _prepared(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its texts bounded and checked. Raises RenderError."""
        limit, last = self.max_prompt_length, prompt.turns[-1]
        contents = [self._bounded(turn.content, limit, end=turn is last) for turn in prompt.turns]
        if self.chat is not None:
            contents = [self._checked(content) for content in contents]
        if all(turn.content is content for turn, content in zip(prompt.turns, contents, strict=True)):
            return prompt
        turns = (replace(turn, content=c) for turn, c in zip(prompt.turns, contents, strict=True))
        return replace(prompt, turns=tuple(turns))

    def _bounded(self, text: str, limit: int, end: bool = False) -> str:
        """Return a text that is far longer than ``limit`` tokens without what no token of the row is made of:
        its beginning, or with ``end`` its end, of a few more tokens. Tokenising takes hundreds of bytes a
        character."""
        size = _FAR * limit
        while size < len(text):
            # A template would strip white space at the cut, and with it what is still to be cut by tokens.
            part = f"…{text[-size:]}" if end else f"{text[:size]}…"
            if len(self.encoder.alone([part])[0]) > limit + _MORE:
                self.cuts[CUT_EARLY] += 1
                return part
            size *= 2
        return text

    def _checked(self, text: str) -> str:
        """Return a person's text; texts with control tokens are counted. Raises RenderError for one that is
        dropped."""
        if (token := self.controls.search(text)) is not None:
            self.cuts[CONTROLLED] += 1
            if self.control_tokens == DROP:
                raise RenderError(f"a text holds the control token {token[0]} (data.control_tokens=drop)")
        return text


def _or_reason(render: Callable[..., T], first: Any, *more: Any) -> T | RenderError:
    """Return what ``render`` makes of a row, or the reason why there is none, which may be known before."""
    try:
        return first if isinstance(first, RenderError) else render(first, *more)
    except RenderError as error:
        return error


def _encoded(encode: Encode, texts: list[str | RenderError]) -> list[list[int] | RenderError]:
    """Return the ids of the texts, and the reasons among them as they are."""
    ids = iter(encode([text for text in texts if isinstance(text, str)]))
    return [next(ids) if isinstance(text, str) else text for text in texts]


def chat_fingerprint(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    max_length: int,
    max_prompt_length: int,
    how: Iterable[str] = (),
) -> str:
    """Return 32 hex digits of everything that token ids depend on besides the text. ``template`` None means
    plain concatenation; ``how``: what is done with control tokens and long prompts, where that is no
    default."""
    machine = json.loads(tokenizer.backend_tokenizer.to_str())
    # padding and truncation are remnants of the last call
    state = {key: machine[key] for key in machine if key not in ("padding", "truncation")}
    today = DATE["date_string"]
    parts = [state, tokenizer.special_tokens_map, template, max_length, max_prompt_length, today, *how]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits of the token that each id stands for, added tokens included. They identify the
    tokenizer that token ids belong to, independently of template and lengths."""
    return _vocabulary_fingerprint(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """Compute the fingerprint. ``size`` is part of the cache key, because added tokens change a tokenizer."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps([size, tokens]).encode(), digest_size=8).hexdigest()
