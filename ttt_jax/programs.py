"""How every program of launch/ starts and ends."""

import sys
from collections.abc import Callable

from absl import app, flags, logging

from ttt_jax import config_files, processes
from ttt_jax.checkpoint import CheckpointError


def run(main: Callable[[], int | None]) -> None:
    """Parses the command line, runs a program and exits.

    An error that the user can mend is one line and code 1, without a traceback (--verbosity=1
    shows it); what is no flag is refused.

    Args:
      main: the program; its flags are defined already. It returns the exit code, None for 0.
    """

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ValueError(f"{argv[1:]} are no flags: write --name=value")
            code = main()
        except (ValueError, NotImplementedError, OSError, CheckpointError) as error:
            logging.debug("traceback (shown with --verbosity=1)", exc_info=True)
            processes.fail(f"error: {error}")
        sys.exit(code)

    app.run(guarded, flags_parser=config_files.parse_flags)


def require(flag: flags.FlagHolder, example: str) -> None:
    """Refuses to go on without a flag that has no default.

    Args:
      flag: as `flags.DEFINE_...` returned it.
      example: a value to show.

    Raises:
      ValueError: it was not given.
    """
    if flag.value is None:
        raise ValueError(f"--{flag.name} is missing, for example --{flag.name}={example}")
