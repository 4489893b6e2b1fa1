"""An independent reference of the inner loop: NumPy, float64, one head and one document at a time.

Written from the paper's formulas with loops over tokens; it shares no code with the package.
Gradients of a token come from finite formulas of the network, orthogonalisation from the iteration.
"""

import numpy as np


def _silu(z):
    return z / (1 + np.exp(-z))


def _predict(weights, x):
    if "w" in weights:
        return x @ weights["w"]
    return (_silu(x @ weights["w0"]) * (x @ weights["w2"])) @ weights["w1"]


def _token_gradients(weights, k, error):
    """``∂⟨error, f(k)⟩/∂W`` for one token."""
    if "w" in weights:
        return {"w": np.outer(k, error)}
    gate, up = k @ weights["w0"], k @ weights["w2"]
    sigmoid = 1 / (1 + np.exp(-gate))
    back = weights["w1"] @ error
    return {
        "w0": np.outer(k, back * up * (sigmoid + gate * sigmoid * (1 - sigmoid))),
        "w1": np.outer(_silu(gate) * up, error),
        "w2": np.outer(k, back * _silu(gate)),
    }


def _orthogonalise(matrix, triples, eps):
    matrix = matrix / (np.sqrt(np.sum(matrix**2)) + eps)
    for a, b, c in triples:  # from the left, whichever side is longer: the polynomial is the same
        gram = matrix @ matrix.T
        matrix = a * matrix + b * gram @ matrix + c * gram @ gram @ matrix
    return matrix


def document(spec, weights, q, k, v, lr=None, momentum=None, forget=None):
    """Output ``[time, value_dim]`` and final weights for one head of one document."""
    used = {n: w.copy() for n, w in weights.items()}
    main = {n: w.copy() for n, w in weights.items()}
    targets = {n: np.sqrt(np.sum(w**2, 0)) for n, w in weights.items()}
    speed = {n: np.zeros_like(weights[n]) for n in spec.trained}
    chunk = spec.chunk_size or len(k)
    q = k if spec.query == "key" else q
    out = []

    def learn(tokens):
        nonlocal used, main
        size = len(tokens)
        for step in range(spec.steps):
            total = {n: np.zeros_like(used[n]) for n in spec.trained}
            for t in tokens:
                prediction = _predict(used, k[t])
                error = -v[t] if type(spec.loss).__name__ == "DotProduct" else prediction - v[t]
                gradients = _token_gradients(used, k[t], spec.loss.scale * error)
                for i, n in enumerate(spec.trained):
                    if spec.rate == "per_token":
                        rate = lr[t, min(i, lr.shape[1] - 1)]
                    else:
                        rate = spec.rate[i] if isinstance(spec.rate, tuple) else spec.rate
                    total[n] += rate * gradients[n]
            for n in spec.trained:
                if spec.loss.reduction == "mean":
                    total[n] /= size
                if spec.momentum is not None:
                    gate = momentum[tokens].mean() if momentum is not None else spec.momentum
                    speed[n] = gate * speed[n] + total[n]
                    total[n] = speed[n]
                if spec.orthogonalise is not None:
                    muon = spec.orthogonalise
                    total[n] = _orthogonalise(total[n], muon.coefficients, muon.eps)
                if spec.direction == "ascent":
                    total[n] = -total[n]
                keep = 1.0
                if spec.forget is not None and step == 0:
                    keep = forget[tokens].mean() if forget is not None else spec.forget
                pre = spec.weight_norm is not None and spec.weight_norm.form == "pre"
                moved = keep * (main[n] if pre else used[n]) - total[n]
                main[n] = moved
                if spec.weight_norm is not None:
                    norm = np.sqrt(np.sum(moved**2, 0)) + spec.weight_norm.eps
                    moved = moved / norm * targets[n]
                used[n] = moved

    for begin in range(0, len(k), chunk):
        tokens = np.arange(begin, min(begin + chunk, len(k)))
        if spec.order == "update_then_apply":
            learn(tokens)
        out += [_predict(used, q[t]) for t in tokens]
        if spec.order == "apply_then_update" and len(tokens) == chunk:
            learn(tokens)
    return np.array(out), {n: used[n] for n in spec.trained}


def run(spec, weights, q, k, v, *, lr=None, momentum=None, forget=None, segment_ids=None):
    """As ``ttt_jax.ttt`` without a carried state; also the last document's weights, by row."""
    batch, time, heads, _ = k.shape
    ids = np.zeros((batch, time), int) if segment_ids is None else np.asarray(segment_ids)
    out = np.zeros((batch, time, heads, v.shape[-1]))
    finals = []
    for b in range(batch):
        real = np.flatnonzero(ids[b] >= 0)
        cuts = np.flatnonzero(np.diff(ids[b, real])) + 1
        documents = np.split(real, cuts)
        row = []
        for h in range(heads):
            final = {n: weights[n][h] for n in spec.trained}
            for tokens in documents:
                gates = {
                    "lr": None if lr is None else lr[b, tokens, h].reshape(len(tokens), -1),
                    "momentum": None if momentum is None else momentum[b, tokens, h],
                    "forget": None if forget is None else forget[b, tokens, h],
                }
                head = {n: w[h] for n, w in weights.items()}
                values = (x[b, tokens, h] for x in (q, k, v))
                out[b, tokens, h], final = document(spec, head, *values, **gates)
            row.append(final)
        finals.append({n: np.stack([f[n] for f in row]) for n in spec.trained})
    return out, {n: np.stack([f[n] for f in finals]) for n in spec.trained}
