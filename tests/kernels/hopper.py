"""What the checks of the Hopper kernels share: how a case runs, its program, its errors.

A case runs in three ways. "chip": the kernels, on a Hopper GPU (`pytest -m hopper`). "lowered": the
same program made for CUDA and not run, which finds what does not lower (`pytest -m exhaustive`).
"xla": the operation without kernels, for a few small cases, some of them in the ordinary suite; it
keeps the checks themselves right where there is no GPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention_battery import BF16_RMS, rms_error
from ttt_kernels import compat

_MARKS = {"chip": pytest.mark.hopper, "lowered": pytest.mark.exhaustive}
_H200 = jax.sharding.AbstractMesh(
    (1,), ("one",), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
)
_STRANGE = 2**26  # numbers left behind in the memory that a second run gets
# Lowering asks for the layouts of registers, which older versions do not infer.
_LOWERS = compat.layout_problem() is None


def ways(cases, ordinary=(), xla=()):
    """Parameters `case, way` of a test: all cases on the chip and lowered, some by XLA.

    Args:
      cases: {name: case}, the most valuable first.
      ordinary: names of cases that the ordinary suite runs by XLA.
      xla: those of more that exhaustive runs do.
    """
    found = [(name, way, mark) for way, mark in _MARKS.items() for name in cases]
    found += [(name, "xla", ()) for name in ordinary]
    found += [(name, "xla", pytest.mark.exhaustive) for name in xla]
    return pytest.mark.parametrize(
        "case, way", [pytest.param(cases[n], w, marks=m, id=f"{n} {w}") for n, w, m in found]
    )


def implementation(way, kernels="mosaic_gpu"):
    """The implementation that a way asks for by name."""
    return "xla" if way == "xla" else kernels


def run(way, function, *arguments, kernels=()):
    """The results of `function(*arguments)` in one program, or None where it is lowered alone.

    Asserts that the program holds the kernels with these names, and that on the chip a second run
    gives the same bits.
    """
    jitted = jax.jit(function)
    if way == "xla":
        return jitted(*arguments)
    if way == "chip":
        lowered = jitted.lower(*arguments)
    else:
        if not _LOWERS:
            pytest.skip(compat.layout_problem())
        with pytest.MonkeyPatch.context() as patch, jax.sharding.use_abstract_mesh(_H200):
            patch.setattr(compat, "hopper_problem", lambda: None)
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    names = _names(lowered.as_text())
    assert set(kernels) <= names, f"{sorted(set(kernels) - names)} not in {sorted(names)}"
    return _twice(lowered.compile(), *arguments) if way == "chip" else None


def _twice(program, *arguments):
    """The results of a program that must not depend on what the memory held before it."""
    first = jax.block_until_ready(program(*arguments))
    strange = jax.block_until_ready(jnp.full(_STRANGE, jnp.nan))
    strange.delete()
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first),
                            jax.tree.leaves(program(*arguments)), strict=True):  # fmt: skip
        same = np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert same, f"{jax.tree_util.keystr(path)} differs from run to run"
    return first


def _names(program) -> set[str]:
    """The kernels' names. Constants are long words, through which no pattern should look."""
    ends = (match.start() for match in re.finditer("_mosaic_gpu", program))
    mosaic = {program[max(0, end - 60) : end].rsplit("00", 1)[-1] for end in ends}
    return mosaic | set(re.findall(r'\bname = "(\w+)"', program))


def exact(function, *arguments):
    """The results of a reference in float32, without TF32."""
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arguments
    )
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*wide)


def check(got, want, plain=None, bound=BF16_RMS):
    """Asserts that the relative RMS of every array is at most a bound; prints all of them.

    Args:
      got, want: pytrees of equal structure.
      plain: results of XLA in got's precision, where roundings are amplified and no bound of its
        own is known: then `bound` on top of 1.2 times XLA's error.
      bound: a number.
    """
    got, want, plain = ({} if t is None else _named(t) for t in (got, want, plain))
    assert got.keys() == want.keys()
    errors, bad = [], []
    for name, expected in want.items():
        error, limit = rms_error(got[name], expected), bound
        text = f"{name} {error:.1e}"
        if plain:
            other = rms_error(plain[name], expected)
            text, limit = f"{text} ({other:.1e})", bound + 1.2 * other
        errors.append(text)
        if not error <= limit:  # NaN is not
            bad.append(f"{text} above {limit:.1e}")
    print("errors:", ", ".join(errors))
    assert not bad, "; ".join(bad)


def _named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)
    }  # fmt: skip


def scattered(tree):
    """Arrays [batch, time, heads, ...] as rows, heads first, that lie between rows of NaN."""
    def one(x):
        x = jnp.swapaxes(x, 1, 2) if x.ndim > 2 else x
        strange = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 7
        return jnp.stack([jnp.full_like(x, strange), x], 1).reshape(-1, *x.shape[1:])

    return jax.tree.map(one, tree)


def gathered(tree):
    """Undoes `scattered`, in the program that uses the arrays."""
    return jax.tree.map(lambda x: jnp.swapaxes(x[1::2], 1, 2) if x.ndim > 2 else x[1::2], tree)


def with_nan(tree, segment_ids):
    """Arrays [batch, time, ...] with NaN in what is padding."""
    def one(x):
        real = (segment_ids >= 0).reshape(*segment_ids.shape, *[1] * (x.ndim - 2))
        return jnp.where(real, x, jnp.nan)

    return jax.tree.map(one, tree)


def draw(seed, *shape, dtype=jnp.bfloat16):
    """Random normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)
