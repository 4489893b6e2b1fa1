"""(d) How queries and keys are distributed in a trained model: numbers, and a t-SNE picture."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ttt_jax.experiments.cells import Values
from ttt_jax.experiments.report import COLOURS, Report, new_figure

_POINTS = 500  # queries, and as many keys, of a layer


def measure(layers: Sequence[dict[str, jax.Array]], folder: pathlib.Path) -> Values:
    """Compares queries and keys of each layer, and keeps the t-SNE map for the picture.

    Args:
      layers: of `paradoxes.probe`: q, k [rows, T, heads, dim] of each layer.
      folder: where ``points.npz`` goes: the t-SNE places, [2 · points, 2] a layer, queries first.

    Returns:
      Lists with a number a layer: distance, mmd, accuracy; see `compare`.
    """
    from sklearn.manifold import TSNE  # a second to import

    found: dict[str, list[float]] = {"distance": [], "mmd": [], "accuracy": []}
    maps = {}
    for index, layer in enumerate(layers):
        q, k = (_sample(layer[name], index) for name in "qk")
        for name, value in compare(q, k).items():
            found[name].append(value)
        options = dict(perplexity=min(30, len(q) // 2), init="pca", random_state=0)
        maps[f"layer_{index}"] = TSNE(**options).fit_transform(np.concatenate([q, k]))
    np.savez(folder / "points.npz", **maps)
    return found


def _sample(x: jax.Array, seed: int) -> np.ndarray:
    """The same random tokens and heads for queries and keys, [points, dim] in float64."""
    flat = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    count = min(_POINTS, len(flat))
    return flat[np.random.default_rng(seed).choice(len(flat), count, replace=False)]


def compare(q: np.ndarray, k: np.ndarray) -> dict[str, float]:
    """Measures how far two sets of vectors are from having one distribution.

        distance = ‖mean q − mean k‖ / sqrt((tr cov q + tr cov k) / 2)
        mmd²     = mean K(q, q') + mean K(k, k') − 2 mean K(q, k),  K Gaussian with the median
                   distance as its width, pairs of a point with itself left out

    Args:
      q, k: [n, dim].

    Returns:
      distance, mmd (its square root, 0 where the estimate is negative), and accuracy: of a logistic
      regression that tells q from k, over held-out halves; 0.5 where they cannot be told apart.

    Source: Gretton et al. 2012, eq. 3, for the MMD.

    >>> random = np.random.default_rng(0)
    >>> same = compare(random.normal(size=(200, 2)), random.normal(size=(200, 2)))
    >>> apart = compare(random.normal(size=(200, 2)), 9 + random.normal(size=(200, 2)))
    >>> same["accuracy"] < 0.6 < 0.99 < apart["accuracy"], apart["distance"] > 5
    (True, True)
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    spread = np.sqrt((q.var(0).sum() + k.var(0).sum()) / 2)
    gap = np.linalg.norm(q.mean(0) - k.mean(0))
    points = np.concatenate([q, k])
    labels = np.repeat([0, 1], [len(q), len(k)])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    accuracy = cross_val_score(classifier, points, labels, cv=2).mean()
    squares = ((points[:, None] - points[None]) ** 2).sum(-1)
    apart = ~np.eye(len(points), dtype=bool)
    kernel = np.exp(-squares / np.maximum(np.median(squares[apart]), 1e-30))
    own = [kernel[np.ix_(labels == i, labels == i)] for i in (0, 1)]
    within = sum((block.sum() - np.trace(block)) / (len(block) * (len(block) - 1)) for block in own)
    squared = within - 2 * kernel[np.ix_(labels == 0, labels == 1)].mean()
    return {
        "distance": float(gap / max(spread, 1e-30)),
        "mmd": float(np.sqrt(max(squared, 0.0))),
        "accuracy": float(accuracy),
    }


def report(results: dict[str, Values], out: Report, root: pathlib.Path) -> None:
    """Writes the table of all layers, and a t-SNE picture per model.

    Args:
      results: "distribution-<model>" -> of `measure`.
      out: the report.
      root: folder of the experiments.
    """
    if not results:
        return
    out.heading("(d) Distributions of queries and keys")
    rows: list[dict[str, Any]] = []
    for name, values in results.items():
        for layer, numbers in enumerate(
            zip(values["distance"], values["mmd"], values["accuracy"], strict=True)
        ):
            titles = ("centroid distance / spread", "MMD", "linear accuracy")
            found = {"model": name.removeprefix("distribution-"), "layer": layer}
            rows.append(found | dict(zip(titles, numbers, strict=True)))
    out.table("distributions", rows, "Queries against keys; accuracy 0.5 cannot tell them apart.")
    for name, values in results.items():
        maps = np.load(root / "cells" / values["folder"] / "points.npz")
        figure, panels = new_figure(len(maps.files), width=3.2, height=3.2)
        for panel, layer in zip(panels, maps.files, strict=True):
            half = len(maps[layer]) // 2
            for part, label, colour, marker in (
                (maps[layer][:half], "queries", COLOURS[0], "o"),
                (maps[layer][half:], "keys", COLOURS[1], "^"),
            ):
                panel.scatter(*part.T, s=4, label=label, color=colour, marker=marker, alpha=0.6)
            panel.set(title=layer.replace("_", " "), xlabel="t-SNE 1", ylabel="t-SNE 2")
            panel.set(xticks=[], yticks=[])  # places have no unit
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2, markerscale=3)
        model = name.removeprefix("distribution-")
        out.figure(f"tsne_{model}", figure, f"t-SNE of queries and keys of {model}, each layer.")
    means = {
        name.removeprefix("distribution-"): float(np.mean(values["accuracy"]))
        for name, values in results.items()
    }
    listed = ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in means.items())
    out.text(f"A linear classifier tells queries from keys with an accuracy of: {listed}.")
