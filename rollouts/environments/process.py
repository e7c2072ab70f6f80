"""A user's environment in separate processes that can be killed. If it raises or never returns, the run gets
one error message and does not hang."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, require
from common.imports import import_function
from common.worker_process import WorkerError
from config.schema_environment import ROLES, EnvironmentConfig
from rollouts.rewards.base import Missing, RewardError
from rollouts.rewards.pool import Pool

Call = dict[str, Any]
"""The arguments of one call: ``conversation`` and those in ``FIELDS``."""

FIELDS = ("reference", "prompt_id", "seed", "turn")
"""Arguments that an environment may take besides the conversation: the prompt's reference answer, its id, a
number derived from the seed and the prompt, and the number of turns that the policy has had."""

LOG_NAME = "environment-{}.log"


class EnvironmentProcess:
    """The function or class named by ``environment.path``, in worker processes."""

    def __init__(self, config: EnvironmentConfig, log_dir: Path) -> None:
        """Raises ConfigError if the environment cannot be imported or does not take its options."""
        self.config = config
        argument = (config.path, config.options, config.role)
        self._pool = _Pool(
            "rollouts.environments.process.load",
            argument,
            workers=config.workers,
            timeout=config.timeout,
            log_dir=log_dir,
            log_name=LOG_NAME,
        )
        try:
            check(str(config.path), config.options)
            self._pool.start()
        except RewardError as error:
            raise ConfigError("environment.path", config.path, str(error)) from error

    def answers(self, calls: Sequence[Call]) -> list[dict[str, str] | None]:
        """Return the next turn of each conversation, {"role", "content"}, or None for its end. Raises
        WorkerError at the first call that fails, because samples of a broken environment must not be trained
        on."""
        try:
            return self._pool.map(calls)
        except RewardError as failed:
            self._pool.close()  # the other calls may wait for the same
            raise WorkerError(
                f"environment.path={self.config.path} failed on a conversation: {failed}"
            ) from failed

    def close(self) -> None:
        self._pool.close()


class _Pool(Pool):
    """A pool of which the first task without a result ends all."""

    def _run(self, task: Call) -> Any:
        answer = super()._run(task)
        if isinstance(answer, Missing):
            raise RewardError(answer.reason)
        return answer


def check(path: str, options: dict[str, Any]) -> None:
    """Raise ConfigError for a path that names nothing, and for options that the environment does not take."""
    function = import_function("environment.path", path)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in ("conversation", *FIELDS)]
    for name, value in options.items():
        said = f"{path} does not take it; it takes {', '.join(known) or 'none'}"
        require(takes_all or name in known, f"environment.options.{name}", value, said)


# In the worker process


def load(argument: tuple[str, dict[str, Any], str]) -> Callable[[Call], dict[str, str] | None]:
    """Return the environment as a function that answers one conversation. A class is instantiated with the
    options, and the instance is called. Raises ConfigError."""
    path, options, role = argument
    function = import_function("environment.path", path)
    if inspect.isclass(function):
        function, options = function(**options), {}
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def answer(call: Call) -> dict[str, str] | None:
        fields = {name: call[name] for name in FIELDS if takes_all or name in parameters}
        return turn_of(function(call["conversation"], **fields, **options), role)

    return answer


def turn_of(returned: Any, role: str) -> dict[str, str] | None:
    """Convert what an environment returned to a turn. A text becomes a turn of the role ``environment.role``.
    Raises TypeError, ValueError."""
    if returned is None:
        return None
    turn = {"role": role, "content": returned} if isinstance(returned, str) else returned
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
        raise TypeError(f"it returned a {type(returned).__name__}: give a text, a turn with one, or None")
    if turn.get("role") not in ROLES:
        raise ValueError(f"it returned a turn of the role {turn.get('role')!r}: use {', '.join(ROLES)}")
    if (turn["role"] == "assistant") != (role == "assistant"):
        raise ValueError(
            f"it returned a turn of the role {turn['role']}, which environment.role={role} does not go with"
        )
    turn["content"].encode()  # raises UnicodeEncodeError for half a surrogate pair, which no tokenizer takes
    return {"role": turn["role"], "content": turn["content"]}
