"""Which operations of ``ttt_kernels`` have kernels for which backend.

An inner loop is made of several operations, and not each of them has kernels everywhere: with
``mode="kernel"`` and a named backend those that have none run in XLA.
"""

_KERNELS = {
    "chunk_products": ("mosaic_gpu",),
    "fast_weight": ("mosaic_gpu", "mosaic_tpu"),
    "fast_weight_hidden": ("mosaic_gpu",),
    "newton_schulz": ("mosaic_gpu", "mosaic_tpu"),
}


def backend_of(operation: str, backend: str | None) -> str | None:
    """The implementation that an operation gets: ``backend``, or ``"xla"`` where it has no kernels.

    Args:
      operation: a folder or function of ``ttt_kernels``.
      backend: ``"mosaic_gpu"``, ``"mosaic_tpu"``, ``"xla"``, or ``None``, which lets it pick.

    >>> backend_of("fast_weight", "mosaic_tpu"), backend_of("chunk_products", "mosaic_tpu")
    ('mosaic_tpu', 'xla')
    """
    return backend if backend is None or backend in _KERNELS[operation] else "xla"
