"""The machine: devices, number formats, memory."""
import contextlib
import ctypes
import sys

import torch

from nanodepth.files import UserError

try:
    import resource                     # POSIX alone
except ImportError:
    resource = None

def pick_device(name: str) -> str:
    """'auto' is cuda, else mps, else cpu. UserError when the named device is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device is {name!r}; it must be auto, cpu, cuda, cuda:N or mps.")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError):
        raise UserError(f"--device {name}: this machine or this build of torch has no such device; "
                        f"use --device auto.") from None
    return name

def pick_dtype(name: str, device: str) -> str:
    """'auto' is bfloat16 on a card that computes in it, float16 on one that does not (T4, V100), else float32."""
    if name == "auto":
        if not device.startswith("cuda"):
            return "float32"
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if name not in ("float32", "bfloat16", "float16"):
        raise UserError(f"--dtype is {name!r}; it must be auto, float32, bfloat16 or float16.")
    return name

def autocast(device: str, dtype: str):
    """The context for a forward pass: autocast to bfloat16 or float16, or nothing at all in float32."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.split(":")[0], dtype=getattr(torch, dtype))

def compile_error(error: Exception) -> str | None:
    """What torch.compile lacks, in a line; None when the error is not of torch.compile."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    return telling_line(error)

def compiled(net):
    """torch.compile(net); UserError where it refuses, as on a Python or a system that it does not know."""
    try:
        return torch.compile(net)
    except RuntimeError as e:
        raise UserError(f"--compile does not work here: {telling_line(e)}; leave it out.") from None

def telling_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "ompiler" in line or "riton" in line or "not supported" in line]
    return (telling or lines or [type(error).__name__])[0][:200].rstrip(".")

def keep_freed_memory() -> None:
    """On Linux, let freed tensors up to 32 MiB (more is not possible) stay with the process: 3 to 15 % of a step.

    glibc gives freed memory back to the system above a threshold, and to get it again costs a page fault every 4 KiB.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):       # another C library: as it is
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)                                              # M_MMAP_THRESHOLD, from malloc.h
        mallopt(-1, -1)                                                 # M_TRIM_THRESHOLD: never

def settle_kernels() -> None:
    """Before threads share it: MKL settles on a kernel in the first call of each function, and where several threads
    make that call together one may get a coarse kernel, right to 1e-4 (pytorch issue 188792): one seed would not be one
    result. One number has one thread."""
    for one in (torch.ones(1), torch.ones(1, dtype=torch.float64)):
        one.exp(), one.log(), one.sqrt(), one.cos(), one.sin()

def peak_mem_mb(device: str) -> float | None:
    """The most memory so far, in MiB: what torch's allocator held on a card, elsewhere the resident set of the process;
    None on Windows, which does not tell it."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    if resource is None:                                                # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10      # bytes on a Mac, KiB on Linux
