"""Expressions from files match what `re` matches, and no text takes them long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.schemes.expressions import Expression
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed

PIECES = ["a", "b", ".", "1", r"\d", r"\.", "[ab]", "[^a]", "[a-c]", r"\w", r"[\d_]", r"\s", "\n", "{", "^", "$", r"\Z"]
REPEATS = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "{,}", "{}", "*?", "{1,2}?"]
TEXTS = st.text("ab1.c_\n {", max_size=8)


def joined(parts):
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(parts, st.sampled_from(REPEATS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.recursive(st.sampled_from(PIECES), joined, max_leaves=8), st.lists(TEXTS, min_size=4, max_size=4))
def test_they_match_what_re_matches(pattern, texts):
    try:
        expected = re.compile(pattern)
    except re.error:
        with pytest.raises(ValueError, match="it is not valid"):
            Expression(pattern)
        return
    try:
        ours = Expression(pattern)
    except ValueError as error:
        assert "not matched" in str(error)  # ^ elsewhere than at the beginning
        return
    assert [ours.matches(text) for text in texts] == [bool(expected.match(text)) for text in texts]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 100_000 + "!"),
        ("(a*)*b", "a" * 100_000),
        ("(a|a)*c", "a" * 100_000),
        ("(a|b)*a(a|b){300}c", "abbabaaa" * 10_000),
        (".*.*.*.*.*.*x", "y" * 100_000),
    ],
)
def test_no_text_takes_long(pattern, text):
    began = time.process_time()
    assert not Expression(pattern).matches(text)
    assert time.process_time() - began < 5  # `re` needs a time without end for most


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "it is not valid: "),
        ("(?=a)b", "only plain groups are"),
        ("(?<!a)b", "only plain groups are"),
        ("(?i)a", "only plain groups are"),
        (r"(a)\1", r"\\1 is not matched here"),
        (r"\bup", r"\\b is not matched here"),
        ("a++", "possessive repetitions"),
        ("b^", r"\^ is not matched there"),
        ("((((a{30}){30}){30}){30})", "more than 4096 positions"),
        ("(" * 60 + "a" + ")" * 60, "nested more than 50 deep"),
        ("a" * 5000, "has 5000 characters; at most 4096"),
    ],
)
def test_what_is_not_matched_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        Expression(pattern)


def test_plain_text_is_recognised():
    assert Expression(re.escape("model.layers.0.mlp.experts") + r"\.").literal == "model.layers.0.mlp.experts."
    assert [Expression(pattern).literal for pattern in ("a|b", "a.", "ab?", "[a]b", "")] == [None] * 3 + ["ab", None]


def mixed(*targets):
    found = (schemes.by_name("fp8_channel"), schemes.by_name("mxfp4"))
    return Mixed(tuple(ConfigGroup((target,), found[n % 2]) for n, target in enumerate(targets)))


def test_targets_are_found_among_thousands():
    began = time.process_time()
    found = mixed("re:(a+)+$", *(rf"re:layers\.{n}\.experts\." for n in range(10_000)), "Linear")
    assert found.of_module("a" * 50_000 + "!").name == "mxfp4"
    assert all(found.of_module(f"layers.{n}.experts.0.up") is not None for n in range(10_000))
    assert time.process_time() - began < 20


def test_expressions_keep_their_order():
    both = mixed(r"re:model\.", "re:model.*up")
    assert both.of_module("model.up").name == "mxfp4" and both.of_module("model.down").name == "fp8_channel"
    assert mixed("re:model.*up", r"re:model\.up").of_module("model.up").name == "fp8_channel"
    with pytest.raises(ValueError, match="have 4780 characters together; at most 4096"):
        mixed(*("re:" + "." * (100 + n) for n in range(40)))
