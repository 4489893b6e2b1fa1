"""Run by sequence_parallel_test.py on eight host devices: prints errors against one device as JSON.

With the argument "all": every variant, and float64.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from tests.inner_loop import cases
from tests.tolerances import relative_error
from ttt_jax import presets
from ttt_jax.compile_check import hlo
from ttt_jax.inner_loop import sequence_parallel
from ttt_jax.inner_loop.sequence_parallel_cost import cost
from ttt_jax.layers import attention_halo
from ttt_jax.layers.attention import causal_attention, document_indices

_BATCH, _HEADS, _DIM = 2, 2, 8
_DOCUMENTS = (5, 300, 64, 1, 63, 320, 200)  # and padding to the end


def segment_ids(time):
    """Two packings with padding at the end of one and inside the other."""
    ids = np.full((_BATCH, time), -1)
    for row, lengths in enumerate((_DOCUMENTS, _DOCUMENTS[::-1])):
        packed = np.repeat(np.arange(len(lengths)), lengths)[:time]
        ids[row, : packed.size] = packed
    ids[1, 250:280] = -1
    return jnp.asarray(ids, jnp.int32)


def sharded(spec, devices, exchange):
    """``ttt`` over a mesh of so many devices: (weights, tokens, ids) to (out, final state)."""
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("seq",), auto, devices=jax.devices()[:devices])

    def local(weights, tokens, ids):
        rest = {name: x for name, x in tokens.items() if name not in "qkv"}
        return sequence_parallel.ttt(
            spec, weights, *(tokens[name] for name in "qkv"), axis_name="seq", segment_ids=ids,
            exchange=exchange, **rest,
        )  # fmt: skip

    def whole(weights, tokens, ids):
        out, state = local(weights, tokens, ids)
        return out, sequence_parallel.final_state(state, "seq")

    cut = PartitionSpec(None, "seq")
    specs = dict(mesh=mesh, in_specs=(PartitionSpec(), cut, cut), check_vma=False)
    outputs = jax.shard_map(lambda *x: local(*x)[0], out_specs=cut, **specs)
    return jax.shard_map(whole, out_specs=(cut, PartitionSpec()), **specs), outputs


def gradients(run, differentiate, weights, tokens, ids):
    """Gradients of a random loss of outputs and final state, where asked for, and these two."""

    def loss(weights, tokens):
        found = run(weights, tokens, ids)
        leaves = [x for _, x in cases.named_leaves(found)]
        random = [np.random.default_rng(n) for n in range(len(leaves))]
        pairs = zip(leaves, random, strict=True)
        return sum(jnp.sum(x * r.normal(size=x.shape).astype(x.dtype)) for x, r in pairs), found

    if not differentiate:
        return run(weights, tokens, ids)
    return jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, tokens)


def bytes_received(text, devices):
    """Bytes that one of so many devices receives: nothing else may occur."""
    part = (devices - 1) / devices
    shares = {"all-gather": part, "all-reduce": 2 * part, "collective-permute": 1}
    return sum(shares[found.kind] * found.bytes * found.runs for found in hlo.collectives(text))


def compare(
    spec, devices, time, packed, dtype="float32", exchange=None, *, differentiate=True, whole=None
):
    """Errors by leaf, and bytes received in a forward pass: as stated, and as compiled.

    ``whole`` is the specification on one device where it is another one.
    """
    weights, tokens = cases.arguments(
        spec, time=time, batch=_BATCH, heads=_HEADS, dim=_DIM, dtype=dtype
    )
    ids = segment_ids(time) if packed else None
    run, outputs = sharded(spec, devices, exchange)

    def one(weights, tokens, ids):
        return cases.run(whole or spec, weights, tokens, ids)

    program = jax.jit(gradients, static_argnums=(0, 1))
    found = program(run, differentiate, weights, tokens, ids)
    expected = program(one, differentiate, weights, tokens, ids)
    pairs = zip(cases.named_leaves(found), cases.named_leaves(expected), strict=True)
    stated = cost(
        spec, devices=devices, batch=_BATCH, heads=_HEADS, length=time // devices, key_dim=_DIM,
        hidden_dim=_DIM + 2, dtype=dtype, documents=packed, exchange=exchange,
    )  # fmt: skip
    text = jax.jit(outputs).lower(weights, tokens, ids).compile().as_text()
    return {
        "dtype": dtype,
        "time": time,
        "errors": {name: relative_error(a, b) for (name, a), (_, b) in pairs},
        "stated": stated.bytes_received,
        "compiled": bytes_received(text, devices),
    }


def compare_attention(devices, time, window):
    """The same for window attention over packed documents."""
    random = np.random.default_rng(0)
    q, k, v = jnp.asarray(random.normal(size=(3, _BATCH, time, _HEADS, _DIM)), jnp.float32)
    documents = document_indices(segment_ids(time))
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("seq",), auto, devices=jax.devices()[:devices])

    def local(q, k, v, documents):
        options = dict(axis_name="seq", window=window, documents=documents)
        return attention_halo.halo_attention(q, k, v, **options)

    cut = PartitionSpec(None, "seq")
    program = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut, check_vma=False)
    )
    size = attention_halo.halo_length(time // devices, devices, window)
    expected = jax.jit(causal_attention, static_argnames="window")
    expected = expected(q, k, v, window=window, documents=documents)
    text = program.lower(q, k, v, documents).compile().as_text()
    return {
        "dtype": "float32",
        "time": time,
        "errors": {"out": relative_error(program(q, k, v, documents), expected)},
        "stated": _BATCH * size * (2 * _HEADS * _DIM + 1) * 4,
        "compiled": bytes_received(text, devices),
    }


def main(everything: bool) -> None:
    """Runs the cases of the default suite, or all."""
    v2, v0 = (presets.lact_llm(variant, chunk_size=64) for variant in (2, 0))
    local, whole = (presets.lact_nvs([(0, n, True, True)], muon_steps=1) for n in (16, 64))
    result = {
        "LaCT-NVS, one span of all": compare(
            local, 4, 64, False, differentiate=everything, whole=whole
        ),
        "V2, packed": compare(v2, 4, 1024, True, differentiate=everything),
        "window attention": compare_attention(4, 1024, 300),  # two hops
    }
    if everything:
        result["V2, by the ring"] = compare(v2, 8, 1024, False)
        result["mamba2, packed"] = compare(presets.mamba2(), 4, 1024, True)
        jax.config.update("jax_enable_x64", True)
        result["V0, packed"] = compare(v0, 4, 1024, True)
        for variant in range(7):
            spec = presets.lact_llm(variant, chunk_size=48)
            for devices, packed, exchange in ((4, True, "ring"), (8, False, "all_gather")):
                name = f"V{variant}, {packed=}, {devices} devices, {exchange}"
                result[name] = compare(spec, devices, 1024, packed, "float64", exchange)
        for name in ("linear_attention", "mamba2"):
            spec = getattr(presets, name)()
            result[name] = compare(spec, 8, 1024, False, "float64")
        result["retnet"] = compare(presets.retnet(_HEADS), 8, 1024, True, "float64")
    print(json.dumps(result))


if __name__ == "__main__":
    main("all" in sys.argv[1:])
