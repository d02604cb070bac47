"""Layouts of rules: stacked, with heads, joined, split, padded, tied, with offsets; floats and quantised kernels."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlowprec.checkpoints import DEFAULTS, Rule, Rules, TreeMapping, schemes
from jaxlowprec.checkpoints.trees.layout import parsed
from jaxlowprec.weight_sync import WeightSource
from tests.checkpoints.families.trees import nested
from tests.checkpoints.weights import assert_same_tensors
from tests.eager import jlp
from tests.helpers import assert_same_bytes

D, H, G, W, L, E, F, V = 32, 4, 2, 8, 3, 2, 48, 11


def numbers(*shape, dtype="float32", seed=0):
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return made.astype(getattr(ml_dtypes, dtype, dtype))


def round_trip(rule, leaves, scheme=None):
    """The tensors of leaves, after a comparison of what is read back with the leaves."""
    mapping, tree = TreeMapping((rule,) if isinstance(rule, Rule) else rule), nested(leaves)
    tensors = mapping.to_tensors(tree, scheme)
    assert_same_bytes(mapping.from_tensors(tensors, tree, scheme), tree)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    assert_same_bytes(mapping.from_tensors(tensors, abstract, scheme), tree)
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())
    return tensors


LAYOUTS = [  # the rule, the leaves' shapes, and what each tensor is, by einops's meaning
    (Rule("q.kernel", "q.weight", "D H d -> (H d) D"), [(D, H, W)], lambda x: [x.reshape(D, H * W).T]),
    (Rule("o.kernel", "o.weight", "H d D -> D (H d)"), [(H, W, D)], lambda x: [x.reshape(H * W, D).T]),
    (Rule("q.bias", "q.bias", "H d -> (H d)"), [(H, W)], lambda x: [x.reshape(-1)]),
    (Rule("k", "l.{i}.weight", "i D N -> N D"), [(L, D, F)], lambda x: [x[i].T for i in range(L)]),
    (
        Rule("k", "l.{i}.weight", "D i H d -> (H d) D"),
        [(D, L, H, W)],
        lambda x: [x[:, i].reshape(D, -1).T for i in range(L)],
    ),
    (Rule("s", "l.{i}.weight", "D i -> D"), [(D, L)], lambda x: list(x.T)),
    (Rule("l.kernel", "l.{i}.weight"), [(L, D, F)], lambda x: [x[i].T for i in range(L)]),
    (Rule("l.scale", "l.{i}.weight"), [(L, D)], list),
    (
        Rule("k", "l.{i}.e.{expert}.w", "expert i K N -> N K"),
        [(E, L, D, F)],
        lambda x: [x[e, i].T for e in range(E) for i in range(L)],
    ),
    (
        Rule("k", ("q.weight", "k.weight", "v.weight"), "D +N -> N D", parts=(2, 1, 1)),
        [(D, 32)],
        lambda x: [x[:, :16].T, x[:, 16:24].T, x[:, 24:].T],
    ),
    (
        Rule("k", ("q.w", "k.w", "v.w"), "D +H d -> (H d) D", parts=(H, G, G)),
        [(D, H + 2 * G, W)],
        lambda x: [p.reshape(D, -1).T for p in (x[:, :H], x[:, H : H + G], x[:, H + G :])],
    ),
    (Rule("k", ("g.w", "u.w"), "+ D I -> I D"), [(2, D, F)], lambda x: [x[0].T, x[1].T]),
    (Rule("k", ("g.w", "u.w"), "D + I -> I D"), [(D, 2, F)], lambda x: [x[:, 0].T, x[:, 1].T]),
    (
        Rule("k", ("q.w", "k.w"), "D (G +H d) -> (G H d) D", parts=(2, 1), sizes=(("G", G),)),
        [(D, G * 3 * W)],
        lambda x: [p.reshape(D, -1).T for p in (x.reshape(D, G, 3, W)[:, :, :2], x.reshape(D, G, 3, W)[:, :, 2:])],
    ),
    (Rule(("q", "k"), "qk.weight", "D N -> +N D"), [(D, 32), (D, 16)], lambda q, k: [np.concatenate([q, k], 1).T]),
    (
        Rule(("q", "k"), "qk.weight", "D H d -> (+H d) D"),
        [(D, H, W), (D, G, W)],
        lambda q, k: [np.concatenate([q.reshape(D, -1), k.reshape(D, -1)], 1).T],
    ),
    (
        Rule(("q", "k"), "{i}.weight", "i D N -> +N D"),
        [(L, D, 32), (L, D, 16)],
        lambda q, k: [np.concatenate([q[i], k[i]], 1).T for i in range(L)],
    ),
    (Rule(("g", "u"), "gate_up", "E D I -> E D +I"), [(E, D, F)] * 2, lambda g, u: [np.concatenate([g, u], 2)]),
    (Rule(("g", "u"), "gate_up", "E D I -> E +I D"), [(E, D, F)] * 2, lambda g, u: [np.concatenate([g, u], 2).mT]),
    (
        Rule(("g", "u"), "gate_up", "E D I -> E D (I +)"),
        [(E, D, F)] * 2,
        lambda g, u: [np.stack([g, u], -1).reshape(E, D, 2 * F)],
    ),
    (
        Rule("q", "q.weight", "D H (d 2) -> (H 2 d) D"),
        [(D, H, W)],
        lambda x: [np.concatenate([x[..., ::2], x[..., 1::2]], -1).reshape(D, -1).T],
    ),
    (Rule("k", "l.{2*i+1}.weight", "i D N -> N D"), [(L, D, F)], lambda x: [x[i].T for i in range(L)]),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule, shapes, meaning", LAYOUTS, ids=[f"{r.layout} {r.name}" for r, _, _ in LAYOUTS])
def test_a_layout_there_and_back(rule, shapes, meaning, dtype):
    leaves = {
        path: numbers(*shape, dtype=dtype, seed=n)
        for n, (path, shape) in enumerate(zip(rule.paths, shapes, strict=True))
    }
    tensors = round_trip(rule, leaves)
    needed = meaning(*leaves.values())
    assert len(tensors) == len(needed)
    for tensor, expected in zip(tensors.values(), needed, strict=True):
        assert_same_bytes(tensor, np.ascontiguousarray(expected))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    stacked=st.booleans(),
    split=st.booleans(),
    axis=st.integers(0, 2),
)
def test_any_sizes_there_and_back(sizes, stacked, split, axis):
    a, b, c, layers = sizes
    axes = ["A", "B", "C"]
    joined = [*axes[:axis], f"+{axes[axis]}", *axes[axis + 1 :]]
    left, right = (joined, ["(C A)", "B"]) if split else (axes, [joined[2], f"({joined[0]} {joined[1]})"])
    lead, name = (["i"], "{i}.") if stacked else ([], "")
    shape = [a, b, c]
    if split:
        shape[axis] *= 3
    leaf = numbers(*([layers] if stacked else []), *shape)
    layout = f"{' '.join(lead + left)} -> {' '.join(right)}"
    rule = Rule("x", (f"{name}p", f"{name}q"), layout, parts=(2, 1)) if split else Rule(("x", "y"), f"{name}p", layout)
    tensors = round_trip(rule, {path: leaf for path in rule.paths})
    assert sum(tensor.size for tensor in tensors.values()) == leaf.size * len(rule.paths)


def test_numbers_of_a_stack_follow_the_name():
    mapping = TreeMapping((Rule("l.{n}.k", "m.{6*i+2}.{n+3}.w", "i D N -> N D"),))
    assert list(mapping.to_tensors({"l": [{"k": numbers(2, D, F)}]})) == ["m.2.3.w", "m.8.3.w"]


class TestPadding:
    RULE = Rule("e", "e.weight", "V D -> V D", sizes=(("V", V),), padded=("V",))

    def test_rows_that_the_file_lacks_are_zeros(self):
        leaf = numbers(V + 5, D)
        mapping = TreeMapping((self.RULE,))
        tensors = mapping.to_tensors({"e": leaf})
        assert_same_bytes(tensors["e.weight"], leaf[:V])
        back = np.asarray(mapping.from_tensors(tensors, {"e": leaf})["e"])
        assert_same_bytes(back[:V], leaf[:V])
        assert not back[V:].any()

    def test_heads_lack_columns(self):
        rule = Rule("h.kernel", "h.weight", "D V -> V D", sizes=(("V", V),), padded=("V",))
        leaf = numbers(D, V + 5)
        leaf[:, V:] = 0
        assert round_trip(rule, {"h.kernel": leaf})["h.weight"].shape == (V, D)

    def test_a_leaf_that_is_too_small(self):
        with pytest.raises(ValueError, match=r"e has shape \[7, 32\] .* its axis V has 7; needs at least 11"):
            TreeMapping((self.RULE,)).to_tensors({"e": numbers(7, D)})

    def test_a_quantised_head_is_stored_without_its_padding(self):
        rule = Rule("h.kernel", "h.weight", "D V -> V D", sizes=(("V", 40),), padded=("V",))
        scheme = schemes.by_name("w4a16", group_size=32)
        leaf = jlp.quantize(jax.device_put(numbers(32, 48)), scheme.format, axis=-2)
        with pytest.raises(ValueError, match="h.kernel is quantised and padded; store it without its padding"):
            TreeMapping((rule,)).to_tensors({"h": {"kernel": leaf}}, scheme)
        tensors = TreeMapping((rule,)).to_tensors({"h": {"kernel": quantized(scheme, 32, 40)}}, scheme)
        with pytest.raises(ValueError, match=r"h.kernel is \(32, 40\) and quantised .* \(32, 48\) with padding"):
            TreeMapping((rule,)).from_tensors(tensors, {"h": {"kernel": leaf}}, scheme)


class TestTies:
    RULES = (
        Rule("embed", "embed.weight"),
        Rule("head.kernel", "head.weight", "D V -> V D", tied_to="embed.weight"),
    )
    MAPPING = TreeMapping(RULES)

    def test_the_file_has_the_embedding_only(self):
        embedding = numbers(V, D)
        tensors = round_trip(self.RULES, {"embed": embedding, "head.kernel": embedding.T})
        assert list(tensors) == ["embed.weight"]

    def test_a_tied_head_is_among_what_a_config_leaves_alone(self):
        tree = {"embed": numbers(V, D), "up": {"kernel": numbers(32, 32)}}
        mapping = TreeMapping((*self.RULES, Rule("up.kernel", "up.weight")))
        assert mapping.float_modules(nested(tree)) == ["up", "head"]
        source = WeightSource(tree, mapping, schemes.by_name("w4a16", group_size=32), quantize=Rules())
        assert source.quantization_config()["ignore"] == ["head"]

    def test_a_head_that_is_another_matrix(self):
        tree = nested({"embed": numbers(V, D), "head.kernel": numbers(D, V, seed=1)})
        with pytest.raises(
            ValueError, match="head.kernel differs from embed, to which it is tied; use a mapping without"
        ):
            self.MAPPING.to_tensors(tree)
        with pytest.raises(ValueError, match=r"head.kernel differs from embed"):
            WeightSource(tree, self.MAPPING)

    def test_a_file_may_have_both(self):
        embedding = numbers(V, D)
        tensors = {"embed.weight": embedding, "head.weight": embedding}
        filled = self.MAPPING.from_tensors(tensors, {"embed": embedding})
        assert_same_bytes(filled["embed"], jax.device_put(embedding))
        with pytest.raises(ValueError, match=r"head.weight differs from embed.weight, to which the mapping ties it"):
            self.MAPPING.from_tensors(tensors | {"head.weight": -embedding}, {"embed": embedding})


class TestOffsets:
    MAPPING = TreeMapping((Rule("scale", "weight", offset=1.0),))

    def test_bfloat16_in_a_float32_leaf(self):
        weight = numbers(100, dtype="bfloat16")
        leaf = self.MAPPING.from_tensors({"weight": weight}, {"scale": np.zeros(100, np.float32)})
        assert_same_bytes(np.asarray(leaf["scale"]), (weight.astype(np.float64) + 1).astype(np.float32))
        assert_same_bytes(self.MAPPING.to_tensors(leaf, dtype="bfloat16")["weight"], weight)

    def test_what_a_leaf_cannot_hold_is_refused(self):
        weight = np.asarray([0.5, 2.0**-40], ml_dtypes.bfloat16)
        with pytest.raises(ValueError, match=r"scale: bfloat16 cannot hold 9.09.*make the leaf float32, or keep"):
            self.MAPPING.from_tensors({"weight": weight}, {"scale": np.zeros(2, np.float32)})
        with pytest.raises(ValueError, match="scale: bfloat16 cannot hold"):
            self.MAPPING.from_tensors({"weight": numbers(9, dtype="bfloat16")}, {"scale": numbers(9, dtype="bfloat16")})

    def test_a_trained_leaf_is_rounded_only_if_asked(self):
        leaf = np.asarray([1e-9, 0.3, 1.0], np.float32)
        with pytest.raises(ValueError, match="scale: float32 cannot hold 9.99.*pass dtype="):
            self.MAPPING.to_tensors({"scale": leaf})
        made = self.MAPPING.to_tensors({"scale": leaf}, dtype="float32")["weight"]
        assert_same_bytes(made, (leaf.astype(np.float64) - 1).astype(np.float32))

    def test_on_the_device(self):
        (stored,) = self.MAPPING.stored({"scale": jax.device_put(np.float32([1.5, 2.0]))})
        (made,) = stored.make(on_device=True).values()
        assert isinstance(made, jax.Array)
        assert made.tolist() == [0.5, 1.0]

    def test_factors(self):
        mapping = TreeMapping((Rule("q.kernel", "q.weight", factor=0.125),))
        leaf = numbers(D, F)
        tensors = mapping.to_tensors({"q": {"kernel": leaf}})
        assert_same_bytes(tensors["q.weight"], np.ascontiguousarray(leaf.T * 8))
        assert_same_bytes(mapping.from_tensors(tensors, {"q": {"kernel": leaf}})["q"]["kernel"], jax.device_put(leaf))


SCHEMES = ("w4a16", "w4a16_asym", "nvfp4", "mxfp8", "fp8_block", "fp8_tensor")
N, K = 256, 128


def quantized(scheme, *shape, seed=0):
    kernel = jax.device_put(numbers(*shape, dtype="bfloat16", seed=seed))
    amax = jnp.full(shape[:-2], 6.0, jnp.float32) if scheme.shares_global_scale else None
    return jlp.quantize(kernel, scheme.format, axis=-2, amax=amax)


@pytest.mark.parametrize("name", SCHEMES)
class TestQuantisedKernels:
    """Codes and scales go through the layouts in which rows of the file stay rows: the bytes are those of the parts."""

    def test_stacked_layers_of_experts(self, name):
        scheme = schemes.by_name(name)
        leaf = quantized(scheme, L, E, K, N)
        rule = Rule("l.e.kernel", "l.{i}.e.{expert}.weight")
        tensors = round_trip(rule, {"l.e.kernel": leaf}, scheme)
        alone = TreeMapping((Rule("kernel", "x.weight"),))
        one = alone.to_tensors({"kernel": jax.tree.map(lambda x: x[1, 0], leaf)}, scheme)
        names = {part: part.replace("x.", "l.1.e.0.") for part in one}
        assert_same_tensors({part: tensors[name] for part, name in names.items()}, one)

    def test_split_along_rows(self, name):
        scheme = schemes.by_name(name)
        rule = Rule("l.qkv.kernel", ("{i}.q.weight", "{i}.k.weight"), "i D +N -> N D", parts=(2, 1))
        leaf = quantized(scheme, L, K, 384)
        tensors = round_trip(rule, {"l.qkv.kernel": leaf}, scheme)
        joined = TreeMapping((Rule(("q.kernel", "k.kernel"), "{i}.qk.weight", "i D N -> +N D"),))
        like = nested(
            {
                "q.kernel": np.zeros((L, K, 256), ml_dtypes.bfloat16),
                "k.kernel": np.zeros((L, K, 128), ml_dtypes.bfloat16),
            }
        )
        apart = TreeMapping((Rule("q.kernel", "{i}.q.weight"), Rule("k.kernel", "{i}.k.weight")))
        parts = apart.from_tensors(tensors, like, scheme)
        fused = joined.to_tensors(parts, scheme)
        whole = TreeMapping((Rule("qk.kernel", "{i}.qk.weight"),)).to_tensors({"qk": {"kernel": leaf}}, scheme)
        assert_same_tensors(fused, whole)
        assert_same_bytes(joined.from_tensors(whole, like, scheme), parts)

    def test_gate_and_up_stacked(self, name):
        scheme = schemes.by_name(name)
        rule = Rule("kernel", ("g.weight", "u.weight"), "+ D I -> I D")
        round_trip(rule, {"kernel": quantized(scheme, 2, K, N)}, scheme)

    def test_heads_are_refused(self, name):
        scheme = schemes.by_name(name)
        mapping = TreeMapping((Rule("q.kernel", "q.weight", "D N -> N D | D H d -> (H d) D"),))
        with pytest.raises(
            ValueError, match=r"q.kernel of shape \(2, 128, 128\) is quantised; the layout .* or dequantise it"
        ):
            mapping.to_tensors({"q": {"kernel": quantized(scheme, 2, K, 128)}}, scheme)
        tensors = mapping.to_tensors({"q": {"kernel": quantized(scheme, K, N)}}, scheme)
        with pytest.raises(ValueError, match=r"holds q.weight quantised to .*; needs a leaf \[K, N\] for it"):
            mapping.from_tensors(tensors, {"q": {"kernel": np.zeros((K, 2, 128), np.float32)}}, scheme)

    def test_compressed_on_the_way(self, name):
        """Weight sync quantises what a layout makes as if it were a tree of single matrices."""
        scheme = schemes.by_name(name)
        leaf = numbers(L, K, 384, dtype="bfloat16")
        split = TreeMapping(
            (Rule("l.qkv.kernel", ("l.{i}.a.weight", "l.{i}.b.weight"), "i D +N -> N D", parts=(2, 1)),)
        )
        single = TreeMapping((Rule("l.{i}.a.kernel", "l.{i}.a.weight"), Rule("l.{i}.b.kernel", "l.{i}.b.weight")))
        ours = WeightSource({"l": {"qkv": {"kernel": leaf}}}, split, scheme, quantize=Rules(defaults=DEFAULTS))
        tree = {"l": [{"a": {"kernel": x[:, :256]}, "b": {"kernel": x[:, 256:]}} for x in leaf]}
        theirs = WeightSource(tree, single, scheme, quantize=Rules(defaults=DEFAULTS))
        assert ours.manifest == theirs.manifest
        assert_same_tensors(dict(ours.arrays()), dict(theirs.arrays()))


class TestQuantisedFaults:
    def test_parts_of_other_tensor_scales(self):
        scheme = schemes.by_name("nvfp4")
        q, k = (jlp.quantize(jax.device_put(numbers(K, 64) * s), scheme.format, axis=-2) for s in (1, 2))
        mapping = TreeMapping((Rule(("q.kernel", "k.kernel"), "qk.weight", "D N -> +N D"),))
        with pytest.raises(ValueError, match="tensor scales of amax .*quantise them with the same amax="):
            mapping.to_tensors(nested({"q.kernel": q, "k.kernel": k}), scheme)

    def test_a_tile_over_two_parts(self):
        scheme = schemes.by_name("fp8_block")
        leaf = quantized(scheme, K, 384)
        mapping = TreeMapping((Rule("k.kernel", ("a.weight", "b.weight"), "D +N -> N D"),))
        with pytest.raises(ValueError, match="quantised in tiles of 128 rows, and its parts have 192, 192"):
            mapping.to_tensors({"k": {"kernel": leaf}}, scheme)

    def test_whole_arrays_of_experts(self):
        scheme = schemes.by_name("w4a16")
        mapping = TreeMapping((Rule("e.kernel", "experts.down", "E I D -> E I D"),))
        with pytest.raises(
            ValueError, match="e.kernel of shape .* is quantised; the layout 'E I D -> E I D' is for float"
        ):
            mapping.to_tensors({"e": {"kernel": quantized(scheme, E, K, N)}}, scheme)


class TestFaults:
    QKV = Rule(("q", "k"), "qk.weight", "D N -> +N D")

    def test_a_stack_of_other_depth(self):
        mapping = TreeMapping((Rule("l.kernel", "l.{i}.weight"),))
        tensors = mapping.to_tensors({"l": {"kernel": numbers(L, D, F)}})
        with pytest.raises(ValueError, match="missing tensors: l.3.weight$"):
            mapping.from_tensors(tensors, {"l": {"kernel": numbers(L + 1, D, F)}})
        with pytest.raises(ValueError, match="unexpected tensors: l.2.weight$"):
            mapping.from_tensors(tensors, {"l": {"kernel": numbers(L - 1, D, F)}})

    def test_other_numbers_of_heads(self):
        mapping = TreeMapping((Rule("q.kernel", "q.weight", "D H d -> (H d) D", sizes=(("H", H), ("d", W))),))
        with pytest.raises(ValueError, match=r"q.kernel has shape \[32, 8, 4\] .*: its axis H has 8; needs 4"):
            mapping.to_tensors({"q": {"kernel": numbers(D, 8, 4)}})
        with pytest.raises(
            ValueError, match=r"q.kernel has shape \(40, 32\) in the checkpoint; .* compare the numbers of heads"
        ):
            mapping.from_tensors({"q.weight": numbers(40, D)}, {"q": {"kernel": numbers(D, H, W)}})

    def test_a_part_that_is_missing(self):
        with pytest.raises(ValueError, match="qk.weight joins several leaves; the tree has q but no k"):
            TreeMapping((self.QKV,)).to_tensors({"q": numbers(D, 8)})

    def test_parts_of_other_widths_and_dtypes(self):
        mapping = TreeMapping((self.QKV,))
        with pytest.raises(ValueError, match=r"q \+ k are joined to qk.weight .* shapes \(32, 8\), \(16, 8\)"):
            mapping.to_tensors({"q": numbers(D, 8), "k": numbers(16, 8)})
        with pytest.raises(ValueError, match="have dtypes bfloat16, float32; needs one dtype"):
            mapping.to_tensors({"q": numbers(D, 8), "k": numbers(D, 8, dtype="bfloat16")})

    def test_a_leaf_that_cannot_be_split(self):
        mapping = TreeMapping((Rule("k", ("a.w", "b.w"), "D +N -> N D", parts=(2, 1)),))
        with pytest.raises(ValueError, match="its axis N, 32, cannot be split 2 : 1"):
            mapping.to_tensors({"k": numbers(D, 32)})

    def test_another_number_of_axes(self):
        mapping = TreeMapping((Rule("q.kernel", "q.weight", "D N -> N D | D H d -> (H d) D"),))
        with pytest.raises(ValueError, match=r"q.kernel has shape \(32,\); its rule needs \[D N\] or \[D H d\]"):
            mapping.to_tensors({"q": {"kernel": numbers(D)}})

    def test_a_layer_that_is_stacked_and_apart(self):
        mapping = TreeMapping((Rule("l.scale", "l.{i}.weight"), Rule("l.{i}.scale", "l.{i}.weight")))
        tree = {"l": {"scale": numbers(2, D), "1": {"scale": numbers(D)}}}
        with pytest.raises(ValueError, match=r"are both called l.1.weight"):
            mapping.to_tensors(tree)

    def test_an_axis_of_another_size_than_its_number(self):
        mapping = TreeMapping((Rule("k", "w", "D 2 -> 2 D"),))
        with pytest.raises(ValueError, match=r"k has shape \[32, 3\] .* needs a multiple of 2"):
            mapping.to_tensors({"k": numbers(D, 3)})

    def test_layers_of_a_stack_that_differ(self):
        mapping = TreeMapping((Rule("l.scale", "l.{i}.weight"),))
        tensors = {"l.0.weight": numbers(D), "l.1.weight": numbers(D, dtype="bfloat16")}
        with pytest.raises(ValueError, match="l.scale: the leaf's tensors differ in shape, dtype or format"):
            mapping.from_tensors(tensors, {"l": {"scale": numbers(2, D)}})

    def test_what_may_be_left_out(self):
        mapping = TreeMapping((Rule("a", "a"),), left_out=(r"draft\..*",))
        assert mapping.from_tensors({"a": numbers(2), "draft.b": numbers(2)}, {"a": numbers(2)})
        with pytest.raises(ValueError, match="unexpected tensors: c$"):
            mapping.from_tensors({"a": numbers(2), "draft.b": numbers(2), "c": numbers(2)}, {"a": numbers(2)})

    @pytest.mark.parametrize(
        "layout, message",
        [
            ("D N", '"->"'),
            ("D N -> N (D", "a bracket is open"),
            ("D ((N)) -> N D", "brackets within brackets"),
            ("D ? -> D", "is not understood"),
            ("D D -> D", "occurs twice"),
            ("D -> D N", "the leaf has no axis N"),
            ("D +N -> +N D", "both sides have a \\+"),
            ("+D +N -> N D", "several \\+"),
            ("(i D) -> D", "counts tensors is merged with another"),
            ("D (N +) -> N D", "the leaf's \\+ is merged with another"),
            ("D N -> N D | A B -> B A", "same number of axes"),
        ],
    )
    def test_a_layout_that_is_none(self, layout, message):
        with pytest.raises(ValueError, match=f"^layout .*{message}"):
            parsed(layout)

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"path": ("a", "b"), "name": ("c", "d")}, "several paths and several names"),
            ({"path": ("a", "b"), "name": "c"}, "needs a layout with a \\+"),
            ({"path": "a", "name": "c", "layout": "D +N -> N D"}, "needs one \\+, on the side of what has parts"),
            ({"path": "l.{i}.a", "name": "c"}, "the name lacks {i}"),
            ({"path": "a", "name": "l.{i}.a", "layout": "D N -> N D"}, "the name counts"),
            ({"path": "a", "name": "a", "layout": "j D -> D"}, "the tensor lacks"),
            ({"path": "a", "name": ("b", "c"), "layout": "+ D -> D", "parts": (1,)}, "a positive size for each of 2"),
            ({"path": "a", "name": "b", "factor": 0.0}, "the factor not 0"),
            ({"path": "a", "name": "b", "padded": ("V",)}, "sizes needs its size"),
        ],
    )
    def test_a_rule_that_is_none(self, fields, message):
        with pytest.raises(ValueError, match=f"Rule\\(.*{message}"):
            Rule(**fields)
