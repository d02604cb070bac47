"""Bytes that a kernel has on their way from global memory: what hides the memory's latency.

A window begins at a load of the widest kind that the kernel has (narrower ones are for edges and for scales). It
follows the control flow, each side of every branch, until an instruction touches a register that a load of the window
writes, or waits for a background copy of the window. Its bytes are those of its loads of that kind, for a thread; a
load in a loop counts once. The main path is that of the best window, in a loop where the kernel's work is a loop.

Times the threads that a multiprocessor holds, that is the most that the kernel can have in flight: it is not a
measurement.
"""

import dataclasses

from sass import Block, Instruction, Kernel

MOST_STATES = 20000  # of a window's search; then the best one so far counts

# What a multiprocessor of sm_90 has, and one of sm_100.
REGISTERS, THREADS, BLOCKS, SHARED_BYTES = 65536, 2048, 32, 228 * 1024
RESERVED_SHARED_BYTES = 1024  # of every block, for the system


def blocks_held(kernel: Kernel, dynamic_shared: int) -> int:
    """How many blocks a multiprocessor holds, by registers, threads and shared memory."""
    warps = -(-kernel.threads // 32)
    of_warp = -(-kernel.registers * 32 // 256) * 256  # registers are given to warps in units of 256
    by_registers = REGISTERS // 4 // of_warp * 4 // warps  # a quarter of them to each of four schedulers
    shared = max(kernel.shared_bytes, RESERVED_SHARED_BYTES) + dynamic_shared
    return min(by_registers, THREADS // (warps * 32), BLOCKS, SHARED_BYTES // shared)


def reads_memory(instruction: Instruction) -> bool:
    """Whether it loads from global memory, or copies from it in the background."""
    return instruction.is_load or instruction.is_copy


def widest(kernel: Kernel) -> int:
    """Bytes of the kernel's widest load."""
    return max((i.bytes for block in kernel.blocks for i in block.instructions if reads_memory(i)), default=0)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a window needs to know of an instruction. Registers are bits."""

    touches: int
    writes: int = 0  # of a load
    load: int = 0  # a bit for each load and copy of the kernel; 0: neither
    copies: bool = False
    commits: bool = False
    waits: int | None = None  # until so many groups of copies are unfinished


def step_of(instruction: Instruction, load: int) -> Step:
    """The step of an instruction; `load` is its bit if it reads memory."""
    touches = sum(1 << register for register in instruction.registers)
    if instruction.is_load:
        writes = sum(1 << register for register in instruction.destinations)
        return Step(touches | writes, writes, load)
    if instruction.is_copy:
        return Step(touches, load=load, copies=True)
    waits = int(instruction.operands[1], 0) if instruction.name == "DEPBAR" else None
    return Step(touches, commits=instruction.name == "LDGDEPBAR", waits=waits)


@dataclasses.dataclass(frozen=True)
class Window:
    """The loads so far, the registers not to be touched, each group's copies with the newest last: all as bits."""

    loads: int = 0
    registers: int = 0
    groups: tuple[int, ...] = (0,)

    def after(self, step: Step) -> "Window | None":
        """The window with one instruction more; None: it ends here."""
        if step.touches & self.registers:
            return None
        if step.load & ~self.loads:
            groups = (*self.groups[:-1], self.groups[-1] | step.load) if step.copies else self.groups
            return Window(self.loads | step.load, self.registers | step.writes, groups)
        if step.commits and self.groups[-1]:
            return Window(self.loads, self.registers, (*self.groups, 0))
        if step.waits is not None and any(self.groups[: max(0, len(self.groups) - 1 - step.waits)]):
            return None
        return self


class Code:
    """A kernel's steps by block, without those that no window depends on."""

    def __init__(self, blocks: list[Block], width: int):
        """`width`: the bytes of the loads that count."""
        self.successors = [block.successors for block in blocks]
        self.steps: list[list[Step]] = []
        self.starts: list[tuple[int, int]] = []
        self.counted, load = 0, 1
        loaded = frozenset(r for b in blocks for i in b.instructions if i.is_load for r in i.destinations)
        for index, block in enumerate(blocks):
            steps: list[Step] = []
            for instruction in block.instructions:
                reads = reads_memory(instruction)
                if not (reads or instruction.registers & loaded or instruction.name in ("LDGDEPBAR", "DEPBAR")):
                    continue
                if reads and instruction.bytes == width:
                    self.counted |= load
                    self.starts.append((index, len(steps)))
                steps.append(step_of(instruction, load if reads else 0))
                load <<= reads
            self.steps.append(steps)

    def loads_from(self, block: int, place: int) -> int:
        """How many loads of the width the best window has which begins at a step of a block."""
        best, seen, stack = 0, set(), [(block, place, Window())]
        while stack and len(seen) < MOST_STATES:
            index, place, window = stack.pop()
            following: Window | None = window
            for step in self.steps[index][place:]:
                following = window.after(step)
                if following is None:
                    break
                window = following
            best = max(best, (window.loads & self.counted).bit_count())
            if following is None:
                continue
            for successor in self.successors[index]:
                if (successor, window) not in seen:
                    seen.add((successor, window))
                    stack.append((successor, 0, window))
        return best


def bytes_of_thread(kernel: Kernel, in_loop: bool) -> int:
    """Bytes that a thread has in flight on the kernel's main path."""
    width = widest(kernel)
    code = Code(kernel.blocks, width)
    looped = frozenset().union(*kernel.loops)
    starts = [start for start in code.starts if start[0] in looped or not in_loop]
    most = len(starts)  # that a window can have; beginning with the best candidates, which come first in a loop
    best = 0
    for start in starts:
        if best == most:
            break
        best = max(best, code.loads_from(*start))
    return best * width
