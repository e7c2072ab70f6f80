"""Chat templates: where one comes from, what it is given, and what it does with that, found out by rendering.

An answer is what the template writes behind the prompt once the conversation goes on with it. So a row is
refused whose prompt the template writes in another way then, or whose words it leaves out.

A template is a program of somebody else. It gets the same date on every day, so that a run can be resumed
tomorrow; it is stopped if it does not end; and whatever goes wrong within it is a ``jinja2.TemplateError``.
"""

from __future__ import annotations

import datetime
import json
import os.path
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from common.errors import ConfigError
from data.types import Prompt, Turn, of_message, split_system

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE = Path(__file__).parent.parent / "config" / "templates" / "default.jinja"
KEY, VARIABLES = "model.chat_template", "model.chat_template_kwargs"

MARK = "humanline-probe"
_DAY = datetime.datetime(2024, 7, 26)
DATE: Mapping[str, Any] = {"date_string": f"{_DAY:%d %b %Y}", "strftime_now": _DAY.strftime}
"""What every rendering gets as today: the day that Llama 3's own template falls back to."""
_GIVEN = {"messages", "tools", "add_generation_prompt", "strftime_now"}
"""What a template reads that is no setting: it comes with the row, or is fixed."""
SECONDS, GIB = 20, 1
"""CPU seconds, and GiB of further memory, beyond which a rendering is stopped."""
THINKS = re.compile(r"<[^<>\s]*(?:think|thought|reason)[^<>\s]*>|\[/?THINK\]", re.IGNORECASE)
"""The tags between which models think."""


def load_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's template, or, if it has none, the one shipped for base models. Raises
    ConfigError for named templates of which none is the default."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        why = f"the tokenizer has several, and no default: choose of {', '.join(template)}"
        if "default" not in template:
            raise ConfigError(KEY, None, why)
        return str(template["default"])
    return template or DEFAULT_TEMPLATE.read_text(encoding="utf-8")


def chosen_template(
    tokenizer: PreTrainedTokenizerBase, chosen: str | None, variables: Mapping[str, Any] | None
) -> str:
    """Return the template that model.chat_template (``chosen``) asks for: a jinja file, or one of the
    tokenizer's named templates; with None the tokenizer's. ``variables`` (model.chat_template_kwargs) are its
    defaults. Raises ConfigError."""
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chosen is None:
        source = load_template(tokenizer)
    elif chosen in named:
        source = named[chosen]
    else:
        choices = f"one of the tokenizer's ({', '.join(named)})" if named else "null for the tokenizer's own"
        if not Path(chosen).is_file():
            raise ConfigError(KEY, chosen, f"no such file; give a jinja file, or {choices}")
        source = Path(chosen).read_text(encoding="utf-8")
    unread = ", ".join(sorted(set(variables or ()) - _variables(source))) if variables else ""
    why = f"the chat template does not read {unread}; it reads {_listed(source) if unread else ''}"
    if unread:
        raise ConfigError(VARIABLES, variables, why)
    # The newline is the block's own: jinja drops the first one behind a block (trim_blocks).
    sets = [f"{{% set {key} = {_default(key, value)} %}}\n" for key, value in (variables or {}).items()]
    return "".join(sets) + source


def _default(key: str, value: Any) -> str:
    """Return the jinja expression of a variable: what the caller gives, and ``value`` otherwise. The date is
    what the setting says, because every rendering is given one."""
    return _literal(value) if key in DATE else f"{key} if {key} is defined else {_literal(value)}"


def _literal(value: Any) -> str:
    """Return a value of settings as a jinja literal."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _variables(source: str) -> set[str]:
    """Return the names that a template reads and that a setting may give. Raises ConfigError for a template
    that is not jinja."""
    from transformers.utils import chat_template_utils

    try:
        environment = chat_template_utils._compile_jinja_template(source).environment
        tree = environment.parse(source)
    except jinja2.TemplateError as error:
        raise ConfigError(KEY, "…", f"is no jinja template: {error}") from error
    undeclared_names = jinja2.meta.find_undeclared_variables(tree)
    # Names of loops and macros are among them; a name that is set in the template and may also be given is
    # one that is asked for (`is defined`, `default`).
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    tested = {
        test.node.name
        for test in tree.find_all((nodes.Test, nodes.Filter))
        if test.name in ("defined", "undefined", "default", "d") and isinstance(test.node, nodes.Name)
    }
    named = {name for name in undeclared_names if not name.endswith("_token")}
    return named - (assigned - tested) - set(environment.globals) - _GIVEN


def _listed(source: str) -> str:
    return ", ".join(sorted(_variables(source))) or "nothing of this kind"


@contextmanager
def _bounded(memory: bool) -> Iterator[None]:
    """Stop what runs within by a TimeoutError after ``SECONDS`` and, with ``memory``, by a MemoryError beyond
    ``GIB``, on the thread that can be interrupted. The limit of memory is the whole process's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it does not end within {SECONDS} seconds")

    before, limits = signal.signal(signal.SIGVTALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    if memory and sys.platform == "linux":
        with open("/proc/self/statm", "rb") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (GIB << 30), limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"it takes more than {GIB} GiB") from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


class RenderError(Exception):
    """A row that the template refuses, or that it does not write as training needs it; the message is the
    reason to report."""


class ChatTemplate:
    """A template with its tokenizer's special tokens. Contents are given as texts, or as lists of parts
    (``{"type": "text", "text": …}``) to a template that reads those alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        """Raises ConfigError for a template that does not write what a user or an assistant says."""
        self.tokenizer, self.source = tokenizer, source
        self._probing = True  # before threads work in the background, which need memory too
        self.parts: set[str] = set()
        """Roles whose contents are given as parts."""
        ask = Turn("user", "a")
        fault = self._fault("user", [Turn("user", MARK)])
        fault = fault or self._fault("assistant", [ask, Turn("assistant", MARK)])
        if fault:
            raise ConfigError(KEY, "…", fault)
        self.takes_system = not self._fault("system", [Turn("system", MARK), ask])
        self._probe_answer(ask)
        self._probing = False

    def apply(self, turns: Iterable[Turn], *, add_generation_prompt: bool, tools: str = "") -> str:
        """Return the template's text of ``turns``. ``tools``: as ``Prompt.tools``. Raises
        jinja2.TemplateError."""
        try:
            with _bounded(self._probing):
                text = self.tokenizer.apply_chat_template(
                    [self._message(turn) for turn in turns],
                    tools=json.loads(tools) if tools else None,
                    chat_template=self.source,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **DATE,
                )
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a template raises whatever its filters, its loops and Python do
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        return text

    def _message(self, turn: Turn) -> dict[str, Any]:
        parts = {"content": [{"type": "text", "text": turn.content}]} if turn.role in self.parts else {}
        return turn.message | parts

    def opened(self, prompt: Prompt) -> str:
        """Return the prompt's text up to the point where the answer begins. Raises RenderError."""
        roles, calling = {turn.role for turn in prompt.turns}, any(turn.calls for turn in prompt.turns)
        lacks = ""
        if calling and not self.takes_calls[0]:
            lacks = "writes no tool_calls"
        elif "tool" in roles and not (self.takes_calls[1] if calling else self.takes_tool):
            lacks = "has no tool turns"
        elif prompt.tools and not self.takes_tools:
            lacks = "describes no tools"
        elif "assistant" in roles and self.forgets:
            lacks = "leaves out what was said in earlier turns"
        if lacks:
            raise RenderError(f"the chat template {lacks}; {KEY} may name another")
        return self._written(prompt, (), "prompt")

    def answer(self, prompt: Prompt, opened: str, turn: Turn) -> str:
        """Return what the template writes for ``turn`` behind ``opened``, the text of ``prompt``, without
        ``end_text``. Raises RenderError."""
        whole = self._written(prompt, (turn,), "answer")
        text = whole[len(opened) :]
        if not whole.startswith(opened) or (self._generation and text.startswith(self._generation)):
            raise RenderError(self._uncut)
        if text.endswith(self._behind_mark):
            text = text.removesuffix(self._behind_mark)
        elif self.end_text in text:
            text = text.rpartition(self.end_text)[0]
        else:
            raise RenderError("the chat template closes the answer in another way than other answers")
        for key, words in turn.message.items():
            if key not in ("role", "tool_calls") and not _holds(text, words):
                raise RenderError(
                    f"the chat template leaves out or changes words of the answer's {key!r}; give the row "
                    f"without them, or a template that writes them ({KEY})"
                )
        body = text.removeprefix(self._head)
        if len(body) < len(text) and any(tag in body for tag in self.thinks):
            raise RenderError(
                "the chat template writes a think block of its own before that of the answer; give what was "
                "thought as the message's reasoning_content"
            )
        return text

    def _written(self, prompt: Prompt, more: tuple[Turn, ...], what: str) -> str:
        system, turns = ((), prompt.turns) if self.takes_system else split_system(prompt.turns)
        if system and turns:  # it has no such role
            turns = (Turn(turns[0].role, f"{system[0].content}\n\n{turns[0].content}"), *turns[1:])
        try:
            return self.apply((*(turns or system), *more), add_generation_prompt=not more, tools=prompt.tools)
        except jinja2.TemplateError as error:
            raise RenderError(f"the chat template refuses the {what}: {error}") from error

    # Behaviour of the template, found out once by rendering

    def _rendered(self, turns: list[Turn], tools: str = "") -> str:
        """Return the text of ``turns`` up to the point where an answer begins; "" if it is refused."""
        try:
            return self.apply(turns, add_generation_prompt=True, tools=tools)
        except jinja2.TemplateError:
            return ""

    def _probe_answer(self, ask: Turn) -> None:
        """Find out what the template puts before and after an answer."""
        opened = self.apply([ask], add_generation_prompt=True)
        closed = self.apply([ask, Turn("assistant", MARK)], add_generation_prompt=False)
        before, _, self._behind_mark = closed.rpartition(MARK)
        self._head = before.removeprefix(opened) if before.startswith(opened) else ""
        start = len(os.path.commonprefix([opened, self.apply([ask], add_generation_prompt=False)]))
        self.thinks = frozenset(THINKS.findall(before[start:]))
        """Tags of a think block that the template writes before every answer."""
        self.end_text, self.end_id = self._closing(ask)
        """Text up to the end of the token that closes an answer, and the token's id."""
        self.rest = self._behind_mark.removeprefix(self.end_text)
        """What the template writes behind that at the end of a conversation."""
        self._generation = opened[start:]
        self._uncut = (
            f"the chat template does not write the answer behind {self._generation!r}, which a sample "
            f"continues; {VARIABLES} (it reads {_listed(self.source)}) or another {KEY} may"
        )

    def _closing(self, ask: Turn) -> tuple[str, int]:
        """Return (text up to its end, id) of the token that closes an answer: the first special token behind
        it, or the end of sequence where answers in the middle of a conversation are closed by it too, or the
        end of sequence that is added where the template writes no special token."""
        tail, eos, eos_id = self._behind_mark, str(self.tokenizer.eos_token), int(self.tokenizer.eos_token_id)
        to_eos = tail[: tail.find(eos) + len(eos)] if eos in tail else ""
        within = self._rendered([ask, Turn("assistant", MARK), ask]).rpartition(MARK)[2]
        if to_eos and within.startswith(to_eos):
            return to_eos, eos_id
        for token in self.tokenizer(tail, add_special_tokens=False)["input_ids"]:
            if is_mark(self.tokenizer, token):
                content = self.tokenizer.added_tokens_decoder[token].content
                return tail[: tail.index(content)] + content, token
        return tail.rstrip() + eos, eos_id

    def _fault(self, role: str, turns: list[Turn]) -> str:
        """Return why the template does not write MARK, the words of ``role`` in ``turns``; "" if it does,
        given as a text or, where only that helps, as parts."""
        fault = ""
        for parts in ({*self.parts}, {*self.parts, role}):
            self.parts = parts
            try:
                text = self.apply(turns, add_generation_prompt=role != "assistant")
            except jinja2.TemplateError as error:
                fault = fault or f"cannot render a question and an answer: {error}"
                continue
            before, mark, _ = text.partition(MARK)
            if mark and not (role in parts and before.endswith(("'", '"'))):  # a list's own notation
                return ""
            fault = fault or f"does not write the {role}'s words; use a chat template that does"
        self.parts -= {role}
        return fault

    @cached_property
    def heading(self) -> str:
        """What the template writes between a question and its answer, without a think block, stripped."""
        between = self.apply([Turn("user", MARK)], add_generation_prompt=True).rpartition(MARK)[2]
        return THINKS.split(between)[0].strip()

    @cached_property
    def forgets(self) -> bool:
        """Whether the template leaves out what a user or an assistant said in earlier turns."""
        turns = [Turn("user", f"{MARK} 1"), Turn("assistant", f"{MARK} 2"), Turn("user", "a")]
        text = self._rendered(turns)
        return bool(text) and not all(turn.content in text for turn in turns)

    @cached_property
    def takes_tool(self) -> bool:
        """Whether the template writes a tool's result, and not as the assistant's words. Some templates
        raise, some omit it, some know only two roles."""
        tool, assistant = (
            [Turn("user", "a"), Turn("assistant", "b"), Turn(role, MARK)] for role in ("tool", "assistant")
        )
        return not self._fault("tool", tool) and self._rendered(tool) != self._rendered(assistant)

    @cached_property
    def takes_calls(self) -> tuple[bool, bool]:
        """Whether the template writes the tool calls of an assistant's turn, and the results of such; many
        omit them silently, and some refuse a result without its call."""
        name = "humanline_probe_call"
        call = {"id": "abcdefghi", "function": {"name": name, "arguments": {"a": 1}}}
        result = of_message({"role": "tool", "name": name, "tool_call_id": call["id"]})
        calling, plain = (
            self._rendered([Turn("user", "a"), Turn("assistant", "", keys), Turn("tool", MARK, result)])
            for keys in (of_message({"tool_calls": [call]}), "")
        )
        return calling.count(name) > plain.count(name), MARK in calling

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template describes tools to the model."""
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": MARK, "description": "b", "parameters": parameters}
        turns = [Turn("system", "a"), Turn("user", "a")][not self.takes_system :]
        return MARK in self._rendered(turns, json.dumps([{"type": "function", "function": function}]))


def is_mark(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether an id is an added token that marks something. (Some tokenizers add runs of newlines.)"""
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and bool(added.content.strip())


def _holds(text: str, words: str) -> bool:
    """Return whether ``text`` has all of ``words``, but for white space and the tags of think blocks."""
    return words.strip() in text or _bare(words) in _bare(text)


def _bare(text: str) -> str:
    return "".join(THINKS.sub("", text).split())
