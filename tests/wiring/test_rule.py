"""What a rule says about dimensions, splits and partition specs."""

import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxlowprec.wiring import Rule

MESH = AbstractMesh((2, 4), ("a", "b"))
BLOCKS = Rule("r (c k), r -> r c", k=4)


@pytest.mark.parametrize(
    ("tokens", "ndim", "dims"),
    [
        (["...", "r", "(c k)"], 2, [("r", 1), ("c", 16)]),
        (["...", "r", "(c k)"], 4, [("batch0", 1), ("batch1", 1), ("r", 1), ("c", 16)]),
        (["..."], 2, [("batch0", 1), ("batch1", 1)]),
        (["..."], 0, []),
        (["r"], 1, [("r", 1)]),
        (["(c k h)"], 1, [("c", 128)]),
    ],
)
def test_dimensions_are_factors_that_may_be_split_times_the_rest(tokens, ndim, dims):
    assert Rule("r -> r", k=16, h=8).dims(tokens, ndim) == dims


def test_operands_and_results_are_read_off_the_text():
    rule = Rule("... r (c k), ..., r -> ... r (c h), ... r c", k=16, h=8)
    assert rule.operands == [["...", "r", "(c k)"], ["..."], ["r"]]
    assert rule.results == [["...", "r", "(c h)"], ["...", "r", "c"]]


@pytest.mark.parametrize(
    ("specs", "split"),
    [
        ([P("a", "b"), P("a")], {"r": ("a",), "c": ("b",)}),
        ([P("b", "a"), P()], {"r": ("b",), "c": ("a",)}),
        ([P(), P(("b", "a"))], {"r": ("b", "a")}),
        ([P("a"), P("b")], {"r": ("a",)}),
        ([P(None, "b"), P("b")], {"c": ("b",)}),
    ],
)
def test_the_first_operand_that_splits_a_factor_decides_and_no_mesh_axis_splits_two(specs, split):
    assert BLOCKS.split(MESH, [(16, 32), (16,)], specs, partial=True) == split


@pytest.mark.parametrize(
    ("shape", "spec", "partial", "split"),
    [
        ((16, 24), P(None, "a"), True, {"c": ("a",)}),  # 6 blocks
        ((16, 24), P(None, "b"), True, {}),
        ((16, 24), P(None, ("a", "b")), True, {"c": ("a",)}),
        ((16, 24), P(None, ("a", "b")), False, {}),
        ((3, 24), P("a"), True, {}),
    ],
)
def test_a_split_cuts_no_block(shape, spec, partial, split):
    assert BLOCKS.split(MESH, [shape, shape[:1]], [spec, P()], partial) == split


@pytest.mark.parametrize(
    ("rule", "shape", "spec", "split"),
    [
        (Rule("r c -> r c", whole=("c",)), (16, 32), P("a", "b"), {"r": ("a",)}),
        (Rule("... w -> ...", w=2), (8, 2), P("b", "a"), {"batch0": ("b",)}),
    ],
)
def test_what_is_declared_whole_or_has_a_size_is_not_split(rule, shape, spec, split):
    assert rule.split(MESH, [shape], [spec], partial=True) == split


@pytest.mark.parametrize(
    ("tokens", "ndim", "spec"),
    [
        (["...", "r", "(c k)"], 3, P(("c",), ("a", "b"), None)),
        (["...", "r"], 2, P(("c",), ("a", "b"))),
        (["..."], 0, P()),
    ],
)
def test_a_spec_places_the_axes_of_each_factor(tokens, ndim, spec):
    split = {"batch0": ("c",), "r": ("a", "b")}
    assert Rule("... r (c k) -> ... r", k=4).spec(tokens, ndim, split) == spec


def shardy(rule, *shapes):
    class Value:
        def __init__(self, shape):
            self.shape = shape

    values = [Value(shape) for shape in shapes]
    operands = len(rule.operands)
    return rule.shardy(MESH, values[:operands], values[operands:])


class TestShardy:
    def test_a_product_gets_a_name_of_its_own_and_sizes_that_only_it_has(self):
        text, options = shardy(Rule("r (c k) -> r (c h), r", k=16, h=8), (4, 64), (4, 32), (4,))
        assert text == "r (c ck) -> r (c ch), r"
        assert options == {"c": 4, "ck": 16, "ch": 8, "need_replication_factors": ("ck", "ch")}

    def test_a_factor_that_also_stands_alone_brings_its_own_size(self):
        text, options = shardy(BLOCKS, (4, 64), (4,), (4, 16))
        assert text == "r (c ck), r -> r c"
        assert options == {"ck": 4, "need_replication_factors": ("ck",)}

    def test_a_leading_factor_of_size_1_is_left_out_of_its_product(self):
        text, options = shardy(Rule("r (c k) -> r (c h)", k=16, h=8), (4, 16), (4, 8))
        assert text == "r ck -> r ch"
        assert options == {"need_replication_factors": ("ck", "ch")}

    def test_special_factors_come_in_order_of_appearance(self):
        rule = Rule("... m k, ... n k -> ... m n", reductions=("k",), whole=("n", "m"))
        options = shardy(rule, (4, 8), (2, 8), (4, 2))[1]
        assert options == {"need_replication_factors": ("m", "n"), "reduction_factors": ("k",)}
