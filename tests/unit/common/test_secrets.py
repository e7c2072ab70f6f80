"""What is taken for a secret, where it is removed, and what ordinary text stays."""

from __future__ import annotations

import html
import json
import time
from urllib.parse import quote

import pytest

from common import secrets
from common.errors import ConfigError
from common.secrets import REMOVED, is_secret, scrub, scrub_text, scrub_words

BY_NAME = (  # noqa: SIM905
    "key apiKey apikey accessKeyId secret_keys privatekey accountkey authkey x_key token accesstoken "
    "apitoken authtoken bearertokens hftoken hubtoken idtoken refreshtoken sessiontoken secret clientsecret "
    "dbpass http_pass mailpass proxypass smtppass userpass password passwd passphrase passcode pwd pw pass "
    "pat pin otp login credentials auth authorization bearer cookie jwt sig signature headers token_2"
).split()
ORDINARY = (
    "pad eos bos unk sep cls mask stop end start special control image per next first last sort cache "
    "primary foreign row group prompt public full"
)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(secrets, "_remembered", set())


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "form", ["x.{}={}", "--{} {}", "--{}={}", '"{}": "{}"', r"\"{}\": \"{}\"", "{}='{}'", "x_{}: {}"]
)
def test_a_secret_is_known_by_its_name(name, form):
    assert "plain7" not in (made := scrub_text(form.format(name, "plain7"))) and REMOVED in made
    assert "plain7" not in str(scrub({"x": [{name: ["plain7", {"y": "plain7"}]}]}))
    assert "plain7" not in str(scrub_words([f"+x.{name}=plain7", f"--{name.replace('_', '-')}=plain7"]))


@pytest.mark.parametrize(
    "text",
    [
        *("token: 12 of 40", "the secret: love", "full_key: wandb.tags", "pass: 3 of 4", "login: by key"),
        "api_key_env=OPENAI_API_KEY max_tokens=3 api_key: null",
        "x.api_key_env=OPENAI_API_KEY: is not set",
        *(f"{name}_token=plain7 my_{name}_key: plain7" for name in ORDINARY.split()),
        *(f"x.api_key={nothing} y" for nothing in ("null", "None", "true", "~", "???", "${oc.env:X}", '""')),
        "a chat at https://host/a/b?x=1",
        f"a.api_key={REMOVED}: is wrong",
        "the token id 7 of pad_token=<eos>",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert scrub_text(text) == text


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("cannot parse 'x.api_key=plain'", f"cannot parse 'x.api_key={REMOVED}'"),
        ("Password: hunter2; then", f"Password: {REMOVED}; then"),
        ("API_KEY_ENV=plain7 x.api_key_env: plain7", f"API_KEY_ENV={REMOVED} x.api_key_env: {REMOVED}"),
        ("key: token=abc api_keys=[A,B]", f"key: token={REMOVED} api_keys={REMOVED}"),
        ("Authorization: Bearer plain; x", f"Authorization: {REMOVED}; x"),
        ("{'token': 'a\\'plain', \"key\": \"b\"}", f"{{'token': '{REMOVED}', \"key\": \"{REMOVED}\"}}"),
        ("http://me:pw@host/x", f"http://{REMOVED}@host/x"),
    ],
)
def test_the_value_alone_is_removed_from_a_message(text, made):
    assert scrub_text(text) == made == scrub_text(made)


def test_what_a_users_code_gets_and_a_url_beyond_its_host_are_not_shown():
    settings = {
        "callbacks": {"c": {"_target_": "mine.C", "chat": "plain7", "n": 5, "path": ["plain8"], "on": True}},
        "reward": {"name": "own", "_target_": "mine.make", "own": {"scale": 0.5, "place": "plain9"}},
        "loss": {"name": "dpo", "_target_": "trainers.losses.dpo.dpo", "shape": "plain"},
        "data": {
            "path": "own/pairs.jsonl",
            "source": "local",
            "mix": {"b": {"path": "b.csv", "format": "csv"}},
        },
        "hook": "https://hooks.host/services/T0?x=1",
    }
    shown = scrub(settings)
    hidden = {"chat": REMOVED, "n": REMOVED, "path": [REMOVED], "on": True}
    assert shown["callbacks"] == {"c": {"_target_": "mine.C", **hidden}}
    assert shown["reward"] == {**settings["reward"], "own": {"scale": 0.5, "place": REMOVED}}
    assert shown["data"] == settings["data"]
    assert shown["loss"] == settings["loss"] and shown["hook"] == f"https://hooks.host/{REMOVED}"
    kept = scrub(settings, show=False)
    assert kept == settings | {"callbacks": shown["callbacks"]}, "what a resumed run is compared with"
    words = ["+callbacks.c.chat=plain7", "callbacks.c._target_=mine.C", "lr=1e-5"]
    assert scrub_words(words) == [f"+callbacks.c.chat={REMOVED}", *words[1:]]
    assert scrub_words(["+callbacks.c.window=plain"], show=False) == ["+callbacks.c.window=plain"]


SPELLED = "pl<'\"é/7 in"


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        ({"x": {"api_key": SPELLED}}, SPELLED),
        ({"credentials": [{"user": [SPELLED]}]}, SPELLED),
        ({"api_key_env": SPELLED}, SPELLED),
        ({"callbacks": {"c": {"text": SPELLED}}}, SPELLED),
        (["http://me:pl%3C%22%C3%A9%2F7%20in@host"], 'pl<"é/7 in'),
        (["https://pl7tokenalone@host/x"], "pl7tokenalone"),
    ],
)
def test_what_was_a_secret_once_is_removed_in_every_spelling(tree, value):
    scrub(tree, show=False)
    for text in (value, json.dumps(value), html.escape(value), quote(value, safe="")):
        assert REMOVED in scrub_text(f"it says {text} here"), text


def test_the_environments_secrets_are_removed_and_short_words_and_folders_are_not(monkeypatch):
    for name, value in {"MY_TOKEN": "plain words", "PWD": "/some/where", "A_KEY": "short"}.items():
        monkeypatch.setenv(name, value)
    kept = f"{REMOVED}, {REMOVED}, /some/where, short"
    assert scrub_text("plain words, plain%20words, /some/where, short") == kept


def test_a_message_repeats_the_name_of_a_variable_and_no_key():
    assert is_secret("reward.judge.api_key_env", "sk-" + "proj-abcdefghijklmnop1234")
    assert str(ConfigError("x.api_key_env", "MY_2ND_KEY", "is not set")).startswith(
        "x.api_key_env=MY_2ND_KEY: "
    )
    error = ConfigError("reward.judge.api_key", "plain words", "is not a setting")
    assert str(error) == f"reward.judge.api_key={REMOVED}: is not a setting"
    assert error.__reduce__()[1][1] == "plain words"


def test_a_long_text_takes_no_longer_than_its_length():
    for text in ("a" * 300_000, "key" * 100_000, "key=" * 50_000, "token='" + "a\\" * 100_000):
        begun = time.process_time()
        scrub_text(text)
        assert time.process_time() - begun < 10
