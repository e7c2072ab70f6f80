"""The key of vLLM servers that listen at a port: without it they answer nothing but whether they are healthy.

vLLM's own key (``--api-key``) leaves the paths open by which weights are changed and files are written.
``RequireKey`` is a middleware (``vllm serve --middleware``) that guards all of them. The key is in a file
that its user alone may read, and on no command line.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError

MIDDLEWARE = "rollouts.vllm.key.RequireKey"
KEY_FILE = "HUMANLINE_KEY_FILE"
"""Environment variable with the path of the file; by default it is in ``cache_dir``."""
FREE = "/health"

Messages = Callable[..., Awaitable[Any]]


def key_file(cache_dir: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file with the key, for runs and servers that share a ``cache_dir``."""
    given = environment.get(KEY_FILE)
    return Path(given or Path(cache_dir) / f"servers-{os.getuid()}.key").absolute()


def key_in(file: Path) -> str:
    """Return the key in ``file``, which is made if it does not exist. Raises ConfigError for a file that
    others may read, and OSError."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=file.parent)  # with mode 0600
        with os.fdopen(descriptor, "w") as new:
            new.write(secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(part, file)
        os.unlink(part)
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as stream:
        facts = os.fstat(stream.fileno())
        private = stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077 and facts.st_uid == os.getuid()
        if not private:
            raise ConfigError(KEY_FILE, file, "must be a file of yours that nobody else may read: chmod 600")
        key = stream.read().strip()
    if len(key) < 16 or not (key.isascii() and key.isprintable()):
        raise ConfigError(KEY_FILE, file, "holds no key of at least 16 characters: delete it, for a new one")
    return key


class RequireKey:
    """An ASGI middleware: all requests but for ``/health`` need the header ``Authorization: Bearer KEY``."""

    def __init__(self, app: Messages) -> None:
        """Raises KeyError without ``KEY_FILE``: a server that would be open does not start."""
        self._app = app
        self._wanted = f"Bearer {key_in(Path(os.environ[KEY_FILE]))}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Messages, send: Messages) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] == FREE) or self._shown(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            head = {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]}
            await send(head)
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _shown(self, scope: Mapping[str, Any]) -> bool:
        shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._wanted)
