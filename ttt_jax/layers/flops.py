"""Matmul FLOPs of an inner loop, for throughput and model-FLOPs utilisation."""

from ttt_jax.inner_loop.spec import InnerLoop


def inner_loop_flops(
    spec: InnerLoop, heads: int, head_dim: int, hidden_dim: int, sequence_length: int
) -> float:
    """FLOPs by token of the inner loop over one document, forward.

    Of the mathematics, whatever the mode: the fast network on every query; on every key of a
    complete chunk the features, the error sent back through the last layer where something
    below it is trained, and one outer product for each trained matrix; and for each update the
    Newton-Schulz products X Xᵀ, A A, B X of each trained matrix.

    Args:
      spec: the inner loop, with a dot-product or squared loss.
      heads: number of heads.
      head_dim: width of keys and values.
      hidden_dim: width of the network's hidden layer.
      sequence_length: tokens of the document, at least 1.

    Returns:
      2 FLOPs for each multiply-add, divided by the length.

    >>> from ttt_jax.inner_loop import presets
    >>> inner_loop_flops(presets.lact_llm(variant=6, chunk_size=4), 1, 8, 8, 4)
    256.0
    """
    sizes = {
        name: shape[-2] * shape[-1]
        for name, shape in spec.fast_net.shapes(head_dim, head_dim, hidden_dim).items()
    }
    last = spec.fast_net.last
    below = [name for name in sizes if name != last]
    apply = sum(sizes.values())
    gradient = sum(sizes[name] for name in below) + sum(sizes[name] for name in spec.trained)
    if set(below) & set(spec.trained) or not spec.loss.state_free:
        gradient += sizes[last]
    chunk = min(spec.chunk_size or sequence_length, sequence_length)
    updates = sequence_length // chunk * spec.steps
    total = apply * sequence_length + updates * chunk * gradient
    if spec.orthogonalise is not None:
        shapes = spec.fast_net.shapes(head_dim, head_dim, hidden_dim)
        matrices = [shapes[name] for name in spec.trained]
        steps = len(spec.orthogonalise.coefficients)
        total += updates * steps * sum(_newton_schulz_products(*shape) for shape in matrices)
    return 2 * heads * total / sequence_length


def _newton_schulz_products(rows: int, columns: int) -> int:
    """Multiply-adds of one iteration, on the smaller side."""
    small, large = sorted((rows, columns))
    return 2 * small * small * large + small**3
