"""Errors that are sentences, files that are whole or absent, and checkpoints."""
import contextlib
import errno
import hashlib
import importlib.util
import os
import pickle
import sys
import traceback
import zipfile
from pathlib import Path

from filelock import FileLock, Timeout

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
    for stream in (sys.stdout, sys.stderr):     # not every terminal knows every character; no text is worth a traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
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
        message = ("out of memory; a smaller --batch_size (with more --gradient_accumulation_steps) or a smaller model "
                   "needs less")
    with contextlib.suppress(OSError):          # a terminal that has been closed
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)

# ---------------------------------------------------------------------------------------------------------------------
# files

@contextlib.contextmanager
def atomic_write(path, mode: str = "w"):
    """Open a temporary file beside `path`; when the `with` ends well it is synced and becomes `path`, else removed."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, mode, **({} if "b" in mode else {"encoding": "utf-8", "newline": "\n"})) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
        sync_folder(path.parent)
    except BaseException as e:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.errno and not e.filename:       # a write does not say where the disk is full
            e.filename = str(tmp)
        raise

def sync_folder(folder) -> None:
    """A new name must reach the disk too; shares, FUSE and Windows have no such thing, and do without."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

class lock:
    """One process at a time in a folder: held from now on, until `with` or release() ends it, or the process ends.

    When another holds it: UserError with the sentence `refused`, or, without one, its end is waited for. A file system
    without locks goes without.
    """

    def __init__(self, folder, refused: str | None, name: str = ".lock"):
        self.path = Path(folder) / name
        self.held = FileLock(self.path, fallback_to_soft=False)
        try:
            self.held.acquire(timeout=0 if refused else -1)
        except Timeout:
            raise UserError(refused) from None
        except (OSError, NotImplementedError) as e:
            if getattr(e, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOENT):
                raise
            self.path.unlink(missing_ok=True)

    def release(self) -> None:
        with contextlib.suppress(OSError):      # not on Windows, where a file that is open stays
            self.path.unlink()
        self.held.release()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.release()

# ---------------------------------------------------------------------------------------------------------------------
# a router of one's own

def own_router(name: str, routers: dict) -> str | None:
    """For FILE.py:Class run the file, put its class into `routers` under that name, and return the file's sha256. Other
    names are left alone: None. A file runs only where a user has named it in a command, never for a config or a
    checkpoint."""
    path, _, cls = name.rpartition(":")
    if not path.endswith(".py"):
        return None
    try:
        code = Path(path).read_bytes()
        digest = hashlib.sha256(code).hexdigest()
        if getattr(routers.get(name), "digest", None) == digest:        # it has run already, for another cell
            return digest
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise UserError(f"--router {name}: there is no file {path}.") from None
    except Exception as e:                      # of the user's code: the line in it says more than our stack
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == spec.origin]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else "?"
        raise UserError(f"{path}, line {line}: {type(e).__name__}: {e}") from None
    there = [k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__
             and hasattr(v, "forward") and hasattr(v, "parameters")]
    if cls not in there:
        raise UserError(f"--router {name}: {path} has no router {cls}, which is a torch.nn.Module with forward(self, "
                        f"e, sublayers). It has: {' '.join(there) or 'none'}.")
    if cls in routers:
        raise UserError(f"--router {name}: {cls} is a router of model.py too; rename the class.")
    routers[name] = getattr(module, cls)
    routers[name].digest = digest
    return digest

def router_name(router: str) -> str:
    """What a router is called in names of runs and in tables: the class alone of FILE.py:Class."""
    return router.rpartition(":")[2]

def check_named(router: str, named: str | None, where: str, flag: str = "router") -> None:
    """UserError where a config or a checkpoint would run a file that the command does not name."""
    if ".py:" in router and named is None:
        raise UserError(f"{where} has the router {router}, a file of code. It runs only where the command names it: "
                        f"add --{flag} {router}.")

# ---------------------------------------------------------------------------------------------------------------------
# checkpoints

def save_checkpoint(checkpoint: dict, path) -> None:
    """A dict of tensors and plain values as a file that is whole or absent."""
    import torch
    with atomic_write(path, "wb") as f:
        try:
            torch.save(checkpoint, f)
        except RuntimeError as e:               # torch closes its archive in vain after an error of the disk
            raise e.__context__ if isinstance(e.__context__, OSError) else e

def load_checkpoint(path, name: str = "ckpt.pt") -> dict:
    """The checkpoint of a run, on the CPU: `path` is its folder, or a file. It is data: nothing in it is executed."""
    import torch
    path = Path(path)
    path = path / name if path.is_dir() else path
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

def newest_run() -> Path:
    """The folder under out/ whose checkpoint was written last, however deep it lies."""
    runs = list(Path("out").rglob("ckpt.pt"))
    if not runs:
        raise UserError("there is no run under out/ yet; train one with train.py, or name a folder with --out_dir.")
    return max(runs, key=lambda path: path.stat().st_mtime).parent

def router_of(checkpoint: dict, named: str | None, routers: dict) -> str:
    """The router of a checkpoint, by its name in `routers`. named: FILE.py:Class, if the command has --router."""
    router = checkpoint["model_config"].get("router")
    check_named(str(router), named, "this checkpoint")
    if named is None:
        return router
    digest = own_router(named, routers)
    if digest is None or router_name(named) != router_name(router):
        raise UserError(f"--router {named}: the router of this checkpoint is {router}.")
    if digest != checkpoint["settings"].get("router_sha256"):
        print(f"note: {named} is another file than the run was trained with, or has changed since", file=sys.stderr)
    return named

def load_model(checkpoint: dict, GPT, GPTConfig, **changes):
    """The GPT of a checkpoint, with its weights, on the CPU; the classes are model.py's. changes: other settings."""
    try:
        model = GPT(GPTConfig(**checkpoint["model_config"] | changes))
        model.load_state_dict(checkpoint["model"])
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"this checkpoint is of another version of model.py: {str(e).splitlines()[0]}") from None
    return model
