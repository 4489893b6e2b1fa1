"""What every test process has in common; read before jax is imported."""

import gc
import importlib.metadata
import os
import pathlib
import sys

import pytest

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set its environment")

# A test that wants an accelerator is run with JAX_PLATFORMS set by hand.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of the suite's time is XLA compiling small programs that run once. Its older way to make code
# of fusions, which jaxlib 0.11 no longer has, takes a third of the time; an unknown flag is fatal.
# On a GPU the kernels are checked as they run for users, beside references that need no tuning.
_COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
    # YNNPACK of this jaxlib reads beside an array in the delta rule's gradient, on some CPUs.
    _COMPILE_FAST += " --xla_cpu_experimental_ynn_fusion_type="
if "cuda" in os.environ["JAX_PLATFORMS"]:
    _COMPILE_FAST = "--xla_gpu_autotune_level=0"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share the memory
os.environ["XLA_FLAGS"] = f"{_COMPILE_FAST} {os.environ.get('XLA_FLAGS', '')}".strip()

# The workers, the processes that tests start, and later runs compile a program once between them.
_CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# pytest-xdist: the workers share the cores instead of each starting threads for all of them; but
# the interpreters of kernels wait for ever where XLA has fewer threads for their callbacks than a
# kernel has warpgroups that wait for each other.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_threads = (os.cpu_count() or 1) // _workers
os.environ.setdefault("NPROC", str(max(8, _threads)))
if _workers > 1:
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, str(max(1, _threads)))

# The kernel gives a process 65,530 memory maps, and a compiled program on the CPU takes several:
# a worker that keeps the programs of every test it ran ends in a segmentation fault.
_MAPS = pathlib.Path("/proc/self/maps")
_MANY_MAPS = 20_000


def pytest_runtest_setup(item):
    """What needs a Hopper GPU is skipped elsewhere, and says why."""
    if item.get_closest_marker("hopper"):
        from ttt_kernels import compat

        problem = compat.hopper_problem()
        if problem:
            pytest.skip(problem)


@pytest.fixture(autouse=True)
def _forget_programs():
    """Drops the compiled programs of earlier tests before they take too many memory maps."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
