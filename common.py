"""What the scripts share: errors that are sentences, files that are whole or absent, settings from TOML and flags."""
import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import inspect
import os
import pickle
import re
import resource
import sys
import tomllib
import types
import typing
import zipfile
from pathlib import Path

# ---------------------------------------------------------------------------------------------------------------------
# errors

class UserError(Exception):
    """Something the user can put right. Its text is one or two lines: what is wrong, and what to do."""

REASONS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "the file would be larger than this system allows (ulimit -f, or the file system's limit)",
    errno.EACCES: "permission denied; choose another folder or change its permissions",
    errno.EPERM: "permission denied; choose another folder or change its permissions",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.ENOENT: "there is no such file or folder",
    errno.EISDIR: "this is a folder; a file is wanted",
    errno.ENOTDIR: "a part of this path is a file; a folder is wanted",
}

def explain(error: OSError) -> str:
    """One line for an error of the operating system, with the file's name."""
    reason = REASONS.get(error.errno, error.strerror or str(error))
    return f"{error.filename}: {reason}" if error.filename else reason

def run(main) -> None:
    """Run `main(argv)`. What a user can put right ends as one or two lines on stderr and exit code 2."""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
        return
    except BrokenPipeError:                     # the reader of our output has gone, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except UserError as e:
        message = str(e)
    except KeyboardInterrupt as e:
        message = str(e) or "stopped by Ctrl-C"
    except OSError as e:
        message = explain(e)
    except RuntimeError as e:                   # torch's: of the card, of the CPU, of a Mac
        if "out of memory" not in str(e) and "can't allocate memory" not in str(e):
            raise
        message = "out of memory; a smaller --batch_size (with more --gradient_accumulation_steps) or a smaller model needs less"
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)

# ---------------------------------------------------------------------------------------------------------------------
# files

@contextlib.contextmanager
def atomic_write(path, mode: str = "w"):
    """Open a temporary file beside `path`; when the `with` ends well it is synced and becomes `path`, else it is removed."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, mode, **({} if "b" in mode else {"encoding": "utf-8", "newline": "\n"})) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
        if os.name == "posix":                  # the new name itself must reach the disk too
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise

# ---------------------------------------------------------------------------------------------------------------------
# settings: defaults, then a TOML file, then flags

def nearest(name: str, known, before: str = "") -> str:
    """' Did you mean --n_layer?', or nothing when no known name is near."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f" Did you mean {before}{close[0]}?" if close else ""

def comments(cls) -> dict[str, str]:
    """The comment beside each field of a dataclass: the one place where a setting is explained."""
    return dict(re.findall(r"^ {4}(\w+): [^#\n]*# (.*)$", inspect.getsource(cls), re.M))

def convert(kind, value, name: str):
    """`value` (a string from a flag, or a TOML value) as the field type `kind`; UserError names the setting."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in kinds and (value is None or isinstance(value, str) and value.lower() == "none"):
        return None
    kind = kinds[0]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    try:
        if kind is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if kind is str and isinstance(value, str) or kind in (int, float) and type(value) is kind:
            return value
        if kind in (int, float) and isinstance(value, str) or kind is float and type(value) is int:
            return kind(value)
    except ValueError:
        pass
    raise UserError(f"{name} is {value!r}; it must be {words[kind]}.")

class Parser(argparse.ArgumentParser):
    """argparse with errors that are sentences: an unknown flag names the nearest known one.

    `refused`: flags that other projects have and this one answers with a sentence, {name: sentence}.
    """

    def __init__(self, *args, refused: dict[str, str] | None = None, **kwargs):
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)
        self.refused, self.kinds = refused or {}, {}
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")         # argparse takes -1e-3 for a flag

    def add_fields(self, cls, skip=()) -> None:
        """One flag for each field of a dataclass, with its comment as the help text; left out of the result unless given."""
        help_texts = comments(cls)
        for f in dataclasses.fields(cls):
            if f.name in skip:
                continue
            self.kinds[f.name] = f.type
            bare = {"nargs": "?", "const": "true"} if f.type is bool else {}           # `--compile` alone is true
            text = help_texts.get(f.name, "").replace("%", "%%") + f" (default: {f.default})"
            self.add_argument(f"--{f.name}", default=argparse.SUPPRESS, metavar=f.name.upper(), help=text, **bare)

    def error(self, message):
        raise UserError(f"{message}. --help lists the flags.")

    def unknown(self, name: str, what: str, before: str) -> UserError:
        known = {o[2:] for o in self._option_string_actions if o.startswith("--")}
        return UserError(self.refused.get(name) or f"there is no {what} {before}{name}.{nearest(name, known, before)}")

    def parse_args(self, argv=None, namespace=None):
        argv = sys.argv[1:] if argv is None else argv
        for word in argv:
            name = word.split("=")[0]
            if word == "--":
                break
            if name.startswith("--") and name not in self._option_string_actions:
                raise self.unknown(name[2:], "flag", "--")
        args = super().parse_args(argv, namespace)
        for name, kind in self.kinds.items():
            if hasattr(args, name):
                setattr(args, name, convert(kind, getattr(args, name), f"--{name}"))
        return args

    def read_toml(self, path) -> dict:
        """The settings of a TOML file, checked and converted as flags are. It is data: nothing in it is executed."""
        try:
            with open(path, "rb") as f:
                values = tomllib.load(f)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise UserError(f"{path} is not a TOML file: {e}. A line of it looks like: n_layer = 12") from None
        except FileNotFoundError:
            raise UserError(f"there is no config file {path}.") from None
        for name in values:
            if name not in self.kinds:
                error = self.unknown(name, "setting", "")
                raise UserError(f"{path}: {error}")
        return {name: convert(self.kinds[name], v, f"{path}: {name}") for name, v in values.items()}

# ---------------------------------------------------------------------------------------------------------------------
# checkpoints

def save_checkpoint(checkpoint: dict, path) -> None:
    """A dict of tensors and plain values as a file that is whole or absent."""
    import torch
    with atomic_write(path, "wb") as f:
        try:
            torch.save(checkpoint, f)
        except RuntimeError as e:               # torch closes its archive in vain after an error of the disk, and reports that
            raise e.__context__ if isinstance(e.__context__, OSError) else e

def load_checkpoint(path) -> dict:
    """The checkpoint of a run (its folder, or a ckpt.pt), on the CPU. It is data: `weights_only`, nothing is executed."""
    import torch
    path = Path(path)
    path = path / "ckpt.pt" if path.is_dir() else path
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}.")
    try:
        with zipfile.ZipFile(path) as z:                                # torch.load itself checks no checksums
            whole = z.testzip() is None
        checkpoint = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError):
        checkpoint = None
    if not isinstance(checkpoint, dict) or not {"model", "model_config", "tokenizer", "iter"} <= checkpoint.keys():
        raise UserError(f"{path} is damaged, or not a checkpoint of train.py; start the run again without it.")
    return checkpoint

def load_model(checkpoint: dict):
    """The GPT of a checkpoint, with its weights, on the CPU."""
    from model import GPT, GPTConfig
    try:
        model = GPT(GPTConfig(**checkpoint["model_config"]))
        model.load_state_dict(checkpoint["model"])
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"this checkpoint is of another version of model.py: {str(e).splitlines()[0]}") from None
    return model

# ---------------------------------------------------------------------------------------------------------------------
# the machine

def pick_device(name: str) -> str:
    """'auto' is cuda, else mps, else cpu. UserError when the named device is not there."""
    import torch
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
    """'auto' is bfloat16 on a card that computes in it, else float32."""
    import torch
    if name == "auto":
        return "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported(False) else "float32"
    if name not in ("float32", "bfloat16"):
        raise UserError(f"--dtype is {name!r}; it must be auto, float32 or bfloat16.")
    return name

def autocast(device: str, dtype: str):
    """The context for a forward pass: bfloat16 autocast, or nothing at all in float32."""
    import torch
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.split(":")[0], dtype=torch.bfloat16)

def keep_freed_memory() -> None:
    """On Linux, let freed tensors up to 32 MiB (more is not possible) stay with the process: 3 to 15 % of a step's time.

    glibc gives freed memory back to the system above a threshold, and to get it again costs a page fault every 4 KiB.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):       # another C library: as it is
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)                                              # M_MMAP_THRESHOLD, from malloc.h
        mallopt(-1, -1)                                                 # M_TRIM_THRESHOLD: never

def peak_mem_mb(device: str) -> float:
    """The most memory so far, in MiB: what torch's allocator held on a card, the resident set of the process elsewhere."""
    import torch
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10      # bytes on a Mac, KiB on Linux
