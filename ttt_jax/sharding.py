"""The device mesh, the rules from logical axis names to mesh axes, and their application.

Models name the axes of their parameters and activations ("embed", "heads", ...). This module
alone decides which mesh axis each name is cut over, so a model's code does not change with the
number of devices. The mesh has Auto axes: the compiler (GSPMD) places the collectives.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "seq", "model")

# Logical name -> mesh axes. A name that is missing here, and None, stay whole on every device.
LOGICAL_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "images": ("data", "fsdp", "seq"),  # rows that are not cut themselves: seq takes rows, too
    "parts": ("seq", "data", "fsdp"),  # rows that are parts of scenes, see `layers.scene_parts`
    "seq": ("seq",),
    "embed": ("fsdp",),
    "mlp": ("model",),
    "heads": ("model",),
    "vocab": ("model",),
}

AxisNames = Sequence[str | None]


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    seq: int = 1,
    model: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Builds a mesh with the axes data, fsdp, seq and model.

    Args:
      data, fsdp, seq, model: devices along each axis; at most one is -1 and takes what is left.
      devices: the devices to use, all of `jax.devices()` by default.

    Returns:
      A `jax.sharding.Mesh` whose axes are of type Auto (jax.make_mesh would make them Explicit).

    Raises:
      ValueError: the sizes do not multiply to the number of devices.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'seq': 1, 'model': 1}
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, seq, model]
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0 and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(
            f"config.mesh: data={data}, fsdp={fsdp}, seq={seq}, model={model} do not multiply to "
            f"the {len(devices)} devices at hand; set one of them to -1 to take what is left"
        )
    return jax.make_mesh(tuple(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def partition_spec(
    names: AxisNames, shape: Sequence[int], mesh_shape: dict[str, int]
) -> PartitionSpec:
    """Maps the logical names of an array's axes to mesh axes.

    An axis that its mesh axes do not divide stays whole, and so does a second axis that asks for
    a mesh axis already in use: both are right for every shape, and only cost memory.

    Args:
      names: one logical name or None per axis; shorter than `shape` leaves the rest whole.
      shape: the array's shape.
      mesh_shape: size of each mesh axis, by name.

    Returns:
      The PartitionSpec, one entry per name.

    >>> tuple(partition_spec(("vocab", "embed"), (512, 64), {"fsdp": 2, "model": 2}))
    ('model', 'fsdp')
    >>> tuple(partition_spec(("vocab", "embed"), (259, 64), {"fsdp": 2, "model": 2}))
    (None, 'fsdp')
    """
    used: set[str] = set()
    entries: list[Any] = []
    for name, size in zip(names, shape, strict=False):
        axes = tuple(a for a in LOGICAL_RULES.get(name, ()) if a in mesh_shape and a not in used)
        divides = bool(axes) and size % math.prod(mesh_shape[a] for a in axes) == 0
        if not divides:
            entries.append(None)
            continue
        used.update(axes)
        entries.append(axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*entries)


def constrain(x: jax.Array, names: AxisNames) -> jax.Array:
    """Asks for the sharding that the logical names stand for; returns `x` itself without a mesh.

    The mesh is the ambient one (`with jax.set_mesh(mesh):`). Values are unchanged.

    Args:
      x: array of any shape.
      names: one logical name or None per axis of `x`.

    Raises:
      ValueError: `names` has another length than `x` has axes.

    >>> import jax.numpy as jnp
    >>> constrain(jnp.ones((2, 3)), ("batch", "embed")).shape
    (2, 3)
    """
    if len(names) != x.ndim:
        raise ValueError(f"names={tuple(names)} must name the {x.ndim} axes of shape {x.shape}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    # Inside shard_map an axis is Manual: the array is already one device's part along it.
    sizes = {a: mesh.shape[a] for a in mesh.axis_names if a not in mesh.manual_axes}
    if math.prod(sizes.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, sizes))


def devices_along(name: str) -> int:
    """Counts the devices over which the ambient mesh cuts a logical axis; 1 without a mesh.

    Args:
      name: of `LOGICAL_RULES`.

    >>> devices_along("seq")
    1
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = [axis for axis in LOGICAL_RULES[name] if axis not in mesh.manual_axes]
    return 1 if mesh.empty else math.prod(mesh.shape.get(axis, 1) for axis in free)


def sequence_parts(length: int) -> int:
    """Counts the stretches into which the ambient mesh cuts a sequence; 1 without a mesh.

    Args:
      length: tokens of a row.

    Raises:
      ValueError: the mesh axis does not divide the length.

    >>> sequence_parts(512)
    1
    """
    parts = devices_along("seq")
    if length % parts:
        raise ValueError(
            f"sequence_length={length} must be a multiple of mesh.seq={parts}: every device holds "
            "a stretch of the same length; change one of them"
        )
    return parts


def sequence_axis(length: int) -> str | None:
    """Names the mesh axis over which the ambient mesh cuts a sequence, or None.

    Args:
      length: tokens of a row.

    Raises:
      ValueError: as `sequence_parts`.

    >>> print(sequence_axis(512))
    None
    """
    return LOGICAL_RULES["seq"][0] if sequence_parts(length) > 1 else None


def on_each_device(
    function: Callable[..., Any], arrays: Sequence[jax.Array], names: Sequence[AxisNames], out: Any
) -> Any:
    """Calls a function that treats the named axes' entries apart, on each device's own entries.

    For what the compiler cannot cut by itself: a TPU refuses a Pallas kernel whose operands lie on
    several devices, and a GPU gathers them. Nothing is communicated but by the function itself.
    Without a mesh, or inside a `jax.shard_map` over all of it, this is `function(*arrays)`.

    Args:
      function: of arrays like `arrays`, but for the sizes of the axes that are cut.
      arrays: its arguments.
      names: one logical name or None per axis, for each argument.
      out: the same for the result: a tuple of names, or a pytree of such tuples.

    Returns:
      The result for the whole arrays.

    >>> import jax.numpy as jnp
    >>> on_each_device(jnp.sin, [jnp.zeros((2, 3))], [("batch", None)], ("batch", None)).shape
    (2, 3)
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {a: mesh.shape[a] for a in mesh.axis_names if a not in mesh.manual_axes}
    if mesh.empty or math.prod(sizes.values()) == 1:
        return function(*arrays)
    specs = [partition_spec(n, x.shape, sizes) for x, n in zip(arrays, names, strict=True)]
    # The result is cut like the arguments, whose sizes have decided what can be cut.
    cut = {name: axes for n, spec in zip(names, specs, strict=True)
           for name, axes in zip(n, spec, strict=True)}  # fmt: skip
    out_specs = jax.tree.map(
        lambda n: PartitionSpec(*(cut.get(name) for name in n)),
        out,
        is_leaf=lambda n: isinstance(n, tuple) and all(isinstance(x, str | None) for x in n),
    )
    local = jax.shard_map(
        function, in_specs=tuple(specs), out_specs=out_specs, axis_names=set(sizes), check_vma=False
    )
    return local(*arrays)


def param(value: jax.Array, names: AxisNames) -> nnx.Param:
    """Makes a parameter that carries its logical axis names and needs no mesh to be created.

    Flax would apply `out_sharding` at once and fail without a mesh; `eager_sharding=False`
    leaves that to `init_sharded`, which places every parameter while it is being created.

    Args:
      value: the initial value.
      names: one logical name or None per axis.

    >>> import jax.numpy as jnp
    >>> param(jnp.ones((2, 3)), ("embed", "mlp")).get_metadata()["out_sharding"]
    ('embed', 'mlp')
    """
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)


def axis_names(params: nnx.State) -> dict[str, Any]:
    """Reads the logical names of each parameter.

    Args:
      params: the `nnx.Param` state of a model, values or shapes.

    Returns:
      Nested dicts as of `nnx.to_pure_dict`, with a tuple of names (one per axis) at each leaf;
      an unnamed parameter has None for every axis.
    """

    def names_of(variable: nnx.Variable) -> tuple[str | None, ...]:
        names = variable.get_metadata().get("out_sharding")
        return (None,) * variable.ndim if names is None else tuple(names)

    flat = {path: names_of(variable) for path, variable in nnx.to_flat_state(params)}
    return nnx.traversals.unflatten_mapping(flat)


def param_shardings(names: Any, abstract: Any, mesh: Mesh) -> Any:
    """Turns `axis_names` and the shapes of the same parameters into NamedShardings.

    Args:
      names: nested dicts with a tuple of logical names at each leaf.
      abstract: the same dicts with arrays or `jax.ShapeDtypeStruct`s at the leaves.
      mesh: a mesh of `make_mesh`.
    """
    return jax.tree.map(
        lambda leaf, n: NamedSharding(mesh, partition_spec(n, leaf.shape, dict(mesh.shape))),
        abstract,
        names,
    )


def like_params(tree: Any, params: Any, mesh: Mesh) -> Any:
    """Shards a training state: each leaf that mirrors a parameter is placed like it.

    A leaf mirrors a parameter if its path ends with the parameter's path and the shapes agree
    (the parameter itself, Adam's moments, Muon's momentum); every other leaf, such as a step
    count, is replicated.

    Args:
      tree: the state, arrays or `jax.ShapeDtypeStruct`s.
      params: the parameters, likewise, each with a sharding.
      mesh: the mesh.

    Returns:
      `tree` with a NamedSharding in place of each leaf.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    by_path = {
        path: (leaf.shape, leaf.sharding)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            shape, sharding = by_path.get(path[start:], (None, replicated))
            if shape == leaf.shape:
                return sharding
        return replicated

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh, batch_size: int, rows: str = "batch") -> NamedSharding:
    """Returns the sharding of a batch [B, ...]: its rows are cut, the rest of each is whole.

    Args:
      mesh: a mesh of `make_mesh`.
      batch_size: B.
      rows: logical name of the rows: "batch", or "images", which seq splits, too.

    Raises:
      ValueError: the rows do not divide evenly over the devices that split them.

    >>> tuple(batch_sharding(make_mesh(devices=jax.devices()[:1]), 4).spec)
    (('data', 'fsdp'),)
    """
    axes = LOGICAL_RULES[rows]
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if batch_size % parts:
        raise ValueError(
            f"config.data.batch_size={batch_size} (over accumulation_steps) must be a multiple of "
            f"{' * '.join(f'mesh.{axis}' for axis in axes)} = {parts}: change the batch size or "
            "the mesh"
        )
    return NamedSharding(mesh, PartitionSpec(axes))


def row_block(mesh: Mesh, rows: str = "batch") -> tuple[int, int]:
    """Says which block of each batch's rows this process reads, and how many blocks there are.

    Processes whose devices hold the same rows, because an axis that does not split rows spans
    them, read the same ones.

    Args:
      mesh: a mesh of `make_mesh`.
      rows: as in `batch_sharding`.

    Returns:
      (number of this process's block, number of blocks).

    Raises:
      ValueError: two processes hold some rows in common and others not.

    >>> row_block(make_mesh(devices=jax.devices()[:1]))
    (0, 1)
    """
    parts = math.prod(mesh.shape[axis] for axis in LOGICAL_RULES[rows])
    placement = batch_sharding(mesh, parts, rows)
    held: dict[int, set[int]] = {}
    for device, (cut,) in placement.devices_indices_map((parts,)).items():
        held.setdefault(device.process_index, set()).add(cut.start or 0)
    blocks = sorted({tuple(sorted(found)) for found in held.values()})
    if sum(map(len, blocks)) != parts or len({len(block) for block in blocks}) != 1:
        raise ValueError(
            f"config.mesh: {dict(mesh.shape)} gives the {len(held)} processes rows of a batch that "
            "overlap in part; make the product of the axes that split no rows a divisor or a "
            f"multiple of the {jax.local_device_count()} devices of a process"
        )
    return blocks.index(tuple(sorted(held[jax.process_index()]))), len(blocks)


def place_batch(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Puts this process's rows of a batch on its devices.

    Args:
      batch: arrays [rows of this process, ...], those of its `row_block`.
      sharding: of `batch_sharding`.

    Returns:
      Global arrays [B, ...] with that sharding.
    """
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in batch.items()
    }
