"""The check of the GPU kernels' machine code (scripts/machine_code): what it counts, and the fault that it is for."""

import importlib
import pathlib
import shutil

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = ROOT / "scripts" / "machine_code"
SAMPLES = pathlib.Path(__file__).parent

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="needs the source tree")


def kernel(code, registers=32, threads=256, shared=1024):
    """A kernel of some instructions, one a line; `name:` is a label."""
    lines = [line.strip() for line in code.strip().splitlines()]
    text = [line if line.endswith(":") else f"        /*{16 * i:04x}*/    {line} ;" for i, line in enumerate(lines)]
    blocks = importlib.import_module("sass").blocks_of(text)
    return importlib.import_module("sass").Kernel("kernel", "sm_90a", registers, threads, shared, blocks)


def in_flight(code, in_loop=False):
    """Bytes of a thread."""
    return importlib.import_module("in_flight").bytes_of_thread(kernel(code), in_loop)


def sample(name):
    """The kernel of a file that nvdisasm wrote."""
    (found,) = importlib.import_module("sass").parse((SAMPLES / name).read_text())
    found.name = "amax_rotated<BF16>"
    return found


# --- the fault


def test_a_branch_around_each_load_fails():
    old = sample("amax_rotated_branches.txt")
    assert (old.architecture, old.registers, old.threads, old.shared_bytes) == ("sm_90a", 57, 256, 1024)
    result = importlib.import_module("check").check(old)
    assert "4 B a thread, 4 blocks of 256:     4 KiB" in result.line
    assert "4 bytes a thread are loaded before the first of them is used, 4.0 KiB a multiprocessor;" in result.error
    assert "it needs 24.0 KiB" in result.error


def test_sixteen_loads_before_the_first_use_pass():
    result = importlib.import_module("check").check(sample("amax_rotated.txt"))
    assert "64 B a thread, 4 blocks of 256:    64 KiB" in result.line
    assert result.error == ""


def test_a_kernel_that_the_table_does_not_know_fails():
    unknown = kernel("LDG.E R2, desc[UR4][R4.64]\nEXIT")
    assert "does not say what it needs" in importlib.import_module("check").check(unknown).error


@pytest.mark.parametrize(
    ("allowed", "error"), [(9.8, ""), (9.0, "9.7 instructions an element; at most 9.0 are allowed")]
)
def test_more_instructions_than_a_kernel_may_take_fail(monkeypatch, allowed, error):
    kernels, counts = importlib.import_module("kernels"), importlib.import_module("counts")
    monkeypatch.setattr(counts, "counts_of", lambda kernel, parts: [("rows", 9.7)])
    monkeypatch.setattr(kernels, "MOST_INSTRUCTIONS", {"amax_rotated<.*>": allowed})
    found = importlib.import_module("check").check(sample("amax_rotated.txt")).error
    assert error in found and bool(found) == bool(error)


# --- windows


def test_loads_count_until_a_register_of_theirs_is_used():
    assert in_flight("LDG.E R2, desc[UR4][R8.64]\nLDG.E R3, desc[UR4][R8.64+0x4]\nIADD3 R4, R3, R2, RZ\nEXIT") == 8
    assert in_flight("LDG.E R2, desc[UR4][R8.64]\nIADD3 R4, R2, R2, RZ\nLDG.E R3, desc[UR4][R8.64+0x4]\nEXIT") == 4
    assert in_flight("LDG.E R2, desc[UR4][R8.64]\nMOV R2, RZ\nLDG.E R3, desc[UR4][R8.64+0x4]\nEXIT") == 4  # written
    assert in_flight("LDG.E R2, desc[UR4][R8.64]\nLDG.E R3, desc[UR4][R2.64]\nEXIT") == 4  # an address
    assert in_flight("LDG.E R2, desc[UR4][R8.64]\nIADD3 R4, R5, R6, RZ\nLDG.E R3, desc[UR4][R8.64]\nEXIT") == 8


def test_all_registers_of_a_wide_load_count():
    one = "LDG.E.128.CONSTANT R4, desc[UR4][R8.64]\n{}\nLDG.E.128.CONSTANT R16, desc[UR4][R12.64]\nEXIT"
    assert in_flight(one.format("MOV R20, R7")) == 16
    assert in_flight(one.format("MOV R20, R21")) == 32


def test_only_the_widest_loads_count_but_the_use_of_any_ends():
    code = """
        LDG.E.64 R2, desc[UR4][R8.64]
        LDG.E.U8 R6, desc[UR4][R8.64]
        {}
        LDG.E.64 R4, desc[UR4][R8.64]
        EXIT
    """
    assert in_flight(code.format("NOP")) == 16
    assert in_flight(code.format("MOV R7, R6")) == 8


def test_a_merge_of_branches_that_uses_nothing_goes_on():
    row = """
        @!P0 BRA `(.L_x_{0}a)
        LDG.E R{0}, desc[UR4][R8.64]
        .L_x_{0}a:
        BSYNC B0
        {1}
    """
    rows = (20, 21, 22, 23)
    assert in_flight("".join(row.format(i, "NOP") for i in rows) + "EXIT") == 16
    assert in_flight("".join(row.format(i, f"LOP3.LUT R{i}, R{i}, R0, RZ, 0xfc, !PT") for i in rows) + "EXIT") == 4


def test_copies_in_the_background_count_until_waited_for():
    copies = "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R8.64]\n" * 4
    assert in_flight(copies + "LDGDEPBAR\nIADD3 R8, R9, R9, RZ\nDEPBAR.LE SB0, 0x0\n" + copies + "EXIT") == 64
    # A wait that leaves the newest group unfinished ends the window of an older one only.
    assert in_flight(copies + "LDGDEPBAR\n" + copies + "LDGDEPBAR\nDEPBAR.LE SB0, 0x1\n" + copies + "EXIT") == 8 * 16
    assert in_flight(copies + "LDGDEPBAR\n" + copies + "LDGDEPBAR\nDEPBAR.LE SB0, 0x2\n" + copies + "EXIT") == 12 * 16


def test_where_the_work_is_a_loop_only_its_loads_count():
    code = """
        LDG.E R2, desc[UR4][R8.64]
        LDG.E R3, desc[UR4][R8.64]
        LDG.E R4, desc[UR4][R8.64]
        .L_x_1:
        LDG.E R5, desc[UR4][R8.64]
        IADD3 R6, R5, R2, RZ
        @P0 BRA `(.L_x_1)
        EXIT
    """
    assert in_flight(code) == 16
    assert in_flight(code, in_loop=True) == 4


def test_blocks_of_a_multiprocessor():
    held = importlib.import_module("in_flight").blocks_held
    for registers, blocks in ((32, 8), (40, 6), (46, 5), (60, 4), (64, 4), (65, 3), (80, 3), (128, 2), (232, 1)):
        assert held(kernel("EXIT", registers), 0) == blocks
    assert held(kernel("EXIT", 54, threads=512), 0) == 2
    assert held(kernel("EXIT", 32), 53456) == 4  # of 228 KiB, with 1 KiB for the system
    assert held(kernel("EXIT", 32), 86224) == 2
    assert held(kernel("EXIT", 16, threads=32), 0) == 32


# --- instructions per element


def test_a_loops_turn_is_the_shortest_useful_path():
    counts = importlib.import_module("counts")
    code = """
        MOV R1, R2
        .L_x_1:
        LDG.E.128.CONSTANT R4, desc[UR4][R8.64]
        @P0 BRA `(.L_x_2)
        MOV R20, R4
        MOV R20, R4
        .L_x_2:
        @P1 BRA `(.L_x_3)
        STG.E.64 desc[UR4][R8.64], R4
        MOV R20, R4
        .L_x_3:
        NOP
        @P2 BRA `(.L_x_1)
        EXIT
    """
    found = kernel(code)
    (loop,), (head,) = found.loops, found.heads
    everything = counts.blocks_with(found, loop, "LDG|STG")
    assert counts.shortest_turn(found, head, loop, [], frozenset()) == 4
    assert counts.shortest_turn(found, head, loop, everything, frozenset()) == 6
    part = counts.Part("rows", 4, ("LDG",), "LDG|STG")
    assert counts.counts_of(found, (part,)) == [("rows", 1.5)]


# --- names


@pytest.mark.skipif(not shutil.which("c++filt"), reason="needs c++filt")
def test_names_are_as_the_sources_have_them():
    (name,) = importlib.import_module("sass").demangled(
        ["_ZN10jaxlowprec4cuda13quantize_rowsINS0_4BF16ENS_4E2M1ELNS0_6ScalesE1ELb0EEEvNS0_17QuantizeArgumentsE"]
    )
    assert name == "quantize_rows<BF16, E2M1, 1, false>"
    assert importlib.import_module("kernels").need_of(name).in_loop
