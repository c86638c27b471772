"""Let a trained model speak.

    python sample.py                                            # the newest run under out/
    python sample.py --out_dir out/wav-48x64-s0 --prompt "def " --ckpt best
    python sample.py --prompt FILE:start.txt
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
    ckpt: str = "last"                   # last, or best: the weights of the lowest val loss
    prompt: str | None = None            # text to go on from, or FILE:path; none: the start of a new text
    num_samples: int = 3                 # texts, up to 16 at a time; the first of them is shown as it comes
    max_new_tokens: int = 500            # the longest text, in tokens
    temperature: float = 0.8             # below 1 bolder choices are rarer; 0 always takes the likeliest token
    top_k: int = 50                      # choose among the k likeliest tokens; 0: among all
    seed: int = 0                        # of the choices
    device: str = "auto"                 # auto, cpu, cuda, cuda:N or mps
    router: str | None = None            # FILE.py:Class, for a run with a router of one's own

BATCH = 16                              # texts at a time: their keys and values are in memory together
REFUSED = {"start": "--start is --prompt here (FILE:path reads a file).",
           "init_from": "--init_from: name the run with --out_dir, and its last or best weights with --ckpt.",
           "dtype": "--dtype: weights speak in float32 here.", "compile": "--compile: sampling is not compiled here."}

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

def read_prompt(prompt: str | None) -> str:
    """The prompt's text; FILE:path is the text of that file."""
    if not (prompt or "").startswith("FILE:"):
        return prompt or ""
    path = prompt.removeprefix("FILE:")
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError:
        raise UserError(f"--prompt {prompt}: the file is not UTF-8 text.") from None

def check(s: SampleConfig) -> None:
    for name, low in (("num_samples", 1), ("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
        if getattr(s, name) < low:
            raise UserError(f"--{name} is {getattr(s, name)}; it must be {low} or more.")
    if s.temperature != 0 and not 0.001 <= s.temperature <= 1000:       # beyond, logits / temperature is no number
        raise UserError(f"--temperature is {s.temperature}; it must be 0 or from 0.001 to 1000.")
    if s.ckpt not in ("last", "best"):
        raise UserError(f"--ckpt is {s.ckpt!r}; it must be last or best.")

class Text:
    """The characters of one text, as its tokens come: a character can be several tokens. Done at the end token."""
    def __init__(self, tokenizer):
        self.tokenizer, self.decoder, self.done = tokenizer, codecs.getincrementaldecoder("utf-8")("replace"), False

    def add(self, token: int) -> str:
        self.done = self.done or token == self.tokenizer.end
        if self.done or token >= self.tokenizer.vocab_size:             # a vocabulary can be padded
            return ""
        return self.decoder.decode(self.tokenizer.decode_bytes([token]))

    def rest(self) -> str:
        return self.decoder.decode(b"", final=True)

def speak(model, idx, texts: list[Text], s: SampleConfig, generator):
    """Go on from idx, (1, T), with all texts at once: yields the characters that a step has added to each."""
    for tokens in model.stream(idx.expand(len(texts), -1), s.max_new_tokens, s.temperature, s.top_k or None, generator):
        yield [text.add(token) for text, token in zip(texts, tokens.flatten().tolist())]        # tokens: (B, 1)
        if all(text.done for text in texts):
            break
    yield [text.rest() for text in texts]

def main(argv) -> None:
    parser = Parser(prog="sample.py", description="Print text from a trained model, as it comes.", refused=REFUSED,
                    free=("prompt",))
    parser.add_fields(SampleConfig)
    s = SampleConfig(**vars(parser.parse_args(argv)))
    check(s)
    device = pick_device(s.device)
    settle_kernels()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")                        # a terminal that has not all characters shows ?

    out_dir = Path(s.out_dir) if s.out_dir is not None else newest_run()
    checkpoint = load_checkpoint(out_dir, "best.pt" if s.ckpt == "best" else "ckpt.pt")
    if checkpoint["tokenizer"] is None:
        raise UserError(f"the data of {out_dir} came without a tokenizer, so its tokens cannot be shown as text.")
    tokenizer = tokenizer_from(checkpoint["tokenizer"])
    router = router_of(checkpoint, s.router, ROUTERS)
    model = load_model(checkpoint, GPT, GPTConfig, router=router).to(device).eval()
    prompt = read_prompt(s.prompt)
    tokens = [int(t) for t in tokenizer.encode(prompt)] or [first_token(tokenizer)]
    idx = torch.tensor([tokens], device=device)                         # (1, T)
    if s.out_dir is None:
        print(f"{out_dir}, iteration {checkpoint['iter']}", file=sys.stderr)

    generator = torch.Generator(device=device).manual_seed(s.seed)
    for k in range(0, s.num_samples, BATCH):
        texts = [Text(tokenizer) for _ in range(min(BATCH, s.num_samples - k))]
        print(("" if k == 0 else "\n---------------\n") + prompt, end="", flush=True)
        others = [""] * len(texts)
        for added in speak(model, idx, texts, s, generator):
            print(added[0], end="", flush=True)
            others = [text + more for text, more in zip(others, added)]
        print(flush=True)
        for text in others[1:]:
            print("\n---------------\n" + prompt + text, flush=True)


if __name__ == "__main__":
    run(main)
