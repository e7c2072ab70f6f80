"""Detection of secrets in settings, and their removal from everything that leaves the process: messages, records,
trackers, model cards.

There is one rule by name (``is_secret_name``) and one by look (``_FORMATS``). A value that either finds among the
settings, and one that the environment holds under such a name, is removed wherever it occurs (``scrub_text``).
"""  # noqa: E501

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

REMOVED = "[removed]"
IN_FILES = "has a secret, and {} into files: name the environment variable that has it, ${{oc.env:NAME}}"
"""Why a command that a program keeps in files is refused; {}: which program writes what."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:key|(?:api|access|secret|private|account|auth)_?keys?|token"
    r"|(?:access|api|auth|bearer|hf|hub|id|refresh|session)_?tokens?|secrets?|clientsecret"
    r"|(?:db|http|mail|proxy|smtp|user)_?pass|passw(?:or)?ds?|passphrases?|pwd|credentials?|auth|authorization|bearer|cookies?|jwt|sig|signature)"
    r"(?:_\d+)?"
)
_ORDINARY = re.compile(
    r"(?:.*_)?(?:pad|eos|bos|unk|sep|cls|mask|stop|end|start|special|control|image|per|next|first|last"
    r"|sort|cache|primary|foreign|row|group|prompt|public)_(?:token|key)"
)
"""Names of tokens and keys that are no secret."""
_FORMATS = re.compile(
    # A prefix of Hugging Face, Stripe, Groq, NVIDIA, GitHub and others, then letters and digits
    r"\b(?:hf|api_org|[sr]k_(?:live|test)|whsec|gsk|xai|nvapi|pplx|r8|tgp_v1|lin_api|dop_v1|dckr_pat|shpat|npm"
    r"|gh[pousr])[_-][A-Za-z0-9]{16,}"
    # One of Weights & Biases (its older keys look like a commit), OpenAI, GitLab, Slack and others, then also
    # signs; and a JSON web token
    r"|\b(?:wandb_v\d+_|sk-|github_pat_|gl(?:pat|dt|rt|soat|ptt)-|xox[a-z]-|xapp-|AIza|ya29\.|pypi-|SG\.|hvs\."
    r"|eyJ)[A-Za-z0-9_.\-]{15,}[A-Za-z0-9_\-]|\bA[KS]IA[A-Z0-9]{16}\b"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w\-/]+"
    r"|\b(?i:Bearer)\s+(?:(?-i:(?<=Bearer ))|(?=\S{0,99}\d))[A-Za-z0-9._~+/=\-]{8,}"
    r"|\bBasic\s+(?=\S{0,99}[\d=])[A-Za-z0-9+/=]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    # The parameter of a URL, but for its name
    r"|(?<=[?&])(?P<parameter>[\w.\-]{1,60}=)(?=[^\s&'\"#]{0,99}\d)(?=[^\s&'\"#]{0,99}[A-Za-z])[^\s&'\"#]{20,}"
)
_USER = re.compile(r"(?<=://)(?:[^/\s@'\"?#,:]{1,300}|[^/\s:@'\",]{0,300}:(?!\d+[/\s])[^\s'\",]{0,300})(?=@)")
"""``user``, ``token`` or ``user:password`` before the host of a URL"""
_NAMED = re.compile(
    r"(?<![\w.\-+])(?P<option>--)?(?P<name>[A-Za-z_][\w.\-]*+)(?P<quote>\\?[\"'])?"
    r"(?P<sign>\]?\s*[=:](?!//)\s*|\s+(?=\S))"
)
"""A name, and what stands between it and its value; a space does behind an option alone."""
_VALUE = re.compile(
    r"(\\?\")(?:[^\"\\]|\\.)*?\1|(')(?:[^'\\]|\\.)*+'|(?i:bearer|basic|token|digest)\s+[^\s,;'\"]+"
    r"|[^\s,;'\"&<>)}\]]*[^\s,;:.'\"&<>)}\]]"
)
_NONE = re.compile(
    r"(?i:null|none|true|false|~|\?\?\?)(?![\w\-])|\[removed\]|\$\{|\\?[\"']{2}|\\?[\"']\[removed\]"
)
_PROSE = re.compile(r"[a-z]+(?![\w\-])")
_VARIABLE = re.compile(r"(?!.{41})[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""Capital words joined by underscores. Some keys have capitals, digits and underscores too, but none consists
of such words alone."""
_SHORTEST, _SHORTEST_MIXED = 8, 6
"""Fewest characters of a value that is removed wherever it occurs, and of one with letters and digits. A shorter one
is more likely a word than a secret, and removing it would damage ordinary text."""  # noqa: E501
_remembered: set[str] = set()


def is_secret_name(key: str) -> bool:
    """Return whether the last part of a dotted key names a secret: ``x.api_key``, ``token`` and
    ``clientSecret`` do, ``max_tokens`` and ``pad_token`` do not."""
    name = "_".join(_WORDS.findall(key.rstrip("]'\"").rsplit(".", 1)[-1].rsplit("[", 1)[-1])).lower()
    return _SECRET_NAME.fullmatch(name) is not None and _ORDINARY.fullmatch(name) is None


def is_secret(key: str, value: Any) -> bool:
    """Return whether the name of the key marks the value, a text or a number, as a secret.

    ``api_key_env`` holds the name of an environment variable. A value there that does not look like such a
    name also counts as a secret, because it may be the key itself, typed in the wrong place. ``${…}`` says
    where a secret is to be read, and is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        return False
    if isinstance(value, str) and value.startswith("${"):
        return False
    if key.lower().endswith("_env"):
        variable = _VARIABLE.fullmatch(str(value)) and not _FORMATS.search(str(value))
        return is_secret_name(key[:-4]) and not variable
    return is_secret_name(key)


def remember(value: Any, key: str = "") -> None:
    """Remember the secrets in nested settings, in arguments, or in the value of the setting ``key``:
    ``scrub_text`` removes them wherever they occur."""
    if isinstance(value, dict):
        for name, item in value.items():
            remember(item, key if is_secret_name(key) else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            remember(item, key)
    elif is_secret(key, value):
        _remember(str(value))
    elif isinstance(value, str):
        users = _USER.findall(value)
        passwords = [user.partition(":")[2] for user in users]
        named = [value[start:end].strip("\"'") for start, end in _named_values(value)]
        typed = [word.strip("\"'") for word in (_assigned(value) or ())[1:]]
        for secret in (*users, *passwords, *named, *typed):
            _remember(secret)


def _remember(value: str) -> None:
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    if len(value) >= (_SHORTEST_MIXED if mixed else _SHORTEST) and REMOVED not in value:
        _remembered.update(_spellings(value))


def _spellings(value: str) -> set[str]:
    """Return ``value`` as JSON, HTML, URLs and Python's ``repr`` spell it."""
    return {
        way
        for one in (value, unquote(value))
        for way in (one, json.dumps(one)[1:-1], html.escape(one), quote(one, safe=""), repr(one)[1:-1])
    }


def _assigned(word: str) -> tuple[str, str] | None:
    """Return (name, secret value) of an argument ``name=value``; None if it is none, or no secret."""
    key, sign, value = word.partition("=")
    secret = bool(sign) and is_secret(key.lstrip("+~-").replace("-", "_"), value)
    return (key, value) if secret else None


def secret_values() -> list[str]:
    """Return what is remembered, and the values of the environment variables with the name of a secret,
    longest first, because one value may contain another."""
    named = {
        way
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and is_secret_name(name) and not name.endswith("PWD")  # a folder
        for way in _spellings(value)
    }
    return sorted(named | _remembered, key=lambda value: (-len(value), value))


def scrub_text(text: str, secrets: list[str] | None = None) -> str:
    """Return ``text`` without the values in ``secrets`` (default: ``secret_values()``), without anything that
    has the format of a secret and without values that follow the name of one."""
    for value in secret_values() if secrets is None else secrets:
        text = text.replace(value, REMOVED)
    text = _FORMATS.sub(lambda match: f"{match['parameter'] or ''}{REMOVED}", text)
    text = _USER.sub(REMOVED, text)
    kept, end = [], 0
    for start, stop in _named_values(text):
        kept += [text[end:start], REMOVED]
        end = stop
    return "".join([*kept, text[end:]])


def _named_values(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the values that follow the name of a secret and ``=`` or ``:``, in order."""
    at = 0
    while (named := _NAMED.search(text, at)) is not None:
        at = named.end()
        sign = named["sign"].strip()
        if not sign and not named["option"]:
            at = named.end("name")
            continue
        if not is_secret_name(re.sub("(?i)_env$", "", named["name"])) or _NONE.match(text, at):
            continue
        around = text[named.start() - 1 : named.start()]
        if around in ("'", '"') and around and named["quote"] is None and sign == "=":
            end = re.compile(rf"{around}|,(?=[\w.]+=)").search(text, at)  # 'key=two words'
            stop = len(text) if end is None else end.start()
        else:
            value = _VALUE.match(text, at)
            if value is None or (sign == ":" and named["quote"] is None and _is_prose(named, value)):
                continue
            stop = value.end()
            if value[1] or value[2]:  # the quotes stay
                at, stop = at + len(value[1] or value[2]), stop - len(value[1] or value[2])
        if stop > at:
            if is_secret(named["name"], text[at:stop]):
                yield at, stop
            at = stop  # the name of a variable is no name of a secret that would follow it


def _is_prose(named: re.Match[str], value: re.Match[str]) -> bool:
    """Return whether ``key: word`` is a sentence rather than a setting."""
    one_word = _WORDS.fullmatch(named["name"]) is not None and named["name"].lower() in ("key", "token")
    return one_word and named["sign"][-1:].isspace() and _PROSE.fullmatch(value[0]) is not None


def scrub(tree: Any, secrets: list[str] | None = None, key: str = "") -> Any:
    """Return a copy of nested plain data with secrets replaced. ``secrets`` is that of ``scrub_text``;
    ``key``: the name of what is a secret as a whole, if it is one's.

    ``tokenizer_name_or_path``, ``max_tokens`` and revisions (40 hex digits) are not secrets and stay.
    """
    secrets = secret_values() if secrets is None else secrets
    if isinstance(tree, dict):
        return {
            scrub_text(name, secrets) if isinstance(name, str) else name: scrub(
                item, secrets, key if is_secret_name(key) else str(name)
            )
            for name, item in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [scrub(value, secrets, key) for value in tree]
    if is_secret(key, tree):
        return REMOVED
    return scrub_text(tree, secrets) if isinstance(tree, str) else tree


def scrub_words(words: list[str]) -> list[str]:
    """Return the arguments of a command line without secrets."""
    secrets = secret_values()
    typed = {word: _assigned(word) for word in words}
    return [
        f"{found[0]}={REMOVED}" if (found := typed[word]) else scrub_text(word, secrets) for word in words
    ]


def same_but_for_secrets(recorded: Any, now: Any) -> bool:
    """Return whether ``now`` is the plain data of which ``recorded`` is a copy by ``scrub``: a removed secret
    equals any other value."""
    if isinstance(recorded, str) and REMOVED in recorded:
        return (
            re.fullmatch(".*".join(map(re.escape, recorded.split(REMOVED))), str(now), re.DOTALL) is not None
        )
    if isinstance(recorded, dict) and isinstance(now, dict):
        return recorded.keys() == now.keys() and all(same_but_for_secrets(recorded[k], now[k]) for k in now)
    if isinstance(recorded, list) and isinstance(now, list | tuple):
        return len(recorded) == len(now) and all(map(same_but_for_secrets, recorded, now))
    return bool(recorded == now)
