# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows that pipeline stages pass on, without a model: one recorder for each stage."""

import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_routed_experts_recorder import (
    NUM_LAYERS,
    TOP_K,
    Group,
    build_recorder,
    make_slots,
)

from vllm.model_executor.layers.fused_moe import routed_experts_stages
from vllm.model_executor.layers.fused_moe.routed_experts_stages import (
    StageLayers,
    describe_rows,
    gather_from_stages,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.routed_experts import ROUTED_EXPERTS
from vllm.v1.worker.routed_experts import RoutedExpertsRecorder

PARTS = [
    [[1, 2], [4]],
    [[], [1, 2, 4]],  # a first stage without MoE layers
    [[0, 1, 4], []],  # and a last
    [[0], [], [3, 4]],  # and one between
    [[1], [2], [3], [4]],
]


def make_stages(parts: list[list[int]], **changes) -> list[StageLayers]:
    fields = dict(num_experts=200, is_sequence_parallel=False) | changes
    return [StageLayers(part, {TOP_K} if part else set(), **fields) for part in parts]


@pytest.fixture
def make_recorders(monkeypatch: pytest.MonkeyPatch):
    """Build the recorders of all stages, as TP rank `group` sees them."""

    def make(parts, num_experts=200, **options) -> list[RoutedExpertsRecorder]:
        stages = make_stages(
            parts,
            num_experts=num_experts,
            is_sequence_parallel=options.get("is_sequence_parallel", False),
        )
        build = functools.partial(build_recorder, monkeypatch.setattr, stages=stages)
        return [
            build(moe_layers=p, stage=i, num_experts=num_experts, **options)
            for i, p in enumerate(parts)
        ]

    return make


def make_step(parts, num_tokens: int, mark: int = 0, shift: int = 0) -> torch.Tensor:
    """Staging of a whole model, (NUM_LAYERS, num_tokens, TOP_K), zero where dense."""
    layer = torch.arange(NUM_LAYERS)[:, None, None]
    token = torch.arange(num_tokens)[None, :, None]
    ids = 30 * layer + 3 * token + torch.arange(TOP_K) + mark + shift
    dense = [n for n in range(NUM_LAYERS) if n not in sum(parts, [])]
    ids[dense] = 0
    return ids


def run_stages(recorders, parts, ids: torch.Tensor, num_tokens: int):
    """One step through the pipeline, with what a send and a receive do to tensors."""
    tensors = None
    for recorder, part in zip(recorders, parts, strict=True):
        recorder.receive(tensors)
        recorder.staging[part, : ids.shape[1]] = ids[part].to(recorder.staging.dtype)
        snapshot = recorder.snapshot(num_tokens, ids.shape[1], make_slots(num_tokens))
        if recorder.is_last_stage:
            return snapshot
        assert snapshot is None
        output = IntermediateTensors({"hidden_states": torch.zeros(ids.shape[1], 2)})
        tensors = recorder.send(output, ids.shape[1])
        assert list(output.tensors) == ["hidden_states"]  # may be a CUDA graph's
        tensors = IntermediateTensors(
            {
                k: v.clone(memory_format=torch.preserve_format)
                for k, v in tensors.items()
            }
        )


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("num_experts", "shift"), [(200, 0), (1000, 700)])
def test_rows_of_all_stages_reach_the_last_step_after_step(
    make_recorders, parts, num_experts: int, shift: int
):
    recorders = make_recorders(parts, num_experts)
    assert {str(r.info) for r in recorders} == {str(recorders[0].info)}
    assert recorders[0].info.moe_layers == sum(parts, [])
    kept = []
    for mark, num_tokens, padding in [(0, 5, 3), (7, 1, 0), (11, 9, 3)]:
        ids = make_step(parts, num_tokens + padding, mark, shift)
        step = run_stages(recorders, parts, ids, num_tokens).get()
        kept.append((step, ids[:, :num_tokens].transpose(0, 1)))
    for step, expected in kept:
        assert step.rows.dtype == recorders[0].info.dtype
        assert step.slots.tolist() == make_slots(len(expected)).tolist()
        np.testing.assert_array_equal(step.rows, expected.numpy())


def test_what_is_sent_is_bytes_that_the_next_step_does_not_change(make_recorders):
    first, _ = make_recorders([[0, 1], [3]], num_experts=1000)
    first.staging[:2, :4] = 900
    sent = first.send(IntermediateTensors({}), 4).tensors[ROUTED_EXPERTS]
    first.staging.fill_(1)
    assert sent.dtype == torch.uint8  # NCCL has no int16
    assert sent.is_contiguous()
    assert sent.view(torch.int16).unique().tolist() == [900]
    assert sent.view(torch.int16).shape == (2, 4, TOP_K)


def test_stages_before_the_first_moe_layer_send_nothing(make_recorders):
    first, second, third = make_recorders([[], [2], [4]])
    output = IntermediateTensors({"hidden_states": torch.zeros(4, 2)})
    assert first.send(output, 4) is output
    second.receive(output)
    assert list(second.send(output, 4).tensors) == ["hidden_states", ROUTED_EXPERTS]


def test_tp_ranks_whose_output_nobody_reads_send_nothing(make_recorders):
    first, last = make_recorders([[1], [3]], group=Group(1, [torch.zeros(0)]))
    output = IntermediateTensors({})
    assert first.send(output, 4) is output
    last.receive(output)
    assert last.snapshot(4, 4, make_slots(4)) is None


def test_chunks_of_sequence_parallel_ranks_meet_on_the_last_stage(
    make_recorders, monkeypatch
):
    """Seven tokens, padded to eight: each of two TP ranks has four, by stage."""
    parts, ids = [[1, 2], [], [4]], make_step([[1, 2, 4]], 8)
    chunks = [ids[:, :4], ids[:, 4:]]
    others = chunks[1].transpose(0, 1).to(torch.int32)
    recorders = make_recorders(
        parts,
        group=Group(0, [others]),
        tensor_parallel_size=2,
        is_sequence_parallel=True,
    )
    tensors = None
    for recorder, part in zip(recorders, parts, strict=True):
        recorder.receive(tensors)
        recorder.staging[part, :4] = chunks[0][part].to(torch.int32)
        if not recorder.is_last_stage:
            tensors = recorder.send(IntermediateTensors({}), 8)
    step = recorders[-1].snapshot(7, 8, make_slots(7)).get()
    np.testing.assert_array_equal(step.rows, ids[:, :7].transpose(0, 1).numpy())


@pytest.mark.parametrize(
    ("rows", "found"), [(None, "none"), (torch.zeros(2, 1, TOP_K), "2 layers")]
)
def test_rows_that_do_not_come_are_an_error_and_no_zeros(make_recorders, rows, found):
    _, last = make_recorders([[1, 2], [4]])
    tensors = {} if rows is None else {ROUTED_EXPERTS: rows.to(torch.uint8)}
    message = (
        "--enable-return-routed-experts: expected routed experts of the first 3 layers "
        f"from the pipeline stage before, found {found}"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        last.receive(IntermediateTensors(tensors))


def test_only_layers_of_the_own_stage_must_have_run_in_the_warm_up(make_recorders):
    first, last, dense = make_recorders([[1, 2], [4], []])
    last.staging[4] = 3
    last._check_warm_up()
    dense._check_warm_up()
    with pytest.raises(RuntimeError, match=r"none of layers \[1, 2\]"):
        first._check_warm_up()


# What the stages say of their layers.


def test_rows_are_as_wide_as_the_widest_stage_needs():
    few, many = make_stages([[1], []])[:1], make_stages([[3]], num_experts=300)
    info = describe_rows(few + many, NUM_LAYERS)
    assert (info.num_layers, info.moe_layers) == (NUM_LAYERS, [1, 3])
    assert (info.num_experts, info.dtype, info.top_k) == (300, "int16", TOP_K)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            make_stages([[], []]),
            "the model has no MoE layer that routes through vLLM's FusedMoE",
        ),
        (
            [StageLayers([1], {2}, 8, False), StageLayers([2], {6}, 8, False)],
            "expected one top_k for all MoE layers, found [2, 6]",
        ),
        (
            make_stages([[2], [1]]),
            "expected layer numbers that rise from pipeline stage to pipeline stage, "
            "found MoE layers [2], then [1]",
        ),
    ],
    ids=["no-moe", "two-top-ks", "not-in-order"],
)
def test_layers_that_do_not_fit_into_rows_are_refused(stages, message: str):
    message = f"--enable-return-routed-experts: {message}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        describe_rows(stages, NUM_LAYERS)


def test_a_single_stage_asks_nobody(monkeypatch):
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(routed_experts_stages, "get_pp_group", lambda: group)
    assert gather_from_stages("mine") == ["mine"]
