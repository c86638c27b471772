"""Let a trained model speak.

    python sample.py                                            # the newest run under out/
    python sample.py --out_dir out/wav-48x64-s0 --prompt "def "
"""
import codecs
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from model import GPT, GPTConfig, ROUTERS
from nanodepth.files import UserError, load_checkpoint, load_model, newest_run, router_of, run
from nanodepth.machine import pick_device, settle_kernels
from nanodepth.settings import Parser
from nanodepth.data import tokenizer_from


@dataclass
class SampleConfig:
    out_dir: str | None = None           # the folder of a run; none: the newest under out/
    prompt: str | None = None            # text to go on from; none: the start of a new text
    num_samples: int = 3                 # texts
    max_new_tokens: int = 500            # the longest text, in tokens
    temperature: float = 0.8             # below 1 bolder choices are rarer; 0 always takes the likeliest token
    top_k: int = 50                      # choose among the k likeliest tokens; 0: among all
    seed: int = 0                        # of the choices
    device: str = "auto"                 # auto, cpu, cuda, cuda:N or mps
    router: str | None = None            # FILE.py:Class, for a run with a router of one's own

def first_token(tokenizer) -> int:
    """What a text begins after: the end of another; where there is none, as in text8, a newline, a space or id 0."""
    if tokenizer.end is not None:
        return tokenizer.end
    for symbol in ("\n", " "):
        try:
            return int(tokenizer.encode(symbol)[0])
        except (UserError, ValueError, KeyError):
            pass
    return 0

def main(argv) -> None:
    parser = Parser(prog="sample.py", description="Print text from a trained model, as it comes.")
    parser.add_fields(SampleConfig)
    s = SampleConfig(**vars(parser.parse_args(argv)))
    for name, low in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if not low <= getattr(s, name) < float("inf"):
            raise UserError(f"--{name} is {getattr(s, name)}; it must be {low} or more.")
    device = pick_device(s.device)
    settle_kernels()

    out_dir = Path(s.out_dir) if s.out_dir is not None else newest_run()
    checkpoint = load_checkpoint(out_dir)
    if checkpoint["tokenizer"] is None:
        raise UserError(f"the data of {out_dir} came without a tokenizer, so its tokens cannot be shown as text.")
    tokenizer = tokenizer_from(checkpoint["tokenizer"])
    router = router_of(checkpoint, s.router, ROUTERS)
    model = load_model(checkpoint, GPT, GPTConfig, router=router).to(device).eval()
    prompt = s.prompt or ""
    tokens = [int(t) for t in tokenizer.encode(prompt)] or [first_token(tokenizer)]
    idx = torch.tensor([tokens], device=device)                         # (1, T)
    if s.out_dir is None:
        print(f"{out_dir}, iteration {checkpoint['iter']}", file=sys.stderr)

    generator = torch.Generator(device=device).manual_seed(s.seed)
    for k in range(s.num_samples):
        print(("" if k == 0 else "\n---------------\n") + prompt, end="", flush=True)
        text = codecs.getincrementaldecoder("utf-8")("replace")         # a character can be several tokens
        for token in model.stream(idx, s.max_new_tokens, s.temperature, s.top_k or None, generator=generator):
            token = token.item()                                        # (1, 1)
            if token == tokenizer.end:
                break
            if token < tokenizer.vocab_size:                            # a vocabulary can be padded
                print(text.decode(tokenizer.decode_bytes([token])), end="", flush=True)
        print(text.decode(b"", final=True), flush=True)


if __name__ == "__main__":
    run(main)
