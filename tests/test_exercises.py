"""The course: right answers are right, typical mistakes get their sentence, any fault of a file gets one with its line,
and the pages quote model.py and give commands that run. Answers here are a student's, unlike the checker's own."""
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exercises import answers, check, checks, contract
from exercises.answers import MISTAKES, mistaken
from exercises.check import FILES, FUNCTIONS, HERE, check_one
from model import GPTConfig, ROUTERS
from nanodepth.files import UserError
from tiny import data_folder

ROOT = HERE.parent
PAGES = sorted(HERE.glob("ex*.md"))
READING = ROOT / "docs" / "reading-model.md"

# What students hand in. Each is edited below.
RIGHT = {1: """
import torch

def rms(s):
    return torch.sqrt((s ** 2).mean(dim=2) + 1e-6)

def depth_read(query, sources):
    logits = torch.stack([(s @ query) / rms(s) for s in sources])
    e = torch.exp(logits - logits.amax(dim=0))
    alpha = e / e.sum(dim=0)
    mix = torch.zeros_like(sources[0])
    for a, s in zip(alpha, sources):
        mix = mix + a.unsqueeze(-1) * s
    return mix, alpha

def depth_read_backward(query, sources, g):
    mix, alpha = depth_read(query, sources)
    D = len(query)
    dq, ds = torch.zeros_like(query), []
    for a, s in zip(alpha, sources):
        r = rms(s).unsqueeze(-1)
        dl = (a * ((g * s).sum(-1) - (g * mix).sum(-1))).unsqueeze(-1)
        dq = dq + (dl * s / r).sum(dim=(0, 1))
        through_rms = (s @ query).unsqueeze(-1) * s / (D * r ** 3)
        ds.append(a.unsqueeze(-1) * g + dl * (query / r - through_rms))
    return dq, ds
""", 2: """
def split_layers(n_layer, n_blocks):
    sizes = [n_layer // n_blocks] * n_blocks
    for b in range(n_layer % n_blocks):
        sizes[b] += 1
    blocks, start = [], 0
    for size in sizes:
        blocks.append(range(start, start + 2 * size))
        start += 2 * size
    return blocks

def block(e, sublayers, blocks, query, read):
    sums = []
    for b in range(len(blocks)):
        pc = []
        for l in blocks[b]:
            h = read(query[l], [e] + sums + pc)
            u = sublayers[l](h)
            if len(pc) == 0:
                pc = [u]
            else:
                pc = [pc[0] + u]
        sums.append(pc[0])
    return read(query[2 * len(sublayers) // 2], [e] + sums)
""", 3: """
import torch

def inputs(l, sources, query, query_v, read):
    h = read(query[l], sources)
    if l == len(query) - 1 or l % 2 == 1:
        return [h]
    h_v = read(query_v[l // 2], sources)
    return [h, h_v]

def tied_query_v(query):
    L = (len(query) - 1) // 2
    return torch.stack([query[2 * i] for i in range(L)])

def H(p):
    return -(p * p.clamp(min=1e-300).log()).sum(dim=0)

def divergence(p, q):
    m = (p + q) / 2
    return H(m) - H(p) / 2 - H(q) / 2
""", 4: """
def delta(e, sublayers, query, gate, read):
    changes, stream = [e], e
    for l in range(len(sublayers)):
        h = stream
        if l > 0:
            h = h + gate[l] * read(query[l], changes)
        u = sublayers[l](h)
        changes.append(u)
        stream = stream + u
    return stream

def delta_block(e, sublayers, blocks, query, gate, read):
    changes, stream = [e], e
    for b in blocks:
        before = stream
        for l in b:
            h = stream
            if l > 0:
                h = h + gate[l] * read(query[l], changes)
            stream = stream + sublayers[l](h)
        changes = changes + [stream - before]
    return stream
""", 5: """
import torch

def signs(l, block):
    i = l - block.start
    return (-1) ** i, 1 if 2 * i < len(block) else -1

def ratio(c, d, rho):
    with torch.no_grad():
        r = ((c ** 2).mean(-1) + 1e-6).sqrt() / ((d ** 2).mean(-1) + 1e-6).sqrt()
        return torch.minimum(r, torch.full_like(r, rho))

def wav(e, sublayers, blocks, query, detail_bias, rho, read):
    finished = []
    for b in blocks:
        C = P = S = None
        for l in b:
            groups = finished + ([(C, P, S)] if C is not None else [])
            sources, bias, scale = [e], [0], [1]
            for c, p, s in groups:
                sources.extend([c, p, s])
                bias.extend([0, detail_bias[l][0], detail_bias[l][1]])
                scale.extend([1, ratio(c, p, rho), ratio(c, s, rho)])
            u = sublayers[l](read(query[l], sources, bias, scale))
            a, s = signs(l, b)
            if C is None:
                C, P, S = u, a * u, s * u
            else:
                C, P, S = C + u, P + a * u, S + s * u
        finished.append((C, P, S))
    heads = [e] + [c for c, _, _ in finished]
    return read(query[-1], heads, [0] * len(heads), [1] * len(heads))
""", 6: """
import torch
from model import DepthRouter

class Mine(DepthRouter):
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            u = f(*read(l, sources))
            sources = sources + [u]
        return read(self.head, sources)[0]
"""}

# (exercise, function, this text, that text, what the sentence must say)
TYPICAL = [
    (1, "depth_read", "e / e.sum(dim=0)", "e / e.sum(dim=2, keepdim=True)", "sum to 1 over depth"),
    (1, "depth_read",
     "logits = torch.stack([(s @ query) / rms(s) for s in sources])\n    "
     "e = torch.exp(logits - logits.amax(dim=0))\n    "
     "alpha = e / e.sum(dim=0)", "alpha = torch.stack([(s @ query) / rms(s) for s in sources]).softmax(-1)",
     "yours sum to 1 over tokens"),
    (1, "depth_read", "(s @ query) / rms(s)", "s @ query", "divided by its source's rms"),
    (1, "depth_read", "(s ** 2).mean(dim=2)", "(s ** 2).sum(dim=2)", "root of the *mean*"),
    (1, "depth_read", " + 1e-6", "", "1e-6 of the rms is missing"),
    (1, "depth_read", "a.unsqueeze(-1) * s", "a.unsqueeze(-1) * s / rms(s).unsqueeze(-1)", "mixes normed sources"),
    (1, "depth_read", "logits - logits.amax(dim=0)", "logits", "exp overflows"),
    (1, "depth_read", "/ rms(s)", "/ rms(s) / len(query) ** 0.5", "not divided by sqrt(D)"),
    (1, "depth_read", "e = torch.exp(logits - logits.amax(dim=0))", "e = logits", "exponentials first"),
    (1, "depth_read_backward", " - (g * mix).sum(-1)", "", "add up to 0"),
    (1, "depth_read_backward", "a.unsqueeze(-1) * g + dl", "dl", "through the mix and through its logit"),
    (1, "depth_read_backward", " - through_rms", "", "takes it for a constant"),
    (1, "depth_read_backward", "(dl * s / r).sum", "(dl * s).sum", "in yours the rms is missing"),
    (1, "depth_read_backward", "(D * r ** 3)", "r ** 3", "its gradient has 1/D"),
    (2, "split_layers", "range(start, start + 2 * size))\n        start += 2 * size",
     "range(start, start + size))\n        start += size", "counts layers"),
    (2, "split_layers", "sizes[b] += 1", "sizes[-1 - b] += 1", "longer blocks come first"),
    (2, "split_layers", "sizes[b] += 1", "pass", "belong to none"),
    (2, "block", "[e] + sums + pc", "[e] + sums + (pc or [e * 0])", "no PC before"),
    (2, "block", "[e] + sums + pc", "[e] + sums", "in progress is a source too"),
    (2, "block", "        pc = []\n", "        pc = pc if b else []\n", "begins anew with each block"),
    (2, "block", "        pc = []\n        for l in blocks[b]:\n            h = read(query[l], [e] + sums + pc)\n",
     "        if b == 0:\n            pc = []\n        for l in blocks[b]:\n"
     "            h = read(query[l], [e] + sums + pc)\n            pc = pc if l > blocks[b][0] else []\n",
     "reset too late"),
    (2, "block", "[pc[0] + u]", "[u]", "last update alone"),
    (2, "block", "read(query[2 * len(sublayers) // 2]", "read(query[len(sublayers) - 1]",
     "head reads by a query of its own"),
    (2, "block", "read(query[2 * len(sublayers) // 2], [e] + sums)", "e + sum(sums)", "plain sum, the stream"),
    (2, "block", "query[l]", "query[l // 2]", "row of its layer"),
    (2, "block", "sublayers[l](h)", "sublayers[l](e + sum(sums) + sum(pc) + h)", "exercise 4"),
    (3, "inputs", "[h, h_v]", "[h_v, h]", "other way round"),
    (3, "inputs", "[h, h_v]", "[h_v, h_v]", "value route feeds them too"),
    (3, "inputs", "read(query_v[l // 2]", "read(query[l]", "both routes read by `query`"),
    (3, "inputs", "query_v[l // 2]", "query_v[l]", "a row for each *attention*"),
    (3, "inputs", " or l % 2 == 1", "", "an MLP has one input"),
    (3, "inputs", "l == len(query) - 1 or ", "", "head is no attention"),
    (3, "tied_query_v", "2 * i", "i", "first L rows"),
    (3, "tied_query_v", "range(L)", "range(L + 1)", "leave it out"),
    (3, "divergence", "- H(p) / 2 - H(q) / 2", "- H(p) - H(q)", "half of each"),
    (3, "divergence", ".log())", ".log2())", "Yours is in bits"),
    (3, "divergence", ".clamp(min=1e-300)", "", "0 log 0"),
    (3, "divergence", "return H(m) - H(p) / 2 - H(q) / 2", "return (p * (p / q).log()).sum(dim=0)", "Kullback-Leibler"),
    (4, "delta", "h = h + gate", "h = gate", "yours replaces it"),
    (4, "delta", "u = sublayers[l](h)", "stream = h\n        u = sublayers[l](h)", "Yours stays in the stream"),
    (4, "delta", "changes.append(u)\n        stream = stream + u",
     "stream = stream + u\n        changes.append(stream)", "nearly equal"),
    (4, "delta", "if l > 0", "if True", "h_0 = e"),
    (4, "delta", "gate[l] * read", "read", "gate multiplies the mix; yours is missing"),
    (4, "delta", "return stream", "return h", "input of the last sublayer"),
    (4, "delta_block", "stream - before", "stream - changes[-1]", "previous *source*"),
    (4, "delta_block", "stream - before", "stream", "state of the stream"),
    (4, "delta_block", "read(query[l], changes)", "read(query[l], changes + ([stream - before] if l > b[0] else []))",
     "*completed* blocks"),
    (4, "delta_block", "        changes = changes + [stream - before]",
     "            changes = changes + [stream - before]\n            before = stream", "every update"),
    (5, "signs", "l - block.start", "l", "of *this block*"),
    (5, "signs", "(-1) ** i", "-(-1) ** i", "other way round"),
    (5, "signs", "1 if 2 * i < len(block)", "1 if i // 2 < len(block) // 4", "layer is cut in two"),
    (5, "ratio", "return torch.minimum(r, torch.full_like(r, rho))", "return r", "no limit"),
    (5, "ratio", "with torch.no_grad():", "if True:", "must be detached"),
    (5, "ratio", "torch.full_like(r, rho)", "torch.ones_like(r)", "whatever rho is"),
    (5, "wav", "ratio(c, p, rho), ratio(c, s, rho)", "1, 1", "r is missing"),
    (5, "wav", "ratio(c, p, rho), ratio(c, s, rho)",
     "*[(((c ** 2).mean(-1) + 1e-6) / ((d ** 2).mean(-1) + 1e-6)).sqrt().clamp(max=rho) for d in (p, s)]",
     "yours lets a gradient through"),
    (5, "wav", "detail_bias[l][0], detail_bias[l][1]", "0, 0", "in yours there is none"),
    (5, "wav", "sources.extend([c, p, s])", "sources.extend([c, p.detach(), s.detach()])", "not detached, only its r"),
    (5, "wav", "        C = P = S = None\n", "        if b.start == 0:\n            C = P = S = None\n", "yours go on"),
    (5, "wav", "heads = [e] + [c for c, _, _ in finished]", "heads = [e] + [x for t in finished for x in t]",
     "without details"),
    (6, "Mine", "return read(self.head, sources)[0]", "return u", "nothing reads by it"),
    (6, "Mine", "return read(self.head, sources)[0]", "return read(self.head, sources)",
     "return read(self.head, sources)[0]"),
    (6, "Mine", "f(*read(l, sources))", "f(read(l, sources))", "f(*read(l, sources))"),
    (6, "Mine", "sources = sources + [u]", "sources = sources + [u.detach()]", "loses some"),
    (6, "Mine", "u = f(*read(l, sources))", "u = f(*read(l, sources))\n            u *= 2", "in place"),
    (6, "Mine", "u = f(*read(l, sources))", "u = f(*read(l, sources)) * (1 + torch.rand(1).item())", "random numbers"),
    (6, "Mine", "sources = sources + [u]", "sources = sources + [u.mean(1, keepdim=True).expand_as(u)]",
     "each token by itself"),
    (6, "Mine", "u = f(*read(l, sources))", "u = f(*read(l, sources))\n            if l == 2: u = f(*read(l, sources))",
     "once, in order"),
    (6, "Mine", "[u]", "[u.float()]", ""),
    (6, "Mine", "    def forward", "    def __init__(self, config):\n        super().__init__(config)\n"
     "        self.spare = torch.nn.Parameter(torch.zeros(3))\n\n    def forward", "idle ones"),
    (6, "Mine", "read(l, sources)", "read(l, sources, bias=torch.zeros(2 * len(sublayers), 3))", "line 9"),
]

# Other wrong answers, which no list has: where, what was expected and what came is said all the same.
UNLISTED = [
    (1, "depth_read", "alpha = e / e.sum(dim=0)", "alpha = e / e.sum(dim=0) * 0.9", "sum to 0.9"),
    (1, "depth_read", "return mix, alpha", "return alpha, mix", "wrong shape"),
    (1, "depth_read", "(s @ query)", "(s.float() @ query.float())", "Nearly right"),
    (1, "depth_read_backward", "(dl * s / r)", "(2 * dl * s / r)", "gradient by the query"),
    (2, "split_layers", "return blocks", "return blocks[::-1]", "expected"),
    (2, "block", "[e] + sums + pc", "[e] + sums[:1] + pc", "Missing, of 3: 1"),
    (2, "block", "[e] + sums + pc", "[e] + sums + pc + pc", "Not belonging there, of yours: 1"),
    (2, "block", "query[l]", "query[-1 - l]", "row of query"),
    (2, "block", "sublayers[l](h)", "sublayers[l](2 * h)", "not h_0"),
    (2, "block", "sublayers[l](h)", "sublayers[l](h).detach()", "the gradient is not"),
    (2, "block", "for l in blocks[b]:", "for l in reversed(blocks[b]):", "in order"),
    (3, "inputs", "[h, h_v]", "[h, -h_v]", "expected"),
    (3, "inputs", "h = read(query[l], sources)", "h = sum(sources) / len(sources)", "not h of the page"),
    (3, "divergence", "(p + q) / 2", "(p * q) ** 0.5", "expected"),
    (4, "delta", "gate[l] * read", "gate[l] ** 2 * read", "expected"),
    (4, "delta_block", "if l > 0", "if l > 1", "expected"),
    (5, "ratio", "1e-6", "1e-3", "expected"),
    (5, "wav", "detail_bias[l][0], ", "detail_bias[l][0] * 2, ", "bias of one is not"),
    (5, "wav", "scale.extend([1, ", "scale.extend([0.5, ", "scale of s_1 = 1\n"),
]

# Faults of a file, of any exercise
FAULTS = [
    ("h = read(query[l], [e] + sums + pc)", "h = raed(query[l], [e] + sums + pc)", "NameError", "line 17"),
    ("h = read(query[l], [e] + sums + pc)", "h = read(query[l], [e[0]] + sums + pc)", "list of one source or more",
     "(3, 5)"),
    ("h = read(query[l], [e] + sums + pc)", "h = read(query, [e] + sums + pc)", "one row of query", "(11, 5)"),
    ("h = read(query[l], [e] + sums + pc)", "h = read(query[l], sums + pc)", "list of one source or more", "[]"),
    ("u = sublayers[l](h)", "u = sublayers[l]([h])", "takes one tensor", "a list"),
    ("u = sublayers[l](h)", "u = sublayers[l](h) @ e", "RuntimeError", "line 18"),
    ("u = sublayers[l](h)", "u = sublayers[l](h)\n            pc and pc[0].add_(u)", "in place", "line 12"),
    ("u = sublayers[l](h)", "u = sublayers[l](h)\n            e += 1", "in place", "changes e in place"),
    ("u = sublayers[l](h)", "u = sublayers[l](h)\n            import sys; sys.exit(3)", "must return", "line 19"),
    ("u = sublayers[l](h)", "u = 1 / 0", "ZeroDivisionError", "line 18"),
    ("    sums = []\n", "    return block(e, sublayers, blocks, query, read)\n", "RecursionError", "line 13"),
    ("    sums = []\n", "    sums = [\n", "SyntaxError", "line 13"),
    ("[e] + sums)\n", "[e] + sums).float()\n", "float64", "float32"),
    ("[e] + sums)\n", "[e] + sums).detach().numpy()\n", "must be a tensor", "a ndarray"),
    ("[e] + sums)\n", "[e] + sums)[0]\n", "wrong shape", "(3, 5)"),
    ("    return read", "    read", "is a `return` missing", ""),
    ("def block", "def blocks", "no function block", ""),
]

@pytest.fixture(autouse=True)
def routers_as_they_were():
    """A router from a file stays in ROUTERS for as long as a process runs."""
    kept = dict(ROUTERS)
    yield
    for name in ROUTERS.keys() - kept.keys():
        del ROUTERS[name]

def outcome(tmp_path, number, name, code, seed=1) -> str:
    """What the check says, as one text."""
    path = tmp_path / FILES[number]
    path.write_text(code, encoding="utf-8")
    return check.report(number, name, check_one(number, name, path, seed))

def edited(number, old, new):
    assert old in RIGHT[number], old
    return RIGHT[number].replace(old, new)

def test_first_of_all_nothing_is_written():
    for number, names in FUNCTIONS.items():
        for name in names:
            assert check_one(number, name, HERE / FILES[number], 1)["state"] == "not written yet"

@pytest.mark.parametrize("number", RIGHT)
def test_right_answers(tmp_path, number):
    for name in FUNCTIONS[number]:
        assert outcome(tmp_path, number, name, RIGHT[number], seed=number).endswith("right"), name

def test_the_solution_is_model_py():
    for number, names in FUNCTIONS.items():
        for name in names:
            assert check_one(number, name, None, 3) == {"state": "right"}, name

def test_routers_of_model_py_keep_the_contract():
    for name in ("rezero", "rd", "delta_block", "wav"):
        contract.check(None, 1, ROUTERS[name])
    assert check_one(6, "Mine", HERE / "denseformer.py", 1) == {"state": "right"}

@pytest.mark.parametrize("number, name, old, new, says", TYPICAL)
def test_a_typical_mistake(tmp_path, number, name, old, new, says):
    text = outcome(tmp_path, number, name, edited(number, old, new))
    assert f"{name}: wrong" in text and says in text

def test_five_mistakes_an_exercise():
    assert all(sum(row[0] == number for row in TYPICAL) >= 5 for number in FILES)

@pytest.mark.parametrize("number, name, old, new, says", UNLISTED)
def test_another_wrong_answer(tmp_path, number, name, old, new, says):
    text = outcome(tmp_path, number, name, edited(number, old, new))
    assert f"{name}: wrong" in text and says in text and ("came" in text or "expected" in text)

@pytest.mark.parametrize("old, new, says, where", FAULTS)
def test_a_fault_gets_a_sentence_and_a_line(tmp_path, old, new, says, where):
    text = outcome(tmp_path, 2, "block", edited(2, old, new))
    assert says in text and where in text and "Traceback" not in text

def test_one_wrong_function_does_not_fail_the_next(tmp_path):
    code = edited(5, "(-1) ** i", "-(-1) ** i")
    assert "wrong" in outcome(tmp_path, 5, "signs", code) and outcome(tmp_path, 5, "wav", code).endswith("right")

def test_a_sentence_shows_a_token_and_two_sources(tmp_path):
    """The numbers of one token: weights that sum to 1 over depth beside some that do not."""
    text = outcome(tmp_path, 1, "depth_read", edited(1, "e.sum(dim=0)", "e.sum(dim=2, keepdim=True)"))
    assert re.search(r"token b=\d, t=\d", text)
    want = re.search(r"expected\s+alpha_0 = ([\d.]+), alpha_1 = ([\d.]+)", text)
    assert abs(float(want[1]) + float(want[2]) - 1) < 2e-4          # four digits are shown
    assert re.search(r"came\s+alpha_0 = .* sum to ", text)

def test_answers_against_autograd():
    draw = checks.draws(5)
    query, sources, g = draw(5).requires_grad_(), [draw(2, 3, 5).requires_grad_() for _ in range(4)], draw(2, 3, 5)
    want = torch.autograd.grad((answers.depth_read(query, sources)[0] * g).sum(), [query, *sources])
    d_query, d_sources = answers.depth_read_backward(query.detach(), [s.detach() for s in sources], g)
    for a, b in zip([d_query, *d_sources], want):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)        # float64, a few sums of five numbers

def test_wrong_commands():
    for argv in ("", "7", "3 --all", "x", "3 --seed -1", "3 --seconds 0", "3 --file none.py", "--all --folder nowhere",
                 "3 --folder README.md", "3 --solution --file x.py"):
        with pytest.raises(UserError):
            check.main(argv.split())

def test_without_the_module_resource(monkeypatch, tmp_path):
    """As on Windows: no limit of memory, and the check goes on. Past its length a file's print is not shown."""
    monkeypatch.setitem(sys.modules, "resource", None)
    threads, shown = torch.get_num_threads(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    path = tmp_path / FILES[2]
    path.write_text(edited(2, "    sizes = [n", "    print('x' * 5000)\n    sizes = [n"), encoding="utf-8")
    check.child(str(tmp_path / "results"), str(tmp_path / "stuck"), [[2, "split_layers", str(path)]], 1, 60)
    torch.set_num_threads(threads)
    assert check.lines(tmp_path / "results") == [{"state": "right"}]
    assert shown.getvalue().count("x") == check.PRINTED and "more was printed" in shown.getvalue()

# ---------------------------------------------------------------------------------------------------------------------
# the pages

def squeezed(text):
    return [line.strip() for line in text.splitlines() if line.strip()]

def quotes(page):
    """(file, code) of each ```python block: the file is the last of `*.py` named before it."""
    text = page.read_text(encoding="utf-8")
    for m in re.finditer(r"```python\n(.*?)```", text, re.S):
        named = re.findall(r"`((?:exercises/)?\w+\.py)`", text[:m.start()])
        yield named[-1], m[1]

def missing_quotes(page, texts) -> list[str]:
    """The quotes of a page that do not occur, line for line, in the files they name."""
    missing = []
    for name, code in quotes(page):
        want, have = squeezed(code), squeezed(texts(name))
        if not any(have[i:i + len(want)] == want for i in range(len(have))):
            missing.append(code)
    return missing

@pytest.mark.parametrize("page", [*PAGES, READING], ids=lambda p: p.stem)
def test_quotes(page):
    read = lambda name: (ROOT / name).read_text(encoding="utf-8")
    assert not missing_quotes(page, read)
    found = list(quotes(page))
    assert found
    for k, (name, code) in enumerate(found):                        # a changed line is noticed
        changed = squeezed(code)[-1]
        assert missing_quotes(page, lambda n: read(n).replace(changed, changed + " + 1")), code

def test_names_in_the_lecture():
    """What stands in backticks there, outside of blocks, is in model.py word for word, or a file, or a flag."""
    model = " ".join((ROOT / "model.py").read_text(encoding="utf-8").split())
    text = re.sub(r"```.*?```", "", READING.read_text(encoding="utf-8"), flags=re.S)
    for code in re.findall(r"`([^`]+)`", text):
        if not (ROOT / code).exists() and not code.startswith("--"):
            assert " ".join(code.split()) in model, code

def test_what_the_pages_say_of_defaults():
    """Numbers in the prose, which no quote holds to model.py; its formulas are held by the solution."""
    text = {page.stem: " ".join(page.read_text(encoding="utf-8").split()) for page in [*PAGES, READING]}
    config = GPTConfig(n_layer=12, n_blocks=8)
    assert [len(block) // 2 for block in config.blocks] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert all("2, 2, 2, 2, 1, 1, 1, 1 layers" in text[page] for page in ("ex2_block", "reading-model"))
    assert config.detail_bias == -2 and "-2 at first" in text["ex5_wav"]
    assert not ROUTERS["block"](config).query.any() and "Training starts at w = 0" in text["ex1_depth_read"]
    wav, block = ROUTERS["wav"](config), range(6)
    assert "split + + + - - -" in text["reading-model"] and "phase + - + - + -" in text["reading-model"]
    assert [wav.signs(l, block)[1:] for l in block] == [[1, 1], [-1, 1], [1, 1], [-1, -1], [1, -1], [-1, -1]]

def test_each_page_begins_with_not_written_yet():
    assert len(PAGES) == 6
    for page in PAGES:
        top = page.read_text(encoding="utf-8")[:400]
        number = page.name[2]
        for text in (f"python -m exercises.check {number}", '"not written yet"', "Difficulty", "Time:"):
            assert text in top
        assert (HERE / FILES[int(number)]).stem == page.stem

# ---------------------------------------------------------------------------------------------------------------------
# slow: processes

def run_check(*argv, cwd=ROOT):
    done = subprocess.run([sys.executable, "-m", "exercises.check", *map(str, argv)], capture_output=True, text=True,
                          timeout=300, cwd=cwd)
    return done.returncode, done.stdout, done.stderr

@pytest.fixture
def handed_in(tmp_path):
    for number, code in RIGHT.items():
        (tmp_path / FILES[number]).write_text(code, encoding="utf-8")
    return tmp_path

@pytest.mark.slow
def test_a_score_sheet(handed_in):
    code, out, _ = run_check("--all", "--folder", handed_in)
    assert code == 0 and out.count(": right") == 13 and "all right" in out
    assert "| 2 Block AttnRes | 2 of 2 | 0 of 2 | 0 of 2 |" in out
    code, out, _ = run_check("--all")
    assert code == 1 and out.count(": not written yet") == 13 and "0 of 13" in out
    (handed_in / FILES[4]).unlink()
    code, out, _ = run_check("--all", "--folder", handed_in)
    assert code == 1 and "delta: not written yet (there is no ex4_delta.py)" in out and "11 of 13" in out
    code, out, _ = run_check("--all", "--solution")
    assert code == 0 and out.count(": right") == 13
    assert run_check("9")[0] == 2

@pytest.mark.slow
@pytest.mark.parametrize("fault, says", [
    ("    while True: pass\n", "line 3"), ("    for x in (xs := [1]): xs.append(x)\n", "line 3"),
    ("    while True: print('x' * 99)\n", "line 3"),
    ("    10 ** 10 ** 10\n", "line 3"), ("    import os; os._exit(0)\n", "ended the process")])
def test_what_does_not_end(handed_in, fault, says):
    """It ends after the time limit, with a sentence, and the other functions are checked all the same."""
    path = handed_in / FILES[2]
    path.write_text(edited(2, "    sizes = [n", fault + "    sizes = [n"), encoding="utf-8")
    code, out, err = run_check(2, "--folder", handed_in, "--seconds", 3)
    assert code == 1 and "block: right" in out and "split_layers: wrong" in out and says in out and len(out) < 10_000
    assert "did not end within 3 s" in out or "ended the process" in out
    assert "Traceback" not in err

@pytest.mark.slow
def test_a_seed_repeats_the_inputs_and_without_one_they_are_new(handed_in):
    (handed_in / FILES[1]).write_text(edited(1, "/ rms(s)", ""), encoding="utf-8")
    say = lambda *argv: run_check(1, "--folder", handed_in, *argv)[1]
    assert say("--seed", 5) == say("--seed", 5) != say()
    assert say().splitlines()[:-1] != say().splitlines()[:-1]

@pytest.mark.slow
def test_a_broken_model_py(tmp_path):
    for name in ("nanodepth", "lab", "exercises"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "model.py").write_text("def (", encoding="utf-8")
    code, _, err = run_check("--all", cwd=tmp_path)
    assert code == 2 and err.splitlines()[-1].startswith("check.py: the check itself could not start")

@pytest.mark.slow
def test_every_mistake_of_the_list_gets_its_own_sentence():
    for number, parts in checks.CHECKS.items():
        for name in parts:
            for idea, *edits in MISTAKES[name]:
                with pytest.raises(checks.Wrong) as wrong:
                    checks.check(number, name, mistaken(getattr(answers, name), *edits), 1)
                assert wrong.value.lines["idea"] == idea

def commands(page):
    return re.findall(r"^    (python .*)$", page.read_text(encoding="utf-8"), re.M)

@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, HERE / "README.md"], ids=lambda p: p.stem)
def test_commands(tmp_path, page):
    """As they stand on the page, in order, in a copy of the repository; small.toml is tiny there and depths small."""
    for name in ("nanodepth", "lab", "exercises"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model.py", "train.py", "prepare_data.py"):
        shutil.copy(ROOT / name, tmp_path)
    for number, code in RIGHT.items():
        (tmp_path / "exercises" / FILES[number]).write_text(code, encoding="utf-8")
    shutil.copytree(tmp_path / "exercises", tmp_path / "HANDED_IN" / "anna")
    tiny = (tmp_path / "exercises" / "small.toml").read_text(encoding="utf-8")
    for old, new in (("max_iters = 300", "max_iters = 2"), ("eval_interval = 100", "eval_interval = 2"),
                     ("eval_iters = 8", "eval_iters = 1"),
                     ("n_embd = 32", "n_embd = 8"), ("n_blocks = 3", "n_blocks = 2"), ("seq_len = 64", "seq_len = 16")):
        assert old in tiny
        tiny = tiny.replace(old, new)
    (tmp_path / "exercises" / "small.toml").write_text(tiny + f"dataset = '{data_folder(tmp_path)}'\n",
                                                       encoding="utf-8")
    found = commands(page)
    assert found
    for command in found:
        for old, new in (("n_blocks=6", "n_blocks=2"), ("--depths 12,24", "--depths 2,3"), ("--depths 6", "--depths 2"),
                         ("--n_layer 6", "--n_layer 2"), ("-6x32-", "-2x8-"), ("--seeds 0,1,2", "--seeds 0"),
                         ("--seeds 0,1", "--seeds 0")):
            command = command.replace(old, new)
        if "-c " in command:
            argv = ["-c", re.search(r'-c "(.*)"', command)[1]]
        else:
            argv = command.split()[1:]
        done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=600, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout[-600:], done.stderr[-600:])
