"""Other systems and file systems, as far as one machine can show them: what they lack is taken away."""
import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanodepth import files
from nanodepth.files import UserError, atomic_write, lock
from nanodepth.runs import claim
from corpora import all_bytes
from prepare_data import prepare

ROOT = Path(__file__).resolve().parent.parent

WINDOWS = """
import sys
import threading
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import os
for name in ("sched_getaffinity", "fork", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
"""

def test_every_script_starts_without_the_modules_of_posix():
    names = [path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
             for folder in (".", "nanodepth", "lab", "exercises")
             for path in sorted((ROOT / folder).glob("*.py"))]
    assert {"model", "train", "prepare_data", "sample", "lab.sweep"} <= set(names)
    code = WINDOWS + f"sys.path.insert(0, {str(ROOT)!r})\nimport {', '.join(names)}\nassert not sys.modules['fcntl']"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_a_preparation_without_the_modules_of_posix(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 3000)
    code = WINDOWS + f"sys.path.insert(0, {str(ROOT)!r})\nfrom prepare_data import prepare\n" \
        "prepare(input=['a.txt'], tokenizer='byte', out='out')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["meta.json", "test_000000.bin", "train_000000.bin",
                                                                    "val_000000.bin"]

def test_no_module_of_one_system_is_imported_unguarded():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("nanodepth/*.py"), *ROOT.glob("lab/*.py")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.match(r"(import|from) (fcntl|resource|pwd|grp|termios|msvcrt|winreg)\b", line), path

def refusing(number, real):
    """A system call that a file system refuses: fsync of a folder."""
    def fsync(fd):
        if os.path.isdir(f"/dev/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        return real(fd)
    return fsync

@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="POSIX")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO, errno.EBADF])
def test_a_file_system_that_syncs_no_folder(tmp_path, monkeypatch, number):
    monkeypatch.setattr(files.os, "fsync", refusing(number, os.fsync))
    with atomic_write(tmp_path / "a") as f:
        f.write("whole")
    assert all_bytes(tmp_path) == {"a": b"whole"}
    (tmp_path / "a.txt").write_text("some text\n" * 3000)
    prepare(input=[tmp_path / "a.txt"], out=tmp_path / "out")
    assert (tmp_path / "out/meta.json").exists()

@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    fcntl = pytest.importorskip("fcntl")

    def flock(*args):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "a.txt").write_text("some text\n" * 3000)
    prepare(input=[tmp_path / "a.txt"], out=tmp_path / "out")
    assert not (tmp_path / "out/.lock").exists()
    log, held = claim(tmp_path / "run", None)
    log.close()
    held.release()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["log.jsonl"]

def test_a_lock_is_one_process_s(tmp_path):
    with lock(tmp_path, "busy"):
        with pytest.raises(UserError, match="^busy$"):
            lock(tmp_path, "busy")
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from nanodepth.files import lock; " \
            f"lock({str(tmp_path)!r}, 'busy')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "UserError: busy" in done.stderr
    with lock(tmp_path, "busy"):                                # it was given back
        pass
    assert list(tmp_path.iterdir()) == []
    code += "; import os; os.kill(os.getpid(), 9)" if hasattr(os, "kill") else ""
    subprocess.run([sys.executable, "-c", code], capture_output=True)
    lock(tmp_path, "busy").release()                            # the one that was killed holds it no more

def test_a_lock_that_waits(tmp_path):
    code = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from nanodepth.files import lock; " \
        f"held = lock({str(tmp_path)!r}, 'busy'); print('held', flush=True); sys.stdin.read(); held.release()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().strip() == b"held"
        ended = []
        threading.Timer(0.5, lambda: [ended.append(True), process.stdin.close()]).start()
        with lock(tmp_path, None):
            assert ended
        with pytest.raises(UserError, match="^busy$"), lock(tmp_path, None):
            lock(tmp_path, "busy")

@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_stdout_that_is_not_utf8(tmp_path, encoding):
    """No text is worth a traceback: what the terminal does not know is shown by its number."""
    (tmp_path / "東京.txt").write_text("東京 é\n" * 3000, encoding="utf-8")
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    env.pop("PYTHONUTF8", None)
    done = subprocess.run([sys.executable, ROOT / "prepare_data.py", "--input", "東京.txt"], cwd=tmp_path, env=env,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode(encoding)
    assert ("東京" if encoding == "utf-8" else "\\u6771\\u4eac") in shown
