"""The solve inside the delta rule: against LAPACK, its derivatives, and what runs on a CPU."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.tolerances import assert_close, tolerance
from ttt_kernels import delta_rule
from ttt_kernels.delta_rule.solve import solve_unit_lower


def lapack(lower, right):
    return lax.linalg.triangular_solve(
        lower, right, left_side=True, lower=True, unit_diagonal=True
    )


def make_system(rows, repeat, rate, seed=0):
    """A delta rule's systems [3, rows, rows] of unit keys, and right sides [3, rows, 5]."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(3, rows, 4)) * [[[not repeat]]] + rng.normal(size=(3, 1, 4)) * repeat
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    lower = np.tril(rate * keys @ keys.swapaxes(-1, -2), -1)
    return np.float32(lower), np.float32(rng.normal(size=(3, rows, 5)))


@pytest.mark.parametrize("rows", [1, 2, 13, 48, 64])
@pytest.mark.parametrize(("repeat", "rate"), [(False, 1.0), (True, 1.0), (True, 1.9)])
def test_is_as_exact_as_a_substitution(rows, repeat, rate):
    lower, right = make_system(rows, repeat, rate)
    value = np.asarray(jax.jit(solve_unit_lower)(lower, right))
    with jax.enable_x64(True):
        exact = np.asarray(lapack(*map(jnp.float64, (lower, right))))
        wide = np.asarray(jax.jit(solve_unit_lower)(*map(jnp.float64, (lower, right))))
    size = np.abs(exact).max()
    assert np.abs(value - exact).max() < 2e-6 * size
    assert np.abs(wide - exact).max() < 1e-14 * size


def test_derivatives_of_both_kinds_and_both_orders():
    with jax.enable_x64(True):
        system = tuple(map(jnp.float64, make_system(6, False, 1.0)))

        def loss(solve):
            # The entries on and above the diagonal are not read.
            return lambda x: jnp.sum(jnp.sin(solve(jnp.tril(x[0], -1), x[1])))

        for derive in (jax.grad, lambda f: jax.jvp(f, (system,), (system,))[1], jax.hessian):
            ours, theirs = (derive(loss(solve)) for solve in (solve_unit_lower, lapack))
            if callable(ours):
                ours, theirs = jax.jit(ours)(system), jax.jit(theirs)(system)
            jax.tree.map(lambda a, b: assert_close(a, b, tolerance("float64", 36)), ours, theirs)


def test_no_solver_of_lapack_is_in_the_program_of_a_cpu():
    """Two of its batched solves at once wait for each other for ever (jaxlib 0.10.2)."""

    def program(f, *args):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cpu",)).as_text()

    assert "lapack" in program(lapack, *make_system(4, False, 1.0))
    x, beta = jnp.ones((1, 31, 2, 4)), jnp.ones((1, 31, 2))
    gradient = jax.grad(lambda x: delta_rule(x, x, x, beta=beta)[0].sum())
    assert "lapack" not in program(gradient, x)


_LOOP = """
import jax, jax.numpy as jnp, ttt_jax
spec = ttt_jax.presets.gated_deltanet()
weights = spec.init(jax.random.key(1), heads=2, key_dim=16)
q, k, v = jax.random.normal(jax.random.key(0), (3, 16, 31, 2, 16))
k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
lr, forget = jax.nn.sigmoid(v[..., 0]), jax.nn.sigmoid(v[..., 1] + 3)
loss = lambda q, k, v, lr, forget: jnp.sum(
    ttt_jax.ttt(spec, weights, q, k, v, lr=lr, forget=forget)[0] ** 2)
step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
for _ in range(400):
    float(step(q, k, v, lr, forget)[0])
print("finished")
"""


@pytest.mark.exhaustive
def test_four_hundred_gradients_do_not_stand_still():
    subprocess.run([sys.executable, "-c", _LOOP], check=True, timeout=120)
