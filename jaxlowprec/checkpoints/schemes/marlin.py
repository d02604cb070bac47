"""Marlin's layouts of 4-bit weights, and the inverse conversions. All are permutations, so both directions are exact.

A Marlin kernel reads the tile of a tensor-core instruction in the order in which the threads hold it. vLLM and SGLang
repack weights when they load them. With the inverse, the live weights of an engine can be compared with those of a
checkpoint, or updated in part.

    weight       int32 [K/16, 2N]    from GPTQ's int32 [K/8, N]
    scale        [K/g, N]            two orders: for several groups, and for a single group
    zero points  int32 [K/g, N/8]
    bias         [N]

All functions accept leading axes, for experts. Codes are unsigned nibbles: q + 8, or the code beside a zero point.
Source: int4_qat.md 3; IST-DASLab/marlin; vLLM's gptq_marlin_repack.
"""

from __future__ import annotations

import numpy as np

from jaxlowprec.checkpoints.schemes.codes import pack_words, unpack_words

Tensors = dict[str, np.ndarray]

INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds the j-th of eight zero points."""


def repack(qweight: np.ndarray) -> np.ndarray:
    """Converts GPTQ's words to Marlin's.

    Arguments:
        qweight: int32 [..., K/8, N]: nibble i of row r is the code of k = 8r + i.

    Returns:
        int32 [..., K/16, 2N].

    Raises:
        ValueError: K is not a multiple of 16, or N not of 64.
    """
    rows, n = _matrix("repack", "qweight", qweight)
    _multiples("repack", K=(8 * rows, 16), N=(n, 64))
    codes = np.swapaxes(unpack_words(np.swapaxes(qweight, -1, -2), 8 * rows), -1, -2)
    return pack_words(_to_tiles(codes))


def unpack(weight: np.ndarray) -> np.ndarray:
    """The inverse of `repack`: [..., K/16, 2N] as GPTQ's [..., K/8, N]."""
    rows, columns = _matrix("unpack", "weight", weight)
    _multiples("unpack", columns=(columns, 128))
    codes = _from_tiles(unpack_words(weight, 8 * columns))
    return np.ascontiguousarray(np.swapaxes(pack_words(np.swapaxes(codes, -1, -2)), -1, -2))


def _to_tiles(codes: np.ndarray) -> np.ndarray:
    """[..., K, N] as [..., K/16, 16N]; each eight codes are a word.

    Within a tile of 16 x 64: word 4 * (4 * (n % 8) + k % 8 / 2) + n / 16,
    nibble k / 8 + 2 * (n % 16 / 8) + 4 * (k % 2).
    """
    k, n = codes.shape[-2:]
    # the axes of row: k's (half, pair, parity); of column: the tile, n's (sixteen, half, column)
    split = codes.reshape(*codes.shape[:-2], k // 16, 2, 4, 2, n // 64, 4, 2, 8)
    first = split.ndim - 8
    row, khalf, pair, parity, tile, sixteen, nhalf, column = range(first, first + 8)
    order = (*range(first), row, tile, column, pair, sixteen, parity, nhalf, khalf)
    return np.ascontiguousarray(split.transpose(order)).reshape(*codes.shape[:-2], k // 16, 16 * n)


def _from_tiles(codes: np.ndarray) -> np.ndarray:
    """The inverse."""
    rows, n = codes.shape[-2], codes.shape[-1] // 16
    split = codes.reshape(*codes.shape[:-1], n // 64, 8, 4, 4, 2, 2, 2)
    first = split.ndim - 8
    row, tile, column, pair, sixteen, parity, nhalf, khalf = range(first, first + 8)
    order = (*range(first), row, khalf, pair, parity, tile, sixteen, nhalf, column)
    return np.ascontiguousarray(split.transpose(order)).reshape(*codes.shape[:-2], 16 * rows, n)


def permute_scale(scale: np.ndarray, group_size: int, k: int) -> np.ndarray:
    """Scales as Marlin's kernel reads them. The permutation is its own inverse.

    The kernel chooses the order by the number of groups: a single group, whether or not it is called channelwise, is
    read in the order of `permute_bias`.

    Arguments:
        scale: [..., K/g, N].
        group_size: g; -1 for one group.
        k: the K of the whole weight.

    Raises:
        ValueError: the scale has another number of groups, or N is not a multiple of 64 (32 for one group).
    """
    groups, n = _matrix("permute_scale", "scale", scale)
    size = k if group_size == -1 else group_size
    if groups != max(-(-k // size), 1):
        raise ValueError(
            f"marlin.permute_scale: scale has {groups} groups; K={k} in groups of {size} has {-(-k // size)}"
        )
    if groups == 1:
        return permute_bias(scale)
    _multiples("permute_scale", N=(n, 64))
    return np.ascontiguousarray(_columns_by_eight(scale))


def permute_bias(bias: np.ndarray) -> np.ndarray:
    """[..., N] in the order of the accumulators. The permutation is its own inverse.

    n goes to 32 * (n / 32) + 8 * (n % 8 / 2) + 2 * (n % 32 / 8) + n % 2.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    n = bias.shape[-1] if bias.ndim else 0
    _multiples("permute_bias", N=(n, 32))
    split = bias.reshape(*bias.shape[:-1], n // 32, 4, 4, 2)
    return np.ascontiguousarray(split.swapaxes(-3, -2)).reshape(bias.shape)


def pack_zero_points(zeros: np.ndarray) -> np.ndarray:
    """Zero points as Marlin's kernel reads them: always in the order of grouped scales, then interleaved.

    Arguments:
        zeros: uint8 [..., K/g, N].

    Returns:
        int32 [..., K/g, N/8].

    Raises:
        ValueError: N is not a multiple of 64.
    """
    _, n = _matrix("pack_zero_points", "zeros", zeros)
    _multiples("pack_zero_points", N=(n, 64))
    return pack_words(np.ascontiguousarray(_columns_by_eight(zeros)), INTERLEAVED)


def unpack_zero_points(words: np.ndarray) -> np.ndarray:
    """The inverse: [..., K/g, N/8] words as uint8 [..., K/g, N]."""
    _, columns = _matrix("unpack_zero_points", "words", words)
    _multiples("unpack_zero_points", columns=(columns, 8))
    return np.ascontiguousarray(_columns_by_eight(unpack_words(words, 8 * columns, INTERLEAVED)))


def fuse_experts(gate: Tensors, up: Tensors, down: Tensors, *, group_size: int) -> Tensors:
    """Experts as vLLM and SGLang hold them once they are loaded: gate and up side by side along N, in Marlin's order.

    Arguments:
        gate, up: of all E experts, `qweight` int32 [E, H/8, I] as GPTQ's, `scales` [E, H/g, I], and where asymmetric
            `zeros` uint8 [E, H/g, I].
        down: the same with H and I exchanged.
        group_size: g; -1 for one group.

    Returns:
        `w13_weight_packed` int32 [E, H/16, 4I], `w13_weight_scale` [E, H/g, 2I], where asymmetric
        `w13_weight_zero_point` int32 [E, H/g, 2I/8]; `w2_...` of down, with H and I exchanged and half the columns.

    Raises:
        ValueError: the kernel does not take these sizes, or the three have not the same tensors.
    """
    rows, intermediate = _matrix("fuse_experts", "gate's qweight", gate["qweight"])
    if why := why_not_experts(8 * rows, intermediate, group_size):
        raise ValueError(f"marlin.fuse_experts: {why}")
    if not set(gate) == set(up) == set(down):
        held = f"gate has {sorted(gate)}, up {sorted(up)}, down {sorted(down)}"
        raise ValueError(f"marlin.fuse_experts: {held}; needs the same of each")
    both = {name: np.concatenate([gate[name], up[name]], -1) for name in gate}
    return _expert_tensors("w13", both, group_size) | _expert_tensors("w2", down, group_size)


def split_experts(tensors: Tensors, *, group_size: int) -> tuple[Tensors, Tensors, Tensors]:
    """The inverse of `fuse_experts`: gate, up and down."""
    both, down = _stored_tensors("w13", tensors, group_size), _stored_tensors("w2", tensors, group_size)
    halves = {name: np.split(tensor, 2, -1) for name, tensor in both.items()}
    gate, up = ({name: np.ascontiguousarray(half[i]) for name, half in halves.items()} for i in (0, 1))
    return gate, up, down


def _expert_tensors(name: str, stored: Tensors, group_size: int) -> Tensors:
    k = 8 * stored["qweight"].shape[-2]
    made = {
        f"{name}_weight_packed": repack(stored["qweight"]),
        f"{name}_weight_scale": permute_scale(stored["scales"], group_size, k),
    }
    if "zeros" in stored:
        made[f"{name}_weight_zero_point"] = pack_zero_points(stored["zeros"])
    return made


def _stored_tensors(name: str, tensors: Tensors, group_size: int) -> Tensors:
    qweight = unpack(tensors[f"{name}_weight_packed"])
    scales = permute_scale(tensors[f"{name}_weight_scale"], group_size, 8 * qweight.shape[-2])
    stored = {"qweight": qweight, "scales": scales}
    if f"{name}_weight_zero_point" in tensors:
        stored["zeros"] = unpack_zero_points(tensors[f"{name}_weight_zero_point"])
    return stored


def why_not(n: int, k: int, group_size: int) -> str | None:
    """Why vLLM's dense Marlin kernel cannot take a weight; None if it can. Newer versions pad such weights.

    Arguments:
        n, k: of the weight [N, K], as one device holds it.
        group_size: -1, 32, 64 or 128.
    """
    if group_size not in (-1, 32, 64, 128):
        return f"groups of {group_size}; it has -1 (one group), 32, 64 and 128"
    if n % 64:
        return f"N={n} is not a multiple of 64"
    if k % 128:
        return f"K={k} is not a multiple of 128"
    return None


def why_not_experts(hidden: int, intermediate: int, group_size: int) -> str | None:
    """Why vLLM's Marlin kernel for experts cannot take a weight; None if it can.

    Arguments:
        hidden, intermediate: sizes of an expert, as one device holds it.
        group_size: -1, 32, 64 or 128.
    """
    if group_size not in (-1, 32, 64, 128):
        return f"groups of {group_size}; it has -1 (one group), 32, 64 and 128"
    if hidden % 128:
        return f"the hidden size {hidden} is not a multiple of 128"
    if intermediate % max(64, group_size):
        return f"the intermediate size {intermediate} is not a multiple of {max(64, group_size)}"
    return None


def _columns_by_eight(x: np.ndarray) -> np.ndarray:
    """[..., N] with n at 64 * (n / 64) + 8 * (n % 8) + n % 64 / 8: each 8 x 8 transposed, so its own inverse."""
    return x.reshape(*x.shape[:-1], -1, 8, 8).swapaxes(-1, -2).reshape(x.shape)


def _matrix(who: str, name: str, x: np.ndarray) -> tuple[int, int]:
    if x.ndim < 2:
        raise ValueError(f"marlin.{who}: {name} has shape {x.shape}; needs two dimensions or more")
    return x.shape[-2], x.shape[-1]


def _multiples(who: str, **sizes: tuple[int, int]) -> None:
    for name, (size, unit) in sizes.items():
        if not size or size % unit:
            raise ValueError(f"marlin.{who}: {name} is {size}; needs a multiple of {unit}")
