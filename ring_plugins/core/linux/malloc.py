"""Keep the memory that a step frees for the next step, instead of giving it back to the kernel.

A training step frees its gradients and the next one allocates as many. glibc's malloc gives freed memory at the end of
its heap back to the kernel, which then clears it again, page by page, when the next gradients are written. With 67 MB
of gradients, a step on two ranks took 66 ms so, and 49 ms with kept memory (docs/performance.md).

glibc has two thresholds. It maps and unmaps larger blocks than one of them by themselves, and gives free memory at the
end of its heap back once it is more than the other. So at most `_KEPT` free bytes stay there, and holes between blocks
that are still in use.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

#: Parameters of mallopt(3), part of glibc's interface.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Free bytes at the end of the heap that stay in the process: the most that mallopt's int can say.
_KEPT = 2**31 - 1
#: Larger blocks, which training rarely allocates anew in each step, go back as soon as they are freed.
_LARGEST = 256 * 1024 * 1024
#: Variables by which a user sets these parameters for glibc; GLIBC_TUNABLES may, too.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep what is freed, unless the environment sets its thresholds.

    Returns:
        Whether it does; False without glibc.
    """
    is_set = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)
    if is_set or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _KEPT))
