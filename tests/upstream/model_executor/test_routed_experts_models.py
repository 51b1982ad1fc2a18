# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every model class that has MoE layers returns rows or is refused before its load.

Models are built as a worker builds them, on the meta device: small, without weights,
and for the rest with vLLM's own configuration, layers and checks.
"""

import ast
import json
import re
import sys
import tempfile
from copy import copy
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel

import vllm.model_executor.layers.attention.mla_attention as mla_attention
import vllm.model_executor.layers.fused_moe.layer as fused_moe_layer
import vllm.model_executor.models.registry as registry
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import deepseek_v4, interns1_pro
from vllm.platforms.cpu import CpuPlatform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.v1.worker.workspace import init_workspace_manager

ROPE = {"rope_type": "default", "rope_theta": 1e4}
BASE = dict(
    hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=128,
    max_position_embeddings=512, num_experts=8, num_experts_per_tok=2,
    rms_norm_eps=1e-6, hidden_act="silu", rope_parameters=ROPE, dtype="float32",
    tie_word_embeddings=False,
)  # fmt: skip
LOCAL = dict(num_local_experts=4)
MLA = dict(
    kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
    v_head_dim=16, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
    first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True,
    scoring_func="sigmoid", topk_method="noaux_tc", routed_scaling_factor=1.0,
)  # fmt: skip
BAILING = dict(
    num_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True, use_bias=False,
    use_qkv_bias=False, embedding_dropout=0.0, output_dropout=0.0, n_group=1,
    topk_group=1, rope_theta=1e4,
)  # fmt: skip
MINIMAX = dict(
    LOCAL, attn_type_list=[0, 1, 1], shared_intermediate_size=0, postnorm=True,
    rope_theta=1e4, shared_moe_mode="sigmoid", layernorm_full_attention_alpha=1,
    layernorm_full_attention_beta=1, layernorm_linear_attention_alpha=1,
    layernorm_linear_attention_beta=1, layernorm_mlp_alpha=1, layernorm_mlp_beta=1,
)  # fmt: skip
NEMOTRON = dict(
    hybrid_override_pattern="M*EE", num_hidden_layers=4, n_routed_experts=8,
    layers_block_type=["mamba", "attention", "moe", "moe"], n_shared_experts=1,
    n_group=1, topk_group=1,
    moe_shared_expert_intermediate_size=32, mamba_num_heads=8, mamba_head_dim=16,
    n_groups=2, ssm_state_size=8, mlp_hidden_act="relu2", mlp_bias=False,
    attention_bias=False, use_bias=False, use_conv_bias=True, mamba_hidden_act="silu",
    mamba_proj_bias=False, conv_kernel=4, layer_norm_epsilon=1e-6,
    residual_in_fp32=False, norm_topk_prob=True, routed_scaling_factor=1.0,
    moe_latent_size=None, chunk_size=64, sliding_window=None,
)  # fmt: skip
INDEX = dict(index_topk=16, index_n_heads=2, index_head_dim=16)
WITHOUT_ATTENTION = dict(
    hybrid_override_pattern="MMEE", layers_block_type=["mamba", "mamba", "moe", "moe"]
)
V4 = dict(
    MLA, **INDEX, hc_eps=1e-6, hc_mult=2, hc_sinkhorn_iters=2,
    compress_ratios=[0, 4, 128],
    sliding_window=128, num_hash_layers=1, expert_dtype="bf16", o_groups=2,
    o_lora_rank=16, swiglu_limit=7.0,
    compress_rope_theta=1e4, rope_theta=1e4, rope_scaling=None,
    rope_parameters=ROPE | {"factor": 1.0},
)  # fmt: skip
VISION = dict(
    embed_dim=32, hidden_size=32, out_hidden_size=64, depth=1, num_heads=2,
    patch_size=14, spatial_merge_size=2, temporal_patch_size=2, in_channels=3,
    mlp_ratio=2, intermediate_size=32, num_position_embeddings=16,
    deepstack_visual_indexes=[],
)  # fmt: skip
FOPE = ROPE | {"fope_init_factor": 0.1, "fope_sep_head": True, "num_inv_freq": 8}
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=2.0, beta_fast=32.0, beta_slow=1.0,
    original_max_position_embeddings=256,
)  # fmt: skip


def layers(*types: str) -> dict[str, Any]:
    return {"layer_types": list(types), "sliding_window": 16}


LAST_IS_FULL = layers("sliding_attention", "full_attention", "full_attention")
LINEAR = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}

NO_MOE_LAYER = "the model has no MoE layer that routes through vLLM's FusedMoE"
TWO_LAYERS = (
    "expected one MoE layer for each number below 3, found "
    "language_model.model.layers.1.mlp.vision_experts beside "
    "language_model.model.layers.1.mlp.text_experts"
)
TWO_TOP_KS = "expected one top_k for all MoE layers, found [1, 2]"

# Architecture, model type, the config's fields, and the layers of which it returns
# rows or what it is refused with.
MODELS: list[tuple[str, str, dict[str, Any], list[int] | str]] = [
    ("AXK1ForCausalLM", "AXK1", MLA, [1, 2]),
    ("AfmoeForCausalLM", "afmoe", LAST_IS_FULL | dict(num_dense_layers=1,
     num_shared_experts=1), [1, 2]),
    ("ArcticForCausalLM", "arctic", LOCAL | dict(moe_layer_frequency=2,
     use_residual=True, parallel_attn_mlp_res=True), NO_MOE_LAYER),
    ("AriaForConditionalGeneration", "aria", dict(text_config=dict(BASE,
     model_type="aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)),
     [0, 1, 2]),
    ("BailingMoeForCausalLM", "bailing_moe", BAILING, [1, 2]),
    ("BailingMoeV2ForCausalLM", "bailing_moe", BAILING, [1, 2]),
    ("BailingMoeV2_5ForCausalLM", "bailing_moe_linear", MLA | dict(num_shared_experts=1,
     layer_group_size=3, group_norm_size=1, use_qkv_bias=False, use_bias=False), [1,
     2]),
    ("Cohere2MoeForCausalLM", "cohere2_moe", LAST_IS_FULL | dict(num_shared_experts=1,
     shared_expert_combination_strategy="sum", tie_word_embeddings=True), [0, 1, 2]),
    ("DbrxForCausalLM", "dbrx", dict(d_model=64, n_heads=4, n_layers=3, max_seq_len=512,
     attn_config=dict(kv_n_heads=4, clip_qkv=8.0, rope_theta=1e4),
     ffn_config=dict(moe_num_experts=4, moe_top_k=2, ffn_hidden_size=64)), [0, 1, 2]),
    ("DeepseekForCausalLM", "deepseek", dict(n_routed_experts=8, n_shared_experts=1,
     first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True,
     scoring_func="softmax"), [1, 2]),
    ("DeepseekV2ForCausalLM", "deepseek_v2", MLA, [1, 2]),
    ("DeepseekV32ForCausalLM", "deepseek_v32", MLA | INDEX, [1, 2]),
    ("DeepseekV3ForCausalLM", "deepseek_v3", MLA, [1, 2]),
    ("DeepseekV4ForCausalLM", "deepseek_v4", V4, [0, 1, 2]),
    ("Dots1ForCausalLM", "dots1", MLA, [1, 2]),
    ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", dict(moe_num_experts=8, moe_k=2,
     moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_interval=1,
     moe_layer_end_index=2), [1, 2]),
    ("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe",
     dict(vision_config=VISION, pixel_hidden_size=32, spatial_conv_size=2,
     temporal_conv_size=2, use_temporal_conv=False, im_patch_id=5, moe_num_experts=[4,
     4], moe_k=2, moe_intermediate_size=[32, 16], moe_num_shared_experts=1,
     moe_layer_start_index=[1, 1], moe_layer_end_index=[2, 2], moe_layer_interval=1,
     text_config=dict(BASE, model_type="ernie4_5_vl_moe_text", moe_num_experts=4,
     moe_k=2, moe_intermediate_size=[32, 16], moe_num_shared_experts=1)), TWO_LAYERS),
    ("ExaoneMoEForCausalLM", "exaone_moe", LAST_IS_FULL | dict(num_shared_experts=1,
     first_k_dense_replace=1, is_moe_layer=[False, True, True]), [1, 2]),
    ("FlexOlmoForCausalLM", "flex_olmo", {}, [0, 1, 2]),
    ("Gemma4ForCausalLM", "gemma4_text", LAST_IS_FULL | dict(enable_moe_block=True,
     top_k_experts=2, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
     expert_intermediate_size=32), [0, 1, 2]),
    ("Glm4MoeForCausalLM", "glm4_moe", dict(n_routed_experts=8, n_shared_experts=1,
     n_group=1, topk_group=1, first_k_dense_replace=1), [1, 2]),
    ("GlmMoeDsaForCausalLM", "glm_moe_dsa", MLA, [1, 2]),
    ("GptOssForCausalLM", "gpt_oss", LAST_IS_FULL | dict(num_local_experts=8,
     rope_parameters=YARN), [0, 1, 2]),
    ("GraniteMoeForCausalLM", "granitemoe", LOCAL, [0, 1, 2]),
    ("Grok1ForCausalLM", "grok-1", {}, [0, 1, 2]),
    ("Grok1ModelForCausalLM", "grok-1", {}, [0, 1, 2]),
    ("HYV3ForCausalLM", "hy_v3", dict(num_shared_experts=1, first_k_dense_replace=1),
     [1, 2]),
    ("HfMoondream", "moondream3", {}, NO_MOE_LAYER),
    ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", dict(num_experts_per_tok=[2, 2, 2],
     num_shared_expert=[1, 1, 1], moe_intermediate_size=[32] * 3,
     use_mixed_mlp_moe=True), [0, 1, 2]),
    ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", dict(num_experts_per_tok=[2, 1, 2],
     num_shared_expert=[1, 1, 1], moe_intermediate_size=[32] * 3,
     use_mixed_mlp_moe=True), TWO_TOP_KS),
    ("InternS1ProForConditionalGeneration", "interns1_pro", dict(vision_config=VISION |
     dict(hidden_act="silu"), text_config=dict(BASE, decoder_sparse_step=1,
     norm_topk_prob=True, rope_scaling=FOPE)), [0, 1, 2]),
    ("JambaForCausalLM", "jamba", dict(num_experts=4, attn_layer_period=3,
     attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
     mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8), [1]),
    ("KimiLinearForCausalLM", "kimi_linear", MLA | dict(q_lora_rank=None,
     num_experts_per_token=2, num_shared_experts=1, mla_use_nope=True,
     linear_attn_config=dict(kda_layers=[1, 2], full_attn_layers=[3], num_heads=4,
     head_dim=16, short_conv_kernel_size=4)), [1, 2]),
    ("LagunaForCausalLM", "laguna", {}, [1, 2]),
    ("Lfm2MoeForCausalLM", "lfm2_moe", dict(num_dense_layers=1, conv_L_cache=3,
     layer_types=["conv", "full_attention", "full_attention"]), [1, 2]),
    ("Llama4ForCausalLM", "llama4_text", LOCAL | dict(num_hidden_layers=4,
     interleave_moe_layer_step=1, num_experts_per_tok=1, intermediate_size_mlp=64), [0,
     1, 2, 3]),
    ("LongcatFlashForCausalLM", "longcat_flash", MLA | dict(num_layers=3,
     ffn_hidden_size=64, expert_ffn_hidden_size=32, moe_topk=2, zero_expert_num=2,
     zero_expert_type="identity"), [0, 1, 2]),
    ("MiMoV2FlashForCausalLM", "mimo_v2_flash", MLA | dict(moe_layer_freq=[0, 1, 1],
     hybrid_layer_pattern=[0, 1, 0], sliding_window_size=16, swa_num_attention_heads=4,
     swa_num_key_value_heads=4, swa_head_dim=16, swa_v_head_dim=16, swa_rope_theta=1e4,
     rope_theta=1e4, layernorm_epsilon=1e-6, attention_bias=False,
     n_shared_experts=None), [1, 2]),
    ("MiniCPMForCausalLM", "minicpm", dict(num_experts=4, dim_model_base=64,
     scale_emb=1, scale_depth=1.0), NO_MOE_LAYER),
    ("MiniMaxForCausalLM", "minimax", LOCAL | LINEAR, [0, 1, 2]),
    ("MiniMaxM1ForCausalLM", "minimax_m1", MINIMAX, [0, 1, 2]),
    ("MiniMaxM2ForCausalLM", "minimax_m2", dict(num_local_experts=8, rotary_dim=8,
     use_routing_bias=True, use_qk_norm=True, scoring_func="sigmoid"), [0, 1, 2]),
    ("MiniMaxText01ForCausalLM", "minimax_text_01", MINIMAX, [0, 1, 2]),
    ("MixtralForCausalLM", "mixtral", LOCAL, [0, 1, 2]),
    ("Moondream3ForCausalLM", "moondream3", {}, NO_MOE_LAYER),
    ("NemotronHForCausalLM", "nemotron_h", NEMOTRON, [2, 3]),
    ("NemotronHPuzzleForCausalLM", "nemotron_h_puzzle", NEMOTRON | dict(top_ks=[0, 0, 2,
     1]), TWO_TOP_KS),
    ("OlmoeForCausalLM", "olmoe", {}, [0, 1, 2]),
    ("PanguProMoEV2ForCausalLM", "pangu_pro_moe", MLA | dict(num_routed_experts=8), [1,
     2]),
    ("PanguUltraMoEForCausalLM", "pangu_ultra_moe", MLA | dict(num_routed_experts=8,
     num_shared_experts=1, num_dense_layers=1), [1, 2]),
    ("Param2MoEForCausalLM", "param2moe", BAILING, [1, 2]),
    ("PhiMoEForCausalLM", "phimoe", LOCAL, [0, 1, 2]),
    ("Qwen2MoeForCausalLM", "qwen2_moe", dict(shared_expert_intermediate_size=32,
     decoder_sparse_step=1), [0, 1, 2]),
    ("Qwen3MoeForCausalLM", "qwen3_moe", dict(decoder_sparse_step=2), [1]),
    ("Qwen3NextForCausalLM", "qwen3_next", LINEAR | dict(linear_num_value_heads=4,
     linear_num_key_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
     shared_expert_intermediate_size=32, decoder_sparse_step=1), [0, 1, 2]),
    ("SarvamMLAForCausalLM", "sarvam_mla", MLA | dict(num_shared_experts=1), [1, 2]),
    ("SarvamMoEForCausalLM", "sarvam_moe", BAILING, [1, 2]),
    ("Step3TextForCausalLM", "step3_text", dict(moe_num_experts=8, moe_top_k=2,
     share_expert_dim=32, share_q_dim=64, moe_layers_enum="1,2",
     norm_expert_weight=True), [1, 2]),
    ("Step3p5ForCausalLM", "step3p5", dict(num_attention_groups=4, moe_num_experts=8,
     moe_top_k=2, share_expert_dim=32, moe_layers_enum="1,2"), [1, 2]),
]  # fmt: skip
# Served as another architecture of the same class, dense, or pooled.
LEFT_OUT = {
    "HunYuanDenseV1ForCausalLM", "JambaForSequenceClassification", "MiMoV2ForCausalLM",
    "PanguEmbeddedForCausalLM",
}  # fmt: skip


@cache
def builds_moe_layers(module: str) -> bool:
    """Return whether a module of models calls or extends a MoE layer or kernel."""
    path = Path(registry.__file__).with_name(f"{module}.py")
    source = path.read_text() if path.exists() else ""
    named = {"FusedMoE", "fused_experts"}
    if not any(name in source for name in named):
        return False
    used: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            used.append(node.func)
        elif isinstance(node, ast.ClassDef):
            used += node.bases
    return any(isinstance(node, ast.Name) and node.id in named for node in used)


def test_every_architecture_whose_module_builds_moe_layers_is_in_the_table():
    found = {
        architecture
        for architecture, (module, _) in registry._VLLM_MODELS.items()
        if builds_moe_layers(module)
    }
    # Its MoE layers are in the module of its language model.
    found.add("Ernie4_5_VLMoeForConditionalGeneration")
    assert found == {architecture for architecture, *_ in MODELS} | LEFT_OUT


class SomeConfig(PretrainedConfig):
    """Of a model whose config class comes with its weights."""

    def __post_init__(self, **fields: Any) -> None:
        for name in {"text_config", "vision_config"} & fields.keys():
            fields[name] = PretrainedConfig(**fields[name])
        super().__post_init__(**fields)

    def get_nemotron_h_config_for_layer(self, number: int) -> "SomeConfig":
        config = copy(self)
        config.num_experts_per_tok = self.top_ks[number]
        return config


class CpuThatBuildsEverything:
    """The platform, for what its layers ask when they are built."""

    def __getattr__(self, name: str) -> Any:
        return getattr(CpuPlatform, name)

    def is_cuda_alike(self) -> bool:
        return True  # has MoE without a gate


def get_attn_backend_cls(cls: type, selected_backend, attn_selector_config, **_) -> str:
    backends = "vllm.v1.attention.backends"
    if attn_selector_config.use_sparse:
        return f"{backends}.mla.flashmla_sparse.FlashMLASparseBackend"
    if attn_selector_config.use_mla:
        return f"{backends}.mla.triton_mla.TritonMLABackend"
    return f"{backends}.cpu_attn.CPUAttentionBackend"


def some_attention(vllm_config, prefix: str, **_) -> Attention:
    """Stand in for attention that is built on a GPU only."""
    return Attention(2, 16, 1.0, prefix=prefix)


@pytest.fixture(scope="module")
def build():
    """Build a model of this config and return it; nothing of it has memory."""
    patch = pytest.MonkeyPatch()
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    patch.setattr(
        CpuPlatform, "get_attn_backend_cls", classmethod(get_attn_backend_cls)
    )
    patch.setattr(CpuPlatform, "num_compute_units", lambda device_id=0: 1)
    patch.setattr(fused_moe_layer, "current_platform", CpuThatBuildsEverything())
    patch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: lambda **_: None)
    patch.setattr(interns1_pro, "get_rope", lambda *_, **__: torch.nn.Identity())
    patch.setattr(deepseek_v4, "DeepseekV4Attention", some_attention)
    patch.setitem(sys.modules, "vllm.model_executor.layers.mhc", ModuleType("mhc"))
    patch.setattr(torch.cuda, "Stream", type("NoStream", (), {}))
    init_workspace_manager(torch.device("cpu"))

    def build(
        hf_config: dict[str, Any], is_draft: bool = False, **options: Any
    ) -> torch.nn.Module:
        model_type = hf_config["model_type"]
        if model_type not in CONFIG_MAPPING and model_type not in _CONFIG_REGISTRY:
            config_class = type("Config", (SomeConfig,), {"model_type": model_type})
            AutoConfig.register(model_type, config_class)
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "config.json").write_text(json.dumps(hf_config))
            vllm_config = EngineArgs(
                model,
                dtype="float32",
                skip_tokenizer_init=True,
                enable_return_routed_experts=True,
                **options,
            ).create_engine_config()
            with set_current_vllm_config(vllm_config):
                if not torch.distributed.is_initialized():
                    store = f"file://{model}/store"
                    init_distributed_environment(1, 0, store, 0, "gloo")
                    initialize_model_parallel(1, 1)
                model_config = copy(vllm_config.model_config)
                model_config.enable_return_routed_experts = not is_draft
                with torch.device("meta"):
                    return initialize_model(
                        vllm_config=vllm_config, model_config=model_config
                    )

    yield build
    cleanup_dist_env_and_memory()
    patch.undo()


def moe_layers(model: torch.nn.Module) -> list[int]:
    return [m.layer_id for m in model.modules() if isinstance(m, FusedMoE)]


def refused(message: str) -> str:
    return f"^{re.escape('--enable-return-routed-experts: ' + message)}$"


@pytest.mark.parametrize(
    ("architecture", "model_type", "fields", "outcome"),
    MODELS,
    ids=[architecture for architecture, *_ in MODELS],
)
def test_a_model_returns_rows_or_is_refused_before_its_weights_load(
    build, architecture: str, model_type: str, fields: dict[str, Any], outcome
):
    hf_config = BASE | fields | {"architectures": [architecture]}
    hf_config["model_type"] = model_type
    if isinstance(outcome, list):
        assert moe_layers(build(hf_config)) == outcome
        return
    with pytest.raises(ValueError, match=refused(outcome)):
        build(hf_config)


def test_moe_layers_of_transformers_models_return_rows(build, monkeypatch):
    # vLLM puts a class of its own in the place of this one, for good
    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeModel", Qwen3MoeModel)
    hf_config = BASE | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
    }
    assert moe_layers(build(hf_config, model_impl="transformers")) == [0, 1, 2]


MIXTRAL = (
    BASE | LOCAL | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
)


@pytest.mark.parametrize(
    ("window", "options"),
    [(16, {"disable_sliding_window": True}), (16, {"max_model_len": 16}), (512, {})],
)
def test_a_window_that_no_request_outgrows_is_accepted(build, window: int, options):
    assert moe_layers(build(MIXTRAL | {"sliding_window": window}, **options)) == [
        0,
        1,
        2,
    ]


def test_a_window_in_every_layer_is_refused_with_a_way_out(build):
    message = (
        "expected a layer of full attention, found SlidingWindowSpec with a window of "
        "16 tokens for requests of 512. Start with --disable-sliding-window or "
        "--max-model-len 16."
    )
    with pytest.raises(ValueError, match=refused(message)):
        build(MIXTRAL | {"sliding_window": 16})


@pytest.mark.parametrize(
    ("architecture", "change", "found"),
    [
        ("Llama4ForCausalLM", {"num_hidden_layers": 3}, "ChunkedLocalAttentionSpec"),
        ("NemotronHForCausalLM", WITHOUT_ATTENTION, "MambaSpec"),
    ],
)
def test_a_model_without_full_attention_is_refused(build, architecture, change, found):
    (model_type, fields), *_ = [m[1:3] for m in MODELS if m[0] == architecture]
    hf_config = BASE | fields | change | {"architectures": [architecture]}
    message = f"expected a layer of full attention, found {found}"
    with pytest.raises(ValueError, match=refused(message)):
        build(hf_config | {"model_type": model_type})


def test_a_draft_is_not_judged(build):
    """It may route in any way and have any layer number: it is never captured."""
    (fields,) = [fields for name, _, fields, _ in MODELS if name == "ArcticForCausalLM"]
    hf_config = BASE | fields | {"architectures": ["ArcticForCausalLM"]}
    assert moe_layers(build(hf_config | {"model_type": "arctic"}, is_draft=True)) == []


def test_deepseek_v4_whose_kernel_routes_by_itself_is_refused(build):
    fields = V4 | {"expert_dtype": "fp4", "scoring_func": "sqrtsoftplus"}
    hf_config = BASE | fields | {"architectures": ["DeepseekV4ForCausalLM"]}
    options = {"moe_backend": "deep_gemm_mega_moe", "enable_expert_parallel": True}
    with pytest.raises(ValueError, match=refused(NO_MOE_LAYER)):
        build(hf_config | {"model_type": "deepseek_v4"}, **options)
