# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""No cache of routed experts by request, and no copy per layer to fill it."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

REMOVED = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"


def test_removed_module_is_gone_and_nothing_names_it():
    assert find_spec(REMOVED) is None
    root = Path(vllm.__file__).parent
    name = REMOVED.rpartition(".")[2]
    sources = list(root.rglob("*.py"))
    assert root / "v1/worker/gpu_model_runner.py" in sources
    assert [path for path in sources if name in path.read_text("utf-8")] == []


def test_no_custom_op_copies_ids_layer_by_layer():
    assert not hasattr(torch.ops.vllm, "capture_routing")


def test_worker_has_no_second_life_of_requests():
    """Rows by request had to be started, freed and preempted beside the KV cache."""
    assert "routed_experts_dict" not in {f.name for f in fields(ModelRunnerOutput)}
    assert not hasattr(GPUModelRunner, "init_routed_experts_capturer")
    assert not hasattr(GPUModelRunner, "_bind_routed_experts_capturer")


class Kernels(TorchDispatchMode):
    """Every operation that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_monolithic", [False, True])
def test_pass_through_a_layer_runs_nothing_beside_its_router_and_kernel(
    is_monolithic: bool,
):
    hidden, logits = torch.ones(4, 8), torch.ones(4, 16)
    weights, ids = torch.ones(4, 2), torch.tensor([[1, 2]] * 4, dtype=torch.int32)
    seen = []

    def kernel(**kwargs) -> torch.Tensor:
        seen.append(kwargs.get("topk_ids"))
        return hidden

    runner = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(runner)
    runner._shared_experts = None
    runner.router = SimpleNamespace(
        capture_fn=None, select_experts=lambda **_: (weights, ids)
    )
    runner._quant_method = SimpleNamespace(
        is_monolithic=is_monolithic, apply=kernel, apply_monolithic=kernel
    )
    # The attribute that the removed module left on every layer.
    left = torch.full((8, 2), -1, dtype=torch.int16)
    layer = SimpleNamespace(_routing_replay_out=left)
    with Kernels() as kernels:
        _, out = runner._apply_quant_method(layer, hidden, logits, None)
    assert kernels.names == []
    assert out is hidden
    assert seen[0] is (None if is_monolithic else ids)
    assert (left == -1).all()
