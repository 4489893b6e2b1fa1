"""Run by vittt_sharding_test.py on eight host devices: how the gradient's program is cut.

Prints, as JSON, the all-gathers of the compiled gradient by shape, the gradient's distance from one
device's, and the temporary bytes of a device on eight devices and on one.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.tolerances import relative_error
from ttt_jax import sharding
from ttt_jax.models import ViTTTConfig, build

BATCH = 16
CONFIG = ViTTTConfig(
    num_classes=10, image_size=16, patch_size=2, hidden_size=32, num_layers=2, num_heads=2
)


def main() -> None:
    """Compiles the gradient of a batch cut over eight devices, and on one."""
    graphdef, state = nnx.split(build(CONFIG, nnx.Rngs(0)))
    images = np.random.default_rng(0).standard_normal((BATCH, 16, 16, 3)).astype(np.float32)

    def loss(state, images):
        logits = nnx.merge(graphdef, state)(images, key=jax.random.key(0))
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    def run(devices):
        mesh = sharding.make_mesh(devices=devices)
        place = sharding.batch_sharding(mesh, BATCH)
        with jax.set_mesh(mesh):
            x = jax.device_put(images, place)
            params = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
            compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
            return compiled, jax.tree.map(np.asarray, nnx.to_pure_dict(compiled(params, x)))

    eight, gradient = run(jax.devices())
    one, expected = run(jax.devices()[:1])
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True)
    gathers = re.findall(r"(\w+\[[\d,]*\])\S* all-gather(?:-start)?\(", eight.as_text())
    result = {
        "devices": len(jax.devices()),
        "gathers": gathers,
        "all_reduces": len(re.findall(r" all-reduce(?:-start)?\(", eight.as_text())),
        "error": max(relative_error(a, b) for a, b in pairs),
        "bytes": [c.memory_analysis().temp_size_in_bytes for c in (eight, one)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
