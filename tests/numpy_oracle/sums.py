"""Sums over devices whose terms travel as MXFP8, or stochastically rounded to bfloat16 (numerics.md 16)."""

import numpy as np

import jaxlowprec as jlp
from tests.numpy_oracle.quantization import decode, quantize_matrix
from tests.numpy_oracle.random_bits import philox

F, U = np.float32, np.uint32
PIECES, GATHERED, ROUNDED, FURTHER_SUMS = 6, 7, 8, 12
LINE = 1024
FORMAT = jlp.MXFP8()


def words_of(words, *counter):
    """Two further words that follow from a key's."""
    return philox(np.asarray(counter, U), np.asarray(words, U))[:2]


def sent(matrix, words, fmt):
    """float32 numbers as they arrive: quantised, rounded stochastically, and decoded."""
    data, scale, amax = quantize_matrix(matrix, F, fmt, random=(words, 0, 0, 0))
    return decode(data, scale, amax, fmt)[:, : matrix.shape[1]]


def lines(piece, length=32):
    """A piece as a matrix of whole blocks."""
    if piece.ndim > 1 and piece.shape[-1] % length == 0:
        return piece.reshape(-1, piece.shape[-1])
    line = min(LINE, length * max(1, -(-piece.size // length)))
    return np.pad(piece.reshape(-1), (0, -piece.size % line)).reshape(-1, line)


def _added_up(pieces, words, elsewhere, fmt):
    """pieces[device][piece]: matrices -> the sum of each piece."""
    totals = []
    with np.errstate(all="ignore"):
        for piece in range(len(pieces)):
            total = None
            for device, own in enumerate(pieces):
                term = sent(own[piece], words_of(words, device, piece, elsewhere, PIECES), fmt)
                total = term if total is None else total + term
            totals.append(total)
    return totals


def reduce_scatter(terms, axis, words, elsewhere=0, fmt=FORMAT):
    """The part of each device, from the terms of all, in their order."""
    pieces = [np.split(np.asarray(t, F), len(terms), axis) for t in terms]
    totals = _added_up([[lines(p) for p in own] for own in pieces], words, elsewhere, fmt)
    shape = pieces[0][0].shape
    return [t.reshape(-1)[: np.prod(shape, dtype=int)].reshape(shape) for t in totals]


def all_reduce(terms, words, fmt=FORMAT, elsewhere=0, others=1):
    """The sum, as every device has it. `elsewhere`: which of `others` parts of the partial sums these are."""
    count, shape = len(terms), terms[0].shape
    size = terms[0].size
    line = min(LINE, 32 * max(1, -(-size // (count * 32))))
    pieces = [np.pad(np.asarray(t, F).reshape(-1), (0, -size % (line * count))) for t in terms]
    totals = _added_up([[*p.reshape(count, -1, line)] for p in pieces], words, elsewhere, fmt)
    own = [words_of(words, device * others + elsewhere, 0, 0, GATHERED) for device in range(count)]
    gathered = [sent(total, of_device, fmt) for total, of_device in zip(totals, own, strict=True)]
    return np.concatenate([g.reshape(-1) for g in gathered])[:size].reshape(shape)


def reduce_scatter_then_all_reduce(terms, axis, words):
    """terms[i][j] of device (i, j) -> the parts of the devices (0, j), which (1, j), ... have, too: the sum over
    j scattered along `axis`, then the sum over i."""
    rows, columns = len(terms), len(terms[0])
    scattered = [reduce_scatter(row, axis, words, i) for i, row in enumerate(terms)]
    further = words_of(words, 1, 0, 0, FURTHER_SUMS)
    by_column = [[scattered[i][j] for i in range(rows)] for j in range(columns)]
    return [all_reduce(parts, further, elsewhere=j, others=columns) for j, parts in enumerate(by_column)]


def stochastic_bfloat16(x, words):
    """float32 numbers of bfloat16."""
    x = np.asarray(x, F)
    calls = np.arange(-(-max(x.size, 1) // 8), dtype=U)
    counter = np.stack([calls, 0 * calls, 0 * calls, 0 * calls + 1], axis=-1).astype(U)
    drawn = philox(counter, np.broadcast_to(np.asarray(words, U), (len(calls), 2)))
    halves = drawn.astype("<u4").view("<u2").reshape(-1)[: x.size].reshape(x.shape).astype(U)
    rounded = ((x.view(U) + halves) & U(0xFFFF0000)).view(F)
    return np.where(np.isfinite(x), rounded, x)
