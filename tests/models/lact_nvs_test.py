"""LaCT-NVS: sizes, the reduction, two stages, independence of scenes and views, errors."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tolerances import assert_close, tolerance
from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.spec import Span
from ttt_jax.layers import scheduled_ttt
from ttt_jax.layers.rays import camera_rays, pluecker_rays
from ttt_jax.layers.scheduled_ttt import ScheduledTTT
from ttt_jax.models import build, lact_nvs
from ttt_jax.models.lact_nvs import Cameras, LactNVS

_SMALL = lact_nvs.LactNVSConfig(
    hidden_size=16, num_layers=2, num_attention_heads=2, num_fast_heads=2, patch_size=4,
    initializer_range=0.3, base_rate=1.0,
)  # fmt: skip


def _cameras(random, batch, views, size):
    """Cameras with random rotations, as a QR factor with determinant +1."""
    q, r = np.linalg.qr(random.standard_normal((batch, views, 3, 3)))
    q = q * np.sign(np.linalg.det(q))[..., None, None]
    poses = np.zeros((batch, views, 4, 4))
    poses[..., :3, :3], poses[..., 3, 3] = q, 1
    poses[..., :3, 3] = random.standard_normal((batch, views, 3))
    camera = [size * 1.1, size * 0.9, size / 2, size / 2 + 0.3]
    intrinsics = np.broadcast_to(camera, (batch, views, 4))
    return Cameras(jnp.asarray(intrinsics, jnp.float32), jnp.asarray(poses, jnp.float32))


def _scene(batch=2, views=3, targets=2, size=8):
    random = np.random.default_rng(0)
    images = jnp.asarray(random.random((batch, views, size, size, 3)), jnp.float32)
    return images, _cameras(random, batch, views, size), _cameras(random, batch, targets, size)


@pytest.mark.parametrize(("name", "size"), [("14", 182_481_706), ("24", 312_298_056)])
def test_parameters_are_those_of_the_official_code(name, size):
    """The official code's count: 22 d² a block, its norms and rates, embedding and decoder."""
    model = nnx.eval_shape(lambda: build(lact_nvs.preset(name)))
    layers, d = int(name), 768
    block = 3 * d * d + d * d + 2 * 64 + 3 * 2 * d * d + 4 * d * d + (3 * d + 3) + d + 8 * d * d
    expected = layers * (block + 3 * d) + 12 * 64 * d + d + d + d * 3 * 64
    assert model.num_params() == expected == size
    assert nnx.eval_shape(lambda: build(lact_nvs.preset("114m"))).num_params() == 114_100_332


def test_rays_are_those_of_the_pinhole():
    """A point on the ray, projected by K [R | t]⁻¹, falls on the pixel's centre."""
    cameras = _cameras(np.random.default_rng(1), 1, 2, 6)
    origins, directions = (np.asarray(x, np.float64) for x in camera_rays(cameras, 6, 5))
    assert_close(np.linalg.norm(directions, axis=-1), np.ones((1, 2, 6, 5)), 1e-6)
    for view in range(2):
        fx, fy, cx, cy = np.asarray(cameras.intrinsics[0, view], np.float64)
        world_to_camera = np.linalg.inv(np.asarray(cameras.poses[0, view], np.float64))
        point = origins[0, view] + 2.5 * directions[0, view]
        local = point @ world_to_camera[:3, :3].T + world_to_camera[:3, 3]
        assert np.all(local[..., 2] > 0)
        x = fx * local[..., 0] / local[..., 2] + cx
        y = fy * local[..., 1] / local[..., 2] + cy
        assert_close(x, np.broadcast_to(np.arange(5) + 0.5, (6, 5)), 1e-5)
        assert_close(y, np.broadcast_to(np.arange(6)[:, None] + 0.5, (6, 5)), 1e-5)
    moment = np.asarray(pluecker_rays(cameras, 6, 5))[..., 6:]
    assert_close(moment, np.cross(origins, directions), 1e-5)


@pytest.mark.parametrize(
    "variant",
    [6, *(pytest.param(v, marks=pytest.mark.exhaustive) for v in range(6))],
)
def test_two_stages_are_one_pass(variant):
    """Also: target views do not see each other, nor scenes other scenes; gradients reach all."""
    model = build(dataclasses.replace(_SMALL, variant=variant), nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    images, cameras, targets = _scene()

    @jax.jit
    def run(params, images, cameras, targets):
        def loss(params):
            runner = nnx.merge(graphdef, params)
            out = runner(images, cameras, targets)
            return jnp.sum(jnp.square(out - 0.3)), out

        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        runner = nnx.merge(graphdef, params)
        states = runner.reconstruct(images, cameras)
        last = jax.tree.map(lambda x: x[:, 1:], targets)
        alone = runner.render(states, last, *images.shape[2:4])
        return out, runner.render(states, targets, *images.shape[2:4]), alone, gradients

    out, staged, alone, gradients = run(params, images, cameras, targets)
    tol = tolerance("float32", images.shape[1] * 4)
    assert out.shape == (2, 2, 8, 8, 3) and float(out.min()) >= 0 and float(out.max()) <= 1
    assert_close(staged, out, tol)
    assert_close(alone, out[:, 1:], tol)
    for path, leaf in nnx.to_flat_state(gradients):
        assert np.isfinite(leaf[...]).all() and np.abs(leaf[...]).max() > 0, path
    swapped = run(params, images[::-1], *jax.tree.map(lambda x: x[::-1], (cameras, targets)))[0]
    assert_close(swapped[::-1], out, tol)
    changed = run(params, images.at[:, 0].add(0.2), cameras, targets)[0]
    assert np.abs(changed - out).max() > 1e-4, "the input views do not reach the target views"


@functools.partial(jax.jit, static_argnums=0)
def _both_paths(graphdef, params, scene):
    """The one-pass rendering, the two-stage one, and the states between the stages."""
    images, cameras, targets = scene
    model = nnx.merge(graphdef, params)
    states = model.reconstruct(images, cameras)
    staged = model.render(states, targets, *images.shape[2:4])
    return model(images, cameras, targets), staged, states


def test_direction_turns_the_update_and_query_reads_with_the_key():
    """In both paths; the first layer's update is known, and so is a model that reads with keys."""
    plain = dataclasses.replace(_SMALL, variant=6)
    graphdef, params = nnx.split(build(plain, nnx.Rngs(0)), nnx.Param)
    options = {"ascent": dict(direction="ascent"), "key": dict(query="key")}
    graphs = {
        name: nnx.split(build(dataclasses.replace(plain, **change), nnx.Rngs(0)), nnx.Param)[0]
        for name, change in options.items()
    }
    results = {"plain": _both_paths(graphdef, params, _scene())}
    results |= {name: _both_paths(graph, params, _scene()) for name, graph in graphs.items()}
    tol = tolerance("float32", 64)
    for one_pass, staged, _ in results.values():
        assert_close(staged, one_pass, tol)
    initial = params["layers"]["ttt"]["weights"]["w"][...][0]
    moved = {name: states.weights["w"][0] - initial for name, (*_, states) in results.items()}
    assert float(jnp.abs(moved["plain"]).max()) > 0.1
    assert_close(moved["ascent"], -moved["plain"], tol)
    assert_close(moved["key"], moved["plain"], tol)
    assert float(jnp.abs(results["ascent"][0] - results["plain"][0]).max()) > 1e-3

    kernel = params["layers"]["ttt"]["qkv"]["kernel"]  # [layers, in, (q, k, v), out]
    kernel[...] = kernel[...].at[:, :, 0].set(kernel[...][:, :, 1])
    copied = _both_paths(graphdef, params, _scene())
    assert_close(results["key"][0], copied[0], tol)
    assert float(jnp.abs(results["key"][0] - results["plain"][0]).max()) > 1e-3


def test_every_mode_renders_the_same():
    """Variant 3 has all that a mode could get wrong: rates, and Newton-Schulz of the update."""
    tol, wanted = tolerance("float32", 64), None
    for mode in ("recurrent", "parallel"):
        config = dataclasses.replace(_SMALL, variant=3, mode=mode)
        graphdef, params = nnx.split(build(config, nnx.Rngs(0)), nnx.Param)
        one_pass, staged, _ = _both_paths(graphdef, params, _scene())
        wanted = one_pass if wanted is None else wanted
        assert_close(one_pass, wanted, tol, mode)
        assert_close(staged, wanted, tol, mode)
    with pytest.raises(ValueError, match="mode='fast' must be one of"):
        dataclasses.replace(_SMALL, mode="fast").validate()


@pytest.mark.exhaustive
def test_bfloat16_with_recomputation_is_near_float32():
    """The large sizes' numerics: bfloat16, blocks recomputed, Newton-Schulz in bfloat16."""
    images, cameras, targets = _scene()
    results = []
    for options in (dict(), dict(dtype="bfloat16", newton_schulz_dtype="bfloat16", remat="full")):
        model = build(dataclasses.replace(_SMALL, variant=2, **options), nnx.Rngs(0))
        graphdef, params = nnx.split(model, nnx.Param)

        def loss(params, graphdef=graphdef):
            out = nnx.merge(graphdef, params)(images, cameras, targets)
            return jnp.sum(jnp.square(out - 0.3)), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        assert out.dtype == jnp.float32
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradients)])
        results.append((np.asarray(out), flat))
    (out, gradient), (half, half_gradient) = results
    assert np.abs(half - out).mean() < 0.02
    cosine = gradient @ half_gradient / np.linalg.norm(gradient) / np.linalg.norm(half_gradient)
    assert np.isfinite(half_gradient).all() and cosine > 0.95


def test_the_last_variant_is_linear_attention():
    """o = q (W + Σ kᵀ v) with sums over the input tokens alone, written out by hand."""
    config = dataclasses.replace(_SMALL, variant=6)
    spans = [Span(0, 5, True, False), Span(0, 9, False, True)]
    layer = ScheduledTTT(
        16, 2, config.inner_loop(spans), hidden_multiple=2.0, base_rate=1.0, stddev=0.3,
        out_stddev=0.3, dtype="float32", rngs=nnx.Rngs(0),
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (3, 9, 16))
    out, state = layer(x, spans)
    qkv = np.asarray(jax.nn.silu(layer.qkv(x)), np.float64).reshape(3, 9, 3, 2, 8)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    q, k = (y / (np.linalg.norm(y, axis=-1, keepdims=True) + 1e-5) for y in (q, k))
    weights = np.asarray(layer.weights()["w"], np.float64)
    matrix = weights + np.einsum("bthi,btho->bhio", k[:, :5], v[:, :5])
    assert_close(state.weights["w"], matrix, tolerance("float32", 5))
    mixed = np.einsum("bthi,bhio->btho", q, matrix)
    mixed = mixed / np.sqrt(np.mean(mixed**2, -1, keepdims=True) + 1e-5)
    expected = mixed.reshape(3, 9, 16) @ np.asarray(layer.out.kernel[...], np.float64)
    assert_close(out, expected, tolerance("float32", 16))


def test_updates_need_no_keys_and_values_of_tokens_that_are_only_read():
    spec = _SMALL.inner_loop([Span(0, 5, True, False), Span(0, 9, False, True)])
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (2, 9, 2, 8)) for key in keys[:3])
    rates, weights = jax.random.uniform(keys[3], (2, 9, 2, 3)), spec.init(keys[4], 2, 8)

    def run(time, queries=9, spec=spec):
        learnt = (x[:, :time] for x in (k, v))
        return ttt(spec, weights, q[:, :queries], *learnt, lr=rates[:, :time])

    (out, state), (whole, same) = jax.jit(lambda: (run(5), run(9)))()
    assert_close(out, whole, tolerance("float32", 8))
    assert_close(state.weights["w1"], same.weights["w1"], tolerance("float32", 9))
    by_key = dataclasses.replace(spec, query="key")
    for options, message in (
        (dict(time=4), "token 5 of k .* time=4"),
        (dict(time=9, queries=8), "token 9 of q .* time=8"),
        (dict(time=5, spec=by_key), "token 9 of k .* time=5"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**options)


def test_rates_of_bfloat16_tokens_are_as_accurate_as_float32():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((40, 96)), jnp.bfloat16)
    w, error = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((96, 3), (40, 3)))

    @jax.jit
    def run(x, w, error):
        y, back = jax.vjp(scheduled_ttt._wide_product, x, w)
        return y, *back(error)

    y, dx, dw = run(x, w, error)
    x, w, error = (np.asarray(a, np.float64) for a in (x, w, error))
    assert_close(y, x @ w, tolerance("float32", 96))
    assert_close(dw, x.T @ error, tolerance("float32", 40))
    assert_close(dx, error @ w.T, tolerance("bfloat16", 3))


def test_flops_are_the_matmuls_of_one_pass():
    """Against a sum written out for the official shape: one update, two applications."""
    model = nnx.eval_shape(lambda: LactNVS(lact_nvs.preset("14"), nnx.Rngs(0)))
    d, tokens, inputs, view = 768, 4 * 64, 3 * 64, 64
    fast = 3 * 2 * d * d
    steps = 3 * 5 * (2 * d * d * 2 * d + d**3)
    inner = tokens * fast + inputs * (2 * fast // 3 + fast // 3 + fast) + steps
    learnt = inputs * (2 * d * d + 3 * d)  # keys, values and rates
    layer = tokens * (4 * d * d + 2 * d * d + 8 * d * d + 2 * view * d) + learnt + inner
    expected = 2 * (14 * layer + tokens * 12 * 64 * d + (tokens - inputs) * d * 3 * 64)
    assert math.isclose(model.flops_per_scene(3, 1, 64, 64), expected, rel_tol=1e-6)


def test_errors_name_the_argument():
    images, cameras, targets = _scene(1, 1, 1)
    model = nnx.eval_shape(lambda: build(_SMALL))
    for call, message in (
        (lambda: model(images[0], cameras, targets), r"images has shape \(1, 8, 8, 3\)"),
        (lambda: model(images, targets._replace(poses=targets.poses[0]), targets), "cameras have"),
        (lambda: model(images[:, :, :6], cameras, targets), "6 x 8 pixels is not divisible"),
        (lambda: dataclasses.replace(_SMALL, variant=7).validate(), "variant=7"),
        (lambda: dataclasses.replace(_SMALL, num_fast_heads=3).validate(), "num_fast_heads=3"),
        (lambda: dataclasses.replace(_SMALL, newton_schulz_steps=-1).validate(), "muon_steps=-1"),
        (lambda: dataclasses.replace(_SMALL, mlp_multiple=0.0).validate(), "mlp_multiple=0.0"),
        (lambda: lact_nvs.preset("huge"), "name='huge'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
