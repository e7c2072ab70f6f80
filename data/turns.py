"""The tokens that another participant's turn adds to a conversation while it is sampled.

The policy's tokens stay as they were sampled, and nothing before the turn is rendered again. The added text
is what the chat template writes after an answer, up to the point where the next answer begins. So the
template must write a longer conversation as the shorter one plus a continuation. A template that does not (it
leaves out tool turns, or the reasoning of earlier turns) would show the model other words than those it was
trained on.
"""

from __future__ import annotations

from itertools import pairwise

import jinja2

from common.errors import ConfigError
from data.chat import Renderer
from data.templates import MARK, ChatTemplate
from data.types import Turn

_ASK = Turn("user", "a")
_ANSWER = "<think>\nb\n</think>\n\nc"
"""An answer that some templates shorten once it is not the last one."""


class AddedTurns:
    """Turns of ``role`` as token ids; ``role`` is ``tool``, ``user``, or ``assistant``, which stays inside
    the policy's own turn."""

    def __init__(self, renderer: Renderer, role: str) -> None:
        """Raise ConfigError for a chat template that cannot write such a turn after an answer."""
        self.renderer, self.role = renderer, role
        if role != "assistant" and renderer.chat is not None:
            self._check(renderer.chat)

    def ids(self, content: str, closed: bool) -> list[int]:
        """Return the ids between the policy's last token and its next one. ``closed`` says whether that last
        token ended its turn."""
        text = content
        if self.role != "assistant":
            end = "" if closed else self.renderer.end_text
            chat = self.renderer.chat
            text = end + (content if chat is None else self._behind(chat, content))
        return self.renderer.encode_inside([text])[0] if text else []

    def _behind(self, chat: ChatTemplate, content: str) -> str:
        """Return the template's text from the end of an answer's last token to the beginning of the next
        answer."""
        turns = [_ASK, Turn("assistant", MARK), Turn(self.role, content)]
        written = chat.apply(turns, add_generation_prompt=True)
        return written.partition(MARK)[2].removeprefix(chat.end_text)

    def _check(self, chat: ChatTemplate) -> None:
        try:
            wrong = self._fault(chat)
        except jinja2.TemplateError as error:
            wrong = f"the chat template refuses it behind an answer ({error})"
        if wrong:
            other = "tool" if self.role == "user" else "user"
            raise ConfigError(
                "environment.role",
                self.role,
                f"{wrong}; use environment.role={other}, or a template that can (model.chat_template)",
            )

    def _fault(self, chat: ChatTemplate) -> str:
        """Return the reason why the template cannot add such a turn; "" if it can."""
        if self.role == "tool" and not chat.takes_tool:
            return "the chat template has no tool turns"
        ends = [self._written(chat, [MARK]), self._written(chat, [MARK, MARK])]
        if not all(text.partition(MARK)[2].startswith(chat.end_text) for text in ends):
            return "the chat template closes an answer in another way where the conversation goes on"
        for answer in ("b", _ANSWER):
            opened = chat.apply([_ASK], add_generation_prompt=True)
            texts = [opened, self._written(chat, [answer]), self._written(chat, [answer, answer])]
            if not all(later.startswith(before) for before, later in pairwise(texts)):
                return (
                    "the chat template writes the beginning of a conversation in another way once it goes "
                    "on, so that the model would be shown other tokens than it sampled"
                )
            if answer not in texts[1]:
                return "the chat template leaves out words of an earlier answer"
        return ""

    def _written(self, chat: ChatTemplate, answers: list[str]) -> str:
        """Return a question followed by answers, each of which is followed by a turn of the role."""
        turns = [turn for a in answers for turn in (Turn("assistant", a), Turn(self.role, "d"))]
        return chat.apply([_ASK, *turns], add_generation_prompt=True)
