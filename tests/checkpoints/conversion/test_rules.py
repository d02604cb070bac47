"""Rules over module names: the defaults on the names of published models, and what other programs make of them."""

import re

import pytest

from jaxlowprec.checkpoints.conversion.rules import (
    DEFAULTS,
    FUSED,
    Rules,
    config_ignore,
    disagreements,
    fused_siblings,
    matching,
    slime_matches,
    splits,
)
from jaxlowprec.checkpoints.errors import CheckpointError
from tests.checkpoints.model_names import MODELS, NORMS

LAYER = "model.layers.1"


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def test_the_defaults_quantise_the_text_models_projections(model):
    rules = Rules(defaults=DEFAULTS)
    assert [m for m in model.quantised if rules.why_left_alone(m)] == []
    assert [m for m in model.left if not rules.why_left_alone(m)] == []


@pytest.mark.parametrize("module", NORMS)
def test_the_defaults_leave_norms_alone(module):
    assert Rules(defaults=DEFAULTS).why_left_alone(module)


def test_the_defaults_split_nothing_that_engines_fuse(model):
    assert splits(model.left, model.quantised) == []


def test_slime_and_vllm_read_the_written_rules_as_we_do(model):
    ignore = config_ignore(Rules(defaults=DEFAULTS), model.left, model.quantised)
    assert all(rule in DEFAULTS for rule in ignore)
    assert disagreements(ignore, {m: f"{m}.weight" for m in model.left + model.quantised}) == []
    for module in model.left + model.quantised:
        assert bool(matching(module, ignore)) == (module in model.left) == vllm_ignores(module, ignore)
        assert any(slime_matches(f"{module}.weight", rule) for rule in ignore) == (module in model.left)


def test_compressed_tensors_reads_the_written_rules_as_we_do(model):
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    ignore = config_ignore(Rules(defaults=DEFAULTS), model.left, model.quantised)
    for module in model.left + model.quantised:
        assert any(match_name(module, rule) for rule in ignore) == (module in model.left), module


@pytest.mark.parametrize(
    "rule", ["lm_head", "re:.*lm_head", "re:lm_head", "re:.*q_proj$", "model.layers.1", "re:^$", "re:.*"]
)
@pytest.mark.parametrize(
    "module", ["lm_head", "lm_head2", "model.lm_head", f"{LAYER}.self_attn.q_proj", "model.layers.10"]
)
def test_a_rule_means_what_it_means_to_compressed_tensors(rule, module):
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    assert bool(matching(module, [rule])) == match_name(module, rule)


def vllm_ignores(module, ignore):
    """vLLM's decision for a projection, by way of the fused matrix that it is part of."""
    parent, _, last = module.rpartition(".")
    fused = next((name for name, parts in FUSED.items() if last in parts), None)
    if fused is None or f"{parent}.{fused}" in ignore:
        return bool(matching(module, ignore))
    return bool(matching(f"{parent}.{FUSED[fused][0]}", ignore))


@pytest.mark.parametrize(
    ("rules", "left_alone"),
    [
        (Rules(ignore=("a.b",)), True),
        (Rules(ignore=("a",)), False),  # a name is no prefix
        (Rules(ignore=("re:a",)), True),  # an expression is anchored at the start,
        (Rules(ignore=("re:b",)), False),
        (Rules(ignore=("re:.*b$",)), True),
        (Rules(defaults=("re:a",)), True),
        (Rules(defaults=("re:a",), include=("a.b",)), False),
        (Rules(defaults=("re:a",), include=("a.b",), ignore=("re:.*",)), True),
    ],
)
def test_what_was_asked_for_comes_before_the_defaults(rules, left_alone):
    assert bool(rules.why_left_alone("a.b")) == left_alone


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("", "empty"),
        ("re:", "empty"),
        ("re:(", "not a valid regular expression"),
        ("a.weight", "rules name modules: 'a'"),
    ],
)
def test_what_is_no_rule(rule, message):
    with pytest.raises(CheckpointError, match=message):
        Rules(ignore=(rule,))


def test_an_ambiguous_rule_is_written_as_exact_names():
    rules = Rules(defaults=(r"re:(.*\.)?gate(\.|$)",), include=("b.gate",))
    assert config_ignore(rules, ["a.gate", "c.gate"], ["b.gate", "d"]) == ["a.gate", "c.gate"]
    assert config_ignore(rules, ["a.gate"], ["d"]) == [*rules.defaults]


def test_exact_names_are_added_for_what_no_rule_covers():
    assert config_ignore(Rules(ignore=("re:x",)), ["x.a", "y.b"], ["z"]) == ["re:x", "y.b"]


@pytest.mark.parametrize(
    ("left", "quantised"),
    [
        ("self_attn.q_proj", "self_attn.v_proj"),
        ("mlp.up_proj", "mlp.gate_proj"),
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("mlp.experts.0.down_proj", "mlp.experts.1.down_proj"),
        ("mlp.experts.0.down_proj", "mlp.experts.0.up_proj"),
        ("block_sparse_moe.experts.3.w1", "block_sparse_moe.experts.3.w3"),
    ],
)
def test_projections_that_engines_hold_as_one_are_not_split(left, quantised):
    pair = (f"{LAYER}.{left}", f"{LAYER}.{quantised}")
    assert splits(pair[:1], pair[1:]) == [pair]
    assert splits([], pair) == splits(pair, []) == []
    assert splits([f"model.layers.2.{left}"], pair[1:]) == []  # another layer's


def test_what_is_not_fused_may_differ():
    assert (
        splits(
            [f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"],
            [f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"],
        )
        == []
    )


def test_siblings_share_what_is_fused():
    modules = [f"{LAYER}.self_attn.{p}_proj" for p in "qkvo"]
    assert fused_siblings(modules[0], modules) == modules[:3] == fused_siblings(modules[2], modules)
    assert fused_siblings(modules[3], modules) == [modules[3]]
    assert fused_siblings(modules[0], modules[:1]) == modules[:1]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (f"{LAYER}.mlp.gate", rf"slime.*leaves alone {LAYER}.mlp.gate_proj"),  # a prefix to slime
        (r"re:.*\.q_proj$", rf"slime.*quantises {LAYER}.self_attn.q_proj"),  # the tensor's name ends in .weight
        (f"{LAYER}.self_attn.qkv_proj", "vLLM leaves the fused qkv_proj alone"),
    ],
)
def test_a_rule_that_means_something_else_elsewhere_is_reported(rule, message):
    modules = [f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj"]
    found = disagreements([rule], {m: f"{m}.weight" for m in modules})
    assert len(found) == 1
    assert re.search(message, found[0])
