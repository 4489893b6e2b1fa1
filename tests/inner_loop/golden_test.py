"""The LaCT operators against the official PyTorch code: values and every gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import ttt_jax
from tests.golden_cases import Golden
from ttt_jax import WeightNorm
from ttt_kernels.newton_schulz import LACT_COEFFICIENTS, MUON_COEFFICIENTS, newton_schulz

LACT_OPERATORS = (
    "lact_op_bf16ns_post_mom",
    "lact_op_post_gd_mom_T24_lrdimfull",
    "lact_op_post_gd_mom_T8_singlechunk",
    "lact_op_post_gd_nomom_T29",
    "lact_op_post_muon_mom_T29",
    "lact_op_post_muon_nomom_T24",
    "lact_op_pre_gd_mom_T24",
    "lact_op_pre_muon_mom_T29",
    "lact_op_pre_muon_nomom_T29",
)
# what each tag was computed in: (dtype of everything, dtype inside Newton-Schulz)
TAGS = {"f64": ("float64", None), "f32": ("float32", None), "f32bf16": ("float32", "bfloat16")}


def _by_token(x):
    """``[batch·heads, time, d]`` of the golden files to ``[1, time, heads, d]``."""
    return jnp.swapaxes(x, 0, 1)[None]


# float64 always; the others where they are gated tightest, the rest on demand
_SHORT = {("lact_op_post_muon_mom_T29", "f32"), ("lact_op_bf16ns_post_mom", "f32bf16")}


def _operators():
    for name in LACT_OPERATORS:
        for tag in TAGS:
            if f"{tag}/out" in Golden(name).arrays:
                short = tag == "f64" or (name, tag) in _SHORT
                marks = () if short else pytest.mark.exhaustive
                yield pytest.param(name, tag, marks=marks)


@pytest.mark.parametrize("name,tag", _operators())
def test_lact_llm_operator(name, tag):
    case = Golden(name)
    dtype, muon_dtype = TAGS[tag]
    spec = ttt_jax.presets.lact_llm(0, chunk_size=case.hyper["chunk_size"])
    muon = dataclasses.replace(spec.orthogonalise, dtype=muon_dtype)
    spec = dataclasses.replace(
        spec,
        orthogonalise=muon if case.hyper["use_muon"] else None,
        momentum="per_token" if case.hyper["use_momentum"] else None,
        weight_norm=WeightNorm(form="pre" if case.hyper["prenorm"] else "post"),
    )

    def loss(x):
        weights = {n: x[n].mT for n in ("w0", "w1", "w2")}
        lr = jnp.stack([_by_token(x[f"lr{i}"]) for i in range(3)], 3)
        momentum = _by_token(x["momentum"])[..., 0] if "momentum" in x else None
        q, k, v = (_by_token(x[n]) for n in "qkv")
        lr = lr[..., 0] if lr.shape[-1] == 1 else lr
        out, _ = ttt_jax.ttt(spec, weights, q, k, v, lr=lr, momentum=momentum)
        out = jnp.swapaxes(out[0], 0, 1)
        return jnp.sum(out * jnp.asarray(case.arrays["cot/out"], dtype)), out

    with jax.enable_x64(dtype == "float64"):
        inputs = {k[3:]: jnp.asarray(x, dtype) for k, x in case.arrays.items() if k[:3] == "in/"}
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
        case.check(f"{tag}/out", out)
        for n, gradient in gradients.items():
            if case.gated(f"{tag}/grad/{n}"):
                case.check(f"{tag}/grad/{n}", gradient)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "kind,coefficients",
    [("llm", LACT_COEFFICIENTS), *((f"nvs{n}", MUON_COEFFICIENTS[:1] * n) for n in (0, 1, 5))],
)
def test_newton_schulz(index, kind, coefficients):
    case = Golden("ns_unit")
    with jax.enable_x64(True):
        x = jnp.asarray(case.arrays[f"in/G{index}"], jnp.float64)
        case.check(f"f64/{kind}/X{index}", newton_schulz(x, coefficients))
        rounded = newton_schulz(x.astype(jnp.float32), coefficients, dtype=jnp.bfloat16)
        case.check(f"f32bf16/{kind}/X{index}", rounded)
