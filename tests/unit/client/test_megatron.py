"""Replay into real megatron-core models on the CPU: rows reach their layer, or are refused."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sample_answers import refused, rows_of

from vllm_r3.adapters import megatron as adapter
from vllm_r3.adapters.batch import batch_rows
from vllm_r3.errors import R3Error

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'vllm-r3[megatron]'"
)
pytest.importorskip(
    "megatron.core.transformer.moe.router_replay",
    reason="megatron-core 0.16 or newer is not installed: pip install 'vllm-r3[megatron]'",
)
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS, EXPERTS, TOP_K, VOCAB = 4, 8, 2, 32


@pytest.fixture(scope="module")
def cpu_megatron() -> Iterator[None]:
    """One process with gloo; the few CUDA calls that megatron-core makes go to the CPU."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patch = pytest.MonkeyPatch()
    patch.setenv("MASTER_ADDR", "127.0.0.1")
    patch.setenv("MASTER_PORT", str(port))
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    # 0.16.1 reads this name even where Transformer Engine, which defines it, is missing
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    initialize_rng_tracker(inference_rng_tracker=True)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patch.undo()


def config(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = dict(
        num_layers=LAYERS, hidden_size=16, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K, moe_layer_freq=[0, 1, 1, 1], moe_ffn_hidden_size=8,
        ffn_hidden_size=16, moe_enable_routing_replay=True, moe_token_dispatcher_type="allgather",
        add_bias_linear=False, moe_router_load_balancing_type="none", use_cpu_initialization=True,
        gated_linear_unit=True, attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    return TransformerConfig(**{**values, **more})


def build(**more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    torch.manual_seed(3)
    made = config(**more)
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(made, spec, False) if made.mtp_num_layers else None
    return GPTModel(made, spec, VOCAB, 64, mtp_block_spec=mtp).eval()


def forward(model: Any, tokens: Any) -> Any:
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(length, length).tril().logical_not()[None, None]
    with torch.no_grad():
        return model(tokens, positions, mask)


def maps_of(model: Any, tokens: Any) -> tuple[dict[int, np.ndarray], Any]:
    """Run the model; return each router's expert map, by global layer, and the logits."""
    maps: dict[int, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        for router in adapter.target_routers(model):
            hook = router.module.register_forward_hook(
                lambda *call, layer=router.layer: maps.update({layer: call[2][1].numpy()})
            )
            stack.callback(hook.remove)
        return maps, forward(model, tokens)


def recorded(model: Any, tokens: Any) -> np.ndarray:
    """Run the model; return its own choice as rows, one for each token."""
    adapter.set_action(model, "record")
    forward(model, tokens)
    rows = np.zeros((tokens.numel(), LAYERS, TOP_K), np.int64)
    for router in adapter.target_routers(model):
        rows[:, router.layer] = router.replay.get_recorded_indices().numpy()
    adapter.clear_replay(model)
    return rows


def mapped(rows: np.ndarray) -> np.ndarray:
    """The map (T, E) that rows (T, K) mean."""
    result = np.zeros((len(rows), EXPERTS), bool)
    np.put_along_axis(result, rows, True, axis=1)
    return result


TOKENS = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]
SAMPLES = [rows_of(5, LAYERS, TOP_K, EXPERTS), rows_of(5, LAYERS, TOP_K, EXPERTS, first=11)]


def test_every_router_takes_the_rows_of_its_own_layer(cpu_megatron: None) -> None:
    model, tokens = build(), torch.tensor(TOKENS)
    rows = batch_rows(SAMPLES, 6, EXPERTS)
    free, free_logits = maps_of(model, tokens)
    with adapter.replaying(model, rows):
        replayed, replayed_logits = maps_of(model, tokens)
    assert sorted(replayed) == [1, 2, 3]
    for layer, found in replayed.items():
        np.testing.assert_array_equal(found, mapped(rows[:, layer]))
        assert not np.array_equal(found, free[layer])
    assert not torch.equal(free_logits, replayed_logits)
    after, after_logits = maps_of(model, tokens)
    assert torch.equal(after_logits, free_logits)


def test_replaying_the_models_own_choice_changes_no_logit(cpu_megatron: None) -> None:
    model, tokens = build(), torch.tensor(TOKENS)
    logits, own = forward(model, tokens), recorded(model, tokens)
    with adapter.replaying(model, own):
        assert torch.equal(forward(model, tokens), logits)


def test_a_padded_batch_has_the_order_of_megatrons_tokens(cpu_megatron: None) -> None:
    model = build()
    samples = [recorded(model, torch.tensor([tokens]))[:-1] for tokens in TOKENS]
    rows = batch_rows(samples, 6, EXPERTS)
    # the last position of each sample holds a made row
    np.testing.assert_array_equal(recorded(model, torch.tensor(TOKENS))[:-2], rows[:-2])


def test_mtp_routers_are_left_to_route_freely(cpu_megatron: None) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    model = build(mtp_num_layers=1)
    routers = adapter.target_routers(model)
    assert [router.layer for router in routers] == [1, 2, 3]
    assert len(RouterReplay.global_router_replay_instances) == 4
    rows = batch_rows(SAMPLES, 6, EXPERTS)
    with pytest.raises(ValueError, match="does not match instances"):
        RouterReplay.set_replay_data(adapter.layer_tensors(rows, [1, 2, 3]))
    adapter.set_replay(model, rows)
    ours = [router.replay for router in routers]
    (mtp,) = (r for r in RouterReplay.global_router_replay_instances if r not in ours)
    assert (mtp.router_replay_action, mtp.target_topk_idx) == (None, None)
    adapter.clear_replay(model)


def test_recomputed_forwards_take_the_microbatches_in_order(cpu_megatron: None) -> None:
    model = build()
    first, second = (batch_rows([sample], 6, EXPERTS) for sample in SAMPLES)
    for tokens, rows in zip(TOKENS, (first, second), strict=True):
        adapter.set_replay(model, rows)
        forward(model, torch.tensor([tokens]))
    adapter.set_action(model, "replay_backward")
    for tokens, rows in zip(TOKENS, (first, second), strict=True):
        maps, _ = maps_of(model, torch.tensor([tokens]))
        for layer, found in maps.items():
            np.testing.assert_array_equal(found, mapped(rows[:, layer]))
    adapter.clear_replay(model)


ROUTER = "stage 0, decoder.layers.1.mlp.router: expected"


@pytest.mark.parametrize(
    ("layers", "top_k", "message"),
    [
        (LAYERS, 1, f"{ROUTER} top_k 2, got 1 in the rows"),
        (LAYERS, 3, f"{ROUTER} top_k 2, got 3 in the rows"),
        *(
            (
                layers, TOP_K,
                f"layer {layers}: expected rows of more than {layers} decoder layers, got "
                f"{layers}; rows over MoE layers only need moe_layers when they are decoded",
            )
            for layers in (LAYERS - 1, 1)
        ),
    ],
)  # fmt: skip
def test_rows_of_another_model_are_refused_before_any_is_set(
    cpu_megatron: None, layers: int, top_k: int, message: str
) -> None:
    model = build()
    with refused(message):
        adapter.set_replay(model, np.zeros((12, layers, top_k), np.int64))
    assert all(router.replay.target_topk_idx is None for router in adapter.target_routers(model))


def test_a_model_that_cannot_replay_is_refused(cpu_megatron: None) -> None:
    off, fused = build(moe_enable_routing_replay=False), build()
    fused.config.moe_router_fusion = True
    with refused(f"{ROUTER} moe_enable_routing_replay true in the config, got false", R3Error):
        adapter.target_routers(off)
    message = f"{ROUTER} moe_router_fusion false, got true: the fused kernel ignores replay"
    with refused(message, R3Error):
        adapter.set_replay(fused, batch_rows(SAMPLES, 6, EXPERTS))
    with refused("expected a model with MoE routers, found none on this rank", R3Error):
        adapter.target_routers(torch.nn.Linear(2, 2))


def piped(size: int, virtual: int | None = None, **more: Any) -> Any:
    return config(
        num_layers=8,
        moe_layer_freq=[0, 0, 1, 1, 1, 1, 1, 1],
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        **more,
    )


UNEVEN = dict(num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=3)


@pytest.mark.parametrize(
    ("size", "stages", "more", "expected"),
    [
        (4, (None,), {}, [[], [2, 3], [4, 5], [6, 7]]),
        (2, (0, 1), {"virtual": 2}, [[4, 5], [2, 3, 6, 7]]),
        (3, (None,), UNEVEN, [[], [2, 3, 4], [5, 6, 7]]),
    ],
    ids=["even", "virtual", "uneven"],
)
def test_pipeline_ranks_hold_their_own_global_layers(
    cpu_megatron: None, size: int, stages: tuple, more: dict, expected: list
) -> None:
    made = piped(size, **more)
    assert [adapter.stage_moe_layers(made, rank, stages) for rank in range(size)] == expected


def test_routers_of_virtual_stages_are_found_by_their_global_layer() -> None:
    def stage(*numbers: int) -> Any:
        routers = torch.nn.ModuleList()
        for number in numbers:
            router = torch.nn.Linear(1, 1)
            router.layer_number, router.topk = number, TOP_K
            router.router_replay, router.config = SimpleNamespace(), SimpleNamespace()
            routers.append(router)
        return routers

    routers = adapter.target_routers([stage(1, 2), stage(5, 6)])
    assert [(router.layer, router.name) for router in routers] == [
        (0, "stage 0, 0"),
        (1, "stage 0, 1"),
        (4, "stage 1, 0"),
        (5, "stage 1, 1"),
    ]


def test_layer_tensors_are_contiguous_int64() -> None:
    rows = rows_of(6, LAYERS, TOP_K, EXPERTS)
    for layer, tensor in zip((3, 1), adapter.layer_tensors(rows, (3, 1)), strict=True):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), rows[:, layer])
