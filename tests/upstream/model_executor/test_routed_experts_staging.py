# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Capture of expert ids into a layer's slice of the staging buffer."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.fused_moe.routed_experts import (
    RoutedExpertsCapture,
    bind_routed_experts,
    check_capture_support,
)

TOP_K = 2


def make_capture(dtype: torch.dtype, naive_dispatch: bool = False):
    layer = SimpleNamespace(
        layer_name="model.layers.1.mlp.experts",
        runner=SimpleNamespace(do_naive_dispatch_combine=naive_dispatch),
        moe_config=SimpleNamespace(is_sequence_parallel=False),
    )
    buffer = torch.full((8, TOP_K), -1, dtype=dtype)
    return RoutedExpertsCapture(layer, buffer)


def test_kernel_output_is_the_slice_itself():
    capture = make_capture(torch.int32)
    out = capture.topk_ids_out(3, None)
    assert out is not None and out.shape == (3, TOP_K)
    assert out.data_ptr() == capture.buffer.data_ptr()
    out[...] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    capture.record(out)
    assert capture.buffer[:3].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (capture.buffer[3:] == -1).all()


def test_unsigned_ids_of_the_same_width_share_the_slice():
    capture = make_capture(torch.int32)
    out = capture.topk_ids_out(2, torch.uint32)
    assert out is not None and out.dtype == torch.uint32
    assert out.data_ptr() == capture.buffer.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_ids_of_another_width_get_no_output(dtype: torch.dtype):
    assert make_capture(torch.int32).topk_ids_out(2, dtype) is None


def test_rows_gathered_from_other_ranks_get_no_output():
    assert make_capture(torch.int32, naive_dispatch=True).topk_ids_out(2, None) is None


def test_recorded_ids_leave_out_fused_shared_experts():
    capture = make_capture(torch.int64)
    capture.record(torch.tensor([[7, 8, 99], [9, 10, 99]]))
    assert capture.buffer[:2].tolist() == [[7, 8], [9, 10]]
    assert (capture.buffer[2:] == -1).all()


def make_layer(monolithic: bool, captures: bool):
    return SimpleNamespace(
        layer_id=1,
        layer_name="model.layers.1.mlp.experts",
        quant_method=SimpleNamespace(
            is_monolithic=monolithic,
            captures_routed_experts=captures,
            experts_cls=type("InsideRouter", (), {}),
        ),
    )


def test_kernel_that_keeps_its_choice_is_refused():
    with pytest.raises(ValueError) as caught:
        check_capture_support(make_layer(monolithic=True, captures=False), 2)
    assert str(caught.value) == (
        "--enable-return-routed-experts: the MoE kernel InsideRouter of layer "
        "model.layers.1.mlp.experts chooses the experts inside and does not return "
        "them. Start with another kernel, for example --moe-backend triton "
        "(--moe-backend marlin for MXFP4 weights)."
    )


@pytest.mark.parametrize(
    ("monolithic", "captures", "num_layers"),
    [(False, False, 2), (True, True, 2), (True, False, 1)],
    ids=["modular", "with-a-tap", "draft-layer"],
)
def test_other_layers_are_accepted(monolithic: bool, captures: bool, num_layers: int):
    check_capture_support(make_layer(monolithic, captures), num_layers)


def test_model_without_moe_layers_is_refused():
    with pytest.raises(ValueError, match="the model has no MoE layer that routes"):
        bind_routed_experts(torch.nn.Linear(2, 2), 2, 8, torch.device("cpu"))
