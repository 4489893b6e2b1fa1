"""Titans and Atlas: the code of lucidrains, and a NumPy reference written from the equations."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ttt_jax
from tests.golden_cases import Golden
from tests.inner_loop import cases
from tests.tolerances import assert_close
from ttt_jax import fast_nets, losses, presets
from ttt_jax.inner_loop.fast_nets import dense


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ResidualNormMLP(fast_nets.FastNet):
    """lucidrains' memory, whose output norm is trained, too; its gradient by autodiff."""

    names = ("gamma", "w1", "w2")

    def shapes(self, key_dim, value_dim, hidden_dim):
        return {
            "gamma": (1, value_dim),
            "w1": (key_dim, hidden_dim),
            "w2": (hidden_dim, value_dim),
        }

    def apply(self, weights, x):
        hidden = dense(jax.nn.gelu(dense(x, weights["w1"]), approximate=False), weights["w2"])
        centred = hidden - jnp.mean(hidden, -1, keepdims=True)
        normed = centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
        return normed * (weights["gamma"] + 1) + x


def _rms(x, weight):
    eps = jnp.finfo(x.dtype).eps
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * weight


def _neural_memory(case, x, p):
    """lucidrains' layer around the inner loop: one head, gates by chunk, reads one token later."""
    chunk, channels = case.hyper["chunk_size"], case.hyper["dim"]
    stored, time = _rms(x, p["store_norm.weight"]), x.shape[1]
    whole = time // chunk * chunk
    k, v = stored @ p["to_keys.weight"].T, stored @ p["to_values.weight"].T
    q = _rms(x, p["retrieve_norm.weight"]) @ p["to_queries.weight"].T
    sigmoid = jax.nn.sigmoid
    lr = sigmoid(stored @ p["to_adaptive_step.0.weight"].T + p["to_adaptive_step.0.bias"])
    means = stored[:, :whole].reshape(1, -1, chunk, channels).mean(2)

    def by_chunk(name):
        gate = sigmoid(means @ p[f"{name}.0.weight"].T + p[f"{name}.0.bias"])
        gate = jnp.repeat(gate, chunk, 1)
        return jnp.pad(gate, [(0, 0), (0, time + 1 - whole), (0, 0)])

    memory = {n: p[f"memory_model_parameters.{i}"] for i, n in enumerate(("gamma", "w1", "w2"))}
    memory["gamma"] = memory["gamma"][:, None]
    spec = dataclasses.replace(
        presets.titans(depth=2, chunk_size=chunk),
        fast_net=_ResidualNormMLP(),
        loss=losses.Squared(scale=2 / channels),  # the mean over channels
        gradient_at="start",
    )
    behind = [(0, 0), (0, 1), (0, 0)]
    q = jnp.pad(q, [(0, 0), (1, 0), (0, 0)])  # a token in front: reads are one token later
    out, state = ttt_jax.ttt(
        spec,
        memory,
        *(y[:, :, None] for y in (q, jnp.pad(k, behind), jnp.pad(v, behind))),
        lr=jnp.pad(lr, behind),
        momentum=by_chunk("to_momentum"),
        forget=1 - by_chunk("to_decay_factor"),
    )
    return out[:, 1:, 0], state


@pytest.mark.parametrize("tag", ["f64", "f32"])
def test_lucidrains_memory(tag):
    """Output, memory and momentum after the last chunk, gradients of input and parameters."""
    case = Golden("titans_neuralmem_a")
    dtype = {"f64": "float64", "f32": "float32"}[tag]

    def loss(x, p):
        out, state = _neural_memory(case, x, p)
        return jnp.sum(out * jnp.asarray(case.arrays["cot/out"], dtype)), (out, state)

    with jax.enable_x64(tag == "f64"):
        x = jnp.asarray(case.arrays["in/x"], dtype)
        p = {k[6:]: jnp.asarray(y, dtype) for k, y in case.arrays.items() if k[:6] == "param/"}
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, (out, state)), (by_input, by_parameter) = run(x, p)
        case.check(f"{tag}/out", out)
        case.check(f"{tag}/grad/x", by_input)
        if tag == "f64":
            for n, official in (("w1", "model.weights.0"), ("w2", "model.weights.1")):
                case.check(f"f64/last_update.{official}", state.weights[n][0])
                case.check(f"f64/last_momentum.{official}", -state.momentum[n])
            case.check("f64/last_update.norm.gamma", state.weights["gamma"][0, :, 0])
            for n, gradient in by_parameter.items():
                case.check(f"pgrad/{n}", gradient)


_erf = np.vectorize(math.erf)


def _normal(z):
    return 0.5 * (1 + _erf(z / math.sqrt(2)))


def _gelu_slope(z):
    return _normal(z) + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _forward(layers, x):
    """Inputs of all layers and the output, exact GELU between them."""
    inputs, z = [], x
    for index, w in enumerate(layers):
        inputs.append(z * _normal(z) if index else z)
        z = inputs[-1] @ w
    return inputs, z


def _gradients(layers, k, v, scale):
    """``∂(scale/2 |f(k) − v|²)/∂W`` of every layer, for one token."""
    inputs, out = _forward(layers, k)
    error, found = scale * (out - v), []
    for index in reversed(range(len(layers))):
        found.insert(0, np.outer(inputs[index], error))
        if index:
            before = inputs[index - 1] @ layers[index - 1]
            error = (layers[index] @ error) * _gelu_slope(before)
    return found


def _monomials(x, degree):
    """In order of rising degree, by products of chosen channels."""
    found = []
    for order in range(degree + 1):
        picks = itertools.combinations_with_replacement(range(len(x)), order)
        found += [math.prod((x[i] for i in pick), start=1.0) for pick in picks]
    return np.array(found)


def _orthogonalise(matrix, spec):
    matrix = matrix / (np.linalg.norm(matrix) + spec.eps)
    for a, b, c in spec.coefficients:
        gram = matrix @ matrix.T
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    return matrix


def _recurrence(spec, layers, tokens, degree):
    """Titans' and Atlas' equations for one head of one document, token by token or by chunk."""
    q, k = (
        np.stack([_monomials(x, degree) if degree else x for x in tokens[n]]) for n in "qk"
    )
    momenta = [np.zeros_like(w) for w in layers]
    out, chunk = [], spec.chunk_size
    for t in range(len(q)):
        if chunk > 1:  # apply, then update where the chunk is complete
            out.append(_forward(layers, q[t])[1])
        if (t + 1) % chunk == 0:
            own = slice(t + 1 - chunk, t + 1)
            first = max(t + 1 - (spec.window or chunk), 0)
            total = [np.zeros_like(w) for w in layers]
            for i in range(first, t + 1):
                found = _gradients(layers, k[i], tokens["v"][i], spec.loss.scale)
                total = [x + lr * g for x, lr, g in zip(total, tokens["lr"][i], found, strict=True)]
            gate, kept = tokens["momentum"][own].mean(), tokens["forget"][own].mean()
            momenta = [gate * m + g for m, g in zip(momenta, total, strict=True)]
            steps = momenta
            if spec.orthogonalise is not None:
                steps = [_orthogonalise(m, spec.orthogonalise) for m in momenta]
            layers = [kept * w - s for w, s in zip(layers, steps, strict=True)]
        if chunk == 1:
            out.append(_forward(layers, q[t])[1])
    return np.stack(out), layers


MEMORIES = {f"titans_{depth}": presets.titans(depth) for depth in (1, 2, 4)}
MEMORIES["titans_chunks"] = presets.titans(3, chunk_size=3)
MEMORIES["atlas"] = presets.atlas(window=3)
MEMORIES["atlas_chunks"] = presets.atlas(window=4, chunk_size=2, degree=3, depth=1)


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_is_the_recurrence(name):
    spec = MEMORIES[name]
    degree = getattr(spec.fast_net, "degree", 0)
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=8, batch=1, heads=2, dim=3)
        for mode in ttt_jax.explain(spec).modes:
            out, state = cases.run(spec, weights, tokens, mode=mode)
            for head in range(2):
                layers = [np.asarray(weights[n][head]) for n in spec.trained]
                row = {n: np.asarray(x[0, :, head]) for n, x in tokens.items()}
                expected, final = _recurrence(spec, layers, row, degree)
                assert_close(out[0, :, head], expected, 1e-10, mode)
                for n, w in zip(spec.trained, final, strict=True):
                    assert_close(state.weights[n][0, head], w, 1e-10, mode + n)


@pytest.mark.parametrize(
    "name", ["atlas", pytest.param("atlas_chunks", marks=pytest.mark.exhaustive)]
)
def test_windows_in_documents_and_split_calls(name):
    """A window ends at its document's start and reaches back over calls."""
    spec = MEMORIES[name]
    ids = jnp.asarray([[0] * 5 + [1, -1] + [1] * 4 + [2] * 5], jnp.int32)
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=16, batch=1, heads=1, dim=3)
        out, state = cases.run(spec, weights, tokens, ids)
        for document in range(3):
            where = np.flatnonzero(np.asarray(ids[0]) == document)
            alone = jax.tree.map(lambda x, where=where: x[:, where], tokens)
            expected, final = cases.run(spec, weights, alone)
            assert_close(out[0, where], expected[0], 1e-11, f"document {document}")
        _same(state, final)

        expected, final = cases.run(spec, weights, tokens)
        carried, parts = None, []
        for begin, end in ((0, 5), (5, 6), (6, 11), (11, 16)):
            part, carried = cases.run(spec, weights, cases.cut(tokens, begin, end), None, carried)
            parts.append(part)
        assert_close(jnp.concatenate(parts, 1), expected, 1e-11, "split")
        _same(carried, final)


def _same(found, expected):
    pairs = zip(cases.named_leaves(found), cases.named_leaves(expected), strict=True)
    for (leaf, a), (_, b) in pairs:
        assert_close(a, b, 1e-11, leaf)


def test_a_window_of_known_gradients_runs_in_parallel():
    """The dot-product loss over a window: parallel = recurrent, values and every gradient."""
    spec = ttt_jax.InnerLoop(
        chunk_size=2, window=6, order="apply_then_update", rate="per_token", momentum="per_token"
    )
    ids = jnp.asarray([[0] * 9 + [1] * 5], jnp.int32)
    with jax.enable_x64(True):
        weights, tokens = cases.arguments(spec, time=14, batch=1, dim=3)
        expected = cases.gradients(spec, weights, tokens, ids)
        _same(cases.gradients(spec, weights, tokens, ids, None, "parallel"), expected)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"window": 3, "chunk_size": 2, "order": "apply_then_update"}, ["window=3", "multiple"]),
        ({"window": 4, "chunk_size": 2}, ["window=4", "chunk_size=2", "apply_then_update"]),
        ({"clip": True}, ["clip=True", "orthogonalise"]),
        ({"forget": None, "forget_first": True}, ["forget_first=True", "forget=None"]),
        ({"gradient_at": "end"}, ["gradient_at='end'", "'start'"]),
        ({"target": "key"}, ["target='key'", "'value_minus_key'"]),
        ({"erase": "per_token"}, ["erase", "fast_nets.Linear()"]),
    ],
)
def test_errors_of_the_fields(change, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(presets.atlas(window=3), **change)
    assert all(word in str(error.value) for word in words), error.value


def test_errors_of_presets():
    for make, words in (
        (lambda: presets.titans(5), "depth=5"),
        (lambda: presets.retnet(0), "heads=0"),
        (lambda: presets.lact_nvs([(0, 1, True, True)], -1), "muon_steps=-1"),
        (lambda: fast_nets.Polynomial(net=fast_nets.MLP(residual_norm=True)), "residual_norm"),
        (lambda: fast_nets.MLP(activation="tanh"), "activation='tanh'"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


ZEROS = {
    "vittt_glu": presets.vittt_glu(),
    "ttt_mlp": presets.ttt_mlp(chunk_size=4),
    "atlas": presets.atlas(window=3),
    "gated_deltanet": presets.gated_deltanet(),
}
_ON_DEMAND = {
    "lact_nvs": presets.lact_nvs(((0, 6, True, False), (0, 8, False, True))),
    "lact_nvs_v6": presets.lact_nvs(((0, 6, True, False), (0, 8, False, True)), variant=6),
    "vittt_glu_v1": dataclasses.replace(presets.vittt_glu(), update="last_layer"),
    "ttt_linear": presets.ttt_linear(chunk_size=4),
    "titans_1": presets.titans(1),
    "titans_2": presets.titans(2),
    "linear_attention": presets.linear_attention(),
    "retnet": presets.retnet(2),
    "mamba2": presets.mamba2(),
    "gla": presets.gla(),
    "deltanet": presets.deltanet(),
    "rwkv7": presets.rwkv7(),
}


@pytest.mark.parametrize(
    "name", [*ZEROS, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in _ON_DEMAND)]
)
def test_zeros_of_the_family_have_finite_gradients(name):
    """Zero tokens, zero rates, gates at 0 and zero weights of one head: nothing becomes NaN."""
    spec = (ZEROS | _ON_DEMAND)[name]
    weights, tokens = cases.arguments(spec, time=8, batch=1, dim=3, dtype="float32")
    tokens = jax.tree.map(lambda x: x.at[:, 2:6].set(0), tokens)
    weights = {n: w.at[0].set(0) for n, w in weights.items()}
    mode = "parallel" if ttt_jax.explain(spec).parallel else "recurrent"
    for leaf, x in cases.named_leaves(cases.gradients(spec, weights, tokens, mode=mode)):
        assert np.all(np.isfinite(np.asarray(x))), leaf
