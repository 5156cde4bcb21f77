"""Threads that each compute on one core: several shards at a time use the machine better than one on all cores."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

THREADS = min(8, max(2, (os.cpu_count() or 1) // 2))
_setting = threading.Lock()


def one_core_threads(name: str, count: int = THREADS) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, name, initializer=_stay_on_one_core)


def _stay_on_one_core() -> None:
    """torch takes a thread's number of cores for that of all threads to come as well: another, which ends at once, sets
    that back."""
    with _setting:
        cores = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(cores,))
        restore.start()
        restore.join()
