"""Keep freed memory in the process: glibc's allocator otherwise hands every large tensor back to the kernel.

A training step allocates and frees the same few hundred megabytes over and over. By default glibc maps each
tensor above 32 MB afresh and unmaps it when it is freed, and the kernel clears and hands out its pages one by
one, 4 kB at a time, at every step. Three settings stop that: no mapping (M_MMAP_MAX = 0, and the threshold
raised in case that is overridden), and no trimming of the heap's end (M_TRIM_THRESHOLD).

This changes the whole process, so only the command line calls it; importing the package never does. A program that
embeds the library can get the same from the environment with MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647. If
the kernel offers huge pages on request only (`madvise`), start the process with GLIBC_TUNABLES=glibc.malloc.hugetlb=1.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
LARGEST = 2**31 - 1  # mallopt takes an int


def keep_memory() -> bool:
    """Tell glibc to keep freed memory, and return whether it took effect. Does nothing without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")  # glibc's name; musl has another, and no mallopt
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)  # some versions refuse so large a value; the next setting suffices
        return libc.mallopt(M_MMAP_MAX, 0) == 1 and libc.mallopt(M_TRIM_THRESHOLD, LARGEST) == 1
    except (OSError, AttributeError):
        return False
