"""What a checkpoint holds: a state in parts that can be read apart, and a table of its leaves."""

import pathlib
from typing import Any

import jax

from ttt_jax.train_step import TrainState


def parts_of(state: TrainState) -> dict[str, Any]:
    """Cuts a state into the parts of a checkpoint, which can be read apart; no empty ones."""
    names = ("params", "buffers", "average")
    parts = {name: getattr(state, name) for name in names if getattr(state, name)}
    return parts | {"rest": state._replace(**{name: {} for name in names})}


def leaf_table(tree: Any) -> dict[str, list[Any]]:
    """Maps the path of each leaf to [shape, dtype]."""
    tree = tree._asdict() if isinstance(tree, TrainState) else tree
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [list(x.shape), str(x.dtype)]
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def check_leaves(
    saved: dict[str, Any],
    wanted: dict[str, Any],
    path: pathlib.Path,
    advice: str = "resume with the configuration that wrote it",
) -> None:
    """Checks that a checkpoint's leaves are those that are wanted.

    Args:
      saved, wanted: of `leaf_table`; saved ones that are not wanted are passed over.
      path: of the checkpoint.
      advice: the way out.

    Raises:
      ValueError: names the first leaf whose shape or dtype differs or that is missing.
    """
    for name, want in wanted.items():
        have = saved.get(name)
        if have != want:
            raise ValueError(
                f"checkpoint {path}: {name} is {have or 'missing'} there and {want} in this run "
                f"(shape, dtype); {advice}"
            )
