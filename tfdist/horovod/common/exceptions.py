"""Exceptions with Horovod's names.

tfdist raises its own exceptions (`tfdist.errors`), which are subclasses of
TensorFlow's: a mismatch raises a `tf.errors.FailedPreconditionError`, a failed rank a
`tf.errors.AbortedError`. Of the classes below, tfdist raises only
`HostsUpdatedInterrupt`; the others exist for scripts that import them.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective operation has failed.

    tfdist raises `tfdist.RankFailedError` instead. If a script raises this error inside
    the function of `elastic.run`, all ranks restore the state of the last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The ranks of an elastic job are about to change.

    Args:
        skip_sync: whether to continue without `state.sync()`. The ranks skip it only if
            `skip_sync` is true on all ranks and all have the same number of commits.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the ranks of the job are about to change")
        self.skip_sync = skip_sync


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Returns the message of `HorovodVersionMismatchError`."""
    return (
        f"the library was built with {name} {installed_version}, but {version} is "
        "installed now. Rebuild: pip install --no-build-isolation "
        "--force-reinstall --no-deps tfdist"
    )


class HorovodVersionMismatchError(ImportError):
    """The installed version of a framework differs from the build version.

    Args:
        name: name of the framework.
        version: version that is installed now.
        installed_version: version with which the library was built.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
