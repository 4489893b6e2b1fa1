"""Run by sharding_test.py on eight host devices: prints errors against one device as JSON.

Arguments: a folder for a checkpoint; a variant of the language model, "vittt" or "lact_nvs"; and
names of meshes.
"""

import functools
import itertools
import json
import re
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import lact_nvs, vittt
from tests.tolerances import relative_error
from ttt_jax import checkpoint, sharding, train_step, workdirs
from ttt_jax.compile_check import hlo
from ttt_jax.config import Config, OptimizerConfig, TrainConfig
from ttt_jax.models import lact_llm
from ttt_jax.objective import make_token_loss
from ttt_jax.tasks import make_task

_VOCAB, _ROWS, _LENGTH = 64, 16, 24
MESHES = {
    "data 8": {"data": 8},
    "fsdp 8": {"data": 1, "fsdp": 8},
    "data 2, model 4": {"data": 2, "model": 4},
    "data 2, seq 4": {"data": 2, "seq": 4},
    "fsdp 2, seq 2, model 2": {"data": 1, "fsdp": 2, "seq": 2, "model": 2},
    "fsdp 4, model 2": {"data": 1, "fsdp": 4, "model": 2},
}


def model_config(variant: int) -> lact_llm.LactLLMConfig:
    """A model whose axes divide by every mesh."""
    return lact_llm.preset(
        "tiny",
        vocab_size=_VOCAB,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_fast_heads=4,
        intermediate_size=32,
        chunk_size=8,
        window_size=8,
        low_rank=4,
        variant=variant,
    )


class Position:
    """Stands for a data iterator in a checkpoint."""

    def get_state(self):
        return {"step": 1}

    def set_state(self, state):
        assert state == {"step": 1}


def make_batch():
    """Rows of two documents with some tokens that do not count."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, _VOCAB, (_ROWS, _LENGTH + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.repeat([[0] * 11 + [1] * 13], _ROWS, 0).astype(np.int32),
        "weights": random.integers(0, 2, (_ROWS, _LENGTH)).astype(np.float32),
    }


class Setup(NamedTuple):
    """What is trained: a model's configuration, a loss, a batch, and how its rows are cut."""

    model: Any
    loss: Any
    batch: dict[str, np.ndarray]
    rows: str


def make_setup(name: str) -> Setup:
    """A language model by its variant, or a vision model with its task's own loss and data."""
    if name.isdigit():
        return Setup(model_config(int(name)), make_token_loss(8), make_batch(), "batch")
    config = {"vittt": vittt, "lact_nvs": lact_nvs}[name].get_config("tiny")
    config.data.batch_size = _ROWS
    if name == "lact_nvs":
        config.model.num_fast_heads = 4  # divides by every mesh
    task = make_task(config)
    return Setup(config.model, task.loss, next(iter(task.batches("train"))), task.rows)


class Run:
    """A setup on one mesh; no sizes: one device."""

    def __init__(self, setup, **sizes):
        devices = jax.devices() if sizes else jax.devices()[:1]
        self.mesh = sharding.make_mesh(**sizes, devices=devices)
        self.model, self.loss = setup.model, setup.loss
        options = OptimizerConfig(warmup_steps=0)
        self.whole = train_step.make_trainee(setup.model, options, 10, self.mesh)
        rows = sharding.batch_sharding(self.mesh, _ROWS // 2, setup.rows)
        self.batch = sharding.place_batch(setup.batch, rows)
        self.step = train_step.make_train_step(self.whole, self.loss, accumulation_steps=2)

    def start(self):
        with jax.set_mesh(self.mesh):
            return train_step.init_state(self.whole, 0)

    def restore(self, workdir):
        checkpoints = checkpoint.Checkpoints(workdir)
        state = checkpoints.restore(self.whole.abstract, Position())
        checkpoints.close()
        return state

    def losses(self, state, steps):
        """Losses of some steps, and the state after them."""
        found = []
        with jax.set_mesh(self.mesh):
            for _ in range(steps):
                state, metrics = self.step(state, self.batch)
                found.append(float(metrics["loss"]))
        return found, state

    @functools.cached_property
    def compiled(self):
        """Loss and gradient of the whole batch, as one program."""

        def of(params, buffers, batch):
            arguments = (self.whole.graphdef, params, buffers, batch, jax.random.key(0))
            return train_step.loss_and_gradient(self.loss, *arguments)[:2]

        shapes, out = self.whole.abstract, (None, self.whole.shardings.params)
        program = jax.jit(of, out_shardings=out)
        with jax.set_mesh(self.mesh):
            return program.lower(shapes.params, shapes.buffers, self.batch).compile()

    def gradient(self, state):
        """Loss and gradient of the whole batch, on the host."""
        return jax.tree.map(np.asarray, self.compiled(state.params, state.buffers, self.batch))


def gathered_activations(text, params):
    """Floats that the partitioner gathers though they are no (parts of) parameters or gradients.

    Gathers that the program itself asks for are states of the inner loop. ViTTT's local branch is
    the last few channels of a joint projection, which lie on one device of those that cut it.
    LaCT-NVS's rates are one product with few columns; gathered, their gradients are fewer bytes
    than the tokens' gradients summed over the devices that have the heads.
    """
    leaves = jax.tree.leaves(params) + jax.tree.leaves(jax.tree.map(lambda p: p[0], params))
    shapes = {p.shape for p in leaves}
    shapes |= {(*shape[:-2], shape[-2] * shape[-1]) for shape in shapes if len(shape) > 2}

    def is_part(shape):
        """Some axes of a parameter in any order, each whole or one device's part of it.

        Its last two may be one: a kernel of several outputs a head is used as a matrix.
        """
        orders = (sizes for p in shapes for sizes in itertools.permutations(p, len(shape)))
        parts = [{size * n for n in (1, 2, 4, 8)} for size in shape]
        return any(all(map(set.__contains__, parts, sizes)) for sizes in orders)

    found = []
    for each in hlo.collectives(text):
        if each.kind != "all-gather" or each.source.endswith("all_gather"):
            continue
        if "vision_ttt" in each.source and each.source.endswith("/pad"):
            continue
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", each.shape):
            shape = [int(n) for n in sizes.split(",") if n]
            if each.source.endswith("/ttt/reshape") and shape[-2:] == [3, 4]:
                continue  # gradients of LaCT-NVS's rates, three numbers a head and token
            if dtype[0] in "fb" and not is_part(shape):
                found.append(f"{each.shape} {each.source}")
    return found


def begins_with(run, workdir, state):
    """Whether a new run on another mesh, or the same one, takes the parameters as they are."""
    config = Config(model=run.model, train=TrainConfig(init_from=workdir))
    new = checkpoint.new_state(run.whole, 1, checkpoint.find_initial(config, run.whole).values)
    pairs = zip(jax.tree.leaves(new.params), jax.tree.leaves(state.params), strict=True)
    placed = jax.tree.map(lambda x: x.sharding, new.params) == run.whole.shardings.params
    return placed and not int(new.step) and all(np.array_equal(a, b) for a, b in pairs)


def main(workdir: str, name: str, meshes: list[str]) -> None:
    """Compares the meshes with one device, and checkpoints across meshes."""
    setup, result = make_setup(name), {"meshes": {}}
    one = Run(setup)
    loss, gradient = one.gradient(one.start())
    largest = max(np.abs(g).max() for g in jax.tree.leaves(gradient))
    for mesh in meshes:
        run = Run(setup, **MESHES[mesh])
        state = run.start()
        widest = max(jax.tree.leaves(state.params), key=lambda p: p.size)
        got_loss, got = run.gradient(state)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True)
        result["meshes"][mesh] = {
            "loss": relative_error(got_loss, loss),
            "gradient": max(float(np.abs(a - b).max() / largest) for a, b in pairs),
            "part": widest.addressable_shards[0].data.size / widest.size,
            "gathered": gathered_activations(run.compiled.as_text(), state.params),
        }
    losses, state = run.losses(state, 2)  # the last mesh, as a trainer runs it
    checkpoints = checkpoint.Checkpoints(workdir, keep=2)
    checkpoints.save(2, state, Position(), Config(model=setup.model))
    checkpoints.close()
    workdirs.write_config(workdir, Config(model=setup.model))
    restored = one.restore(workdir)
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    next_losses = one.gradient(restored)[0], run.gradient(state)[0]
    result["trained"] = {
        "first loss": relative_error(losses[0], loss),
        "compiles": run.step._cache_size(),
        "restored": all(np.array_equal(a, b) for a, b in pairs),
        "begun with": all(begins_with(other, workdir, state) for other in (one, run)),
        "next loss": relative_error(*next_losses),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
