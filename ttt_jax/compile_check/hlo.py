"""Reading a compiled program: its collectives and kernels, and how often each runs.

The text is what `jax.stages.Compiled.as_text` returns: one instruction a line, loops and fusions
as computations of their own. A line is counted as often as the loops around it go round.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)")
_CALLED = re.compile(r"(?:calls|branch_computations|true_computation|false_computation)="
                     r"(\{[^}]*\}|%?[\w.\-]+)")  # fmt: skip
_SHARED_CHANNEL = "1"  # JAX gives it to every collective inside a shard_map
_KERNELS = ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: without the percent sign.
      shape: of the result, as text: "f32[2,3]{1,0}", or a tuple in parentheses.
      opcode: "all-gather", "fusion", "while", ...
      rest: operands and attributes.
    """

    name: str
    shape: str
    opcode: str
    rest: str

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a pattern's first match in the attributes, or None."""
        found = re.search(pattern, self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
      kind: one of `KINDS`.
      shape: of the result on one device, without layouts.
      bytes: size of that result.
      runs: times in one step.
      source: where in the Python program it is from, as far as the compiler says.
    """

    kind: str
    shape: str
    bytes: int
    runs: int
    source: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel.

    Attributes:
      name: the one given to `pallas_call`.
      calls: places in the program that call it.
      runs: times in one step.
      vmem_bytes: on-chip memory that the compiler gives it, 0 where the text does not say.
    """

    name: str
    calls: int
    runs: int
    vmem_bytes: int


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Splits a program into computations.

    Args:
      text: the program.

    Returns:
      (instructions by computation, the name of the computation where it starts).

    Raises:
      ValueError: the text has no entry computation.

    >>> parse("ENTRY %main (x: f32[2]) -> f32[2] {\\n  ROOT %y = f32[2]{0} negate(%x)\\n}")[1]
    'main'
    """
    computations: dict[str, list[Instruction]] = {}
    entry, lines = None, None
    for line in text.splitlines():
        line = _COMMENT.sub("", line) if "/*" in line else line
        if (found := _COMPUTATION.match(line)) is not None:
            lines = computations.setdefault(found["name"], [])
            entry = found["name"] if found["entry"] else entry
        elif line == "}":
            lines = None
        elif lines is not None and (found := _INSTRUCTION.match(line)):
            lines.append(_instruction(found["name"], found["rest"]))
        elif lines:  # the attributes of a kernel go over several lines
            lines[-1] = dataclasses.replace(lines[-1], rest=lines[-1].rest + line)
    if entry is None:
        raise ValueError("the text of the compiled program has no ENTRY computation")
    return computations, entry


def _instruction(name: str, rest: str) -> Instruction:
    """Cuts "shape opcode(operands), attributes" into its parts."""
    depths = itertools.accumulate((letter == "(") - (letter == ")") for letter in rest)
    outside = (i for i, depth in enumerate(depths) if depth == 0 and rest[i] == " ")
    space = next(outside, len(rest))  # what is before it may be a tuple with spaces in it
    shape, operation = rest[:space], rest[space + 1 :]
    opcode, _, arguments = operation.partition("(")
    return Instruction(name, shape, opcode, arguments)


def shape_bytes(shape: str) -> int:
    """Returns the size of an array, or of all arrays of a tuple, in bytes.

    >>> shape_bytes("(bf16[2,3]{1,0}, f32[])"), shape_bytes("pred[8]")
    (16, 8)
    """
    bits = 0
    for dtype, sizes in _ARRAY.findall(shape):
        width = _BITS.get(dtype) or int((re.findall(r"\d+", dtype) or [0])[0])
        bits += width * math.prod(int(size) for size in sizes.split(",") if size)
    return bits // 8


def _runs(computations: dict[str, list[Instruction]], entry: str) -> Iterator:
    """Pairs of an instruction that is reached and the times that one step runs it."""
    waiting = [(entry, 1)]
    while waiting:
        name, times = waiting.pop()
        for instruction in computations.get(name, ()):
            yield instruction, times
            if instruction.opcode == "while":
                trips = _trips(computations, instruction)
                waiting.append((instruction.attribute(r"body=%?([\w.\-]+)"), times * trips))
                continue
            for called in _CALLED.findall(instruction.rest):
                names = called.strip("{}").replace("%", "").split(",")
                waiting += [(each.strip(), times) for each in names]
            if instruction.opcode == "call":
                waiting.append((instruction.attribute(r"to_apply=%?([\w.\-]+)"), times))


def _trips(computations: dict[str, list[Instruction]], loop: Instruction) -> int:
    """How often a loop goes round: what XLA noted, or the constant that its index runs up to.

    A loop whose length is not known beforehand counts once.
    """
    known = loop.attribute(r'known_trip_count"?:\{"n":"(\d+)"')
    if known is not None:
        return int(known)
    condition = computations.get(loop.attribute(r"condition=%?([\w.\-]+)"), [])
    bounds = [
        int(line.rest.partition(")")[0])
        for line in condition
        if line.opcode == "constant" and re.match(r"[su]32\[\]", line.shape)
    ]
    return bounds[0] if len(bounds) == 1 else 1


def collectives(text: str) -> list[Collective]:
    """Lists the exchanges between devices, each channel once, the most bytes first.

    Args:
      text: the program.
    """
    found: dict[str, Collective] = {}
    for instruction, times in _runs(*parse(text)):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        shape = _result_shape(instruction)
        channel = instruction.attribute(r"channel_id=(\d+)")
        if channel in (None, _SHARED_CHANNEL):
            channel = instruction.name
        if channel not in found:
            found[channel] = Collective(
                kind=kind,
                shape=", ".join(f"{d}[{s}]" for d, s in _ARRAY.findall(shape)),
                bytes=shape_bytes(shape),
                runs=times,
                source=_source(instruction),
            )
    return sorted(found.values(), key=lambda c: c.bytes * c.runs, reverse=True)


def _result_shape(instruction: Instruction) -> str:
    """The result's shape; the start of an asynchronous one returns (operands, results, ...)."""
    if not instruction.opcode.endswith("-start") or not instruction.shape.startswith("("):
        return instruction.shape
    parts, depth, begin = [], 0, 1
    for place, letter in enumerate(instruction.shape):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 1 and letter == "," or depth == 0:
            parts.append(instruction.shape[begin:place])
            begin = place + 1
    many = instruction.opcode == "all-reduce-start"  # its tuple holds results alone
    return instruction.shape if many or len(parts) < 2 else parts[1]


def _source(instruction: Instruction) -> str:
    """The names of the transformations, layers and operation, without the outermost one."""
    name = instruction.attribute(r'op_name="([^"]*)"') or ""
    return name.partition("/")[2] or name


def kernels(text: str) -> list[Kernel]:
    """Lists the Pallas kernels by name.

    Args:
      text: the program.
    """
    calls, runs, memory = collections.Counter(), collections.Counter(), {}
    for instruction, times in _runs(*parse(text)):
        target = instruction.attribute(r'custom_call_target="([^"]*)"')
        if instruction.opcode != "custom-call" or target not in _KERNELS:
            continue
        name = re.sub(r"(\.(\d+|clone|remat\d*|sunk))+$", "", instruction.name)
        calls[name] += 1
        runs[name] += times
        used = re.search(r'used_scoped_memory_configs":(\[[^\]]*\])', instruction.rest)
        sizes = re.findall(r'"size":"?(\d+)', used[1]) if used else []
        memory[name] = max(memory.get(name, 0), *map(int, sizes), 0)
    return [Kernel(name, calls[name], runs[name], memory[name]) for name in sorted(calls)]
