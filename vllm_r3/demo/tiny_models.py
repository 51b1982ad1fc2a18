"""Tiny random mixture-of-experts models on disk, for the demo and the tests.

`write_model(kind, directory)` writes config, float32 weights and a tokenizer that vLLM
and transformers both load. The weights are random but scaled like those of a trained
model: router logits are spread, so that the choice of experts depends on token, layer
and context and ties are rare, and greedy text does not collapse into one token.
Every tensor has its own seed made from its name. May import torch and transformers,
lazily. `python -m vllm_r3.demo.tiny_models KIND DIR` writes one.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

from vllm_r3.demo.tokenizer import EOS_ID, VOCAB_SIZE, plain_ids, write_tokenizer
from vllm_r3.errors import R3Error

SEED = 20260521

_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
    eos_token_id=EOS_ID, bos_token_id=None, pad_token_id=EOS_ID,
)  # fmt: skip
_TOP4 = dict(num_experts=16, num_experts_per_tok=4)
# 64: two tensor-parallel ranks of the CPU kernel need 32 each
_QWEN3 = dict(**_TOP4, num_hidden_layers=4, moe_intermediate_size=64, norm_topk_prob=True)
# sliding-window and full-attention layers in turn: two KV-cache groups
_WINDOWS = dict(
    num_hidden_layers=4, sliding_window=32,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=2.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=1024,
)  # fmt: skip

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # every layer is MoE
    "moe": ("qwen3_moe", _QWEN3),
    # dense layers first and between: MoE layers are 1, 2 and 4 of 6
    "dense-between": ("qwen3_moe", _QWEN3 | dict(num_hidden_layers=6, mlp_only_layers=[0, 3, 5])),
    # ids above 255: int16 rows; the first layer is dense
    "wide": (
        "qwen3_moe",
        _QWEN3
        | dict(num_hidden_layers=3, mlp_only_layers=[0], num_experts=320, num_experts_per_tok=8),
    ),
    # first layer dense, sigmoid scores, grouped top-k, correction bias, shared expert
    "glm4": ("glm4_moe", dict(
        num_hidden_layers=4, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=4, topk_group=2, n_shared_experts=1, norm_topk_prob=True,
        routed_scaling_factor=1.5, use_qk_norm=True, partial_rotary_factor=0.5,
        num_nextn_predict_layers=0,
    )),
    "mixtral": ("mixtral", dict(
        num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64,
        sliding_window=512,  # as long as the longest request: it cuts nothing off
    )),
    # weights of the chosen experts are not normalised
    "olmoe": ("olmoe", dict(
        **_TOP4, num_hidden_layers=3, intermediate_size=32, num_attention_heads=2,
        norm_topk_prob=False,
    )),
    # shared expert behind a gate
    "qwen2": ("qwen2_moe", dict(
        **_TOP4, num_hidden_layers=3, moe_intermediate_size=32, shared_expert_intermediate_size=64,
        num_attention_heads=2, norm_topk_prob=False,
    )),
    # sigmoid scores
    "exaone": ("exaone_moe", dict(
        **_TOP4, **_WINDOWS, moe_intermediate_size=32, first_k_dense_replace=1,
        num_shared_experts=1, routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )),
    # attention sinks, which the CPU build has only in bfloat16
    "gpt-oss": ("gpt_oss", dict(
        **_WINDOWS, num_local_experts=16, num_experts_per_tok=4, intermediate_size=64,
        rope_parameters=_YARN,
    )),
    # no experts at all, for what must be refused
    "dense": ("qwen3", dict(num_hidden_layers=2)),
    # a one-layer MoE to draft for "moe": its layer number is 0 too
    "draft": ("qwen3_moe", _QWEN3 | dict(num_hidden_layers=1)),
}  # fmt: skip

# standard deviation of a weight, as a multiple of 1 / sqrt(inputs), by the tensor's name
_GAINS = {
    "lm_head": 3.0, "gate.weight": 2.0, "router.weight": 2.0, "o_proj": 1.5, "down_proj": 3.0,
    "v_proj": 2.0,
}  # fmt: skip


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of the tensor `name`."""
    if "e_score_correction_bias" in name:
        return 0.0, 0.1
    if "norm" in name:
        return (1.6, 0.2) if "q_norm" in name else (1.0, 0.1)
    if len(shape) == 1:
        return 0.0, 0.2
    if "embed_tokens" in name:
        return 0.0, 1.0
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    return 0.0, gain / shape[-1] ** 0.5


def _fill(name: str, tensor: Any, seed: int = SEED) -> None:
    """Overwrite one parameter or buffer in place with its seeded values."""
    import numpy as np
    import torch

    mean, std = _spread(name, tuple(tensor.shape))
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(tuple(tensor.shape)) * std + mean
    if name == "lm_head.weight":
        rare = np.ones(tensor.shape[0], dtype=bool)
        rare[plain_ids()] = False
        values[rare] *= 0.05
    tensor.copy_(torch.from_numpy(values).to(tensor.dtype))


def make_config(kind: str) -> Any:
    """Return the transformers config of a kind. Raises R3Error for an unknown one."""
    from transformers import AutoConfig

    if kind not in KINDS:
        raise R3Error(f"unknown tiny model {kind!r}, expected one of {', '.join(KINDS)}")
    model_type, fields = KINDS[kind]
    return AutoConfig.for_model(model_type, **(_BASE | fields))


def write_model(kind: str, directory: Path, seed: int = SEED) -> Path:
    """Write the tiny model `kind` into `directory` and return it; other weights by another seed."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                _fill(name, tensor, seed)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}) + "\n")
    return directory


if __name__ == "__main__":
    print(write_model(sys.argv[1], Path(sys.argv[2])))
