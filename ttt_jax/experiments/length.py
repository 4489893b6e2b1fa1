"""Beyond the training length: perplexity by position, and what a token costs in time and memory."""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax import sharding
from ttt_jax.checkpoint import LoadedModel, load_arrays
from ttt_jax.experiments import ablation
from ttt_jax.experiments.cells import Cell, Values
from ttt_jax.experiments.report import Report, new_figure, style
from ttt_jax.models import build
from ttt_jax.tasks import make_task

MODELS = ("V0", "V2", "V6", ablation.SOFTMAX)
FACTORS = (1, 2, 4, 8)  # of the training length


def cells(scale: str, fields: Values | None = None) -> list[Cell]:
    """Lists the cells: the ablation's language models of the first seed, and their measurements.

    Args:
      scale: one of `systems.SCALES`.
      fields: dotted configuration fields to change in every cell.
    """
    found = []
    for title in MODELS:
        base = ablation.model_cell("language", title, scale, 0, fields or {})
        found += [base, _length_cell(title, base)]
    return found


def _length_cell(title: str, base: Cell) -> Cell:
    def run(folder: pathlib.Path) -> Values:
        loaded = load_arrays(folder.parent / base.folder(pathlib.Path()).name)
        trained = loaded.config.data.sequence_length
        by_position = perplexity_by_position(loaded, FACTORS[-1] * trained)
        costs = [decoding_cost(loaded, factor * trained) for factor in FACTORS]
        return {"trained": trained, "by_position": by_position, "costs": costs}

    key = {"of": base.key, "factors": list(FACTORS)}
    return Cell(name=f"length-{title}", key=key, run=run)


def perplexity_by_position(loaded: LoadedModel, length: int) -> list[Any]:
    """Evaluates documents in rows of `length` tokens.

    Args:
      loaded: a trained language model.
      length: tokens of a row.

    Returns:
      [first, last, tokens, perplexity] for doubling ranges of the position in the document.
    """
    data = dataclasses.replace(loaded.config.data, sequence_length=length, batch_size=1)
    config = dataclasses.replace(loaded.config, data=data)
    task = make_task(config)
    arrays = (loaded.graphdef, loaded.params, loaded.buffers)
    result = task.evaluate(*arrays, sharding.make_mesh())
    return [list(entry) for entry in result.details["by_position"]]


def decoding_cost(loaded: LoadedModel, length: int, repeats: int = 20) -> Values:
    """Measures a decoding step that has `length` tokens behind it, batch 1.

    Args:
      loaded: a trained language model.
      length: tokens of context.
      repeats: timed steps after one that compiles; more, until they take 0.3 s together.

    Returns:
      {"length", "milliseconds": median of a step, "kibibytes": of the carried state or cache}.
    """
    model_config = loaded.config.model
    if hasattr(model_config, "max_decode_length"):
        model_config = dataclasses.replace(model_config, max_decode_length=length)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: build(model_config)))

    @jax.jit
    def step(params: Any, token: jax.Array, cache: Any) -> Any:
        return nnx.merge(graphdef, params).decode(token, cache)

    cache = jax.jit(lambda params: nnx.merge(graphdef, params).init_cache(1))(loaded.params)
    cache = cache._replace(position=jnp.full_like(cache.position, length - 1))
    token = jnp.zeros((1, 1), jnp.int32)
    jax.block_until_ready(step(loaded.params, token, cache))
    seconds: list[float] = []
    while len(seconds) < repeats or sum(seconds) < 0.3:
        start = time.perf_counter()
        jax.block_until_ready(step(loaded.params, token, cache))
        seconds.append(time.perf_counter() - start)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    milliseconds = 1e3 * statistics.median(seconds)
    return {"length": length, "milliseconds": milliseconds, "kibibytes": size / 1024}


def report(results: dict[str, Values], out: Report, root: pathlib.Path) -> None:
    """Writes the tables and pictures of all models measured.

    Args:
      results: of `run_cells`.
      out: the report.
      root: unused: all is in the results.
    """
    done = {
        name.removeprefix("length-"): values
        for name, values in results.items()
        if name.startswith("length-") and "failed" not in values
    }
    if not done:
        return
    out.heading("Beyond the training length")
    ranges = {tuple(entry[:2]) for values in done.values() for entry in values["by_position"]}
    rows = []
    for first, last in sorted(ranges):
        row: dict[str, Any] = {"position in document": f"{first} to {last}"}
        for title, values in done.items():
            row[title] = next((e[3] for e in values["by_position"] if e[0] == first), None)
        rows.append(row)
    trained = next(iter(done.values()))["trained"]
    out.table("length", rows, f"Perplexity by position; training saw {trained} tokens at a time.")
    costs = [
        {"model": title, "context": cost["length"], "ms a token": cost["milliseconds"],
         "state, KiB": cost["kibibytes"]}
        for title, values in done.items() for cost in values["costs"]
    ]  # fmt: skip
    out.table("decoding", costs, "A decoding step with so many tokens behind it, batch 1.")
    figure, (left, middle, right) = new_figure(3)
    for index, (title, values) in enumerate(done.items()):
        look = style(index)
        places = [(e[0] + e[1]) / 2 for e in values["by_position"]]
        left.plot(places, [e[3] for e in values["by_position"]], label=title, **look)
        lengths = [cost["length"] for cost in values["costs"]]
        middle.plot(lengths, [c["milliseconds"] for c in values["costs"]], label=title, **look)
        right.plot(lengths, [c["kibibytes"] for c in values["costs"]], label=title, **look)
    left.axvline(trained, color="black", linewidth=0.8, label="training length")
    left.set(xlabel="position in document", ylabel="perplexity", xscale="log")
    middle.set(xlabel="context, tokens", ylabel="ms a token", ylim=(0, None))
    right.set(xlabel="context, tokens", ylabel="state, KiB", yscale="log")
    for panel in (left, middle, right):
        panel.legend(fontsize="small")
    out.figure("length", figure, "Perplexity by position, time and state of a decoding step.")
