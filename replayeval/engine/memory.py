"""Peak memory of this process, on the accelerator that it uses or on the host."""

import resource
import sys

import torch


def peak_memory_bytes() -> int:
    """Largest amount of memory held so far, on all CUDA devices if any was used, else on the host."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return sum(torch.cuda.max_memory_allocated(d) for d in range(torch.cuda.device_count()))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return used if sys.platform == "darwin" else used * 1024
