"""Tasks: what `ttt_jax.train` trains on and how it is measured; see `ttt_jax.tasks.base`."""

from typing import Any

from ttt_jax.config import DataConfig
from ttt_jax.config_images import ImageConfig
from ttt_jax.config_views import ViewsConfig
from ttt_jax.tasks.base import Result, Task
from ttt_jax.tasks.classification import Classification
from ttt_jax.tasks.language import Language
from ttt_jax.tasks.views import Views

# The type of config.data -> the task.
_TASKS: dict[type, type[Task]] = {
    DataConfig: Language,
    ImageConfig: Classification,
    ViewsConfig: Views,
}


def make_task(config: Any) -> Task:
    """Makes the task that a configuration's data is for.

    Args:
      config: a `ttt_jax.config.Config`.

    Returns:
      The task, its data opened.

    Raises:
      ValueError: no task is known for this kind of data, or the data cannot be read.
    """
    if type(config.data) not in _TASKS:
        known = ", ".join(data.__name__ for data in _TASKS)
        raise ValueError(f"config.data is a {type(config.data).__name__}; it must be: {known}")
    return _TASKS[type(config.data)](config)


__all__ = ["Classification", "Language", "Result", "Task", "make_task"]
