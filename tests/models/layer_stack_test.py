"""Layers drawn together have the weights of layers drawn one by one, in a list as in a stack."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from ttt_jax.models import LactNVSConfig, ViTConfig, ViTTTConfig, build, lact_nvs, vision_blocks

_SMALL = dict(hidden_size=16, num_layers=2, initializer_range=0.3)
_VISION = dict(num_classes=5, image_size=8, patch_size=2, num_heads=2)


def _one_by_one(make, keys, *, scan):
    assert not scan
    return nnx.List([make(key) for key in keys])


def _same(a, b):
    """To the last bit, which XLA's vector code may round otherwise in another program."""
    np.testing.assert_allclose(a, b, rtol=4e-7)


@pytest.mark.parametrize(
    "module, config",
    [
        (vision_blocks, functools.partial(ViTConfig, **_SMALL, **_VISION)),
        (vision_blocks, functools.partial(ViTTTConfig, **_SMALL, **_VISION)),
        (
            lact_nvs,
            functools.partial(
                LactNVSConfig, **_SMALL, num_attention_heads=2, num_fast_heads=2, patch_size=4
            ),
        ),
    ],
    ids=["ViT", "ViTTT", "LaCT-NVS"],
)
def test_the_weights_are_those_of_layers_drawn_one_by_one(monkeypatch, module, config):
    def draw(scan):
        make = jax.jit(lambda: nnx.state(build(config(scan_layers=scan)), nnx.Param))
        params = nnx.to_pure_dict(make())
        return params["blocks"]["layers"] if "blocks" in params else params["layers"]

    together, stacked = draw(False), draw(True)
    monkeypatch.setattr(module, "draw_layers", _one_by_one)
    jax.tree.map(_same, together, draw(False))
    cut = {n: jax.tree.map(lambda x, n=n: x[n], stacked) for n in (0, 1)}
    jax.tree.map(_same, together, cut)
