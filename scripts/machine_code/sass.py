"""Kernels' machine code as nvdisasm prints it: instructions, what they read and write, and their control flow."""

import dataclasses
import functools
import re
import subprocess

WIDTHS = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}  # of a memory access; others are of 4 bytes


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `@!P0 LDG.E.128 R4, desc[UR4][R2.64]`."""

    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @functools.cached_property
    def bytes(self) -> int:
        """How many a thread accesses, of an instruction that accesses memory."""
        return next((size for suffix, size in WIDTHS.items() if f"{suffix}." in f"{self.opcode}."), 4)

    @property
    def is_load(self) -> bool:
        """Whether it reads global memory into registers."""
        return self.name in ("LDG", "LD")

    @property
    def is_copy(self) -> bool:
        """Whether it copies global to shared memory in the background (cp.async)."""
        return self.name == "LDGSTS"

    @functools.cached_property
    def registers(self) -> frozenset[int]:
        """All general registers that its text names, without those that follow in a wide operand."""
        return frozenset(int(number) for operand in self.operands for number in re.findall(r"\bR(\d+)\b", operand))

    @functools.cached_property
    def destinations(self) -> frozenset[int]:
        """Registers that a load writes."""
        first = int(self.operands[0][1:]) if re.fullmatch(r"R\d+", self.operands[0]) else None
        return frozenset() if first is None else frozenset(range(first, first + max(1, self.bytes // 4)))

    @property
    def target(self) -> str | None:
        """The label that it may jump to."""
        found = re.search(r"`\((\S+?)\)", self.operands[-1]) if self.name in ("BRA", "JMP") and self.operands else None
        return found[1] if found else None

    @property
    def ends_path(self) -> bool:
        """Whether nothing follows it."""
        return self.name in ("EXIT", "RET", "BRX", "BPT") and not self.predicate

    @property
    def jumps_always(self) -> bool:
        """Whether the next instruction does not follow it."""
        return self.target is not None and not self.predicate and len(self.operands) == 1 and ".DIV" not in self.opcode


@dataclasses.dataclass
class Block:
    """Instructions that run one after another, and the indices of the blocks that may follow."""

    instructions: list[Instruction]
    successors: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Kernel:
    """A kernel, what it occupies of a multiprocessor, and its code; block 0 is entered first."""

    name: str
    architecture: str
    registers: int
    threads: int  # of a block, at most: __launch_bounds__
    shared_bytes: int  # known to the compiler, the system's included
    blocks: list[Block]

    @functools.cached_property
    def loops(self) -> list[frozenset[int]]:
        """The blocks of each natural loop."""
        bodies: dict[int, set[int]] = {}
        before = predecessors(self.blocks)
        dominators = dominators_of(self.blocks, before)
        for tail, block in enumerate(self.blocks):
            for head in block.successors:
                if not dominators[tail] >> head & 1:
                    continue
                body, stack = bodies.setdefault(head, {head}), [tail]
                while stack:
                    index = stack.pop()
                    if index not in body:
                        body.add(index)
                        stack.extend(before[index])
        self.heads = list(bodies)
        return [frozenset(body) for body in bodies.values()]


def predecessors(blocks: list[Block]) -> list[list[int]]:
    """For each block, those that it may follow."""
    before: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].append(index)
    return before


def dominators_of(blocks: list[Block], before: list[list[int]]) -> list[int]:
    """For each block, the blocks that every way to it passes, as bits; none where there is no way."""
    reached, stack = {0}, [0]
    while stack:
        for successor in blocks[stack.pop()].successors:
            if successor not in reached:
                reached.add(successor)
                stack.append(successor)
    every = (1 << len(blocks)) - 1
    result = [1 if index == 0 else every for index in range(len(blocks))]
    changed = True
    while changed:
        changed = False
        for index in range(1, len(blocks)):
            if index not in reached:
                continue
            both = every
            for previous in before[index]:
                if previous in reached:
                    both &= result[previous]
            if (both | 1 << index) != result[index]:
                result[index], changed = both | 1 << index, True
    return [bits if index in reached else 0 for index, bits in enumerate(result)]


INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{ *)?(?:(@\S+)\s+)?([A-Z][A-Z0-9_.x]+)\s*([^;]*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\S+):")
SECTION = re.compile(r"^\t\.section\t(\.text|\.nv\.info|\.nv\.shared|[^.,]*\.[^,]*?)(?:\.(\w+))?,")
WORD = re.compile(r"\.word\t+(?:index@\((\S+)\)|(0x[0-9a-f]+))")


def blocks_of(lines: list[str]) -> list[Block]:
    """The basic blocks of a kernel's lines."""
    blocks, starts = [Block([])], {}
    for line in lines:
        if label := LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block([]))
            starts[label[1]] = len(blocks) - 1
        elif match := INSTRUCTION.match(line):
            operands = tuple(part.strip() for part in match[3].split(",")) if match[3] else ()
            instruction = Instruction(match[1] or "", match[2], operands)
            blocks[-1].instructions.append(instruction)
            if instruction.target or instruction.ends_path:
                blocks.append(Block([]))
    for index, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last and last.target in starts:
            block.successors.append(starts[last.target])
        if index + 1 < len(blocks) and not (last and (last.ends_path or last.jumps_always)):
            block.successors.insert(0, index + 1)
    return blocks


def parse(text: str) -> list[Kernel]:
    """The kernels in nvdisasm's whole output for a cubin."""
    architecture = match[1] if (match := re.search(r"\.target\t(\S+)", text)) else ""
    code: dict[str, list[str]] = {}
    registers: dict[str, int] = {}
    threads: dict[str, int] = {}
    shared: dict[str, int] = {}
    section = name = attribute = ""
    words: list[str] = []
    for line in text.splitlines():
        if match := SECTION.match(line):
            section, name, attribute = match[1], match[2] or "", ""
        elif section == ".text" and name:
            code.setdefault(name, []).append(line)
        elif "nvinfo : " in line:
            attribute, words = line.rpartition(" ")[2], []
        elif match := WORD.search(line):
            words.append(match[1] or match[2])
            if attribute == "EIATTR_REGCOUNT" and len(words) == 2:
                registers[words[0]] = int(words[1], 0)
            elif attribute in ("EIATTR_MAX_THREADS", "EIATTR_REQNTID") and len(words) == 3:
                threads[name] = int(words[0], 0) * int(words[1], 0) * int(words[2], 0)
        elif section == ".nv.shared" and (match := re.search(r"\.zero\t+(\d+)", line)):
            shared[name] = shared.get(name, 0) + int(match[1])
    return [
        Kernel(name, architecture, registers[name], threads[name], shared.get(name, 0), blocks_of(lines))
        for name, lines in code.items()
        if name in registers and name in threads
    ]


def demangled(names: list[str]) -> list[str]:
    """Names as C++ has them, without the parameters' types and the namespaces."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [short_name(name) for name in done.stdout.splitlines()]


def short_name(name: str) -> str:
    """`void jaxlowprec::cuda::f<jaxlowprec::cuda::BF16, (bool)1>(...)` as `f<BF16, true>`."""
    for old, new in (("(anonymous namespace)::", ""), ("(bool)1", "true"), ("(bool)0", "false")):
        name = name.replace(old, new)
    name = re.sub(r"\((?:[\w:]+)\)(?=-?\d)", "", name)  # the types of other constants
    name = re.sub(r"\b(?:\w+::)+", "", name).removeprefix("void ")
    return re.sub(r"\(.*\)$", "", name)
