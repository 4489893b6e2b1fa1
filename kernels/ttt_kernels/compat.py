"""The one place that knows JAX versions, backends and interpreters.

Kernels import Pallas' Mosaic GPU module, its interpreter and its version differences from here
and from nowhere else. Supported: jax 0.10.2 to 0.12.x.
"""

from __future__ import annotations

import functools
import importlib

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])
"""Version of the installed JAX, for example (0, 11, 2)."""


@functools.cache
def mosaic_gpu():
    """Pallas' Mosaic GPU module, `plgpu`.

    Raises:
      NotImplementedError: the installed JAX has none, or one without `plgpu.kernel`.

    >>> mosaic_gpu().__name__
    'jax.experimental.pallas.mosaic_gpu'
    """
    try:
        module = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError as error:
        raise NotImplementedError(
            f"jax {jax.__version__} has no Pallas Mosaic GPU backend ({error}); "
            "implementation='xla' runs everywhere"
        ) from error
    if not hasattr(module, "kernel"):
        raise NotImplementedError(
            f"jax {jax.__version__} has no plgpu.kernel; implementation='xla' runs everywhere"
        )
    return module


@functools.cache
def gpu_interpret_params(detect_races: bool = True):
    """Parameters that make `plgpu.kernel` run in JAX's GPU interpreter on a CPU.

    Raises:
      NotImplementedError: this JAX's interpreter cannot run products with transposed operands,
        which every kernel here needs (before 0.11).
    """
    if JAX_VERSION < (0, 11):
        raise NotImplementedError(
            f"the Mosaic GPU interpreter of jax {jax.__version__} cannot run wgmma with a "
            "transposed operand; it needs jax >= 0.11 (cross-lowering works on any version)"
        )
    return mosaic_gpu().InterpretGPUParams(detect_races=detect_races)


def reset_gpu_interpreter() -> None:
    """Clears the GPU interpreter after an error inside a kernel; later runs fail without it."""
    module = importlib.import_module(
        "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
    )
    module.reset_gpu_interpret_mode_state()


def load(ref, *, layout=None, optimized: bool = True):
    """`plgpu.load` of a whole reference; jax 0.10 wants an explicit index."""
    plgpu = mosaic_gpu()
    if JAX_VERSION < (0, 11):
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)


def target_platform() -> str:
    """The platform that the program being traced is for: "cpu", "gpu" or "tpu".

    That of the ambient mesh's devices, which may be a TPU that is not there (ahead-of-time
    compilation); without a mesh the default backend's.

    >>> target_platform() == jax.default_backend()
    True
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def hopper_problem() -> str | None:
    """Why the Mosaic GPU kernels cannot run on the default device, or None when they can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the default device is a {device.platform.upper()}, not a Hopper GPU (sm90)"
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return (
            f"the default device {device.device_kind!r} has compute capability {capability}, and "
            "the kernels use wgmma, which is sm90 (Hopper) only"
        )
    try:
        mosaic_gpu()
    except NotImplementedError as error:
        return str(error)
    return None


def gpu_kernel(body, *, interpret=None, **arguments):
    """`plgpu.kernel(body, ...)` with the compiler options that every kernel here uses."""
    plgpu = mosaic_gpu()
    params = plgpu.CompilerParams(approx_math=True)
    return plgpu.kernel(body, compiler_params=params, interpret=interpret, **arguments)
