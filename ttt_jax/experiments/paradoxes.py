"""The four paradoxes of arXiv 2602.21204, section 4: what does not fit "memorisation at test time".

(a) More inner steps lower the inner loss and do not help the task. (b) Ascending the inner loss
works as well as descending it. (c) Reading with the keys instead of the queries works. (d) Queries
and keys are distributed differently, so a memory of keys would be read where it never learned.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ttt_jax import sharding
from ttt_jax.checkpoint import load_arrays
from ttt_jax.experiments import ablation, distributions, paper
from ttt_jax.experiments.cells import Cell, Values, training_cell
from ttt_jax.experiments.report import Report, mean_and_spread, new_figure, plus_minus, style
from ttt_jax.experiments.systems import TASKS, make_config
from ttt_jax.inner_loop.api import ttt
from ttt_jax.models import build
from ttt_jax.models.decoder import unstack_layers
from ttt_jax.tasks import make_task

STEPS = (1, 2, 4, 8)
# Title of a model trained anew -> fields of LaCT-LLM V0; the others keep the published loop.
TRAINED: dict[str, Values] = {
    **{f"trained with {n} steps": {"model.inner_steps": n} for n in STEPS[1:]},
    "ascent": {"model.direction": "ascent"},
    "Q = K": {"model.query": "key"},
}


def cells(
    scale: str, seeds: int, tasks: Sequence[str] = tuple(TASKS), fields: Values | None = None
) -> list[Cell]:
    """Lists the cells: V0 and what is trained anew, and the softmax baseline as the control of (d).

    V0 and the baseline are the ablation's cells, and are not trained twice. What needs a trained
    V0 is measured in cells of its own, which come after it.

    Args:
      scale: one of `systems.SCALES`.
      seeds: seeds of each model; at "tiny" one for what is trained with several inner steps, which
        takes as many times as long.
      tasks: keys of `TASKS`; (a) and (d) are of "language" alone.
      fields: dotted configuration fields to change in every cell of "language".
    """
    found = _language_cells(scale, seeds, fields or {}) if "language" in tasks else []
    for task in tasks:
        for seed in range(seeds if task != "language" else 0):
            found.append(ablation.model_cell(task, "V0", scale, seed, {}))
            for title in ("ascent", "Q = K"):
                found.append(_trained_cell(task, title, scale, seed, TRAINED[title]))
    return found


def _language_cells(scale: str, seeds: int, fields: Values) -> list[Cell]:
    found = []
    for seed in range(seeds):
        base = ablation.model_cell("language", "V0", scale, seed, fields)
        found += [base, _test_time_cell(base, seed)]
        for title, own in TRAINED.items():
            if scale == "tiny" and seed > 0 and "model.inner_steps" in own:
                continue
            found.append(_trained_cell("language", title, scale, seed, {**own, **fields}))
    softmax = ablation.model_cell("language", ablation.SOFTMAX, scale, 0, fields)
    base = ablation.model_cell("language", "V0", scale, 0, fields)
    return [*found, softmax, _distribution_cell("V0", base), _distribution_cell("softmax", softmax)]


def _trained_cell(task: str, title: str, scale: str, seed: int, fields: Values) -> Cell:
    config = make_config(task, scale, seed, fields)
    name = title.replace(" ", "_").replace("=", "is")
    return training_cell(f"{task}-{name}-{seed}", config, lambda _: {})


def _test_time_cell(base: Cell, seed: int) -> Cell:
    """(a) and (c) at test time: a trained V0 evaluated with other inner loops."""

    def run(folder: pathlib.Path) -> Values:
        workdir = folder.parent / base.folder(pathlib.Path()).name
        values: Values = {}
        for n in STEPS:
            values[f"perplexity_{n}"] = evaluate_with(workdir, inner_steps=n)
        values["perplexity_key"] = evaluate_with(workdir, query="key")
        losses = inner_losses(workdir, STEPS)
        return values | {f"inner_loss_{n}": losses[n] for n in STEPS}

    return Cell(name=f"test-time-{seed}", key={"of": base.key, "steps": list(STEPS)}, run=run)


def _distribution_cell(title: str, base: Cell) -> Cell:
    def run(folder: pathlib.Path) -> Values:
        workdir = folder.parent / base.folder(pathlib.Path()).name
        return distributions.measure(probe(workdir), folder)

    return Cell(name=f"distribution-{title}", key={"of": base.key}, run=run)


def evaluate_with(workdir: pathlib.Path, **fields: Any) -> float:
    """Evaluates a trained language model with some fields of its configuration changed.

    Args:
      workdir: of the trained model.
      **fields: of the model's configuration, none of which changes its parameters.

    Returns:
      The perplexity over its held-out split.
    """
    loaded = load_arrays(workdir)
    model = dataclasses.replace(loaded.config.model, **fields)
    config = dataclasses.replace(loaded.config, model=model)
    config.validate()
    task, graphdef = make_task(config), nnx.graphdef(nnx.eval_shape(lambda: build(model)))
    result = task.evaluate(graphdef, loaded.params, loaded.buffers, sharding.make_mesh())
    return result.metrics["perplexity"]


def probe(workdir: pathlib.Path, rows: int = 4) -> list[dict[str, jax.Array]]:
    """Runs held-out text through a trained language model and keeps what its mixers compare.

    Args:
      workdir: of the trained model.
      rows: rows of text.

    Returns:
      For each layer q, k, v [rows, T, heads, dim], gates where there are any, and, for a TTT
      branch, "weights": its initial fast weights.
    """
    model, tokens = _open(workdir, rows)
    found = jax.jit(lambda model, tokens: model.probe(tokens))(model, tokens)
    for layer, values in zip(model.layers, found, strict=True):
        if hasattr(layer.mixer, "branch"):
            values["weights"] = layer.mixer.branch.weights()
    return found


def _open(workdir: pathlib.Path, rows: int) -> tuple[nnx.Module, jax.Array]:
    """A trained model with its layers one by one, and held-out rows."""
    loaded = load_arrays(workdir)
    config = dataclasses.replace(loaded.config.model, scan_layers=False)
    params = unstack_layers(loaded.params) if loaded.config.model.scan_layers else loaded.params
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: build(config)))
    batches = make_task(loaded.config).batches("eval")
    tokens: list[np.ndarray] = []
    for batch in batches:
        tokens += list(batch["tokens"][batch["weights"].any(axis=1)])
        if len(tokens) >= rows:
            break
    return nnx.merge(graphdef, params), jnp.asarray(np.stack(tokens[:rows]))


def inner_losses(workdir: pathlib.Path, steps: tuple[int, ...]) -> dict[int, float]:
    """Measures the inner loss of a chunk after so many inner steps on it.

        L = −mean over tokens, heads, rows and layers of <f_θ(k), v>,  θ after n steps on the first
        chunk

    Args:
      workdir: of a trained LaCT-LLM.
      steps: numbers of inner steps; 0 is the loss before any.

    Returns:
      n -> loss.
    """
    model, tokens = _open(workdir, rows=4)
    spec = model.config.inner_loop()
    tokens = tokens[:, : spec.chunk_size]
    found = jax.jit(lambda model, tokens: model.probe(tokens))(model, tokens)
    losses = {}
    for n in steps:
        of_layers = []
        for layer, values in zip(model.layers, found, strict=True):
            loop = dataclasses.replace(spec, steps=max(n, 1))
            weights = layer.mixer.branch.weights()
            if n:
                _, state = ttt(loop, weights, **values, mode="recurrent")
                weights = state.weights
            of_layers.append(_loss_of(spec, weights, values["k"], values["v"]))
        losses[n] = float(jnp.mean(jnp.stack(of_layers)))
    return losses


def _loss_of(spec: Any, weights: Any, k: jax.Array, v: jax.Array) -> jax.Array:
    """−mean <f(k), v>; the fast weights are [heads, …] or [rows, heads, …]."""
    read = dataclasses.replace(spec, chunk_size=k.shape[1] + 1, order="apply_then_update")
    out, _ = ttt(read, weights, k, k, v, **_no_gates(read, k), mode="recurrent")
    return -jnp.mean(jnp.sum(out.astype(jnp.float32) * v.astype(jnp.float32), axis=-1))


def _no_gates(spec: Any, k: jax.Array) -> dict[str, jax.Array]:
    """Gates of zero for a call that only reads."""
    gates = {}
    if spec.rate == "per_token":
        gates["lr"] = jnp.zeros((*k.shape[:3], len(spec.trained)), jnp.float32)
    if spec.momentum == "per_token":
        gates["momentum"] = jnp.zeros(k.shape[:3], jnp.float32)
    return gates


def report(results: dict[str, Values], out: Report, root: pathlib.Path) -> None:
    """Writes the tables and pictures of the four paradoxes.

    Args:
      results: of `run_cells`.
      out: the report.
      root: folder of the experiments, for the pictures of (d).
    """
    done = {name: values for name, values in results.items() if "failed" not in values}
    _report_steps(done, out)
    _report_trained(done, out)
    found = {name: v for name, v in done.items() if name.startswith("distribution-")}
    distributions.report(found, out, root)


def _report_steps(done: dict[str, Values], out: Report) -> None:
    test_time = [v for name, v in done.items() if name.startswith("test-time-")]
    if not test_time:
        return
    out.heading("(a) More inner steps")
    losses = {n: [v[f"inner_loss_{n}"] for v in test_time] for n in STEPS}
    tasks = {n: [v[f"perplexity_{n}"] for v in test_time] for n in STEPS}
    trained = {n: _of_seeds(done, f"language-trained_with_{n}_steps-") for n in STEPS[1:]}
    same = {seed for found in trained.values() for seed in found}  # a mean is of the same seeds
    base = {s: x for s, x in _of_seeds(done, "language-V0-").items() if s in same or not same}
    trained = {n: list(found.values()) for n, found in {1: base, **trained}.items()}
    rows = [
        {
            "inner steps": n,
            "inner loss": plus_minus(losses[n], 4),
            "perplexity, steps at test time": plus_minus(tasks[n]),
            "perplexity, trained so": plus_minus(trained[n]) if trained[n] else None,
        }
        for n in STEPS
    ]
    out.table("inner_steps", rows, "Inner steps on each chunk (mean ± deviation over seeds).")
    figure, (left, right) = new_figure(2)
    _curve(left, losses, "inner loss after the steps", 0)
    _curve(right, tasks, "steps at test time alone", 0)
    _curve(right, {n: values for n, values in trained.items() if values}, "trained so", 1)
    left.set(xlabel="inner steps", ylabel="inner loss after the steps", xticks=STEPS)
    right.set(xlabel="inner steps", ylabel="perplexity", xticks=STEPS)
    right.legend(fontsize="small")
    out.figure("inner_steps", figure, "Inner loss and perplexity against inner steps.")
    loss, task = ([mean_and_spread(found[n])[0] for n in STEPS] for found in (losses, tasks))
    out.text(
        f"From 1 to {STEPS[-1]} steps at test time the inner loss goes from {loss[0]:.4f} to "
        f"{loss[-1]:.4f} and the perplexity from {task[0]:.3f} to {task[-1]:.3f}: the inner loss "
        f"{'falls' if loss[-1] < loss[0] else 'does not fall'} and the task "
        f"{'gets worse' if task[-1] > task[0] else 'does not get worse'}; the paper finds that it "
        "falls and that the task gets worse."
    )


def _of_seeds(done: dict[str, Values], prefix: str) -> dict[str, float]:
    """Seed -> perplexity of the finished cells whose names begin so."""
    found = [name for name in done if name.startswith(prefix)]
    return {name.removeprefix(prefix): done[name]["perplexity"] for name in found}


def _curve(panel: Any, values: dict[int, list[float]], label: str, look: int) -> None:
    """Draws mean and deviation over seeds against inner steps."""
    means, spreads = zip(*map(mean_and_spread, values.values()), strict=True)
    panel.errorbar(list(values), means, yerr=spreads, capsize=3, label=label, **style(look))


def _report_trained(done: dict[str, Values], out: Report) -> None:
    out.heading("(b) Ascent, and (c) queries replaced by keys")
    rows, said = [], []
    for task, models in TASKS.items():
        ours: dict[str, list[float]] = {}
        for title in ("V0", "ascent", "Q = K"):
            name = title.replace(" ", "_").replace("=", "is")
            values = [v[models.metric] for c, v in done.items() if c.startswith(f"{task}-{name}-")]
            if not values:
                continue
            scaled = [models.scale_of_paper * value for value in values]
            paper_value = paper.ABLATION[task][title]
            found = {"task": task, "metric": models.metric, "model": title}
            rows.append(found | {"here": plus_minus(scaled), "paper": paper_value})
            ours[title] = scaled
        others = [title for title in ours if title != "V0"] if "V0" in ours else []
        said += [_against_v0(task, title, ours, models.better) for title in others]
    swapped = [v["perplexity_key"] for name, v in done.items() if name.startswith("test-time-")]
    if swapped:
        found = {"task": "language", "metric": "perplexity", "model": "Q = K at test time alone"}
        rows.append(found | {"here": plus_minus(swapped), "paper": None})
    out.table("ascent_and_keys", rows, "Trained from scratch, unless it says otherwise.")
    if said:
        out.text(" ".join(said))


def _against_v0(task: str, title: str, ours: dict[str, list[float]], better: str) -> str:
    """One sentence: a model against V0, here and in the paper.

    >>> _against_v0("images", "Q = K", {"V0": [80.0, 80.2], "Q = K": [79.0, 79.2]}, "higher")
    'images, Q = K against V0: -1.000 here (worse by more than the seeds differ), -0.160 in...'
    """
    (mean, spread), (base, base_spread) = (mean_and_spread(ours[name]) for name in (title, "V0"))
    change, theirs = mean - base, paper.ABLATION[task][title] - paper.ABLATION[task]["V0"]
    several = min(len(ours[title]), len(ours["V0"])) > 1
    clear = several and abs(change) > spread + base_spread
    word = "better" if (change > 0) == (better == "higher") else "worse"
    seeds = f"{word} by more than the seeds differ" if clear else "no more than seeds differ"
    if not several:
        seeds = f"{word}, one seed"
    return f"{task}, {title} against V0: {change:+.3f} here ({seeds}), {theirs:+.3f} in the paper."
