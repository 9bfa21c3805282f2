"""Which of its allocators TensorFlow takes the memory of tensors from."""

from __future__ import annotations

import os
from collections.abc import Mapping

KEEPS = "TF_CPU_ALLOCATOR_USE_BFC"
MOST_MIB = "TF_CPU_BFC_MEM_LIMIT_IN_MB"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set before TensorFlow makes its first tensor.

    By default TensorFlow has memory from malloc, which gives that of large tensors back
    to the system: each step maps gradients and results anew, 4 KiB at a time. Of its
    own allocator (best fit with coalescing), which it uses by itself where it has a
    GPU, the memory stays with the process. It may take 64 GiB unless told; here all
    memory of the host, as malloc.

    Args:
        environ: of this process; what the user has set there stays.

    Example:
        >>> from tfdist.core import allocator
        >>> sorted(allocator.settings({}))
        ['TF_CPU_ALLOCATOR_USE_BFC', 'TF_CPU_BFC_MEM_LIMIT_IN_MB']
        >>> allocator.settings({"TF_CPU_ALLOCATOR_USE_BFC": "false"})
        {}
    """
    if KEEPS in environ:
        return {}
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = {KEEPS: "true", MOST_MIB: str(max(1, host_bytes >> 20))}
    return {name: value for name, value in wanted.items() if name not in environ}


__all__ = ["KEEPS", "MOST_MIB", "settings"]
