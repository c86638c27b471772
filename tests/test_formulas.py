"""The numbered formulas of docs/depth-read.md, each held to autograd or to the definition, for one token in float64."""
import re
from pathlib import Path

import pytest
import torch

from model import depth_read

N, D, OLD = 5, 7, 3                     # sources, their width, and how many of them are old
# sums of a few products of numbers near 1: an error of 1e-15 or so, against formulas that would be off by 1e-2
TOLERANCE = 1e-12

class Token:
    """A read of one token with autograd's gradients: of the loss g . mix by sources, query, logits and weights."""
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        self.s, self.w, self.g, self.b = draw(N, D).requires_grad_(), draw(D).requires_grad_(), draw(D), draw(N)
        self.r = draw(N).sigmoid().requires_grad_()
        self.rms = (self.s.square().sum(-1) / D + 1e-6).sqrt()
        self.dot = self.s @ self.w / self.rms
        self.logit = self.dot + self.b
        self.alpha = self.logit.softmax(0)
        self.weight = self.alpha * self.r
        self.mix = self.weight @ self.s
        self.d_logit, self.d_r, self.d_s, self.d_w = torch.autograd.grad(
            self.g @ self.mix, (self.logit, self.r, self.s, self.w), retain_graph=True)

@pytest.fixture
def t():
    return Token()

def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)

def test_the_page_and_these_tests_have_the_same_numbers():
    page = (Path(__file__).parent.parent / "docs" / "depth-read.md").read_text(encoding="utf-8")
    tested = {name[5] for name in globals() if re.match(r"test_\d_", name)}
    assert set(re.findall(r" \((\d)\)$", page, re.M)) == tested == set("1234567")

def test_the_page_s_definition_is_the_model_s(t):
    mix, alpha = depth_read(t.w, [s.view(1, 1, D) for s in t.s], t.b, [r.view(1, 1) for r in t.r])
    close(mix.flatten(), t.mix)
    close(alpha.flatten(), t.alpha)

def test_1_old_sources_are_one(t):
    lse = t.logit[:OLD].logsumexp(0)
    past = ((t.logit[:OLD] - lse).exp() * t.r[:OLD]) @ t.s[:OLD]
    alpha_0 = lse.exp() / (lse.exp() + t.logit[OLD:].exp().sum())
    close(alpha_0 * past + t.weight[OLD:] @ t.s[OLD:], t.mix)

def test_2_gradient_of_the_logits(t):
    close(t.weight * (t.s @ t.g) - t.alpha * (t.g @ t.mix), t.d_logit)

def test_gradient_of_the_scales(t):
    close(t.alpha * (t.s @ t.g), t.d_r)

def test_3_it_adds_up_to_0(t):
    close(t.d_logit.sum(), torch.zeros((), dtype=torch.float64))

def test_4_in_a_pass_it_adds_up_to_the_log_sum_exp_s(t):
    d_lse = torch.tensor(0.7, dtype=torch.float64)
    got, = torch.autograd.grad(t.g @ t.mix + d_lse * t.logit.logsumexp(0), t.logit)
    close(t.alpha * (t.r * (t.s @ t.g) - t.g @ t.mix + d_lse), got)
    close(got.sum(), d_lse)

def test_5_through_the_rms(t):
    d_dot = torch.linspace(-1, 1, N, dtype=torch.float64)
    got, = torch.autograd.grad(d_dot @ t.dot, t.s, retain_graph=True)
    close(d_dot[:, None] * (t.w / t.rms[:, None] - (t.dot / (D * t.rms ** 2))[:, None] * t.s), got)

def test_6_gradient_of_a_source(t):
    by_w, by_s = t.d_logit / t.rms, t.d_logit * t.dot / (D * t.rms ** 2)
    close(torch.outer(t.weight, t.g) + torch.outer(by_w, t.w) - by_s[:, None] * t.s, t.d_s)
    close(by_w @ t.s, t.d_w)

def test_7_rms_norm_by_layer_norm(t):
    x, gamma, rms = t.s, t.w, t.rms[:, None]
    g = torch.linspace(-1, 1, N * D, dtype=torch.float64).view(N, D)
    want, want_gamma = torch.autograd.grad((g * gamma * x / rms).sum(), (x, gamma), retain_graph=True)
    h, unit = gamma * g, x / rms
    layer = (h - h.mean(-1, keepdim=True) - unit * (h * unit).mean(-1, keepdim=True)) / rms
    fused, d_gamma, _ = torch.ops.aten.native_layer_norm_backward(
        g, x, (D,), torch.zeros_like(rms), 1 / rms, gamma, None, (True, True, False))
    close(fused, layer)
    close(layer + h.mean(-1, keepdim=True) / rms, want)
    close(d_gamma, want_gamma)
