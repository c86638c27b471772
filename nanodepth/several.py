"""Several processes on one batch, as torchrun starts them: replicas (DistributedDataParallel) or shards (fully_shard).

    torchrun --standalone --nproc_per_node=2 train.py ...               # gloo on CPUs, nccl on cards

A process that is alone is a group of one: nothing is wrapped and nothing is sent.
"""
import contextlib
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodepth.files import UserError

@dataclass
class Group:
    rank: int = 0                       # this process among all
    size: int = 1                       # processes
    local_rank: int = 0                 # this process among those of its machine

    def sum(self, *values: float) -> list[float]:
        """The sums of these numbers over the processes; all must call it."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """This process's part of a batch, (n, ...) -> (n / size, ...)."""
        return batch.chunk(self.size)[self.rank]

    def wait(self) -> None:
        """Until all processes have come here."""
        self.sum(0.0)

    def card(self, device: str) -> str:
        """The device of this process: on cards each takes its own."""
        if self.size == 1 or device == "cpu":
            return device
        if device != "cuda":
            raise UserError(f"--device {device}: several processes take --device cpu, or cuda, a card each.")
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(f"--nproc_per_node: a process takes a card, and here are {torch.cuda.device_count()}.")
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

@contextlib.contextmanager
def processes():
    """The group of torchrun's processes; without it a group of one. When one fails, one of them says so and all end."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        yield Group()
        return
    store, rank, size = next(dist.rendezvous("env://"))
    cards = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", store=store, rank=rank, world_size=size)
    try:
        yield Group(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    except BaseException as e:
        try:
            first = store.add("failed", 1) == 1
        except RuntimeError:                                            # the process that held the store is gone
            first = rank == 1
        if not first:
            sys.exit(2)
        if isinstance(e, dist.DistError) or isinstance(e, RuntimeError) and "gloo" in str(e):
            raise UserError("another process of this run has ended, killed perhaps, or out of memory; this ends the "
                            "run. Its last checkpoint is whole: go on with --init_from resume.") from None
        raise
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)         # all is written; a thread that outlives the interpreter aborts it now and then (exit code -6)

# ---------------------------------------------------------------------------------------------------------------------
# models and optimizers

def spread(model, group: Group, device: str, fsdp: bool):
    """The model as the processes train it together: replicas, or with fsdp a shard in each, a sublayer a unit."""
    if fsdp:
        from torch.distributed.fsdp import fully_shard
        if not dist.is_initialized():
            raise UserError("--fsdp shards a model over processes; start them with "
                            "torchrun --standalone --nproc_per_node=2 train.py --fsdp ...")
        if empty := [name for name, p in model.named_parameters() if p.numel() == 0]:
            raise UserError(f"--fsdp cannot shard {empty[0]}, which is empty (--details none): take --router block.")
        mesh = dist.init_device_mesh(device.split(":")[0], (group.size,))
        for f in model.sublayers:
            fully_shard(f, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if group.size == 1:
        return model
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=None if device == "cpu" else [device])

@contextlib.contextmanager
def summing(net, now: bool):
    """Around a forward and backward pass: whether the gradients are to be summed over the processes with it."""
    if hasattr(net, "set_requires_gradient_sync"):                      # fully_shard's
        net.set_requires_gradient_sync(now)
    with contextlib.nullcontext() if now or not hasattr(net, "no_sync") else net.no_sync():
        yield

def whole(value, keep: bool = True):
    """A tensor of which each process has a shard, whole and on the CPU; anything else as it is. All must call it; it is
    None in those that do not keep it."""
    if isinstance(value, dict):
        return {k: whole(v, keep) for k, v in value.items()}
    if not hasattr(value, "full_tensor"):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if keep else None

def optimizer_state(optimizer, keep: bool = True) -> dict:
    """The optimizer's state in whole tensors, as of one process."""
    state = optimizer.state_dict()
    return {"state": whole(state["state"], keep), "param_groups": state["param_groups"]}

def load_optimizer(optimizer, model, saved: dict) -> None:
    """Take over what `optimizer_state` gave. Only AdamW's memory: rates, decay and betas stay the optimizer's own.
    Parameters are told by their names, in files without names by their order."""
    names = {p: name for name, p in model.named_parameters()}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    saved_names = [name for group in saved["param_groups"] for name in group.get("param_names", ())]
    of = dict(zip(saved_names or [names[p] for p in own], ids))
    state = {}
    for i, p in enumerate(own):
        own_state = saved["state"].get(of.get(names[p]), {})
        if any(v.dim() and v.shape != p.shape for v in own_state.values()):
            raise UserError(f"the checkpoint is of another version of model.py: its {names[p]} does not fit.")
        if own_state:
            state[i] = {k: like(v, p) for k, v in own_state.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

def like(value, p):
    """A whole tensor as p lies: sharded where p is."""
    if not hasattr(p, "placements") or not torch.is_tensor(value) or value.shape != p.shape:
        return value
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)
