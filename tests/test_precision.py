"""bfloat16 autocast, gradient accumulation and torch.compile give the losses of plain float32, for every router."""
import copy

import pytest
import torch

from model import GPT, GPTConfig, ROUTERS


def make(router, **changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=31, seq_len=16, n_layer=3, n_head=2, n_embd=32, router=router, n_blocks=2, **changes))
    with torch.no_grad():
        for p in model.router.parameters():                     # as after some training: nothing is uniform
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model


def tokens(seed=0):
    return torch.randint(31, (4, 17), generator=torch.Generator().manual_seed(seed))


def losses(model, step_model, steps=4, autocast=None, device="cpu", learning_rate=1e-3):
    """The losses of a few steps of AdamW on one batch each."""
    optimizer = torch.optim.AdamW(model.param_groups(0.1, learning_rate))
    out = []
    for i in range(steps):
        x = tokens(i).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast is not None):
            _, loss = step_model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out.append(loss.item())
    return torch.tensor(out)


@pytest.mark.parametrize("router", ROUTERS)
def test_bfloat16_autocast_trains_to_nearly_the_same_losses(router):
    model = make(router)
    plain, narrow = (losses(m, m, autocast=a) for m, a in ((copy.deepcopy(model), None), (model, "bfloat16")))
    # 8 bits of mantissa in the matrix products: each rounds to 2^-9 relative, and a loss near log(31) = 3.4 averages 64
    # of them; 2e-2 is that bound in full, and a sum along depth kept in bfloat16 would not meet it at larger depth.
    assert (plain - narrow).abs().max() < 2e-2
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("router", [r for r in ROUTERS if r not in ("residual", "rezero", "layerscale")])
def test_what_is_read_from_depth_stays_float32_under_autocast(router):
    model, seen = make(router), []
    for f in model.sublayers:
        f.register_forward_pre_hook(lambda f, args: seen.extend(args))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens()[:, :-1])
    assert len(seen) >= 6 and all(h.dtype == torch.float32 for h in seen)


@pytest.mark.parametrize("router", [r for r in ROUTERS if r not in ("residual", "rezero", "layerscale")])
def test_fifty_steps_with_the_fast_read_and_with_the_plain_one(router):
    fast, plain = make(router), make(router, plain_read=True)
    # float32 rounds to 1e-7; training at a high learning rate would amplify that tenfold every few steps, at this one not
    fast, plain = (losses(m, m, steps=50, learning_rate=1e-4) for m in (fast, plain))
    assert ((fast - plain).abs() / plain).max() < 1e-5


@pytest.mark.parametrize("router", ROUTERS)
def test_accumulated_gradients_are_the_batch_s(router):
    model, x = make(router).double(), tokens()
    model(x[:, :-1], x[:, 1:])[1].backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for micro in x.split(2):
        (model(micro[:, :-1], micro[:, 1:])[1] / 2).backward()
    for name, p in model.named_parameters():                    # float64 and two orders of summation
        torch.testing.assert_close(p.grad, whole[name], rtol=0, atol=1e-12, msg=name)


def compiled_agrees(router, device, autocast=None):
    """Compiled without a graph break (fullgraph) and without a recompilation after the first step."""
    torch._dynamo.reset()
    model = make(router).to(device)
    other = copy.deepcopy(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = losses(model, torch.compile(model, fullgraph=True), autocast=autocast, device=device)
    want = losses(other, other, autocast=autocast, device=device)
    # float32: fused kernels sum in another order, 1e-7 a rounding; four steps of AdamW carry it on. bfloat16: see above.
    assert (got - want).abs().max() < (1e-4 if autocast is None else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
def test_compiled_model(router):
    compiled_agrees(router, "cpu")


@pytest.mark.slow
def test_compiled_model_under_autocast():
    compiled_agrees("wav", "cpu", "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("router", ROUTERS)
def test_compiled_model_on_a_card(router, autocast):
    compiled_agrees(router, "cuda", autocast)
