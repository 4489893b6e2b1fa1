"""Official names against ours: what a table of tensors is, and both ways through it.

A table maps each official tensor to the parameters that hold it. All checks are made before a
value is returned, so a mismatch leaves nothing half converted.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Path = tuple[str | int, ...]
Map = Callable[[np.ndarray], np.ndarray]


def _as_it_is(x: np.ndarray) -> np.ndarray:
    return x


@dataclasses.dataclass(frozen=True)
class Entry:
    """One official tensor.

    Attributes:
      paths: the parameters that hold it, paths in the model's nested dict. Several of them are
        parts of equal size, in this order, along the official tensor's first axis.
      ours: official layout (of one part) to ours.
      official: our layout to the official one.

    Example:
      >>> transposed = Entry((("out", "kernel"),), np.transpose, np.transpose)
      >>> transposed.ours(np.zeros((2, 3))).shape
      (3, 2)
    """

    paths: tuple[Path, ...]
    ours: Map = _as_it_is
    official: Map = _as_it_is


Table = Mapping[str, Entry]


def linear(*paths: Path, out_shape: tuple[int, ...] | None = None) -> Entry:
    """A torch ``Linear.weight`` ``[out, in]``, ours ``[in, out]`` or ``[in, *out_shape]``.

    Example:
      >>> linear(("rate", "kernel"), out_shape=(2, 3)).ours(np.zeros((6, 4))).shape
      (4, 2, 3)
    """

    def ours(w: np.ndarray) -> np.ndarray:
        return w.T if out_shape is None else w.T.reshape(w.shape[1], *out_shape)

    return Entry(paths, ours, lambda w: w.reshape(w.shape[0], -1).T)


def vector(*paths: Path, shape: tuple[int, ...] | None = None) -> Entry:
    """A vector, ours of ``shape`` where there is one.

    Example:
      >>> vector(("bias",), shape=(3, 2)).ours(np.zeros(6)).shape
      (3, 2)
    """
    return Entry(paths, lambda w: w if shape is None else w.reshape(shape), np.ravel)


def swapped(path: Path) -> Entry:
    """An array whose last two axes are the other way round.

    Example:
      >>> swapped(("w0",)).ours(np.zeros((1, 2, 3))).shape
      (1, 3, 2)
    """

    def swap(w: np.ndarray) -> np.ndarray:
        return np.swapaxes(w, -1, -2)

    return Entry((path,), swap, swap)


def nested(table: Table, name: str, *path: str | int) -> dict[str, Entry]:
    """The table of a part of a model, of whose names and paths these are the beginnings.

    Example:
      >>> found = nested({"weight": swapped(("kernel",))}, "blocks.0.", "layers", 0)
      >>> found["blocks.0.weight"].paths
      (('layers', 0, 'kernel'),)
    """
    return {
        name + inside: dataclasses.replace(entry, paths=tuple((*path, *p) for p in entry.paths))
        for inside, entry in table.items()
    }


def from_official(
    table: Table,
    tensors: Mapping[str, np.ndarray],
    shapes: Mapping,
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict:
    """The parameters of a model, all of them from the official tensors.

    Args:
      table: official name to ``Entry``; entries whose parameters the model does not have are not
        used.
      tensors: official name to array.
      shapes: the model's parameters as nested dicts of anything with ``shape`` and ``dtype``.
      ignored: names of official tensors that hold nothing learned.

    Returns:
      Nested dicts like ``shapes`` of arrays of its dtypes.

    Raises:
      ValueError: a tensor is missing, has no place, or has another shape; the message names it
        and both shapes.

    Example:
      >>> table = {"fc.weight": linear(("fc", "kernel"))}
      >>> shapes = {"fc": {"kernel": np.zeros((3, 2))}}
      >>> from_official(table, {"fc.weight": np.zeros((2, 4))}, shapes)
      Traceback (most recent call last):
      ...
      ValueError: tensor 'fc.weight' is [2, 4] in the file, but this model's fc/kernel makes it
      [2, 3]; ...
    """
    flat = dict(flatten(shapes))
    used = {name: entry for name, entry in table.items() if entry.paths[0] in flat}
    values: dict[Path, np.ndarray] = {}
    for name, entry in used.items():
        targets = [flat[path] for path in entry.paths]
        wanted = _official_shape(entry, [target.shape for target in targets])
        if name not in tensors:
            raise ValueError(f"tensor {name!r} ({list(wanted)}) is missing in the file; {_HINT}")
        array = tensors[name]
        if array.shape != wanted:
            raise ValueError(
                f"tensor {name!r} is {list(array.shape)} in the file, but this model's "
                f"{_joined(entry.paths)} makes it {list(wanted)}; {_HINT}"
            )
        parts = np.split(array, len(targets)) if len(targets) > 1 else [array]
        for path, part, target in zip(entry.paths, parts, targets, strict=True):
            values[path] = np.ascontiguousarray(entry.ours(part)).astype(target.dtype)
    extra = [name for name in tensors if name not in used and not ignored(name)]
    if extra:
        raise ValueError(
            f"tensor {extra[0]!r} ({list(tensors[extra[0]].shape)}) of the file has no place in "
            f"this model, nor have {len(extra) - 1} others; {_HINT}"
        )
    empty = [path for path in flat if path not in values]
    if empty:
        raise ValueError(
            f"parameter {_joined(empty[:1])} is not in the official code; {len(empty)} in all: it "
            "has variant 0 alone"
        )
    return unflatten(values)


_HINT = "give the configuration that the weights were trained with"


def to_official(table: Table, params: Mapping) -> dict[str, np.ndarray]:
    """The official tensors of a model's parameters, in the order of the table.

    Args:
      table: official name to ``Entry``.
      params: nested dicts of arrays.

    Returns:
      Official name to array.

    Raises:
      ValueError: a parameter has no official name; the message names it.
    """
    flat = dict(flatten(params))
    out = {}
    for name, entry in table.items():
        if entry.paths[0] in flat:
            parts = [entry.official(np.asarray(flat.pop(path))) for path in entry.paths]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
            out[name] = np.ascontiguousarray(joined)
    if flat:
        raise ValueError(
            f"parameter {_joined(list(flat)[:1])} has no name in the official code, nor have "
            f"{len(flat) - 1} others: it has variant 0 alone"
        )
    return out


def flatten(tree: Mapping, path: Path = ()) -> list[tuple[Path, Any]]:
    """``(path, leaf)`` of nested dicts.

    Example:
      >>> flatten({"a": {0: 1.0}})
      [(('a', 0), 1.0)]
    """
    if not isinstance(tree, Mapping):
        return [(path, tree)]
    return [pair for key, value in tree.items() for pair in flatten(value, (*path, key))]


def unflatten(flat: Mapping[Path, Any]) -> dict:
    """The inverse of ``flatten``, from path to leaf.

    Example:
      >>> unflatten({("a", 0): 1.0})
      {'a': {0: 1.0}}
    """
    tree: dict = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def stack(tree: Any, like: Any) -> Any:
    """Layers that ``tree`` counts (0, 1, …) and ``like`` does not, as arrays with a first axis.

    Example:
      >>> layers = {0: {"w": np.zeros(2)}, 1: {"w": np.ones(2)}}
      >>> stack({"layers": layers}, {"layers": {"w": None}})["layers"]["w"].tolist()
      [[0.0, 0.0], [1.0, 1.0]]
    """
    if not isinstance(tree, Mapping):
        return tree
    if 0 in tree and 0 not in like:
        flats = [dict(flatten(tree[index])) for index in sorted(tree)]
        tree = unflatten({path: np.stack([flat[path] for flat in flats]) for path in flats[0]})
    return {key: stack(value, like[key]) for key, value in tree.items()}


def unstack(tree: Any, like: Any) -> Any:
    """The inverse of ``stack``: ``like`` counts the layers and ``tree`` stacks them.

    Example:
      >>> layers = {0: {"w": None}, 1: {"w": None}}
      >>> unstack({"w": np.array([[0.0], [1.0]])}, layers)[1]["w"].tolist()
      [1.0]
    """
    if not isinstance(tree, Mapping):
        return tree
    if 0 in like and 0 not in tree:
        flat = dict(flatten(tree))
        tree = {i: unflatten({path: leaf[i] for path, leaf in flat.items()}) for i in like}
    return {key: unstack(value, like[key]) for key, value in tree.items()}


def _official_shape(entry: Entry, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """By the maps themselves, on arrays that take no memory."""
    first = entry.official(np.broadcast_to(np.float32(0), shapes[0])).shape
    return (first[0] * len(shapes), *first[1:]) if len(shapes) > 1 else first


def _joined(paths) -> str:
    return ", ".join("/".join(map(str, path)) for path in paths)
