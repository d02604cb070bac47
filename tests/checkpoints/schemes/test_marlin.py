"""Marlin's layouts: the published formulas, that they are permutations, and their inverses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlowprec.checkpoints.schemes import marlin
from jaxlowprec.checkpoints.schemes.codes import pack_words, unpack_words
from tests.helpers import digest


def gptq_words(codes):
    """[..., K, N] codes as GPTQ's [..., K/8, N]."""
    return np.ascontiguousarray(np.swapaxes(pack_words(np.swapaxes(codes, -1, -2)), -1, -2))


def codes_of(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 16, shape, np.uint8)


def by_formula(codes):
    """int4_qat.md 3, one nibble after the other."""
    k_size, n_size = codes.shape
    words = np.zeros((k_size // 16, 2 * n_size), np.uint32)
    for k in range(k_size):
        for n in range(n_size):
            column = 128 * (n // 64) + 4 * (4 * (n % 8) + (k % 8) // 2) + (n % 64) // 16
            nibble = (k % 16) // 8 + 2 * ((n % 16) // 8) + 4 * (k % 2)
            words[k // 16, column] |= np.uint32(int(codes[k, n]) << (4 * nibble))
    return words.view(np.int32)


def back_by_formula(words):
    """The inverse of the same section."""
    rows, columns = words.shape
    codes = np.full((16 * rows, columns // 2), 255, np.uint8)
    for row in range(rows):
        for column in range(columns):
            rest = column % 128
            thread = rest // 4
            for p in range(8):
                k = 16 * row + 8 * (p & 1) + 2 * (thread % 4) + (p >> 2)
                n = 64 * (column // 128) + 16 * (rest % 4) + 8 * ((p >> 1) & 1) + thread // 4
                codes[k, n] = words.view(np.uint32)[row, column] >> np.uint32(4 * p) & 15
    return codes


class TestWeights:
    @pytest.mark.parametrize("shape", [(16, 64), (128, 192), (48, 128)])
    def test_repack_is_the_formula(self, shape):
        codes = codes_of(shape)
        np.testing.assert_array_equal(marlin.repack(gptq_words(codes)), by_formula(codes))

    @pytest.mark.parametrize("shape", [(16, 64), (128, 192)])
    def test_unpack_is_the_inverse_formula(self, shape):
        words = by_formula(codes_of(shape))
        np.testing.assert_array_equal(marlin.unpack(words), gptq_words(back_by_formula(words)))

    @pytest.mark.parametrize(
        ("shape", "expected"),
        [((16, 64), "12961a00375cf2edbf13ae0fc35b1909"), ((128, 192), "ccdd0ad73c8f00a9672d0e18173f4489")],
    )
    def test_golden_tiles(self, shape, expected):
        codes = (np.arange(np.prod(shape)) % 16).astype(np.uint8).reshape(shape)
        assert digest(marlin.repack(gptq_words(codes))) == expected

    @given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
    def test_unpack_undoes_repack_and_repack_unpack(self, k, n, seed):
        words = np.random.default_rng(seed).integers(0, 2**32, (2 * k, 64 * n), np.uint32).view(np.int32)
        np.testing.assert_array_equal(marlin.unpack(marlin.repack(words)), words)
        packed = words.reshape(k, 128 * n)
        np.testing.assert_array_equal(marlin.repack(marlin.unpack(packed)), packed)

    def test_every_bit_goes_to_one_place(self):
        k, n = 32, 64
        seen = np.zeros((k // 16, 2 * n), np.uint32)
        for bit in range(32):
            one = np.full((k // 8, n), 1 << bit, np.uint32).view(np.int32)
            moved = marlin.repack(one).view(np.uint32)
            assert np.bitwise_count(moved).sum() == k // 8 * n
            assert not (seen & moved).any()
            seen |= moved
        assert (seen == 2**32 - 1).all()

    def test_experts_are_repacked_one_by_one(self):
        words = gptq_words(codes_of((3, 32, 64)))
        packed = marlin.repack(words)
        np.testing.assert_array_equal(packed, np.stack([marlin.repack(one) for one in words]))
        np.testing.assert_array_equal(marlin.unpack(packed), words)

    @pytest.mark.parametrize(("shape", "message"), [((3, 64), "K is 24; needs a multiple of 16"), ((2, 96), "N is 96")])
    def test_sizes(self, shape, message):
        with pytest.raises(ValueError, match=message):
            marlin.repack(np.zeros(shape, np.int32))
        with pytest.raises(ValueError, match="columns is 192; needs a multiple of 128"):
            marlin.unpack(np.zeros((2, 192), np.int32))


class TestScales:
    def test_grouped_order_is_the_formula(self):
        scale = np.arange(2 * 192).reshape(2, 192)
        expected = np.empty_like(scale)
        for n in range(192):
            expected[:, 64 * (n // 64) + 8 * (n % 8) + (n % 64) // 8] = scale[:, n]
        np.testing.assert_array_equal(marlin.permute_scale(scale, 64, 128), expected)

    def test_order_of_one_group_is_the_formula(self):
        scale = np.arange(96).reshape(1, 96)
        expected = np.empty_like(scale)
        for n in range(96):
            expected[:, 32 * (n // 32) + 8 * ((n % 8) // 2) + 2 * ((n % 32) // 8) + n % 2] = scale[:, n]
        for group_size in (-1, 128, 256):  # channelwise, and groups as long as K or longer
            np.testing.assert_array_equal(marlin.permute_scale(scale, group_size, 128), expected)
        np.testing.assert_array_equal(marlin.permute_bias(scale[0]), expected[0])

    @given(st.integers(1, 3), st.integers(1, 4))
    def test_both_orders_are_their_own_inverse(self, groups, tiles):
        scale = np.random.default_rng(0).standard_normal((2, groups, 64 * tiles)).astype(np.float16)
        once = marlin.permute_scale(scale, 32, 32 * groups)
        np.testing.assert_array_equal(marlin.permute_scale(once, 32, 32 * groups), scale)
        assert not np.array_equal(once, scale)
        np.testing.assert_array_equal(marlin.permute_bias(marlin.permute_bias(scale)), scale)

    def test_another_number_of_groups(self):
        with pytest.raises(ValueError, match="scale has 3 groups; K=256 in groups of 128 has 2"):
            marlin.permute_scale(np.zeros((3, 64)), 128, 256)
        with pytest.raises(ValueError, match="N is 48; needs a multiple of 64"):
            marlin.permute_scale(np.zeros((2, 48)), 128, 256)
        with pytest.raises(ValueError, match="N is 48; needs a multiple of 32"):
            marlin.permute_bias(np.zeros(48))


class TestZeroPoints:
    def test_layout_is_the_formula(self):
        zeros = codes_of((3, 128))
        words = np.zeros((3, 16), np.uint32)
        for n in range(128):
            nibble = ((n % 64) // 8) // 2 + 4 * (((n % 64) // 8) % 2)
            words[:, 8 * (n // 64) + n % 8] |= zeros[:, n].astype(np.uint32) << np.uint32(4 * nibble)
        np.testing.assert_array_equal(marlin.pack_zero_points(zeros), words.view(np.int32))

    @given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
    def test_unpack_is_the_inverse(self, groups, tiles, seed):
        zeros = codes_of((groups, 64 * tiles), seed)
        words = marlin.pack_zero_points(zeros)
        np.testing.assert_array_equal(marlin.unpack_zero_points(words), zeros)
        np.testing.assert_array_equal(marlin.pack_zero_points(marlin.unpack_zero_points(words)), words)

    def test_sizes(self):
        with pytest.raises(ValueError, match="N is 32; needs a multiple of 64"):
            marlin.pack_zero_points(np.zeros((1, 32), np.uint8))


class TestConstraints:
    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ((128, 256, 128), None),
            ((64, 128, -1), None),
            ((96, 128, 32), "N=96 is not a multiple of 64"),
            ((64, 192, 64), "K=192 is not a multiple of 128"),
            ((64, 128, 16), "groups of 16; it has -1 (one group), 32, 64 and 128"),
        ],
    )
    def test_dense(self, arguments, reason):
        assert marlin.why_not(*arguments) == reason

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ((256, 192, 64), None),
            ((192, 256, 64), "the hidden size 192 is not a multiple of 128"),
            ((256, 96, 32), "the intermediate size 96 is not a multiple of 64"),
            ((256, 192, 128), "the intermediate size 192 is not a multiple of 128"),
            ((256, 256, 8), "groups of 8; it has -1 (one group), 32, 64 and 128"),
        ],
    )
    def test_experts(self, arguments, reason):
        assert marlin.why_not_experts(*arguments) == reason


def test_words_and_codes_are_inverse():
    codes = codes_of((3, 21))
    words = pack_words(codes)
    assert words.shape == (3, 3)
    np.testing.assert_array_equal(unpack_words(words, 21), codes)
    assert (words[:, 2].view(np.uint32) >> np.uint32(20) == 0).all()  # what no code fills is 0


class TestExperts:
    HIDDEN, INTERMEDIATE, EXPERTS = 128, 64, 2

    def stored(self, k, n, group_size, asymmetric, seed):
        random = np.random.default_rng(seed)
        groups = 1 if group_size == -1 else k // group_size
        tensors = {
            "qweight": gptq_words(codes_of((self.EXPERTS, k, n), seed)),
            "scales": random.standard_normal((self.EXPERTS, groups, n)).astype(np.float16),
        }
        return tensors | ({"zeros": codes_of((self.EXPERTS, groups, n), seed + 1)} if asymmetric else {})

    def all_three(self, group_size, asymmetric=True):
        h, i = self.HIDDEN, self.INTERMEDIATE
        return [self.stored(k, n, group_size, asymmetric, 7 * j) for j, (k, n) in enumerate([(h, i), (h, i), (i, h)])]

    def test_weights_are_the_formula_of_gate_beside_up(self):
        gate, up, down = self.all_three(32)
        fused = marlin.fuse_experts(gate, up, down, group_size=32)
        h, i = self.HIDDEN, self.INTERMEDIATE
        assert fused["w13_weight_packed"].shape == (2, h // 16, 4 * i)
        assert fused["w2_weight_packed"].shape == (2, i // 16, 2 * h)
        for e in range(self.EXPERTS):
            codes = [
                np.swapaxes(unpack_words(np.swapaxes(t["qweight"][e], -1, -2), k), -1, -2)
                for t, k in ((gate, h), (up, h), (down, i))
            ]
            np.testing.assert_array_equal(fused["w13_weight_packed"][e], by_formula(np.hstack(codes[:2])))
            np.testing.assert_array_equal(fused["w2_weight_packed"][e], by_formula(codes[2]))

    @pytest.mark.parametrize("group_size", [-1, 32])
    def test_scales_and_zeros_are_those_of_each_expert(self, group_size):
        gate, up, down = self.all_three(group_size)
        fused = marlin.fuse_experts(gate, up, down, group_size=group_size)
        for e in range(self.EXPERTS):
            for name, k, parts in (("w13", self.HIDDEN, (gate, up)), ("w2", self.INTERMEDIATE, (down,))):
                scale = np.hstack([part["scales"][e] for part in parts])
                zeros = np.hstack([part["zeros"][e] for part in parts])
                expected = marlin.permute_scale(scale, group_size, k)
                np.testing.assert_array_equal(fused[f"{name}_weight_scale"][e], expected)
                np.testing.assert_array_equal(fused[f"{name}_weight_zero_point"][e], marlin.pack_zero_points(zeros))

    @pytest.mark.parametrize("group_size", [-1, 32, 64])
    @pytest.mark.parametrize("asymmetric", [False, True])
    def test_split_undoes_fuse(self, group_size, asymmetric):
        given_ = self.all_three(group_size, asymmetric)
        back = marlin.split_experts(marlin.fuse_experts(*given_, group_size=group_size), group_size=group_size)
        for sent, restored in zip(given_, back, strict=True):
            assert set(sent) == set(restored)
            for name in sent:
                assert sent[name].dtype == restored[name].dtype
                np.testing.assert_array_equal(sent[name], restored[name])

    def test_what_the_kernel_does_not_take(self):
        gate, up, down = self.all_three(32)
        with pytest.raises(ValueError, match="groups of 16; it has -1"):
            marlin.fuse_experts(gate, up, down, group_size=16)
        del up["zeros"]
        with pytest.raises(ValueError, match="needs the same of each"):
            marlin.fuse_experts(gate, up, down, group_size=32)
