"""traffic: the collectives of XLA's text, in every form that CPUs and GPUs print."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxlowprec.diagnostics.traffic import Collective, collectives
from tests.helpers import random_array
from tests.sharding.meshes import mesh_of, on_mesh, place


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "  %r.1 = f32[8,16]{1,0} all-gather(f32[2,16]{1,0} %x), channel_id=1, replica_groups={{0,1,2,3}}, dim...",
            Collective("all-gather", (("f32", (8, 16)),), 4),
        ),
        (
            "  %r = (f32[], u32[3]{0}) all-reduce(%a, %b), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%region",
            Collective("all-reduce", (("f32", ()), ("u32", (3,))), 4),
        ),
        (
            "  ROOT %r.3 = bf16[4]{0} collective-permute(%r.1), channel_id=3, source_target_pairs={{0,1},{1,0}}",
            Collective("collective-permute", (("bf16", (4,)),), 2),
        ),
        (
            "  %r = u8[2,16]{1,0} reduce-scatter(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimens...",
            Collective("reduce-scatter", (("u8", (2, 16)),), 4),
        ),
        (
            "  %r = (f8e4m3fn[1,16]{1,0}, f8e4m3fn[1,16]{1,0}) all-to-all(%a, %b), "
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}, metadata={}",
            Collective("all-to-all", (("f8e4m3fn", (1, 16)), ("f8e4m3fn", (1, 16))), 2),
        ),
        (
            "  %s = (u8[2,16]{1,0}, u8[8,16]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}",
            Collective("all-gather", (("u8", (8, 16)),), 4),
        ),
        (
            "  %s = ((f32[8]{0}, f32[4]{0}), (f32[2]{0}, f32[1]{0})) reduce-scatter-start(%x, %y), "
            "replica_groups={{0,1,2,3}}",
            Collective("reduce-scatter", (("f32", (2,)), ("f32", (1,))), 4),
        ),
        (
            "  %s = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}",
            Collective("all-reduce", (("f32", (8,)),), 2),
        ),
        (
            "  %s = ((bf16[8]{0}), bf16[8]{0}) all-reduce-start(%x), replica_groups=mesh['axis_0'=8] {'axis_0'}",
            Collective("all-reduce", (("bf16", (8,)),), 8),
        ),
        (
            "  %s = ((u8[8,4]{1,0}), u8[8,4]{1,0:T(8,128)}) all-to-all-start(%x), replica_groups={{0,1}}",
            Collective("all-to-all", (("u8", (8, 4)),), 2),
        ),
        (
            "  %s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            Collective("collective-permute", (("f32", (8,)),), 2),
        ),
    ],
)
def test_every_form_is_read(line, expected):
    assert collectives(f"ENTRY %main {{\n{line}\n}}") == [expected]


OFFSETS = "s64[8]{0}, s64[8]{0}, s64[8]{0}, s64[8]{0}"
GROUP = "replica_groups={{0,1,2,3,4,5,6,7}}"


@pytest.mark.parametrize(
    "text",
    [
        f"%s = (bf16[96,32]{{1,0}}, bf16[512,32]{{1,0}}, {OFFSETS}) ragged-all-to-all-start(%x, %o, %a, %b), {GROUP}",
        f"%s = ((bf16[96,32]{{1,0}}, bf16[512,32]{{1,0}}, {OFFSETS}), bf16[512,32]{{1,0}}) "
        f"ragged-all-to-all-start(%x, %o, %a, %b), {GROUP}",
        f"%x.1 = bf16[96,32]{{1,0}} fusion(%y)\n  %r = bf16[512,32]{{1,0}} ragged-all-to-all(%x.1, %o, %a), {GROUP}",
        f"%r = bf16[512,32]{{1,0}} ragged-all-to-all(bf16[96,32]{{1,0}} %x.1, bf16[512,32]{{1,0}} %o), {GROUP}",
    ],
    ids=["flat start", "start", "operand by name", "operand with its type"],
)
def test_a_ragged_collective_has_a_bound(text):
    """Its sizes are known on the device only. No device sends more than it has, and on average no more than arrives."""
    (found,) = collectives("  " + text)
    assert found == Collective("ragged-all-to-all", (("bf16", (512, 32)),), 8, 96 * 32 * 2)
    assert found.wire_bytes == 96 * 32 * 2 and "at most 6,144 bytes sent by each" in str(found)


def test_what_only_uses_a_collective_is_none():
    text = "  %r.4 = f32[] get-tuple-element(%all-reduce.2), index=0\n  %d = f32[8]{0} all-reduce-done(%s)\n"
    assert collectives(text) == []


@pytest.mark.parametrize(
    ("kind", "dtype", "sent"),
    [
        ("all-gather", "bf16", 1600 * 3 / 4),
        ("reduce-scatter", "f32", 3200 * 3),
        ("all-reduce", "f32", 2 * 3200 * 3 / 4),
        ("all-to-all", "u8", 800 * 3 / 4),
        ("collective-permute", "pred", 800),
        ("all-gather", "f4e2m1fn", 400 * 3 / 4),
    ],
)
def test_bytes_on_the_wire(kind, dtype, sent):
    assert Collective(kind, ((dtype, (8, 100)),), 4).wire_bytes == sent


def test_a_compiled_function():
    x, mesh = random_array((16, 64), "float32"), mesh_of((2, 4))

    def function(x):
        return jax.lax.with_sharding_constraint(x, P("a"))

    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(place(x, mesh, P("a", "b"))).compile()
    (found,) = collectives(compiled)
    assert found == Collective("all-gather", (("f32", (8, 64)),), 4)
    assert str(found) == "all-gather among 4: f32[8, 64], 1,536 bytes sent by each"
    _, counted = on_mesh(function, [x], [P("a", "b")], mesh)
    assert counted == [("all-gather", 512)]
