"""The folder of a run: config.json, and whether a run may start or go on in it; other outputs.

Layout: ``config.json`` (the run's configuration), ``checkpoints/`` and ``broken/`` (see
`ttt_jax.checkpoint`), ``metrics.jsonl``, ``evaluation.json``, pictures; ``train.lock`` says who
trains there (`alone_in`).
"""

import contextlib
import datetime
import fcntl
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import jax

from ttt_jax import config as config_lib
from ttt_jax import processes

logger = logging.getLogger(__name__)

# Fields that a resumed run may change: they do not touch the sequence of updates.
FREE_FIELDS = (
    "mesh.",
    "data.num_workers",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.save_every",
    "train.keep",
    "train.profile_steps",
    "train.max_nonfinite_steps",
)


class CheckpointError(RuntimeError):
    """A workdir cannot be used, or none of its checkpoints can be read."""


def read_config(workdir: str | os.PathLike[str]) -> Any:
    """Returns the configuration of the run in `workdir`, or None where there is no run.

    Raises:
      CheckpointError: the folder has no name, or config.json is there and cannot be read.
    """
    _check_name(workdir)
    path = pathlib.Path(workdir) / "config.json"
    try:
        return config_lib.from_json(path.read_text()) if path.exists() else None
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} cannot be read as a configuration: {error}") from error


def _check_name(workdir: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if `workdir` is empty, which would be the current folder."""
    if not str(workdir).strip():
        raise CheckpointError("workdir='' has no name (an unset shell variable?); give --workdir")


def holds_checkpoints(workdir: str | os.PathLike[str]) -> bool:
    """Says whether a run has saved a state in `workdir`, without reading it.

    >>> holds_checkpoints("/no/such/folder")
    False
    """
    return any(path.name.isdigit() for path in pathlib.Path(workdir).glob("checkpoints/*"))


def check_workdir(workdir: str | os.PathLike[str], config: Any) -> None:
    """Checks that a run of `config` may start or go on in `workdir`; makes no folder that stays.

    Raises:
      CheckpointError: the folder has no name, is an address, cannot be written to, or holds a run
        of another configuration or of one that is lost.
    """
    _check_name(workdir)
    if "://" in str(workdir):
        raise CheckpointError(
            f"workdir={str(workdir)!r} is an address; mount the bucket (gcsfuse, s3fs) and "
            "give the path of a folder"
        )
    folder = pathlib.Path(workdir)
    problem = _sharing_problem(folder)
    if not processes.all_true(problem is None):
        problem = problem or "is not one folder that all processes share and can write to"
        raise CheckpointError(f"workdir={str(workdir)!r} {problem}; give another --workdir")
    found = read_config(workdir)
    if found is None:
        if holds_checkpoints(workdir):
            raise CheckpointError(
                f"workdir={str(workdir)!r} holds checkpoints and no config.json that says of what; "
                "put the file back, or give another --workdir"
            )
        return
    changed = config_lib.differences(config, found)
    if any(name == "train.steps" for name, _, _ in changed):
        logger.warning(
            "train.steps is %d here and %d in %s: the learning-rate schedule is that of the new "
            "length from now on",
            config.train.steps,
            found.train.steps,
            folder,
        )
    free = (*FREE_FIELDS, "train.steps")
    wrong = [
        change for change in changed if not change[0].startswith(free) and not _same_path(*change)
    ]
    if wrong:
        listed = "; ".join(
            f"{name} is {theirs!r} there, {ours!r} here" for name, ours, theirs in wrong
        )
        raise CheckpointError(
            f"workdir={str(workdir)!r} holds a run with another configuration ({listed}); give "
            "another --workdir, or the flags that it was started with"
        )


def _same_path(name: str, ours: Any, theirs: Any) -> bool:
    """Says whether the field is `train.init_from`, and names the same folder in both."""
    if name != "train.init_from" or not (ours and theirs):
        return False
    return len({pathlib.Path(path).expanduser().resolve() for path in (ours, theirs)}) == 1


@contextlib.contextmanager
def alone_in(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """While entered, no other run can enter with the same folder, which is made if need be.

    The first process of the run holds a lock on ``train.lock``; the system releases it when that
    process ends, however it ends. The file stays: one that is removed could be locked twice. A
    file system without locks is a warning.

    Raises:
      CheckpointError: another run is in there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, alone_in(folder):
    ...     sorted(os.listdir(folder))
    ['train.lock']
    """
    path = pathlib.Path(workdir) / "train.lock"
    with contextlib.ExitStack() as stack:
        problem = _locking_problem(path, stack) if processes.is_first() else None
        if not processes.all_true(problem is None):
            raise CheckpointError(
                f"{problem or 'another process'} trains in workdir={str(workdir)!r}; wait for its "
                "end, or give another --workdir"
            )
        yield


def _locking_problem(path: pathlib.Path, stack: contextlib.ExitStack) -> str | None:
    """Locks a file until the stack closes it, and signs it; names the process that has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = stack.enter_context(path.open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another process ({path.read_text() or 'starting now'})"
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see that no other run trains there", path, error)
        return None
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, pid {os.getpid()}, since {since}")
    file.flush()
    return None


def check_output(name: str, folder: str | os.PathLike[str]) -> None:
    """Checks before the work that its results can be written; makes no folder that stays.

    Args:
      name: of the flag or argument that gave the folder.
      folder: where files will be written; need not be there.

    Raises:
      ValueError: the folder has no name, or cannot be made or written to.

    >>> check_output("out", "/dev/null")
    Traceback (most recent call last):
    ...
    ValueError: out='/dev/null' cannot be written to ([Errno 17] File exists: '/dev/null'); give \
another --out
    """
    if not str(folder).strip():
        raise ValueError(f"{name}='' has no name (an unset shell variable?); give --{name}")
    new = not os.path.exists(folder)
    problem = _writing_problem(pathlib.Path(folder))
    if new:
        _remove_empty(pathlib.Path(folder))
    if problem is not None:
        raise ValueError(f"{name}={str(folder)!r} {problem}; give another --{name}")


def _remove_empty(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it was not made, or something is in it
        folder.rmdir()


def _writing_problem(folder: pathlib.Path) -> str | None:
    """Makes the folder and a file in it, which is removed; says why that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{jax.process_index()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return f"cannot be written to ({error})"
    return None


def _sharing_problem(folder: pathlib.Path) -> str | None:
    """Says why a folder cannot be written to, or is not the first process's folder."""
    new = processes.all_true(not os.path.exists(folder))  # all look before one of them makes it
    mark = folder / f".run-{int(processes.largest(os.getpid() if processes.is_first() else 0))}"
    problem = _writing_problem(folder)
    if problem is None and processes.is_first():
        mark.write_text("")
    processes.all_true(True)  # the others wait for the mark
    if problem is None and not mark.exists():
        problem = "is another folder here than for the first process, and all must share one"
    processes.all_true(True)  # and it waits for them
    if processes.is_first() and mark.exists():
        mark.unlink()
    if new:  # whoever writes first makes it again, after the caller's question to all
        _remove_empty(folder)
    return problem


def write_config(workdir: str | os.PathLike[str], config: Any) -> None:
    """Writes config.json, in one piece or not at all."""
    path = pathlib.Path(workdir) / "config.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(config_lib.to_json(config))
    draft.replace(path)
