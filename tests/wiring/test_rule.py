"""What a rule says about dimensions, splits and partition specs."""

import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxlowprec.wiring.sharding_rule import MeshArray, ShardingRule

MESH = AbstractMesh((2, 4), ("a", "b"))
BLOCKS = ShardingRule("r (c k), r -> r c", k=4)


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
    assert ShardingRule("r -> r", k=16, h=8).dims(tokens, ndim) == dims


def test_operands_and_results_are_read_off_the_text():
    rule = ShardingRule("... r (c k), ..., r -> ... r (c h), ... r c", k=16, h=8)
    assert rule.operands == [["...", "r", "(c k)"], ["..."], ["r"]]
    assert rule.results == [["...", "r", "(c h)"], ["...", "r", "c"]]


MATMUL = ShardingRule("... m (k h), ... n (k h) -> ... m n", reductions=("k",), h=8)


def split(rule, *values, partial=True):
    """What (shape, spec) of every operand, and then of the results if they are given, comes to."""
    placed = [MeshArray(shape, spec, 4 if i >= len(rule.operands) else 1) for i, (shape, spec) in enumerate(values)]
    return rule.split(MESH, placed[: len(rule.operands)], placed[len(rule.operands) :], partial)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([P("a", "b"), P("a")], {"r": ("a",), "c": ("b",)}),
        ([P("b", "a"), P()], {"r": ("b",), "c": ("a",)}),
        ([P(), P(("b", "a"))], {"r": ("b", "a")}),
        ([P("a"), P("b")], {"r": ("a",)}),
        ([P(None, "b"), P("b")], {"c": ("b",)}),
    ],
)
def test_the_first_operand_to_split_a_factor_decides(specs, expected):
    assert split(BLOCKS, ((16, 32), specs[0]), ((16,), specs[1])) == expected


ALIKE = ShardingRule("m k, n k, p k -> m n, m p", reductions=("k",)).with_alike(["n", "p"])


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([P("a"), P("b"), P("b")], {"m": ("a",), "n": ("b",), "p": ("b",)}),
        ([P("a"), P(), P("b")], {"m": ("a",), "n": ("b",), "p": ("b",)}),
        ([P("a"), P("b"), P()], {"m": ("a",), "n": ("b",), "p": ("b",)}),
        ([P(None, "a"), P(None, "a"), P(None, "a")], {"k": ("a",)}),
        ([P(), P("a"), P("b")], {"n": ("a",), "p": ("a",)}),
    ],
)
def test_factors_alike_are_split_by_the_same_axes(specs, expected):
    assert split(ALIKE, ((8, 16), specs[0]), ((8, 16), specs[1]), ((12, 16), specs[2])) == expected


def test_factors_alike_are_split_if_each_divides():
    assert split(ALIKE, ((8, 16), P()), ((8, 16), P("b")), ((6, 16), P())) == {}
    assert split(ALIKE, ((8, 16), P()), ((8, 16), P("a")), ((6, 16), P())) == {"n": ("a",), "p": ("a",)}


@pytest.mark.parametrize(
    ("shape", "spec", "partial", "expected"),
    [
        ((16, 24), P(None, "a"), True, {"c": ("a",)}),  # 6 blocks
        ((16, 24), P(None, "b"), True, {}),
        ((16, 24), P(None, ("a", "b")), True, {"c": ("a",)}),
        ((16, 24), P(None, ("a", "b")), False, {}),
        ((3, 24), P("a"), True, {}),
    ],
)
def test_a_split_cuts_no_block(shape, spec, partial, expected):
    assert split(BLOCKS, (shape, spec), (shape[:1], P()), partial=partial) == expected


@pytest.mark.parametrize(
    ("rule", "shape", "spec", "expected"),
    [
        (ShardingRule("r c -> r c", whole=("c",)), (16, 32), P("a", "b"), {"r": ("a",)}),
        (ShardingRule("... w -> ...", w=2), (8, 2), P("b", "a"), {"batch0": ("b",)}),
    ],
)
def test_what_is_declared_whole_or_has_a_size_is_not_split(rule, shape, spec, expected):
    assert split(rule, (shape, spec)) == expected


class TestWhereOperandsDoNotAgree:
    """A GEMM [64, 128] x [32, 128] on int8 operands with a float32 result, along the mesh axis b of 4."""

    def split(self, a, b, result=None, rows=64):
        values = ((rows, 128), a), ((32, 128), b), ((rows, 32), result)
        return split(MATMUL, *values[: 2 if result is None else 3])

    def test_a_reduction_gives_way(self):
        """FSDP: the weight is gathered, however it is split."""
        for result in (None, P(), P("b"), P(None, "b")):
            assert self.split(P("b"), P(None, "b"), result) == {"m": ("b",)}
        assert self.split(P(None, "b"), P("b")) == {"n": ("b",)}

    def test_a_reduction_stays_where_operands_agree(self):
        for result in (None, P(), P("b"), P(None, "b")):
            assert self.split(P(None, "b"), P(None, "b"), result) == {"k": ("b",)}
            assert self.split(P(None, "b"), P(), result) == {"k": ("b",)}

    def test_the_fewest_bytes_travel(self):
        assert self.split(P("b"), P("b")) == {"m": ("b",)}  # nothing known of the result: the first
        assert self.split(P("b"), P("b"), P("b")) == {"m": ("b",)}  # 4096 for b
        assert self.split(P("b"), P("b"), P(None, "b")) == {"m": ("b",)}  # 4096 for b, 2048 of the result; 8192 for a
        assert self.split(P("b"), P("b"), P(None, "b"), rows=32) == {"n": ("b",)}  # 4096 + 1024; 4096

    def test_the_results_alone_may_split(self):
        assert self.split(P(), P(), P(None, "b")) == {"n": ("b",)}
        assert self.split(P("a"), P(), P(("a", "b"))) == {"m": ("a", "b")}

    def test_a_factor_is_split_by_what_its_first_operand_says(self):
        assert self.split(P(None, "a"), P(None, ("a", "b"))) == {"k": ("a",)}


class TestScatteredSums:
    """Where a sum lies that the devices of a and b have parts of."""

    def landed(self, before, wanted, rule=MATMUL):
        return rule.landed(MESH, {"k": ("a", "b"), **before}, MeshArray((64, 32), wanted, 4))

    @pytest.mark.parametrize(
        ("wanted", "where"),
        [
            (P(), {}),
            (P("b"), {"m": ("b",)}),
            (P(None, ("b", "a")), {"n": ("b", "a")}),
            (P("a", "b"), {"m": ("a",), "n": ("b",)}),
        ],
    )
    def test_each_device_keeps_what_is_wanted_of_it(self, wanted, where):
        assert self.landed({}, wanted) == (where, where)

    def test_an_earlier_split_stays_the_major_one(self):
        rule = ShardingRule("... m k, ... n k -> ... m n", reductions=("k",))
        value = MeshArray((64, 32), P(("a", "b")), 4)
        assert rule.landed(MESH, {"k": ("b",), "m": ("a",)}, value) == ({"m": ("a", "b")}, {"m": ("b",)})
        value = MeshArray((64, 32), P(("b", "a")), 4)
        assert rule.landed(MESH, {"k": ("b",), "m": ("a",)}, value) == ({"m": ("a",)}, {})

    def test_a_block_is_not_cut(self):
        tiles = ShardingRule("... (m t) k, ... n k -> ... (m t) n", reductions=("k",), t=16)
        assert self.landed({}, P("b"), tiles) == ({"m": ("b",)},) * 2  # 4 tiles
        assert self.landed({}, P(("a", "b")), tiles) == ({}, {})

    def test_without_a_split_reduction_nothing_changes(self):
        assert MATMUL.landed(MESH, {"m": ("a",)}, MeshArray((64, 32), P("b"), 4)) == ({"m": ("a",)}, {})


def test_operands_that_are_reduced():
    rule = ShardingRule("... m (k h), ... n (k h), ... n, ... -> ... m n", reductions=("k",), h=8)
    assert [rule.is_reduced(tokens) for tokens in rule.operands] == [True, True, False, False]


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
    assert ShardingRule("... r (c k) -> ... r", k=4).spec(tokens, ndim, split) == spec


def shardy(rule, *shapes):
    class Value:
        def __init__(self, shape):
            self.shape = shape

    values = [Value(shape) for shape in shapes]
    operands = len(rule.operands)
    return rule.shardy(MESH, values[:operands], values[operands:])


class TestShardy:
    def test_a_product_has_its_own_name_and_sizes(self):
        text, options = shardy(ShardingRule("r (c k) -> r (c h), r", k=16, h=8), (4, 64), (4, 32), (4,))
        assert text == "r (c ck) -> r (c ch), r"
        assert options == {"c": 4, "ck": 16, "ch": 8, "need_replication_factors": ("ck", "ch")}

    def test_a_factor_that_also_stands_alone_brings_its_own_size(self):
        text, options = shardy(BLOCKS, (4, 64), (4,), (4, 16))
        assert text == "r (c ck), r -> r c"
        assert options == {"ck": 4, "need_replication_factors": ("ck",)}

    def test_a_leading_factor_of_size_1_is_left_out_of_its_product(self):
        text, options = shardy(ShardingRule("r (c k) -> r (c h)", k=16, h=8), (4, 16), (4, 8))
        assert text == "r ck -> r ch"
        assert options == {"need_replication_factors": ("ck", "ch")}

    def test_special_factors_come_in_order_of_appearance(self):
        rule = ShardingRule("... m k, ... n k -> ... m n", reductions=("k",), whole=("n", "m"))
        options = shardy(rule, (4, 8), (2, 8), (4, 2))[1]
        assert options == {"need_replication_factors": ("m", "n"), "reduction_factors": ("k",)}
