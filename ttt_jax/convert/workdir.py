"""Official weights into the workdir of a run, and a run's parameters back into official files.

A converted workdir is a run at step 0: evaluation and generation read it like any other, and
training goes on from its weights with a fresh optimizer at the beginning of the data.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ttt_jax import checkpoint, models, sharding, workdirs
from ttt_jax.convert import files, lact_llm, lact_nvs, vittt
from ttt_jax.convert.tables import flatten, from_official, stack, to_official, unflatten, unstack
from ttt_jax.models.h_vittt import HViTTTConfig
from ttt_jax.models.lact_llm import LactLLMConfig
from ttt_jax.models.lact_nvs import LactNVSConfig
from ttt_jax.models.vittt import ViTTTConfig
from ttt_jax.train_step import abstract_params, make_trainee

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_TABLES = {
    HViTTTConfig: vittt,
    LactLLMConfig: lact_llm,
    LactNVSConfig: lact_nvs,
    ViTTTConfig: vittt,
}


def import_weights(
    config: Any, official: str | os.PathLike[str], workdir: str | os.PathLike[str]
) -> int:
    """Makes a workdir from official weights; nothing is written unless every tensor fits.

    Args:
      config: a `ttt_jax.config.Config` whose model is of a kind with official weights. The fields
        that the ``config.json`` of a folder decides are taken from there.
      official: a Hugging Face folder, or a ``.safetensors``, ``.pt`` or ``.pth`` file.
      workdir: a folder that does not exist yet, or is empty.

    Returns:
      How many numbers were converted.

    Raises:
      ValueError: a tensor does not fit; the message names it and both shapes. Or the
        configuration breaks a rule, ``official`` cannot be read, or ``workdir`` is not empty or
        cannot be written to.
    """
    target = pathlib.Path(workdir)
    workdirs.check_output("workdir", workdir)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"workdir={str(workdir)!r} is not empty; give another --workdir")
    table = _table_of(config.model)
    with _named("--official", official):
        hyper = files.read_config(official)
    if hyper is not None and table is lact_llm:
        for name, value in lact_llm.config_fields(hyper).items():
            setattr(config.model, name, value)
    config.validate()
    with _named("--official", official):
        params, buffers = load(config.model, files.read_tensors(official))
    averaged = config.train.ema_decay > 0
    parts = (config.model, config.optimizer, config.train.steps, sharding.make_mesh())
    trainee = make_trainee(*parts, averaged=averaged)
    state = checkpoint.new_state(trainee, config.train.seed, (params, buffers))
    draft = target.with_name(f".{target.name}.incomplete-{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        checkpoints = checkpoint.Checkpoints(draft, keep=config.train.keep)
        checkpoints.save(0, state, _Beginning(), config)
        checkpoints.close()
        workdirs.write_config(draft, config)
        if target.exists():
            target.rmdir()
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sum(leaf.size for leaf in jax.tree.leaves((params, buffers)))


def export_weights(
    workdir: str | os.PathLike[str],
    official: str | os.PathLike[str],
    step: int | None = None,
    dtype: str = "float32",
) -> int:
    """Writes a run's parameters under the names and in the layouts of the official code.

    Args:
      workdir: the run's folder.
      official: a file by its suffix (``.safetensors``, ``.pt``, ``.pth``), or for a language model
        a folder in Hugging Face's form, with ``config.json``; nothing is there yet. Folders above
        it are made.
      step: the checkpoint's step; ``None`` takes the newest.
      dtype: of the written tensors: "float32", "bfloat16" or "float16".

    Returns:
      How many tensors were written.

    Raises:
      ValueError: the official code has no such model, or the file exists or cannot be written.
      CheckpointError: ``workdir`` holds no readable checkpoint.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=}: use one of {tuple(DTYPES)}")
    with _named("--export", official):
        files.check_new(official)
    loaded = checkpoint.load_arrays(workdir, step)
    model, hyper = loaded.config.model, None
    with _named("--workdir", workdir):
        found = save(model, loaded.params, loaded.buffers)
    tensors = {name: array.astype(DTYPES[dtype]) for name, array in found.items()}
    if _table_of(model) is lact_llm:
        hyper = lact_llm.official_config(model) | {"torch_dtype": dtype}
    with _named("--export", official):
        files.write_tensors(official, tensors, hyper)
    return len(tensors)


def load(model_config: Any, tensors: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """Parameters and running statistics of a model from official tensors.

    Args:
      model_config: the model's configuration.
      tensors: official name to array.

    Returns:
      Two nested dicts of NumPy arrays, as of `nnx.to_pure_dict`.

    Raises:
      ValueError: a tensor does not fit, see `tables.from_official`.
    """
    module = _table_of(model_config)
    params, buffers = _shapes(model_config, scan_layers=False)
    found = from_official(
        module.table(model_config),
        tensors,
        unflatten(dict(flatten(params) + flatten(buffers))),
        lambda name: module.ignored(model_config, name),
    )
    leaves = dict(flatten(found))
    parts = [unflatten({path: leaves[path] for path, _ in flatten(x)}) for x in (params, buffers)]
    wanted = _shapes(model_config, scan_layers=model_config.scan_layers)
    return tuple(stack(part, like) for part, like in zip(parts, wanted, strict=True))


def save(model_config: Any, params: dict, buffers: dict) -> dict[str, np.ndarray]:
    """Official tensors of a model's parameters and running statistics; the inverse of `load`.

    Raises:
      ValueError: the official code has no such model.
    """
    module = _table_of(model_config)
    module.check(model_config)
    like = _shapes(model_config, scan_layers=False)
    parts = [unstack(part, shapes) for part, shapes in zip((params, buffers), like, strict=True)]
    merged = unflatten(dict(flatten(parts[0]) + flatten(parts[1])))
    return to_official(module.table(model_config), merged)


@contextlib.contextmanager
def _named(flag: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts a flag before the message of an error with its path; the path must have a name."""
    try:
        if not str(path).strip():
            raise ValueError("has no name (an unset shell variable?)")
        yield
    except ValueError as error:
        raise ValueError(f"{flag}={path}: {error}") from error


def _shapes(model_config: Any, scan_layers: bool) -> tuple[dict, dict]:
    """Parameters and running statistics, shapes only, with layers stacked or not."""
    config = dataclasses.replace(model_config, scan_layers=scan_layers)
    _, params, buffers, _ = abstract_params(config, sharding.make_mesh(), models.build)
    return params, buffers


def _table_of(model_config: Any):
    """The module with ``table``, ``ignored`` and ``check`` for a kind of model."""
    if type(model_config) not in _TABLES:
        known = ", ".join(kind.__name__ for kind in _TABLES)
        raise ValueError(
            f"config.model is a {type(model_config).__name__}: official weights exist for {known}"
        )
    return _TABLES[type(model_config)]


class _Beginning:
    """Stands for the data of a run that has not read any."""

    def get_state(self) -> None:
        """The position before the first batch."""
