"""The key of servers: what is open without it, and which files may hold it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from rollouts.vllm.key import KEY_FILE, RequireKey, key_file, key_in


def status(path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> Any:
    """What the middleware answers before a server that says 200 to everything, by ASGI."""
    said: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(RequireKey(app)(scope, None, send))  # type: ignore[arg-type]
    return said[0].get("status") or said[0].get("code")


def test_everything_but_health_needs_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "key"
    monkeypatch.setenv(KEY_FILE, str(file))
    right = (b"authorization", f"Bearer {key_in(file)}".encode())
    assert file.stat().st_mode & 0o777 == 0o600 and key_in(file) == key_in(file)
    for path in ("/collective_rpc", "/update_weights", "/v1/models", "/health/", "//health", "/healthz", ""):
        for wrong in ([], [(b"authorization", b"Bearer x")], [right, right], [(b"x", right[1])]):
            assert status(path, wrong) == 401, path
            assert status(path, wrong, "websocket") == 1008
        assert status(path, [right]) == status(path, [right], "websocket") == 200
    assert status("/health", []) == 200 and status("/health", [], "websocket") == 1008
    monkeypatch.delenv(KEY_FILE)
    with pytest.raises(KeyError):
        status("/", [])


def test_a_file_that_others_may_read_or_that_is_a_link_holds_no_key(tmp_path: Path) -> None:
    file = key_file(str(tmp_path), {})
    assert file.parent == tmp_path and key_file("c", {KEY_FILE: "/k"}) == Path("/k")
    key_in(file)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError):
        key_in(tmp_path / "link")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="nobody else may read"):
        key_in(file)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ConfigError, match="no key of at least 16"):
        key_in(file)
    assert os.listdir(tmp_path).count("link") == 1 and len(os.listdir(tmp_path)) == 2
