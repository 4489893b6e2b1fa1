"""Reads the collectives of a compiled program: what is moved, and how much of it."""

import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8}
_LINE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array of one collective."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def result_bytes(self) -> int:
        return self.size * _BYTES[self.dtype]


def collectives(text: str) -> list[Collective]:
    """All collectives of a compiled program's text, one entry an array of the result."""
    found = []
    for line in text.splitlines():
        match = _LINE.search(line)
        if match:
            for dtype, shape in _ARRAY.findall(match["result"]):
                dims = tuple(int(n) for n in shape.split(",") if n)
                found.append(Collective(match["kind"], dtype, dims))
    return found


def bytes_received(text: str, devices: int) -> int:
    """Bytes that one of `devices` devices receives: all-gathers and permutes alone may occur."""
    total = 0
    for found in collectives(text):
        if found.kind == "all-gather":
            total += found.result_bytes * (devices - 1) // devices
        elif found.kind == "collective-permute":
            total += found.result_bytes
        else:
            raise AssertionError(f"unexpected {found}")
    return total
