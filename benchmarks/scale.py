"""What each GPU holds when a draft trains on many, counted on the meta device: no memory, no network, no GPU.

    .venv/bin/python benchmarks/scale.py TARGET [--ranks 1 4 32]      (a folder with config.json is enough)

The draft is built from its config and spread by the very code that trains, over a make-believe group of ranks; its bytes
are then counted tensor by tensor and set beside the audit's arithmetic. Prints one JSON object.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from eyas.audit import audit_config, config_for_audit
from eyas.draft.model import Draft
from eyas.recipe import Train
from eyas.target import read_target
from eyas.train.parallel import Masters, Ranks
from eyas.train.trainer import make_optimizers


def local(tensor: torch.Tensor) -> int:
    """Bytes of this rank's part."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.numel() * part.element_size()


def held(target: str, size: int, shard: bool) -> dict[str, Any]:
    """Bytes of one of `size` ranks."""
    known = read_target(target)
    config = replace(config_for_audit(known), rope_parameters={"rope_type": "default"})  # it holds no parameters
    with torch.device("meta"):
        draft = Draft(config)
        draft.embed_tokens.weight = torch.nn.Parameter(draft.embed_tokens.weight.bfloat16(), requires_grad=False)
    masters = Masters(draft, Ranks(0, size), torch.bfloat16, shard)
    matrices = sum(p.numel() for p in masters.trained if p.ndim == 2)
    optimizers = make_optimizers(draft, Train())
    for parameter in masters.trained:
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["fused"] = False  # there is no fused kernel for the meta device
        optimizer.step()
    moments = [value for o in optimizers for state in o.state.values() for value in state.values() if value.ndim]
    teacher = config.draft_vocab_size * config.target_hidden_size
    return {
        "masters": sum(map(local, masters.trained)),
        "optimizer": sum(map(local, moments)),
        "gradients": 4 * sum(p.numel() for p in masters.trained),  # sums of the sinks, before they are shared out
        "bf16": 2 * (matrices + teacher) + local(draft.embed_tokens.weight),
        "activations": audit_config(known, config)["estimates"]["activations_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 32])
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for size in given.ranks:
        for shard in (False, True) if size > 1 else (False,):
            dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
            parts = held(given.target, size, shard)
            found[f"{size} {'sharded' if shard else 'whole'}"] = parts | {"together": sum(parts.values())}
            dist.destroy_process_group()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
