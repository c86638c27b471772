"""Check the exercises: what is right, what is not yet written, and for a wrong answer which idea it breaks.

    python -m exercises.check 3                         # exercise 3, that is exercises/ex3_rd.py
    python -m exercises.check --all                     # a score sheet of all six
    python -m exercises.check --all --folder HANDED_IN  # of somebody's files, with the names they have here
    python -m exercises.check --all --solution          # model.py's own routers, through the same checks

Inputs are drawn anew at each run; --seed repeats one. The files run in a process of their own, with a time limit for
each function, so that an endless loop ends with a sentence. Exit code: 0 all right, 1 not yet, 2 the command was wrong.
"""
import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from tqdm import tqdm

from nanodepth.files import UserError, run
from nanodepth.settings import Parser

HERE = Path(__file__).resolve().parent
TITLES = {1: "The depth read", 2: "Block AttnRes", 3: "RD", 4: "Delta", 5: "WAV", 6: "A router of your own"}
FILES = {1: "ex1_depth_read.py", 2: "ex2_block.py", 3: "ex3_rd.py", 4: "ex4_delta.py", 5: "ex5_wav.py",
         6: "ex6_router.py"}
FUNCTIONS = {1: ["depth_read", "depth_read_backward"], 2: ["split_layers", "block"],
             3: ["inputs", "tied_query_v", "divergence"], 4: ["delta", "delta_block"], 5: ["signs", "ratio", "wav"],
             6: ["Mine"]}
PRINTED = 2000                                              # characters that a file may print
MEMORY = 8 << 30                                            # bytes that its process may ask for, on some systems

# ---------------------------------------------------------------------------------------------------------------------
# in a process of its own: a function of a student, checked

class Printed(io.TextIOBase):
    """stdout and stderr for a student's prints: shown up to a length, as an endless loop may print too."""
    def __init__(self, stream):
        self.stream, self.left = stream, PRINTED

    def write(self, text):
        shown, self.left = text[:max(0, self.left)], self.left - len(text)
        self.stream.write(shown + ("\n.. (more was printed)\n" if shown and self.left <= 0 else ""))
        self.stream.flush()
        return len(text)

def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def check_one(number, name, path, seed) -> dict:
    """One function of a file (path None: of model.py): its state, "right", "not written yet" or "wrong", and why."""
    from exercises import answers, checks, contract, solution
    if path and not path.is_file():
        return {"state": "not written yet", "why": f"there is no {path.name}"}
    try:
        if number == 6:
            contract.check(path, seed, None if path else solution.Mine)
            return {"state": "right"}
        module = load(path) if path else solution
        f = getattr(module, name, None)
        if f is None:
            raise checks.Wrong(f"There is no function {name} in {path.name}; give it back its name.")
        if path:                                            # what it calls of its file is right: a mistake is told once
            for other in FUNCTIONS[number]:
                if other != name:
                    setattr(module, other, getattr(answers, other))
        checks.check(number, name, f, seed)
        return {"state": "right"}
    except (checks.NotWritten, NotImplementedError) as why:
        return {"state": "not written yet", "why": str(why)}
    except checks.Wrong as wrong:
        at = getattr(getattr(locals().get("f"), "__code__", None), "co_firstlineno", None)
        return {"state": "wrong", "file": f"{path.name}, line {at}" if path and at else "", **wrong.lines}
    except (Exception, SystemExit) as error:
        return {"state": "wrong", **checks.sentence(error, path or Path(solution.__file__)).lines}

def give_up(trace):
    """Write which lines the main thread is in, the innermost first, as faulthandler does, and end the process."""
    for frame, line in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident]):
        trace.write(f'File "{frame.f_code.co_filename}", line {line}\n')
    trace.flush()
    os._exit(1)

def child(results, stuck, parts, seed, seconds):
    """Check parts, [number, name, path] each, and write a line of JSON to `results` after each."""
    import torch
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource                                     # not on Windows
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import exercises.contract, exercises.solution           # noqa: E401  before the clock runs
    out = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="backslashreplace")          # not every terminal knows every character
    with open(results, "a", encoding="utf-8") as f, open(stuck, "w", encoding="utf-8") as trace:
        for number, name, path in parts:
            timer = threading.Timer(seconds, give_up, [trace])
            timer.daemon = True
            timer.start()
            faulthandler.dump_traceback_later(seconds + 1, exit=True, file=trace)   # one step of C keeps the timer out
            printed = Printed(out)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                result = check_one(number, name, path and Path(path), seed)
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
            f.write(json.dumps(result) + "\n")
            f.flush()

# ---------------------------------------------------------------------------------------------------------------------
# the process that was started

def check_parts(parts, seed, seconds) -> list[dict]:
    """A result for each part. Where a process does not come back, its part is told of and the next go on in another."""
    code = (f"import sys, json, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
            f"sys.path.insert(0, {str(HERE.parent)!r}); from exercises import check; "
            f"check.child(*json.loads(sys.argv[1]))")
    results = []
    bar = tqdm(total=len(parts), unit="check", disable=None, leave=False)
    with bar, tempfile.TemporaryDirectory() as folder:
        while len(results) < len(parts):
            file, stuck = Path(folder) / f"{len(results)}.jsonl", Path(folder) / "stuck"
            rest = parts[len(results):]
            job = json.dumps([str(file), str(stuck), rest, seed, seconds])
            process = subprocess.Popen([sys.executable, "-c", code, job])
            try:
                limit = time.monotonic() + len(rest) * seconds + 120        # if even the clock in there is stuck
                while process.poll() is None and time.monotonic() < limit:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
                    bar.update(len(lines(file)) + len(results) - bar.n)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if not file.exists():
                raise UserError("the check itself could not start; what Python says of it stands above. "
                                "Is model.py whole?")
            results += lines(file)
            if len(results) < len(parts):
                results.append(no_answer(parts[len(results)], stuck, process.returncode, seconds))
    return results

def lines(file) -> list[dict]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

def no_answer(part, stuck, returncode, seconds) -> dict:
    """What to say of a part whose process ended without a word."""
    trace = stuck.read_text(encoding="utf-8", errors="replace") if stuck.exists() else ""
    if trace:
        at = re.search(rf'File "{re.escape(str(part[2]))}", line (\d+)', trace)
        return {"state": "wrong",
                "idea": f"It did not end within {seconds:g} s: is there a loop that has no end, or a list that "
                "grows while a loop goes over it? (--seconds gives it longer.)",
                "where": f"{Path(part[2]).name}, line {at[1]}" if at else ""}
    return {"state": "wrong",
            "idea": f"The file ended the process by itself (exit code {returncode}): no memory left, or os._exit."}

# ---------------------------------------------------------------------------------------------------------------------

def report(number, name, result) -> str:
    """What is said of one function."""
    text = f"{name}: {result['state']}"
    if result.get("why", "not written yet") != "not written yet":
        text += f" ({result['why']})"
    for label in ("idea", "where", "expected", "came", "file"):
        if result.get(label):
            text += f"\n    {label:<10}" + result[label].replace("\n", "\n" + " " * 14)
    return text

def main(argv) -> None:
    parser = Parser(prog="python -m exercises.check", description="Check the exercises of the course.")
    parser.add_argument("exercise", nargs="?", help="1 to 6")
    parser.add_argument("--all", action="store_true", help="all six, and a score sheet")
    parser.add_argument("--solution", action="store_true", help="model.py's own routers in place of the files")
    parser.add_argument("--folder", default=None, help="where the files to check lie; none: exercises/")
    parser.add_argument("--file", default=None, help="another file for this exercise")
    parser.add_argument("--seed", default=None, help="of the inputs; none: drawn anew")
    parser.add_argument("--seconds", default="10", help="the time limit for each function")
    s = parser.parse_args(argv)
    if s.all == (s.exercise is not None):
        raise UserError("say which exercise, 1 to 6, or --all: python -m exercises.check 3")
    if not s.all and s.exercise not in map(str, FILES):
        raise UserError(f"there is no exercise {s.exercise}; they are 1 to 6.")
    numbers = list(FILES) if s.all else [int(s.exercise)]
    if (s.file or s.folder) and s.solution or s.file and s.folder or s.file and s.all:
        raise UserError("--file is for one exercise, --folder for a folder of them, --solution for model.py; give one.")
    if s.seed is not None and not re.fullmatch(r"\d{1,9}", s.seed):
        raise UserError(f"--seed is {s.seed!r}; it must be a whole number of at most nine digits.")
    if not re.fullmatch(r"\d{1,5}(\.\d+)?", s.seconds) or float(s.seconds) == 0:
        raise UserError(f"--seconds is {s.seconds!r}; it must be a number above 0.")
    for path, there in ((s.folder, Path.is_dir), (s.file, Path.is_file)):
        if path and not there(Path(path)):
            raise UserError(f"there is no {path}; --folder says in which folder the files are, --file which file.")
    seed = int.from_bytes(os.urandom(3), "big") if s.seed is None else int(s.seed)
    parts = []
    for number in numbers:
        path = None if s.solution else Path(s.file or Path(s.folder or HERE) / FILES[number]).resolve()
        parts += [(number, name, path and str(path)) for name in FUNCTIONS[number]]
    results = check_parts(parts, seed, float(s.seconds))
    for number in numbers:
        print(f"Exercise {number}: {TITLES[number]}")
        for (n, name, _), result in zip(parts, results):
            if n == number:
                print("  " + report(number, name, result).replace("\n", "\n  "))
    right = sum(r["state"] == "right" for r in results)
    if s.all:
        print("\n| exercise | right | not written | wrong |\n|---|---|---|---|")
        for number in numbers:
            states = [r["state"] for (n, _, _), r in zip(parts, results) if n == number]
            cells = [f"{states.count(x)} of {len(states)}" for x in ("right", "not written yet", "wrong")]
            print(f"| {number} {TITLES[number]} | {' | '.join(cells)} |")
    if right < len(parts):
        print(f"{right} of {len(parts)} functions right. The same inputs again: --seed {seed}")
        sys.exit(1)
    print(f"all right (seed {seed})" if len(parts) > 1 else f"right (seed {seed})")


if __name__ == "__main__":
    run(main)
