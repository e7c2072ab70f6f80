"""What is taken for a secret in a message, and what is not."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.secrets import REMOVED, is_secret, scrub_text

KEYS = (  # made up, and cut in two so that no file of the repository looks as if it held one
    "sk-" + "proj-abcdefghijklmnop1234",
    "gsk_" + "abcdefghijklmnop1234567890",
    "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "AKIA" + "ABCDEFGHIJKLMNOP",
    "hf_" + "ABCDEFGHIJKLMNOPQRSTUV",
    "0123456789abcdef" * 2,
    "ABCDEF0123456789" * 2,
)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_the_place_of_a_variables_name_is_not_repeated(key):
    assert is_secret("reward.judge.api_key_env", key)
    assert key not in str(ConfigError("alpacaeval.api_key_env", key, "is not set"))


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "JUDGE_KEY", "MY_2ND_KEY"])
def test_the_name_of_a_variable_is(name):
    assert str(ConfigError("reward.judge.api_key_env", name, "is not set")).startswith(
        f"reward.judge.api_key_env={name}: "
    )


def test_the_value_of_a_secret_setting_is_not_repeated_whatever_it_looks_like():
    error = ConfigError("reward.judge.api_key", "plain words", "is not a setting")
    assert str(error) == f"reward.judge.api_key={REMOVED}: is not a setting"
    assert error.__reduce__()[1][1] == "plain words"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("cannot parse 'x.api_key=plain,y=1'", f"cannot parse 'x.api_key={REMOVED},y=1'"),
        ("Password: hunter2; then", f"Password: {REMOVED}; then"),
        ("a.api_key=plain: is wrong", f"a.api_key={REMOVED}: is wrong"),
        (f"a.api_key={REMOVED}: is wrong", f"a.api_key={REMOVED}: is wrong"),
        ("api_key_env=OPENAI_API_KEY max_tokens=3 api_key: null", None),
        ("the token id 7 of pad_token=<eos>", None),
    ],
)
def test_what_follows_the_name_of_a_secret_is_removed_from_messages(text, made):
    assert scrub_text(text) == (text if made is None else made)
    assert scrub_text(scrub_text(text)) == scrub_text(text)
