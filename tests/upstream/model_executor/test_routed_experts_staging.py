# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a router's choice to the layer's slice of the staging buffer.

The routers and the capture are vLLM's own; kernels, layers and groups are fakes that
show what was done to them.
"""

import contextlib
import importlib
import pkgutil
import re
from types import SimpleNamespace

import pytest
import torch

import vllm.model_executor.layers.fused_moe.routed_experts as routed_experts
from vllm.distributed.eplb.eplb_state import EplbLayerState
from vllm.model_executor.layers.fused_moe import experts
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.oracle import (
    fp8,
    mxfp4,
    nvfp4,
    unquantized,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
)
from vllm.model_executor.layers.fused_moe.routed_experts import (
    RoutedExpertsCapture,
    bind_routed_experts,
    find_moe_layers,
)
from vllm.model_executor.layers.fused_moe.router import (
    base_router,
    fused_topk_bias_router,
    fused_topk_router,
    grouped_topk_router,
    zero_expert_router,
)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import (
    CustomRoutingRouter,
)
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
    FusedTopKBiasRouter,
)
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    FusedTopKRouter,
)
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import (
    GroupedTopKRouter,
)
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import (
    ZeroExpertRouter,
)
from vllm.v1.routed_experts import RoutedExpertsInfo

TOP_K = 2
MAX_NUM_TOKENS = 8
CPU = torch.device("cpu")


class TrtLlmBf16Experts:
    """A MoE kernel that routes inside, by the name of one of vLLM's."""

    @staticmethod
    def is_monolithic() -> bool:
        return True


class Router:
    capture_fn = None

    def set_capture_fn(self, capture_fn):
        self.capture_fn = capture_fn


class Layer(FusedMoE):
    """A MoE layer without weights: what binding and capture look at."""

    def __init__(self, name: str, top_k: int = TOP_K, **changes):
        torch.nn.Module.__init__(self)
        self.layer_name = name
        self.top_k = top_k
        self.router = changes.pop("router", Router())
        self.runner = SimpleNamespace(do_naive_dispatch_combine=False)
        self.enable_eplb = False
        self.moe_config = SimpleNamespace(
            is_sequence_parallel=changes.pop("is_sequence_parallel", False),
            dp_size=1,
        )
        method = {
            "is_monolithic": False,
            "experts_cls": None,
            "topk_indices_dtype": None,
            "moe_kernel": None,
        }
        self.quant_method = SimpleNamespace(**(method | changes))


class DirectCapture(RoutedExpertsCapture):
    """Copies at once, where the CPU build goes through an op and a forward context."""

    def __call__(self, topk_ids: torch.Tensor) -> None:
        self.record(topk_ids)


def make_capture(
    dtype: torch.dtype = torch.int32, cls: type = DirectCapture, **changes
) -> RoutedExpertsCapture:
    """A capture whose slice shows untouched cells as -1."""
    buffer = torch.full((MAX_NUM_TOKENS, TOP_K), -1, dtype=dtype)
    return cls(Layer("model.layers.3.mlp.experts", **changes), buffer)


def make_ids(num_tokens: int, width: int = TOP_K, dtype: torch.dtype = torch.int32):
    """Ids that depend on token and column."""
    ids = 10 * torch.arange(num_tokens)[:, None] + torch.arange(width)
    return ids.to(dtype)


def assert_recorded(capture: RoutedExpertsCapture, ids: torch.Tensor) -> None:
    num_tokens = len(ids)
    assert capture.buffer[:num_tokens].tolist() == ids[:, :TOP_K].tolist()
    assert (capture.buffer[num_tokens:] == -1).all()


# Copying.


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint32])
@pytest.mark.parametrize("buffer_dtype", [torch.int32, torch.int64])
def test_as_many_rows_of_any_type_are_written_as_there_are_tokens(
    num_tokens: int, dtype: torch.dtype, buffer_dtype: torch.dtype
):
    capture = make_capture(buffer_dtype)
    capture.record(make_ids(num_tokens, dtype=dtype))
    assert_recorded(capture, make_ids(num_tokens))


def test_columns_of_fused_shared_experts_and_gaps_in_memory_are_left_out():
    capture = make_capture()
    every_second = make_ids(8, width=2 * TOP_K + 2)[::2, ::2]
    assert not every_second.is_contiguous() and every_second.shape == (4, TOP_K + 1)
    capture.record(every_second)
    assert_recorded(capture, every_second)


# The slice as the output of the top-k kernel.


@pytest.mark.parametrize("num_tokens", [1, 5, 8])
@pytest.mark.parametrize("dtype", [None, torch.int32, torch.uint32])
def test_a_top_k_kernel_gets_the_slice_itself(num_tokens: int, dtype):
    capture = make_capture()
    out = capture.topk_ids_out(num_tokens, dtype)
    assert out.shape == (num_tokens, TOP_K)
    assert out.dtype == (torch.int32 if dtype is None else dtype)
    assert out.is_contiguous()
    out.copy_(make_ids(num_tokens, dtype=out.dtype))
    assert_recorded(capture, make_ids(num_tokens))


@pytest.mark.parametrize(
    ("buffer_dtype", "dtype"),
    [
        (torch.int32, torch.int64),
        (torch.int32, torch.int16),
        (torch.int64, None),
        (torch.int64, torch.int32),
    ],
)
def test_a_kernel_with_ids_of_another_width_gets_memory_of_its_own(buffer_dtype, dtype):
    assert make_capture(buffer_dtype).topk_ids_out(4, dtype) is None


def test_a_router_with_64_bit_ids_writes_a_64_bit_slice():
    capture = make_capture(torch.int64)
    capture.topk_ids_out(3, torch.int64).copy_(make_ids(3))
    assert_recorded(capture, make_ids(3))


def test_ids_that_are_the_slice_already_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    capture = make_capture()
    out = capture.topk_ids_out(3, torch.uint32)
    out.copy_(make_ids(3))

    def fail(ids):
        raise AssertionError("copied")

    monkeypatch.setattr(capture, "_rows_of_this_rank", fail)
    capture.record(out)
    assert_recorded(capture, make_ids(3))


def test_rows_of_all_ranks_are_not_written_to_the_slice_under_naive_dispatch():
    capture = make_capture()
    capture._runner.do_naive_dispatch_combine = True
    assert capture.topk_ids_out(4, torch.int32) is None


# Rows of this rank among those of all ranks.


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_naive_dispatch_records_the_rows_of_this_rank(
    monkeypatch: pytest.MonkeyPatch, is_sequence_parallel: bool, rank: int
):
    sizes = [3, 0, 4]
    capture = make_capture(is_sequence_parallel=is_sequence_parallel)
    capture._runner.do_naive_dispatch_combine = True
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: sizes)
    context = SimpleNamespace(dp_metadata=metadata)
    right, wrong = (
        SimpleNamespace(rank_in_group=rank),
        SimpleNamespace(rank_in_group=99),
    )
    monkeypatch.setattr(routed_experts, "get_forward_context", lambda: context)
    groups = (wrong, right) if is_sequence_parallel else (right, wrong)
    monkeypatch.setattr(routed_experts, "get_dp_group", lambda: groups[0])
    monkeypatch.setattr(routed_experts, "get_ep_group", lambda: groups[1])
    gathered = make_ids(7)
    capture.record(gathered)
    start = sum(sizes[:rank])
    assert_recorded(capture, gathered[start : start + sizes[rank]])


# The op that a compiler cannot look into.


@pytest.fixture
def forward_context(monkeypatch: pytest.MonkeyPatch) -> RoutedExpertsCapture:
    """A forward context that knows one bound layer; returns its capture."""
    capture = make_capture(cls=RoutedExpertsCapture)
    layer = SimpleNamespace(router=SimpleNamespace(capture_fn=capture))
    context = SimpleNamespace(no_compile_layers={capture.layer_name: layer})
    monkeypatch.setattr(routed_experts, "get_forward_context", lambda: context)
    return capture


@pytest.mark.skipif(
    not routed_experts.current_platform.is_cpu(),
    reason="other platforms do not compile it",
)
def test_a_compiled_graph_keeps_the_capture_though_nobody_reads_its_result(
    forward_context,
):
    capture = forward_context

    def route(logits: torch.Tensor) -> torch.Tensor:
        ids = torch.topk(logits, TOP_K, dim=-1).indices.to(torch.int32)
        capture(ids)
        return ids + 1000

    compiled = torch.compile(route, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.rand(5, 16, generator=generator)
        expected = torch.topk(logits, TOP_K, dim=-1).indices
        # The op says that it changes its input; it must not.
        assert compiled(logits).tolist() == (expected + 1000).tolist()
        assert_recorded(capture, expected)


# Routers.


EPLB = {"expert_load_view", "logical_to_physical_map", "logical_replica_count"}


def make_eplb_state() -> EplbLayerState:
    tensor = torch.zeros(1)
    return EplbLayerState(
        **{name: tensor for name in EPLB}, should_record_tensor=torch.ones(1)
    )


def fake_top_k(taken: list) -> object:
    """A top-k kernel that writes to the memory it is handed, and says which."""

    def top_k(*args, topk_ids_out=None, hidden_states=None, **kwargs):
        taken.append(topk_ids_out)
        num_tokens = len(hidden_states)
        ids = torch.empty(num_tokens, TOP_K, dtype=torch.int32)
        ids = ids if topk_ids_out is None else topk_ids_out
        ids.copy_(make_ids(num_tokens))
        weights = torch.ones(num_tokens, TOP_K)
        return weights, ids, torch.zeros(num_tokens, TOP_K)

    return top_k


def route(
    router: BaseRouter, capture: RoutedExpertsCapture | None, num_tokens: int = 4
):
    """Return the ids that the MoE kernel gets."""
    router.set_capture_fn(capture)
    return router.select_experts(
        torch.zeros(num_tokens, 1), torch.zeros(num_tokens, 128)
    )[1]


def patch_top_k(monkeypatch: pytest.MonkeyPatch) -> list:
    taken: list = []
    top_k = fake_top_k(taken)

    def without_indices(*args, **kwargs):
        return top_k(*args, **kwargs)[:2]

    monkeypatch.setattr(fused_topk_router, "fused_topk", top_k)
    monkeypatch.setattr(fused_topk_bias_router, "fused_topk_bias", without_indices)
    monkeypatch.setattr(grouped_topk_router, "fused_topk", top_k)
    monkeypatch.setattr(grouped_topk_router, "fused_topk_bias", without_indices)
    return taken


BIAS = torch.zeros(128)


def custom(hidden_states, gating_output, topk, renormalize):
    num_tokens = len(hidden_states)
    return torch.ones(num_tokens, topk), make_ids(num_tokens, topk, torch.int64)


def make_router(kind: str, **kwargs) -> BaseRouter:
    common = {
        "top_k": TOP_K,
        "global_num_experts": 128,
        "eplb_state": EplbLayerState(),
        **kwargs,
    }
    if kind == "softmax":
        return FusedTopKRouter(**common)
    if kind == "bias":
        return FusedTopKBiasRouter(**common, e_score_correction_bias=BIAS)
    if kind == "custom":
        return CustomRoutingRouter(**common, custom_routing_function=custom)
    # 7 groups do not divide 128 experts: these two fall back to the plain top-k.
    bias = BIAS if kind == "grouped with bias" else None
    grouped = {"num_expert_group": 7, "topk_group": 1, "e_score_correction_bias": bias}
    return GroupedTopKRouter(**common, **grouped)


ROUTERS = ["softmax", "bias", "grouped", "grouped with bias"]


@pytest.mark.parametrize("kind", ["softmax", "bias"])
def test_the_top_k_kernel_writes_straight_into_the_slice(monkeypatch, kind: str):
    taken = patch_top_k(monkeypatch)
    capture = make_capture()
    ids = route(make_router(kind), capture)
    assert taken[0].data_ptr() == capture.buffer.data_ptr() == ids.data_ptr()
    assert_recorded(capture, make_ids(4))


@pytest.mark.parametrize("kind", ["softmax", "bias"])
def test_the_kernel_below_the_router_is_handed_the_slice(monkeypatch, kind: str):
    def kernel(weights, ids, *_, **__):
        return weights, ids.copy_(make_ids(len(ids)))

    monkeypatch.setattr(
        fused_topk_router, "dispatch_topk_softmax_func", lambda *_, **__: kernel
    )
    monkeypatch.setattr(fused_topk_bias_router, "vllm_topk_sigmoid", kernel)
    capture = make_capture()
    for bound in (capture, None):
        ids = route(make_router(kind), bound)
        assert ids.tolist() == make_ids(4).tolist()
        assert (ids.data_ptr() == capture.buffer.data_ptr()) == (bound is not None)
    assert_recorded(capture, make_ids(4))


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_top_k_kernel_has_memory_of_its_own_without_a_capture(
    monkeypatch, kind: str
):
    taken = patch_top_k(monkeypatch)
    assert route(make_router(kind), None).tolist() == make_ids(4).tolist()
    assert taken == [None]


@pytest.mark.parametrize("kind", [*ROUTERS, "custom"])
def test_a_kernel_that_wants_64_bit_ids_gets_them_and_the_slice_has_them(
    monkeypatch, kind
):
    patch_top_k(monkeypatch)
    capture = make_capture()
    ids = route(make_router(kind, indices_type_getter=lambda: torch.int64), capture)
    assert ids.dtype == torch.int64
    assert ids.tolist() == make_ids(4).tolist()
    assert_recorded(capture, make_ids(4))


@pytest.mark.parametrize("kind", [*ROUTERS, "custom"])
def test_ids_are_captured_before_eplb_maps_them(monkeypatch, kind: str):
    patch_top_k(monkeypatch)
    monkeypatch.setattr(
        base_router,
        "eplb_map_to_physical_and_record",
        lambda topk_ids, **_: topk_ids + 1000,
    )
    capture = make_capture()
    router = make_router(kind, enable_eplb=True)
    router.eplb_state = make_eplb_state()
    assert route(router, capture).tolist() == (make_ids(4) + 1000).tolist()
    assert_recorded(capture, make_ids(4))


@pytest.mark.parametrize("num_choices", [24, 34])
def test_zero_experts_are_captured_before_they_become_expert_zero(
    monkeypatch, num_choices
):
    def top_k(hidden_states, **kwargs):
        assert "topk_ids_out" not in kwargs or kwargs["topk_ids_out"] is None
        return torch.ones(len(hidden_states), TOP_K), make_ids(len(hidden_states))

    monkeypatch.setattr(zero_expert_router, "fused_topk_bias", top_k)
    monkeypatch.setattr(
        zero_expert_router, "zero_experts_compute_triton", lambda **_: None
    )
    router = ZeroExpertRouter(
        TOP_K,
        num_choices,
        EplbLayerState(),
        e_score_correction_bias=torch.zeros(num_choices),
        num_logical_experts=20,
        zero_expert_type="identity",
    )
    bind(Layer(layer_name(1), router=router))
    assert isinstance(router.capture_choices, RoutedExpertsCapture)
    router.capture_choices = capture = make_capture()
    ids = route(router, None)
    # Tokens 2 and 3 chose 20, 21, 30 and 31, which are zero experts.
    assert ids.tolist() == [[0, 1], [10, 11], [0, 0], [0, 0]]
    assert_recorded(capture, make_ids(4))


# Binding.


class Model(torch.nn.Module):
    def __init__(self, *layers: Layer):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


def layer_name(number: int) -> str:
    return f"model.layers.{number}.mlp.experts"


def bind(*layers: Layer, num_layers: int = 4):
    found = find_moe_layers(Model(*layers), num_layers)
    return bind_routed_experts(found, (num_layers, TOP_K), MAX_NUM_TOKENS, CPU), found


def test_each_layer_gets_the_slice_of_its_number():
    layers = [Layer(layer_name(3)), Layer(layer_name(1))]
    staging, bound = bind(*layers)
    assert staging.shape == (4, MAX_NUM_TOKENS, TOP_K)
    assert staging.dtype == torch.int32
    assert [layer.layer_id for layer in bound] == [1, 3]
    for layer in layers:
        layer.router.capture_fn.record(make_ids(2) + 100 * layer.layer_id)
    for number in (1, 3):
        assert staging[number, :2].tolist() == (make_ids(2) + 100 * number).tolist()


def test_dense_layers_are_zero_and_moe_layers_show_that_nothing_was_written():
    staging, _ = bind(Layer(layer_name(1)), Layer(layer_name(3)))
    assert (staging[[0, 2]] == 0).all()
    assert (staging[[1, 3]] == -1).all()


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        ([None, None], torch.int32),
        ([torch.int32, torch.uint32], torch.int32),
        ([torch.int64, torch.int64], torch.int64),
        ([torch.int64, torch.int32], torch.int32),
    ],
)
def test_the_staging_buffer_has_the_type_that_lets_kernels_write_to_it(types, dtype):
    layers = [Layer(layer_name(i), topk_indices_dtype=t) for i, t in enumerate(types)]
    assert bind(*layers)[0].dtype == dtype


BOUND_TWICE = (
    "--enable-return-routed-experts: expected one MoE layer for each number below 4, "
    "found model.layers.2.vision_experts beside model.layers.2.mlp.experts"
)
BEYOND = (
    "--enable-return-routed-experts: expected one MoE layer for each number below 4, "
    "found model.layers.4.mlp.experts"
)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([(layer_name(2), 2), ("model.layers.2.vision_experts", 2)], BOUND_TWICE),
        ([(layer_name(4), 2)], BEYOND),
    ],
    ids=["bound-twice", "beyond-the-model"],
)
def test_a_model_that_layer_numbers_cannot_index_is_refused(layers, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bind(*[Layer(name, top_k) for name, top_k in layers])


def test_modules_that_are_no_moe_layers_are_passed_over():
    model = Model(Layer(layer_name(0)))
    model.lm_head = torch.nn.Linear(2, 2)
    assert len(find_moe_layers(model, 4)) == 1


# Kernels that route inside.


def refusal(kernel: str, way_out: str) -> str:
    return (
        f"--enable-return-routed-experts: the MoE kernel {kernel} of layer "
        "model.layers.1.mlp.experts chooses the experts inside and does not return "
        f"them. Start with {way_out}."
    )


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"is_monolithic": True, "experts_cls": TrtLlmBf16Experts},
            refusal("TrtLlmBf16Experts", "--moe-backend triton"),
        ),
        # Says so once its weights are loaded.
        (
            {"experts_cls": TrtLlmBf16Experts},
            refusal("TrtLlmBf16Experts", "--moe-backend triton"),
        ),
        (
            {"is_monolithic": True},
            refusal("SimpleNamespace", "weights in another format"),
        ),
    ],
)
def test_a_kernel_that_routes_inside_is_refused_with_a_way_out(method, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find_moe_layers(Model(Layer(layer_name(1), **method)), 4)


def test_the_kernel_of_the_cpu_hands_over_its_choice():
    cpu = {"is_monolithic": True, "unquantized_backend": UnquantizedMoeBackend.CPU}
    assert len(find_moe_layers(Model(Layer(layer_name(1), **cpu)), 4)) == 1


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(c) for c in cls.__subclasses__()))


def kernels_that_route_inside() -> list[str]:
    for module in pkgutil.iter_modules(experts.__path__, experts.__name__ + "."):
        with contextlib.suppress(ImportError):  # kernels of another platform
            importlib.import_module(module.name)
    found = subclasses(FusedMoEExpertsMonolithic) - {FusedMoEExpertsMonolithic}
    return sorted(cls.__name__ for cls in found)


BACKENDS = {
    "TrtLlmBf16Experts": (unquantized, unquantized.map_unquantized_backend),
    "TrtLlmFp8ExpertsMonolithic": (fp8, fp8.map_fp8_backend),
    "TrtLlmNvFp4ExpertsMonolithic": (nvfp4, nvfp4.map_nvfp4_backend),
    "TrtLlmMxfp4ExpertsMonolithic": (mxfp4, mxfp4.map_mxfp4_backend),
    "OAITritonMxfp4ExpertsMonolithic": (mxfp4, mxfp4.map_mxfp4_backend),
}
# Have no other kernel on their platform.
NO_WAY_OUT = {"AiterW4A8ExpertsMonolithic", "CPUExpertsFp8"}


def test_every_kernel_of_vllm_that_routes_inside_has_been_judged():
    assert set(kernels_that_route_inside()) == set(BACKENDS) | NO_WAY_OUT


@pytest.mark.parametrize("kernel", BACKENDS)
def test_the_backend_that_a_refusal_names_exists_and_routes_outside(kernel: str):
    oracle, backend_of = BACKENDS[kernel]
    name = routed_experts._WAYS_OUT[kernel].split()[1]
    found = oracle.backend_to_kernel_cls(backend_of(name))
    for cls in found if isinstance(found, list) else [found]:
        assert not cls.is_monolithic(), cls


# What goes over the wire.


def test_a_description_survives_the_way_from_the_worker():
    info = RoutedExpertsInfo(num_layers=4, moe_layers=[1, 3], num_experts=128, top_k=8)
    assert RoutedExpertsInfo.from_dict(info.to_dict()) == info
    assert info.row_shape == (4, 8)
