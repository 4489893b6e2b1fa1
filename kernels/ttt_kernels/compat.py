"""The one place that knows JAX versions, backends and interpreters.

Kernels import Pallas' Mosaic modules, their interpreters and their version differences from here
and from nowhere else. Supported: jax 0.10.2 to 0.12.x.
"""

from __future__ import annotations

import functools
import importlib
import os

import jax
from jax.experimental import pallas as pl

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
            f"jax {jax.__version__} has no Pallas Mosaic GPU backend ({error})"
        ) from error
    if not hasattr(module, "kernel"):
        raise NotImplementedError(f"jax {jax.__version__} has no plgpu.kernel")
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
    # Code below Pallas is left out: of what runs here that is fences, which it does not need.
    return mosaic_gpu().InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")


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


def store(ref, value) -> None:
    """`ref[...] = value`; jax 0.12 has an operation for it, whose layouts it finds sooner."""
    plgpu = mosaic_gpu()
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


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
    """Why the Mosaic GPU kernels cannot run in the program being traced, or None when they can.

    They need a program for a Hopper GPU, and where the ambient mesh has several devices a
    `jax.shard_map(..., check_vma=False)` around the call: a plain jit would gather their inputs.
    """
    platform = target_platform()
    if platform != "gpu":
        return f"the program is for a {platform.upper()}, not a Hopper GPU (sm90)"
    device = jax.devices()[0]
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
    return mesh_problem()


def mesh_problem() -> str | None:
    """Why the ambient mesh stands in a kernel's way, or None; a `jax.shard_map` removes it."""
    mesh = jax.sharding.get_abstract_mesh()
    spread = {a: n for a, n in mesh.shape.items() if n > 1 and a not in mesh.manual_axes}
    if spread:
        return f"the mesh axes {spread} are not inside a jax.shard_map around the call"
    return None


def layout_problem() -> str | None:
    """Why kernels that leave register layouts to the compiler cannot be lowered, or None."""
    if JAX_VERSION < (0, 11):
        return f"jax {jax.__version__} does not infer register layouts; the kernel needs 0.11"
    return None


def gpu_kernel(body, *, interpret=None, **arguments):
    """`plgpu.kernel(body, ...)` with the compiler options that every kernel here uses."""
    plgpu = mosaic_gpu()
    params = plgpu.CompilerParams(approx_math=True)
    return plgpu.kernel(body, compiler_params=params, interpret=interpret, **arguments)


def program_options() -> dict[str, bool] | None:
    """XLA's options for a whole training or evaluation step, `compiler_options` of `jax.jit`.

    On NVIDIA GPUs every product is cuBLASLt's, which adds in its epilogue what XLA's own Triton
    products leave to a pass of its own: on an H200 1.6 % less time a training step of LaCT-NVS,
    2.8 % of a softmax ViT, the same of ViTTT and LaCT-LLM. None elsewhere, or where XLA_FLAGS
    already says which.

    >>> program_options()  # on a CPU
    """
    name = "xla_gpu_enable_triton_gemm"
    if jax.default_backend() != "gpu" or name in os.environ.get("XLA_FLAGS", ""):
        return None
    return {name: False}


@functools.cache
def mosaic_tpu():
    """Pallas' TPU module, `pltpu`.

    >>> mosaic_tpu().__name__
    'jax.experimental.pallas.tpu'
    """
    return importlib.import_module("jax.experimental.pallas.tpu")


def tpu_problem() -> str | None:
    """Why the Mosaic TPU kernels cannot run in the program being traced, or None when they can.

    They need a program for a TPU, and where the ambient mesh has several devices a
    `jax.shard_map(..., check_vma=False)` around the call: JAX does not cut a kernel by itself.
    """
    platform = target_platform()
    if platform != "tpu":
        return f"the program is for a {platform.upper()}, not a TPU"
    return mesh_problem()


def tpu_interpret_params(detect_races: bool = True, seed: int = 0, cores: int = 1):
    """Parameters that make a TPU kernel run in JAX's TPU interpreter on a CPU.

    Args:
      detect_races: reports races: prints "RACE DETECTED", and where JAX can (0.12) raises.
      seed: of the random order in which parallel grid points run.
      cores: simulated cores, over which parallel axes are split.
    """
    return mosaic_tpu().InterpretParams(
        detect_races=detect_races, random_seed=seed, num_cores_or_threads=cores
    )


def reset_tpu_interpreter() -> None:
    """Clears the TPU interpreter after an error inside a kernel; later runs fail without it."""
    mosaic_tpu().reset_tpu_interpret_mode_state()


# What a v5p has, the least of v5e, v5p and v6e, but for what the compiler keeps for itself.
TPU_VMEM_BYTES = 63 * 2**20
# Kernels that need more than this ask the compiler for it; its own limit is 16 MiB on a v5e.
_TPU_DEFAULT_VMEM_BYTES = 12 * 2**20


def tpu_kernel(body, *, name: str, semantics, vmem_bytes: int, interpret=None, **arguments):
    """`pl.pallas_call(body, ...)` for TPUs; a call of the result launches the kernel.

    Args:
      body: the kernel.
      name: of the kernel in compiled programs and profiles.
      semantics: "parallel" or "arbitrary" for each axis of the grid.
      vmem_bytes: estimate of the on-chip memory needed.
      interpret: None, or what `tpu_interpret_params` returns.
      **arguments: as of `pl.pallas_call`.
    """
    limit = None
    if vmem_bytes > _TPU_DEFAULT_VMEM_BYTES:
        limit = min(TPU_VMEM_BYTES, max(2 * vmem_bytes, 16 * 2**20))
    params = mosaic_tpu().CompilerParams(
        dimension_semantics=tuple(semantics), vmem_limit_bytes=limit
    )
    call = pl.pallas_call(
        body, name=name, compiler_params=params, interpret=interpret or False, **arguments
    )

    def launch(*operands):
        # 64-bit literals in index maps do not compile for TPUs.
        with jax.enable_x64(False):
            return call(*operands)

    return launch
