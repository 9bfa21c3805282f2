"""Selects the allocator that TensorFlow uses for the memory of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping

USE_BFC = "TF_CPU_ALLOCATOR_USE_BFC"
LIMIT_MIB = "TF_CPU_BFC_MEM_LIMIT_IN_MB"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to set before TensorFlow's first tensor.

    By default TensorFlow uses malloc, which returns the memory of large tensors to the
    system. Each step then maps memory for gradients and results again, 4 KiB at a time.
    TensorFlow's own allocator (best fit with coalescing), which is its default with a
    GPU, keeps the memory in the process. Its default limit is 64 GiB; these variables
    set the limit to the whole memory of the host, as with malloc.

    Args:
        environ: environment of this process. Variables that the user has set are not
            changed.

    Example:
        >>> from tfdist.core import allocator
        >>> sorted(allocator.settings({}))
        ['TF_CPU_ALLOCATOR_USE_BFC', 'TF_CPU_BFC_MEM_LIMIT_IN_MB']
        >>> allocator.settings({"TF_CPU_ALLOCATOR_USE_BFC": "false"})
        {}
    """
    if USE_BFC in environ:
        return {}
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    defaults = {USE_BFC: "true", LIMIT_MIB: str(max(1, host_bytes >> 20))}
    return {name: value for name, value in defaults.items() if name not in environ}


__all__ = ["USE_BFC", "LIMIT_MIB", "settings"]
