"""Runs functions in threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["in_thread"]

_logger = logging.getLogger("tfdist")


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Calls a function in a separate thread.

    Args:
        target: the function.
        args: its arguments.
        name: name of the thread.
        daemon: whether the program may exit before the thread has ended.
        silent: whether exceptions of the function are logged at debug level instead of
            being printed to stderr.

    Returns:
        The started thread.

    Raises:
        ValueError: `args` is not a tuple.

    Example:
        >>> from tfdist.horovod.runner.util.threads import in_thread
        >>> found = []
        >>> in_thread(found.append, (3,)).join()
        >>> found
        [3]
    """
    if not isinstance(args, tuple):
        raise ValueError(
            f"Expected args to be a tuple, got {type(args).__name__}: {args!r}. For "
            "one argument write (argument,)."
        )

    def quiet(*args: Any) -> None:
        try:
            target(*args)
        except Exception:
            _logger.debug("in a thread of %r:", target, exc_info=True)

    work = quiet if silent else target
    thread = threading.Thread(target=work, args=args, name=name, daemon=daemon)
    thread.start()
    return thread
