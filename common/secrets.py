"""Secrets in settings, and their removal from all that leaves the process. What a user's own code gets is not
shown, nor is a URL beyond its host. What is left goes by its name, and then wherever it occurs."""

from __future__ import annotations

import html
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

REMOVED = "[removed]"
IN_FILES = "has a secret, and {} into files: name the environment variable that has it, ${{oc.env:NAME}}"
_ROOT = Path(__file__).parents[1]
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STEMS = "key|token|secret|pass|pw|credential|auth|bearer|cookie|jwt|sig|pat|pin|otp|login|header"
_SECRET_NAME = re.compile(
    r"(?!(?:.*_)?(?:pad|eos|bos|unk|sep|cls|mask|stop|end|start|special|control|image|per|next|first|last"
    r"|sort|cache|primary|foreign|row|group|prompt|public|full)_(?:token|key)$)"
    r"(?:.*_)?(?:key(?:_id)?|(?:api|access|secret|private|account|auth)_?keys?|(?:client)?secrets?|otp|pin|jwt"
    r"|token|(?:access|api|auth|bearer|hf|hub|id|refresh|session)_?tokens?|(?:db|http|mail|proxy|smtp|user)?pass"
    r"|pass(?:w(?:or)?ds?|phrases?|codes?)|pwd?|pat|login|credentials?|auth(?:orization)?|bearer|headers?"
    r"|cookies?|sig(?:nature)?)(?:_\d+)?"
)
_FORMATS = re.compile(r"\b(?:hf_|sk[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|wandb_v1_|eyJ)[\w.\-]{16,}")
_URL = re.compile(r"(?P<host>[a-zA-Z][\w+.\-]*://)(?:(?P<user>[^/\s'\"@]*)@)?(?P<at>[^/\s?#@]*)(?P<rest>\S*)")
_USER = re.compile(r"(?<=://)[^/\s'\",@]+(?=@)")
_NAMED = re.compile(
    rf"(?i)(?<![\w.\-])(?P<option>--)?(?P<name>(?=[\w.\-]*?(?:{_STEMS}))[\w.\-]++)(?P<quote>\\?[\"'])?\]?"
    r"(?P<sign>\s*=\s*|\s*:(?!//)\s*|(?(option)\s+|(?!)))"
    r"(?:(?P<mark>\\?\"|')(?P<text>(?:(?!(?P=mark))(?:\\.|[^\\]))*)(?P=mark)"
    r"|(?P<value>\[[^\]\n]*\]|(?:bearer|basic|token|digest)\s+[^\s,;'\"]+|[^\s,;'\"&<>)}\]]*[^\s,;:.'\"&<>)}\]]))"
)
_NOTHING = re.compile(r"(?i)|\d{1,3}|null|none|true|false|~|\?\?\?|\[removed\]|\$\{.*")
_IMPORT_PATH = re.compile(r".+\.py:\w+|(?!.+\.(?:jsonl?|parquet|[ct]sv|gz)$)\w+(?:\.\w+)+")
_VARIABLE = re.compile(r"(?!.{41})[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_remembered: set[str] = set()


@cache
def is_secret_name(key: str) -> bool:
    """Return whether the last part of a dotted key names a secret: ``x.api_key`` does, ``pad_token`` not."""
    name = "_".join(_WORDS.findall(key.rstrip("]'\"").rsplit(".", 1)[-1].rsplit("[", 1)[-1])).lower()
    return _SECRET_NAME.fullmatch(name) is not None


def is_secret(key: str, value: Any) -> bool:
    """Return whether the name of the key marks the value as a secret. ``api_key_env`` holds the name of a
    variable; what does not look like one may be the key itself. ``${…}`` is none."""
    something = isinstance(value, str | int | float) and not _NOTHING.fullmatch(str(value))
    variable = key.lower().endswith("_env") and _VARIABLE.fullmatch(str(value))
    return something and not variable and is_secret_name(re.sub("(?i)_env$", "", key))


def scrub(tree: Any, key: str = "", show: bool = True, hidden: bool = False) -> Any:
    """Return a copy of plain data with secrets replaced, which are removed from texts from then on. ``key``:
    its name. ``show``: for people, who need no URL beyond its host, nor texts that a user's function gets.
    ``hidden``: whether callbacks or trackers get it."""
    if isinstance(tree, dict):
        path = str(tree.get("_target_") or tree.get("path") or "")
        ours = (_ROOT / path.partition(".")[0]).is_dir()
        users = hidden or (show and not ours and _IMPORT_PATH.fullmatch(path) is not None)
        below = {"callbacks": True, "trackers": True, "_target_": False, "path": hidden, "name": hidden}
        names = {name: key if is_secret_name(key) else str(name) for name in tree}
        return {name: scrub(tree[name], names[name], show, below.get(name, users)) for name in tree}
    if isinstance(tree, list | tuple):
        return [scrub(value, key, show, hidden) for value in tree]
    if is_secret(key, tree) or (hidden and type(tree) in (str, int)):
        _remember("" if show and not is_secret_name(key) else str(tree), is_secret_name(key))
        return REMOVED
    return _shown(tree, show) if isinstance(tree, str) else tree


def _shown(value: str, show: bool) -> str:
    url = _URL.fullmatch(value)
    user = (url["user"] or "") if url else ""
    for part in (user, user.partition(":")[2]):
        _remember(part, True)
    if url and show and (user or len(url["rest"]) > 1):
        return f"{url['host']}{url['at']}/{REMOVED}"
    return scrub_text(value)


def _remember(value: str, secret: bool) -> None:
    """Remember what is removed wherever it occurs, unless it is short enough to be an ordinary word."""
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    if len(value) >= (6 if mixed else 8 if secret else 10**9) and REMOVED not in value:
        for one in (value, unquote(value)):  # as JSON, HTML and URLs spell it
            _remembered.update((one, json.dumps(one)[1:-1], html.escape(one), quote(one, safe="")))


def scrub_text(text: str) -> str:
    """Return ``text`` without secrets: known ones, the environment's, users of URLs, and named values."""
    for name, value in os.environ.items():
        if is_secret_name(name) and not name.endswith("PWD"):  # a folder
            _remember(value, True)
    for value in sorted(_remembered, key=len, reverse=True):  # one may contain another
        text = text.replace(value, REMOVED)
    text, kept, at = _USER.sub(REMOVED, _FORMATS.sub(REMOVED, text)), "", 0
    while named := _NAMED.search(text, at):
        start, end = named.span("value" if named["mark"] is None else "text")
        colon = ":" in named["sign"] and not named["quote"]
        if colon and re.fullmatch("(?i)key|token|secret|pass|pat|pin|login|headers?", named["name"]):
            end = start  # a sentence, as in token: 12 of 40
        secret = is_secret(named["name"], text[start:end])
        kept, at = kept + text[at:start] + (REMOVED if secret else text[start:end]), end
    return kept + text[at:]


def scrub_words(words: list[str], show: bool = True) -> list[str]:
    """Return the arguments of a command line without secrets. ``show``: as in ``scrub``."""
    shown = []
    for word in words:
        key, sign, value = word.partition("=")
        if sign and not re.search(r"[\s'\"]", key):
            users = show and re.match(r"[+~]*(callbacks|trackers)\.(?!.*_target_$)", key) is not None
            word = f"{key}={scrub(value, key.lstrip('+~-').replace('-', '_'), show, users)}"
        shown.append(scrub_text(word))
    return shown
