"""The battery of linear attention for the TPU kernels, and what the compiler for TPUs says."""

import functools

import jax
import jax.numpy as jnp
import pytest

import ttt_jax
from tests.kernels import tpu
from tests.kernels.linear_attention_test import BF16_RMS, cotangents, make, results, rms_error
from tests.tolerances import assert_close, tolerance
from ttt_kernels import compat, linear_attention
from ttt_kernels.linear_attention import mosaic_tpu
from ttt_kernels.linear_attention import mosaic_tpu_tiling as tiling

TOKEN = [
    # batch, length, heads, key_dim, value_dim, decay, state, packed, dtype, seed, cores
    (1, 260, 2, 64, 64, 1, True, True, jnp.float32, 0, 2),
    pytest.param((1, 256, 3, 64, 128, 0, True, False, jnp.float32, 1, 1),
                 marks=pytest.mark.exhaustive),
    (1, 1, 1, 24, 40, 1, True, False, jnp.float32, 2, 1),
    (2, 200, 1, 128, 128, 1, False, True, jnp.bfloat16, 1, 2),
    pytest.param((1, 150, 1, 256, 192, 0, False, False, jnp.bfloat16, 0, 1),
                 marks=pytest.mark.exhaustive),
]
CHUNK = [
    # chunk_size, include_current_chunk, then as above
    (128, False, 2, 300, 2, 64, 64, 0.01, True, False, jnp.float32, 0, 2),
    (256, True, 1, 400, 1, 64, 128, 0.01, True, False, jnp.bfloat16, 1, 1),
    (40, True, 2, 90, 1, 16, 16, 0.1, True, True, jnp.float32, 3, 2),
    (196, True, 1, 196, 2, 64, 64, 0, False, False, jnp.float32, 4, 2),  # an image at once
]


def check(case, **options):
    """Values, final state and every gradient against the float32 reference, token by token."""
    *shape, decay, state, packed, dtype, seed, cores = case
    x, ids = make(seed, *shape, decay=decay, state=state, packed=packed, dtype=dtype)
    if decay:  # a factor: the battery's decays leave nothing of a state after a hundred tokens
        x["log_decay"] *= decay
    if packed:  # padding and the memory behind a row may hold anything
        nan = jnp.where((ids < 0)[:, :, None, None], jnp.nan, 0).astype(dtype)
        dirty = {n: a + nan if n in "qkv" else a for n, a in x.items()}
    else:
        dirty = x
    interpret = compat.tpu_interpret_params(seed=seed, cores=cores)
    kernel = functools.partial(
        mosaic_tpu.linear_attention, block=128, interpret=interpret, **options
    )
    got = tpu.interpreted(results, dirty, ids, kernel, cotangents(x))
    exact = {n: a.astype(jnp.float32) for n, a in x.items()}
    reference = functools.partial(linear_attention, implementation="reference", **options)
    want = results(exact, ids, reference, cotangents(x))
    for name, expected in want.items():
        if dtype == jnp.float32:
            assert_close(got[name], expected, tolerance(dtype, shape[1]), name)
        else:
            assert rms_error(got[name], expected) < BF16_RMS, name


@pytest.mark.parametrize("case", TOKEN, ids=str)
def test_token_causal_equals_reference(case):
    check(case)


@pytest.mark.parametrize("case", CHUNK, ids=str)
def test_chunk_causal_equals_reference(case):
    size, include, *rest = case
    check(rest, causal="chunk", chunk_size=size, include_current_chunk=include)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (128, 256), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("length", [1, 127, 129, 300])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_token_causal_at_every_width_and_tail(dims, length, dtype):
    check((1, length, 2, *dims, 0.1, True, True, dtype, length, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("include", [False, True], ids=["before", "own"])
@pytest.mark.parametrize("size, length", [(128, 100), (384, 1000), (5, 90), (200, 300), (1, 40)])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_chunk_causal_at_every_size(size, length, packed, include):
    case = (1, length, 2, 64, 96, 0.1, True, packed, jnp.float32, length, 2)
    check(case, causal="chunk", chunk_size=size, include_current_chunk=include)


def arguments(batch, length, heads, key_dim, value_dim, dtype, *, decay=True, packed=True):
    """Shapes and dtypes of a call: (dict of floats, segment_ids)."""
    struct = jax.ShapeDtypeStruct
    x = {n: struct((batch, length, heads, key_dim), dtype) for n in "qk"}
    x["v"] = struct((batch, length, heads, value_dim), dtype)
    x["initial_state"] = struct((batch, heads, key_dim, value_dim), jnp.float32)
    if decay:
        x["log_decay"] = struct((batch, length, heads), jnp.float32)
    return x, struct((batch, length), jnp.int32) if packed else None


def gradient(x, ids, **options):
    def loss(x):
        out, final = mosaic_tpu.linear_attention(**x, segment_ids=ids, **options)
        return jnp.sum(out, dtype=jnp.float32) + jnp.sum(final)

    return jax.grad(loss)(x)


CHUNKS_OF_2048 = dict(causal="chunk", chunk_size=2048)  # LaCT-760M
WHOLE_IMAGE = dict(causal="chunk", chunk_size=196, include_current_chunk=True)  # ViTTT-B


@pytest.mark.parametrize("shape", [(1, 32768, 12, 128, 128), (2, 1000, 24, 64, 64),
                                   (1, 1, 3, 80, 96)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_kernels_lower_for_a_tpu(shape, dtype):
    x, ids = arguments(*shape, dtype)
    for order, segment_ids, options in (("token", ids, {}), ("chunk", None, CHUNKS_OF_2048)):
        program = tpu.lowered(functools.partial(gradient, **options), x, segment_ids)
        assert program.count(f'kernel_name = "linear_attention_{order}_forward"') == 1
        assert program.count(f'kernel_name = "linear_attention_{order}_backward"') == 1


COMPILED = [
    # batch, length, heads, key_dim, value_dim, dtype, decay, packed, options
    (1, 32768, 12, 128, 128, jnp.bfloat16, False, False, {}),
    (1, 32768, 4, 384, 384, jnp.bfloat16, False, False, CHUNKS_OF_2048),
    (256, 196, 12, 64, 64, jnp.bfloat16, False, False, WHOLE_IMAGE),
    (1, 4096, 24, 64, 64, jnp.bfloat16, True, True, {}),
    (1, 4096, 4, 256, 256, jnp.float32, True, True, {}),
    (1, 4100, 2, 768, 768, jnp.bfloat16, True, False, {}),
    (1, 4100, 2, 768, 768, jnp.bfloat16, True, False,
     dict(CHUNKS_OF_2048, include_current_chunk=True)),
]


@pytest.mark.parametrize("chip", tpu.TOPOLOGIES)
@pytest.mark.parametrize(
    "cases", [COMPILED[:3], pytest.param(COMPILED[3:], marks=pytest.mark.exhaustive)],
    ids=["used", "others"],
)
def test_kernels_compile_and_fit(chip, cases):
    tpu.device(chip)
    for *shape, dtype, decay, packed, options in cases:
        x, ids = arguments(*shape, dtype, decay=decay, packed=packed)
        found = tpu.kernels(chip, functools.partial(gradient, **options), x, ids)
        chunk_size = options.get("chunk_size")
        if chunk_size is not None:
            chunk_size = tiling.needed_chunk(chunk_size, shape[1])
        plan = tiling.choose(*shape[1:], jnp.dtype(dtype).itemsize, chunk_size=chunk_size)
        for name, backward in (("forward", False), ("backward", True)):
            used = found[f"linear_attention_{options.get('causal', 'token')}_{name}"]
            assert used <= plan.vmem_bytes(backward) <= compat.TPU_VMEM_BYTES, (shape, name)


def test_budget_is_checked_before_anything_compiles():
    with pytest.raises(ValueError, match="block=4096.*need [0-9]+ bytes.*there are.*block smaller"):
        tiling.choose(8192, 1, 256, 256, 4, block=4096)
    with pytest.raises(ValueError, match="block=100 must be a multiple of 128"):
        tiling.choose(8192, 1, 256, 256, 4, block=100)
    with pytest.raises(ValueError, match=r"heads_per_block=3 must be one of \[1, 2, 4\]"):
        tiling.choose(8192, 4, 256, 256, 4, heads_per_block=3)


def test_named_kernel_never_falls_back():
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(NotImplementedError, match="for a CPU, not a TPU.*'xla' can"):
        linear_attention(x, x, x, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="float16"):
        half = x.astype(jnp.float16)
        linear_attention(half, half, half, implementation="mosaic_tpu")
    wide = jax.ShapeDtypeStruct((1, 4, 1, 4096), jnp.float32)
    with pytest.raises(NotImplementedError, match="bytes of VMEM"):
        jax.eval_shape(functools.partial(linear_attention, implementation="mosaic_tpu"),
                       wide, wide, wide)


def test_auto_takes_the_kernels_on_a_tpu(monkeypatch):
    monkeypatch.setattr(compat, "target_platform", lambda: "tpu")
    x, ids = arguments(1, 300, 2, 128, 128, jnp.bfloat16)
    program = tpu.lowered(lambda x, ids: linear_attention(**x, segment_ids=ids), x, ids)
    assert 'kernel_name = "linear_attention_token_forward"' in program


@pytest.mark.parametrize("variant, kernels", [(6, "linear_attention_chunk"), (0, "newton_schulz")])
def test_inner_loop_takes_the_kernels_on_a_tpu(monkeypatch, variant, kernels):
    monkeypatch.setattr(compat, "target_platform", lambda: "tpu")
    spec = ttt_jax.presets.lact_llm(variant=variant, chunk_size=256)
    weights = jax.eval_shape(lambda: spec.init(jax.random.key(0), 2, 128))
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    rates = jax.ShapeDtypeStruct((1, 512, 2, 3), jnp.float32)
    momentum = jax.ShapeDtypeStruct((1, 512, 2), jnp.float32)

    def loss(q, weights, k, v, lr, momentum):
        given = dict(lr=lr, momentum=momentum) if variant == 0 else {}
        return jnp.sum(ttt_jax.ttt(spec, weights, q, k, v, **given)[0], dtype=jnp.float32)

    program = tpu.lowered(jax.grad(loss, (1,)), x, weights, x, x, rates, momentum)
    assert f'kernel_name = "{kernels}_forward"' in program
    assert f'kernel_name = "{kernels}_backward"' in program


def test_under_shard_map_no_collective_is_added():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def loss(q, k, v):
        def one(q, k, v):
            return mosaic_tpu.linear_attention(q, k, v)[0]

        mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jnp.sum(mapped(q, k, v), dtype=jnp.float32)

    x, _ = arguments(2, 300, 2, 128, 128, jnp.bfloat16)
    program = tpu.lowered(jax.grad(loss, (0, 1, 2)), x["q"], x["k"], x["v"])
    assert program.count("tpu_custom_call") == 2
    assert "all_gather" not in program and "all_reduce" not in program
