"""The exceptions of Horovod's names.

tfdist raises its own (`tfdist.errors`), which are subclasses of TensorFlow's: a
mismatch is a `tf.errors.FailedPreconditionError`, a failed rank a
`tf.errors.AbortedError`. These exist for scripts that name them.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective operation has failed: raised by scripts, for `elastic.run`."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed.

    Args:
        skip_sync: whether the ranks that are left go on without a `sync()`.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Returns the message of `HorovodVersionMismatchError`."""
    return (
        f"{name} {installed_version} was there when the library was built, "
        f"{version} is there now. Rebuild: pip install --no-build-isolation "
        "--force-reinstall --no-deps tfdist"
    )


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the library was built for.

    Args:
        name: of the framework.
        version: that is there.
        installed_version: that was there when the library was built.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
