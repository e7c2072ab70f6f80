"""What is taken for a secret in a message, and what is not."""

from __future__ import annotations

import html
import json
from urllib.parse import quote

import pytest

from common import secrets
from common.errors import ConfigError
from common.secrets import REMOVED, is_secret, same_but_for_secrets, scrub, scrub_text, scrub_words

KEYS = (  # made up, and cut in two so that no file of the repository looks as if it held one
    "sk-" + "proj-abcdefghijklmnop1234",
    "gsk_" + "abcdefghijklmnop1234567890",
    "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "AKIA" + "ABCDEFGHIJKLMNOP",
    "hf_" + "ABCDEFGHIJKLMNOPQRSTUV",
    "0123456789abcdef" * 2,
    "ABCDEF0123456789" * 2,
)


def test_a_message_repeats_the_name_of_a_variable_and_no_key():
    for key in KEYS:
        assert is_secret("reward.judge.api_key_env", key)
        assert key not in str(ConfigError("reward.judge.api_key_env", key, "is not set"))
    for name in ("OPENAI_API_KEY", "JUDGE_KEY", "MY_2ND_KEY"):
        said = str(ConfigError("reward.judge.api_key_env", name, "is not set"))
        assert said.startswith(f"reward.judge.api_key_env={name}: ")
    error = ConfigError("reward.judge.api_key", "plain words", "is not a setting")
    assert str(error) == f"reward.judge.api_key={REMOVED}: is not a setting"
    assert error.__reduce__()[1][1] == "plain words"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("cannot parse 'x.api_key=plain,y=1'", f"cannot parse 'x.api_key={REMOVED},y=1'"),
        ("Password: hunter2; then", f"Password: {REMOVED}; then"),
        ("API_KEY_ENV=plain7 x.api_key_env: plain7", f"API_KEY_ENV={REMOVED} x.api_key_env: {REMOVED}"),
        ("a.api_key=plain: is wrong", f"a.api_key={REMOVED}: is wrong"),
        (f"a.api_key={REMOVED}: is wrong", f"a.api_key={REMOVED}: is wrong"),
        ("api_key_env=OPENAI_API_KEY max_tokens=3 api_key: null", None),
        ("x.api_key_env=OPENAI_API_KEY: is not set", None),
        ("the token id 7 of pad_token=<eos>", None),
    ],
)
def test_what_follows_the_name_of_a_secret_is_removed_from_messages(text, made):
    assert scrub_text(text) == (text if made is None else made)
    assert scrub_text(scrub_text(text)) == scrub_text(text)


A, D = "Abcdefghijklmnop", "Q7abcdefghijklmnop"  # letters alone; letters and a digit
PRIVATE = "PRIVATE KEY-----"
BY_LOOK = (
    *(f"hf_{A}", f"api_org_{A}", f"wandb_v1_{A}", f"sk-{A}", f"github_pat_{A}", f"ya29.{A}", f"hvs.{A}"),
    *(f"{prefix}_{A}" for prefix in ("sk_live", "rk_live", "sk_test", "rk_test", "whsec", "gsk", "xai")),
    *(f"{name}-{A}" for name in ("nvapi", "pplx", "r8", "tgp_v1", "lin_api", "dop_v1", "dckr_pat", "npm")),
    *(f"shpat_{A}", *(f"gh{kind}_{A}" for kind in "pousr"), f"AIza{A}{A}", f"AKIA{A.upper()}"),
    *(f"gl{kind}-{A}" for kind in ("pat", "dt", "rt", "soat", "ptt")),
    *(f"xoxb-{A}", f"xapp-{A}", f"ASIA{A.upper()}", f"pypi-{A}", f"SG.{A}.{A}", f"eyJ{A}.{A}.{A}"),
    *(f"hooks.slack.com/services/{A}", f"x/api/webhooks/{A}", f"Bearer {A}", f"bearer {D}", f"Basic {D}"),
    *(f"?x={D}{A}", f"&x={D}{A}", f"-----BEGIN {PRIVATE}|{A}|-----END {PRIVATE}"),
    *(f"http://{A}@host", f"http://me:{A}@host", f"http://me:1{A}@host/x"),
)
BY_NAME = (  # noqa: SIM905
    "key apiKey apikey accesskey secret_keys privatekey accountkey authkey x_key token accesstoken apitoken "
    "authtoken bearertokens hftoken hubtoken idtoken refreshtoken sessiontoken secret clientsecret dbpass "
    "http_pass mailpass proxypass smtppass userpass password passwd passphrase pwd credentials auth "
    "authorization bearer cookie jwt sig signature token_2"
).split()


@pytest.mark.parametrize("text", BY_LOOK)
def test_a_secret_is_known_by_its_look(text):
    made = scrub_text(f"<{text.replace('|', chr(10))}>")
    assert REMOVED in made and not any(part.lower() in made.lower() for part in (A, D))


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "form", ["x.{}={}", "--{} {}", "--{}={}", '"{}": "{}"', r"\"{}\": \"{}\"", "{}: '{}'", "'x.{}={} two'"]
)
def test_a_secret_is_known_by_its_name(name, form):
    assert "plain7" not in (made := scrub_text(form.format(name, "plain7"))) and "two" not in made
    assert "plain7" not in str(scrub({"x": [{name: ["plain7", {"y": "plain7"}]}]}))
    assert "plain7" not in str(scrub_words([f"+x.{name}=plain7", f"--{name.replace('_', '-')}=plain7"]))


ORDINARY = (
    "pad eos bos unk sep cls mask stop end start special control image per next first last sort cache primary"
)


@pytest.mark.parametrize("name", (f"{ORDINARY} foreign row group prompt public").split())
def test_an_ordinary_token_or_key_is_none(name):
    given = {f"{name}_token": "plain7", f"x.{name}_key": "plain7"}
    assert scrub(given) == given
    assert scrub_text(said := f"{name}_token=plain7 my_{name}_key: plain7") == said


@pytest.mark.parametrize("nothing", ["null", "None", "true", "false", "~", "???", "${oc.env:X}", '""'])
def test_what_says_that_there_is_no_secret_stays(nothing):
    for said in (f"x.api_key={nothing} y", f"token: {nothing}", "The key: word of this"):
        assert scrub_text(said) == said
    assert scrub({"token": "${oc.env:X}", "key": True}) == {"token": "${oc.env:X}", "key": True}
    assert scrub({"token": 98765432101, "api_key": 1.5}) == {"token": REMOVED, "api_key": REMOVED}


@pytest.mark.parametrize("scheme", ["Bearer", "basic", "Token", "digest"])
def test_a_header_is_removed_with_its_scheme_and_a_text_up_to_its_last_quote(scheme):
    assert scrub_text(f"Authorization: {scheme} plain; x") == f"Authorization: {REMOVED}; x"
    assert scrub_text("{'token': 'a\\'plain', \"key\": \"b\\\"plain\", 'x': 1}") == (
        f"{{'token': '{REMOVED}', \"key\": \"{REMOVED}\", 'x': 1}}"
    )
    begun = f"-----BEGIN RSA {PRIVATE}\n{A}"
    assert scrub_text(begun) == REMOVED
    assert scrub_text(f"{begun}\n-----END RSA {PRIVATE} said") == f"{REMOVED} said"


SPELLED = "pl<'\"é/7 in"


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"x": {"api_key": SPELLED}}, SPELLED),
        ({"credentials": [{"user": [SPELLED]}]}, SPELLED),
        ({"api_key_env": SPELLED}, SPELLED),
        (["+x.my-token=pl<é/7 in"], "pl<é/7 in"),
        (["http://me:pl%3C%22%C3%A9%2F7%20in@host"], 'pl<"é/7 in'),
        (["https://pl7tokenalone@host/x"], "pl7tokenalone"),
        (["a text with password: pl7tokenalone"], "pl7tokenalone"),
    ],
)
def test_what_was_a_secret_once_is_removed_in_every_spelling(monkeypatch, given, value):
    monkeypatch.setattr(secrets, "_remembered", set())
    secrets.remember(given)
    for said in (value, json.dumps(value), html.escape(value), quote(value, safe=""), repr(value)):
        assert REMOVED in scrub_text(f"it says {said} here"), said


def test_a_copy_without_secrets_equals_its_original_and_no_other():
    given = {"a": "http://me:pw@host/x", "token": "t", "b": [1, "x"]}
    assert same_but_for_secrets(scrub(given), given)
    for changed, same in (
        ({"token": "u"}, True),
        ({"a": "http://me:pw@other/x"}, False),
        ({"b": [1, "y"]}, False),
    ):
        assert same_but_for_secrets(scrub(given), given | changed) is same
