"""The one place where a conversation becomes token ids, for training, scoring and sampling alike.

Prompt and completion are tokenised separately, split at the point where sampling starts. So the prompt's ids
are the same whether an answer follows or not. Which tokens count follows from the span and is never guessed
from the ids, so a pad token that is also the end of sequence causes no error. The answer is closed as the
chat template closes it, by one end-of-turn token.

Lengths: a prompt that is too long loses its oldest turns, then the beginning of its last user turn, never its
system turn. Then the completion loses its end and its end-of-turn token. ``Renderer.cuts`` counts the cuts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from common.errors import ConfigError, DataError, require
from config.schema_data import DataConfig
from config.schema_model import ModelConfig
from data.tool_calls import writes_calls
from data.types import Completion, Prompt, Sequence, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE = Path(__file__).parent.parent / "config" / "templates" / "default.jinja"

MARK = "humanline-probe"
_PADDED_MARK = f"\t\t{MARK}\t\t"
_DATE = "26 Jul 2024"
"""Fixed date, so that templates that write today's date render the same every day; also Llama 3's own
default."""


def make_renderer(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: DataConfig) -> Renderer:
    """Return the renderer that a configuration asks for. Raises ConfigError."""
    return Renderer(
        tokenizer,
        max_length=model.max_length,
        max_prompt_length=model.max_prompt_length,
        template=load_template(tokenizer, model.chat_template) if data.apply_chat_template else None,
    )


def load_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    """Return the template in the file ``path`` (model.chat_template). Without a path, return the tokenizer's
    own template, or, if it has none, the template shipped for base models."""
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(
                "model.chat_template",
                path,
                "no such file; give a jinja file, or null for the tokenizer's own",
            )
        return Path(path).read_text(encoding="utf-8")
    own = tokenizer.chat_template
    if isinstance(own, dict):  # named templates; "default" is the one for chats without tools
        own = own.get("default")
    return own or DEFAULT_TEMPLATE.read_text(encoding="utf-8")


class _RenderError(Exception):
    """A prompt that the template refuses or that cannot be shortened enough; the message is the reason to
    report."""


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
    ) -> None:
        key, name = "model.tokenizer_name_or_path", tokenizer.name_or_path
        require(tokenizer.is_fast, key, name, "has no fast tokenizer (tokenizer.json); use one that has")
        require(
            tokenizer.eos_token_id is not None, key, name, "has no end-of-sequence token; set its eos_token"
        )
        self.tokenizer, self.template = tokenizer, template
        self.max_length, self.max_prompt_length = max_length, max_prompt_length
        self.cuts: Counter[str] = Counter()
        """Number of cuts of each kind: "oldest turns", "last user turn", "completion end"."""
        self._adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [
            tokenizer.bos_token_id
        ]
        self._anchor = ""
        alone, behind_eos = (self._encode([text])[0] for text in ("a", tokenizer.eos_token + "a"))
        if behind_eos[0] == tokenizer.eos_token_id and behind_eos[1:] != alone:
            self._anchor = (
                tokenizer.eos_token
            )  # this tokenizer puts a space before a text, which is wrong in the middle of one
        self._head, self.end_text, self.end_id = "", str(tokenizer.eos_token), int(tokenizer.eos_token_id)
        self._strips_left = self._strips_right = False
        self._takes_system = True
        if template is not None:
            self._probe_answer()
            self._probe_system()
        self._end_token = str(tokenizer.decode([self.end_id]))

    # Properties that other modules use

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sampled answer: the template's end of turn and the tokenizer's end of
        sequence."""
        return tuple(dict.fromkeys((self.end_id, self.tokenizer.eos_token_id)))

    @cached_property
    def fingerprint(self) -> str:
        """``chat_fingerprint`` of this renderer, for the keys of caches of token ids or scores."""
        return chat_fingerprint(self.tokenizer, self.template, self.max_length, self.max_prompt_length)

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
        prompts = list(prompts)
        rendered = [self._try_render(prompt.turns) for prompt in prompts]
        encoded = iter(self._encode([text for text in rendered if isinstance(text, str)]))
        return [
            str(text) if isinstance(text, _RenderError) else self._prompt(prompt, next(encoded))
            for prompt, text in zip(prompts, rendered, strict=True)
        ]

    def sequences(self, rows: Iterable[tuple[Prompt, Completion]]) -> list[Sequence | str]:
        """Return ``sequence`` of many rows in their order, batch-encoded. A prompt that several rows share is
        tokenised once."""
        rows = list(rows)
        distinct = list(dict.fromkeys(prompt for prompt, _ in rows))
        prompts = dict(zip(distinct, self.prompts(distinct), strict=True))
        answers = iter(self.encode_inside([self._answer_text(c) for _, c in rows if c.token_ids is None]))
        return [
            self._sequence(prompts[prompt], next(answers) if c.token_ids is None else self._sampled(c))
            for prompt, c in rows
        ]

    def _sequence(self, prompt: np.ndarray | str, answer: list[int]) -> Sequence | str:
        if isinstance(prompt, str):
            return prompt
        room = self.max_length - len(prompt)
        if len(answer) > room:
            self.cuts["completion end"] += 1
            answer = answer[:room]
        if not answer:
            return "no completion token"
        return Sequence(prompt, np.array(answer, dtype=np.int32))

    # Answers

    def _answer_text(self, completion: Completion) -> str:
        """Return the completion as the template writes it, closed once even if the text has its own end
        token."""
        text = completion.text or ""
        ends = (self._end_token, str(self.tokenizer.eos_token))
        while (bare := text.rstrip()).endswith(ends):
            text = bare.removesuffix(ends[0]).removesuffix(ends[1])
        text = text.lstrip() if self._strips_left else text
        text = text.rstrip() if self._strips_right else text
        return self._head + text + (self.end_text if completion.finished else "")

    def _sampled(self, completion: Completion) -> list[int]:
        """Return sampled ids unchanged, plus the end token if sampling stopped by itself and the sampler left
        it out."""
        assert completion.token_ids is not None
        ids = list(completion.token_ids)
        missing = completion.finished and (not ids or ids[-1] not in self.stop_token_ids)
        return [*ids, self.end_id] if missing else ids

    def encode_inside(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts that continue a sequence of tokens."""
        skip = 1 if self._anchor else 0
        return [ids[skip:] for ids in self._encode([self._anchor + text for text in texts])]

    # Prompts

    def _prompt(self, prompt: Prompt, ids: list[int]) -> np.ndarray | str:
        ids = self._with_bos(ids)
        if len(ids) > self.max_prompt_length:
            try:
                ids = self._shortened(prompt.turns, ids)
            except _RenderError as error:
                return str(error)
        return np.array(ids, dtype=np.int32) if ids else "the prompt has no token"

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Return ``ids`` with exactly one beginning-of-sequence token if the model expects one, whether the
        template, the data or neither wrote it."""
        bos = self.tokenizer.bos_token_id
        if bos is None or not (self._adds_bos or ids[:1] == [bos]):
            return ids
        start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        return [bos, *ids[start:]]

    def _shortened(self, turns: tuple[Turn, ...], ids: list[int]) -> list[int]:
        """Return the prompt within max_prompt_length, without its oldest turns, then without the beginning of
        its last user turn."""
        system, rest = _split_system(turns)
        while len(ids) > self.max_prompt_length:
            later = [i for i, turn in enumerate(rest) if i > 0 and turn.role == "user"]
            if not later:
                break
            rest = rest[later[0] :]
            ids = self._ids(system + rest)
        self.cuts["oldest turns"] += len(system + rest) < len(turns)
        return ids if len(ids) <= self.max_prompt_length else self._cut_user_turn(system, rest, ids)

    def _cut_user_turn(self, system: tuple[Turn, ...], rest: tuple[Turn, ...], ids: list[int]) -> list[int]:
        """Cut the start of the only user turn left, ``rest[0]``; its end, which asks the question, stays."""
        content = rest[0].content
        tokens = self.tokenizer(content, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in tokens["offset_mapping"]]
        cut = 0
        while len(ids) > self.max_prompt_length:
            cut += len(ids) - self.max_prompt_length
            if cut >= len(starts):
                raise _RenderError(
                    f"system turn and template alone exceed model.max_prompt_length={self.max_prompt_length}"
                )
            ids = self._ids((*system, Turn(rest[0].role, content[starts[cut] :]), *rest[1:]))
        self.cuts["last user turn"] += 1
        return ids

    def _ids(self, turns: tuple[Turn, ...]) -> list[int]:
        return self._with_bos(self._encode([self._render(turns)])[0])

    def _try_render(self, turns: tuple[Turn, ...]) -> str | _RenderError:
        try:
            return self._render(turns)
        except _RenderError as error:
            return error

    def _render(self, turns: tuple[Turn, ...]) -> str:
        """Return the prompt's text up to the point where the answer begins."""
        if self.template is None:
            return "".join(turn.content for turn in turns)
        if any(turn.role == "tool" for turn in turns) and not self.takes_tool:
            raise _RenderError(
                "the chat template has no tool turns; model.chat_template may name one that has"
            )
        if any(turn.role == "assistant" and turn.calls for turn in turns) and not self.takes_calls:
            raise _RenderError(
                "the chat template writes no tool_calls; model.chat_template may name one that does"
            )
        try:
            return self.apply(turns if self._takes_system else _folded(turns), add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise _RenderError(f"the chat template refuses the prompt: {error}") from error

    def apply(self, turns: Iterable[Turn], *, add_generation_prompt: bool) -> str:
        """Return the template's text of ``turns``. Raises jinja2.TemplateError."""
        text = self.tokenizer.apply_chat_template(
            [turn.message for turn in turns],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            date_string=_DATE,
        )
        assert isinstance(text, str)
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text alone: special tokens come from the text, which the template wrote."""
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    # Behaviour of the template, found out once by rendering

    def _probe_answer(self) -> None:
        """Find out what the template puts before and after an answer, and whether it strips the answer."""
        ask = Turn("user", "a")
        try:
            opened = self.apply([ask], add_generation_prompt=True)
            closed = self.apply([ask, Turn("assistant", MARK)], add_generation_prompt=False)
            padded = self.apply([ask, Turn("assistant", _PADDED_MARK)], add_generation_prompt=False)
        except jinja2.TemplateError as error:
            raise ConfigError(
                "model.chat_template", "…", f"cannot render a question and an answer: {error}"
            ) from error
        before, found, after = closed.rpartition(MARK)
        if not found:
            raise ConfigError(
                "model.chat_template",
                "…",
                "does not write the assistant's words; use a chat template that does",
            )
        self._head = before.removeprefix(opened) if before.startswith(opened) else ""
        self._strips_left, self._strips_right = f"\t\t{MARK}" not in padded, f"{MARK}\t\t" not in padded
        self.end_text, self.end_id = self._first_turn_token(after)

    def _first_turn_token(self, tail: str) -> tuple[str, int]:
        """Return (text up to its end, id) of the first special token in ``tail``; the end of sequence if
        there is none."""
        for token in self._encode([tail])[0]:
            added = self.tokenizer.added_tokens_decoder.get(token)
            if added is not None and added.content.strip():  # some tokenizers add runs of newlines as tokens
                return tail[: tail.index(added.content)] + added.content, token
        return tail.rstrip() + self.tokenizer.eos_token, self.tokenizer.eos_token_id

    @cached_property
    def takes_tool(self) -> bool:
        """Whether the template writes a tool's result, and not as the assistant's words. Some templates
        raise, some omit it, some know only two roles."""
        written = {}
        for role in ("tool", "assistant"):
            turns = [Turn("user", "a"), Turn("assistant", "b"), Turn(role, MARK)]
            try:
                written[role] = self.apply(turns, add_generation_prompt=True)
            except jinja2.TemplateError:
                written[role] = ""
        return MARK in written["tool"] and written["tool"] != written["assistant"]

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the template writes the tool calls of an assistant's turn."""
        return writes_calls(lambda turns: self.apply(turns, add_generation_prompt=True))

    def _probe_system(self) -> None:
        """Find out whether the template accepts a system turn: some templates raise, some omit it."""
        try:
            rendered = self.apply([Turn("system", MARK), Turn("user", "a")], add_generation_prompt=True)
        except jinja2.TemplateError:
            rendered = ""
        self._takes_system = MARK in rendered


def chat_fingerprint(
    tokenizer: PreTrainedTokenizerBase, template: str | None, max_length: int, max_prompt_length: int
) -> str:
    """Return 32 hex digits of everything that token ids depend on besides the text. ``template`` None means
    plain concatenation."""
    machine = json.loads(tokenizer.backend_tokenizer.to_str())
    state = {
        key: machine[key] for key in machine if key not in ("padding", "truncation")
    }  # padding and truncation are remnants of the last call
    known = [state, tokenizer.special_tokens_map, template, max_length, max_prompt_length, _DATE]
    return hashlib.blake2b(
        json.dumps(known, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits of the token that each id stands for, added tokens included. They identify the
    tokenizer that token ids belong to, independently of template and lengths."""
    return _vocabulary_fingerprint(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase, size: int) -> str:
    """Compute the fingerprint. ``size`` is part of the cache key, because added tokens change a tokenizer."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.blake2b(json.dumps([size, tokens]).encode(), digest_size=8).hexdigest()


def _split_system(turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    return (turns[:1], turns[1:]) if turns and turns[0].role == "system" else ((), turns)


def _folded(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the turns with the system turn put before the first user turn's words, for templates without
    that role."""
    system, rest = _split_system(turns)
    if not system or not rest:
        return turns
    return (Turn(rest[0].role, f"{system[0].content}\n\n{rest[0].content}"), *rest[1:])
