"""One file from the network, whole and checked or not there at all; and one process at a time in one folder."""
import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from nanodepth.files import UserError

WAIT = 1.0          # seconds before a second try, doubled each time
TRIES = 5           # tries in a row that bring nothing
TIMEOUT = 30        # seconds of silence
ELSEWHERE = "Get it from a mirror with --source URL|FILE, or use --dataset pystdlib, which needs no network."

class Unfinished(UserError):
    """The network's fault: what has been done is kept, and the same command goes on."""

class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and keeps what the hub tells only in its first answer: the file's size and sha256."""
    size = sha256 = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        size, etag = headers.get("X-Linked-Size", ""), headers.get("X-Linked-ETag", "").strip('"')
        self.size = int(size) if size.isdigit() else self.size
        self.sha256 = etag if re.fullmatch("[0-9a-f]{64}", etag) else self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)

def receive(url: str, part: Path, size: int | None, bar) -> tuple:
    """One request for what `part` lacks of `url`. Returns length and sha256 of the whole file, or None."""
    mark, redirects = part.with_name(part.name + ".etag"), Redirects()
    have = length(part)
    request = urllib.request.Request(url, headers={"User-Agent": "nanodepth", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if mark.exists():
            request.add_header("If-Range", mark.read_text())                    # a file that has changed is sent whole
    try:
        answer = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        if e.headers.get("Content-Range") == f"bytes */{have}":                 # nothing is missing
            return have, redirects.sha256
        part.unlink(missing_ok=True)                                            # more is here than there: start over
        return -1, None
    with answer:
        total = int(answer.headers.get("Content-Length") or -1)
        if answer.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if not span or int(span[1]) != have:
                part.unlink(missing_ok=True)
                return -1, None
            total = int(span[2])
        else:
            have = 0
        size = size or redirects.size
        if size and total not in (-1, size):
            raise UserError(f"{url} has {total:,} bytes, and the right file has {size:,}. {ELSEWHERE}")
        etag = answer.headers.get("ETag", "")
        mark.write_text("" if etag.startswith("W/") else etag)
        if not mark.stat().st_size:
            mark.unlink()
        bar.total, bar.n = (total if total > 0 else None), have
        with open(part, "ab" if have else "wb") as f:
            while data := answer.read(2**18):
                save(f, data, part)
                bar.update(len(data))
            f.flush()
            os.fsync(f.fileno())
    return (size if total < 0 else total), redirects.sha256

def length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

def fetch(url: str, path: Path, size: int | None = None, sha256: str | None = None, check: bool = True) -> None:
    """Download to `path`, which appears when it is whole and checked. A stopped download goes on where it was.

    `check`: also by the sha256 that the server itself tells.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--source {url}: only http:// and https:// are fetched; a file or folder is named by its "
                        f"path.")
    part, tries = path.with_name(path.name + ".part"), 0
    with tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        while True:
            before = length(part)
            try:
                total, linked = receive(url, part, size, bar)
                if length(part) and total in (None, length(part)):
                    break
                why = f"the connection was cut after {length(part):,} of {max(total or 0, 0):,} bytes"
            except urllib.error.HTTPError as e:
                why = f"the server answered {e.code} {e.reason}"
                if e.code < 500 and e.code not in (408, 429):
                    raise UserError(f"{url}: {why}. {ELSEWHERE}") from None
            except (OSError, http.client.HTTPException) as e:
                if isinstance(e, OSError) and (e.filename or e.errno in (errno.ENOSPC, errno.EDQUOT)):
                    raise                                                       # the disk's fault
                why = f"the connection failed ({getattr(e, 'reason', None) or str(e) or type(e).__name__})"
                if isinstance(e, urllib.error.URLError) and not length(part):
                    raise Unfinished(f"{url}: {why}. {ELSEWHERE}") from None    # there is no network: no use in waiting
            tries = 0 if length(part) > before else tries + 1
            if tries == TRIES:
                raise Unfinished(f"{url}: {why}. Run the same command again to go on. {ELSEWHERE}")
            time.sleep(WAIT * 2**tries)
    try:
        if size and length(part) != size:
            raise UserError(f"{url} has {length(part):,} bytes, and the right file has {size:,}. {ELSEWHERE}")
        check_sum(part, url, sha256 or (linked if check else None))
    except UserError:
        part.unlink()
        raise
    finally:
        part.with_name(part.name + ".etag").unlink(missing_ok=True)
    os.replace(part, path)

def save(f, data, path) -> None:
    """Write, with the file's name in the error: a write says nothing of where the disk is full."""
    try:
        f.write(data)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None

def digest(path, kind: str = "sha256") -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, kind).hexdigest()

def check_sum(path: Path, name, known: str | None) -> None:
    """UserError unless the file has the known sha256 or md5."""
    kind = "md5" if known and len(known) == 32 else "sha256"
    if known and (got := digest(path, kind)) != known:
        raise UserError(f"{name} was changed or damaged: its {kind} is {got[:16]}... and should be {known[:16]}.... "
                        f"Get it elsewhere with --source URL|FILE, or take it as it is with --no_check.")

@contextlib.contextmanager
def lock(folder: Path, doing: str):
    """One process at a time; the system lets go of the lock when that process ends, however it ends."""
    path = folder / ".lock"
    while True:
        f = open(path, "a")
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.close()
            raise UserError(f"another run is {doing} {folder}. Wait for it, or choose another --out.") from None
        if os.fstat(f.fileno()).st_nlink:                                       # 0: its last owner has just removed it
            break
        f.close()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        f.close()
