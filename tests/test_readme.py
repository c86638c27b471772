"""What the README shows is run as it stands there."""
import re
from pathlib import Path

import torch

from model import GPT, GPTConfig, ROUTERS
from nanodepth.files import own_router

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_ci_runs_the_second_command():
    commands = re.findall(r"^    (python3 -m venv .*)$", README, re.M)
    assert len(commands) == 2 and "train.py --router wav --n_layer 48" in commands[0]
    assert commands[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_a_router_of_your_own(monkeypatch, tmp_path):
    """As a file that --router names, with every flag; its values against plain numbers."""
    path = tmp_path / "mine.py"
    path.write_text(next(b for b in BLOCKS if "class LastFour" in b), encoding="utf-8")
    name = f"{path}:LastFour"
    monkeypatch.setitem(ROUTERS, name, None)                    # taken out again at the end
    assert own_router(name, ROUTERS)
    make = lambda **flags: GPT(GPTConfig(vocab_size=11, seq_len=8, n_layer=3, n_head=2, n_embd=8, router=name, **flags)).double()
    for flags in ({}, {"decouple_v": True}, {"null_source": True}, {"plain_read": True}):
        net = make(**flags)
        net(torch.randint(11, (2, 8)), torch.randint(11, (2, 8)))[1].backward()
        assert all(p.grad.abs().sum() > 0 for p in net.router.parameters())
    # queries are 0, so the mix is the mean of the last four
    e, halve = torch.tensor([[[1.0, 2.0] * 4]], dtype=torch.float64), lambda h: h / 2
    updates, stream = [e], e
    for _ in range(6):
        updates.append((stream + sum(updates[-4:]) / len(updates[-4:])) / 2)
        stream = stream + updates[-1]
    torch.testing.assert_close(make().router(e, [halve] * 6), stream, rtol=0, atol=1e-12)       # float64


def test_the_api_block():
    code = next(b for b in BLOCKS if "import GPT, GPTConfig, ROUTERS" in b)
    torch.manual_seed(0)
    names = {"idx": torch.randint(96, (1, 16)), "targets": torch.randint(96, (1, 16)),
             "e": torch.randn(1, 4, 256), "sublayers": [torch.tanh] * 12}
    for shown, here in (("logits, _ =", "last, _ ="), ("n_layer=48", "n_layer=6"), ("n_blocks=8", "n_blocks=3")):
        assert shown in code                                    # 48 layers take a while to generate with
        code = code.replace(shown, here)
    exec(code, names)
    assert names["logits"].shape == (1, 16, 96) and names["last"].shape == (1, 1, 96) and names["loss"].shape == ()
    assert names["out"].shape == (1, 116) and names["h"].shape == (1, 4, 256)


def test_every_file_that_is_named_is_there():
    for name in re.findall(r"`((?:configs/|docs/|lab/|nanodepth/)?[a-z_]+\.(?:py|toml|png|csv))`", README):
        assert any((ROOT / folder / name).exists() for folder in ("", "configs", "lab", "nanodepth", "tests")), name
