"""The models of `tests.gpu.lifecycle`: targets that are partly easy to draft for, and their drafts.

A target's embeddings are louder than what its layers add, so that its greedy next token often,
but not always, follows from the current token alone; routing still depends on the context. A
draft that knows the embeddings then has tokens accepted and tokens rejected. May import torch,
transformers and safetensors, lazily.

H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_r3.demo import tiny_models as tiny

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 8, 4, 64
_SHAPE: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    norm_topk_prob=True,
)
LOUDNESS = 12.0  # of the embeddings
NUM_EXPERTS = 32
MTP_LAYER = 4
OTHER_SEED = 20270101


def write_all(directory: Path) -> None:
    """Write every model: `moe`, `other` (its shape, other weights), `glm`, three drafts."""
    qwen3 = _SHAPE | dict(num_hidden_layers=5, mlp_only_layers=[2], num_experts=NUM_EXPERTS)
    glm4 = _SHAPE | dict(
        # the last one becomes the MTP layer
        num_hidden_layers=MTP_LAYER + 1,
        n_routed_experts=NUM_EXPERTS,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=0,
    )
    tiny.KINDS["lives-qwen3"] = ("qwen3_moe", qwen3)
    tiny.KINDS["lives-glm4"] = ("glm4_moe", glm4)
    # a one-layer MoE whose layer number is 0 too, the weights those of `moe`
    tiny.KINDS["lives-draft"] = ("qwen3_moe", qwen3 | dict(num_hidden_layers=1, mlp_only_layers=[]))
    for name, kind in (("moe", "qwen3"), ("glm", "glm4"), ("draft", "draft")):
        _write_target(f"lives-{kind}", directory / name)
    _write_target("lives-qwen3", directory / "other", seed=OTHER_SEED)
    _add_mtp_layer(directory / "glm")
    final_norm = _load(directory / "moe")["model.norm.weight"]
    _write_draft(directory / "eagle", _eagle_weights(final_norm))
    # the three layers whose outputs fc takes; vLLM's default needs more layers than five
    aux_layers = dict(eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    _write_draft(directory / "eagle3", _eagle3_weights(final_norm), **aux_layers)


def _load(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _save(directory: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_target(kind: str, directory: Path, seed: int = tiny.SEED) -> None:
    tiny.write_model(kind, directory, seed)
    tensors = _load(directory)
    tensors["model.embed_tokens.weight"] *= LOUDNESS
    _save(directory, tensors)


def _random(name: str, *shape: int, std: float) -> Any:
    """Seeded by the name, as everything that `tiny` writes."""
    import torch

    tensor = torch.empty(shape)
    tiny._fill(name, tensor)
    return tensor * (std / float(tensor.std()))


def _add_mtp_layer(directory: Path) -> None:
    """Turn the last layer into an MTP layer that sees little but the next token's embedding."""
    import torch

    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= dict(num_hidden_layers=MTP_LAYER, num_nextn_predict_layers=1)
    for per_layer in ("layer_types", "mlp_layer_types"):
        if per_layer in config:
            config[per_layer] = config[per_layer][:MTP_LAYER]
    path.write_text(json.dumps(config, indent=1) + "\n")
    tensors, prefix = _load(directory), f"model.layers.{MTP_LAYER}."
    mix = _random("mtp.eh_proj", HIDDEN, HIDDEN, std=0.05)
    tensors[prefix + "eh_proj.weight"] = torch.cat([torch.eye(HIDDEN) * LOUDNESS, mix], 1)
    tensors[prefix + "enorm.weight"] = torch.ones(HIDDEN)
    tensors[prefix + "hnorm.weight"] = torch.ones(HIDDEN)
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    _save(directory, tensors)


def _layer_weights(prefix: str, qkv_input: int) -> dict[str, Any]:
    """A Llama layer that adds little."""
    import torch

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, qkv_input),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, qkv_input),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, qkv_input),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (HIDDEN, HIDDEN),
        "mlp.up_proj": (HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, HIDDEN),
    }
    tensors = {
        f"{prefix}{name}.weight": _random(f"draft.{name}", *shape, std=0.1 * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return tensors


def _eagle_weights(final_norm: Any) -> dict[str, Any]:
    """EAGLE: fc takes [embedding, hidden]; what comes out meets the target's lm_head."""
    import torch

    mix = _random("eagle.fc", HIDDEN, HIDDEN, std=0.02)
    fc = torch.cat([torch.diag(final_norm), mix], 1)
    return {"fc.weight": fc} | _layer_weights("layers.0.", HIDDEN)


def _eagle3_weights(final_norm: Any) -> dict[str, Any]:
    """EAGLE3: only attention sees the embedding, so each token attends to itself and copies it.

    The input of q, k and v is [embedding, hidden], both normalised.
    """
    import torch

    tensors = _layer_weights("midlayer.", 2 * HIDDEN)
    nothing = torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN)
    key = 2 * _random("eagle3.key", KV_HEADS * HEAD_DIM, HIDDEN, std=HIDDEN**-0.5)
    per_head = key.view(KV_HEADS, HEAD_DIM, HIDDEN)
    query = per_head.repeat_interleave(HEADS // KV_HEADS, 0).reshape(-1, HIDDEN)
    out = torch.eye(HIDDEN).view(HIDDEN, KV_HEADS, 1, HEAD_DIM) / (HEADS // KV_HEADS)
    out = out.expand(HIDDEN, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM).reshape(HIDDEN, -1)
    tensors["midlayer.self_attn.q_proj.weight"] = torch.cat([query, torch.zeros_like(query)], 1)
    tensors["midlayer.self_attn.k_proj.weight"] = torch.cat([key, nothing], 1)
    tensors["midlayer.self_attn.v_proj.weight"] = torch.cat([torch.eye(HIDDEN), nothing], 1)
    tensors["midlayer.self_attn.o_proj.weight"] = out
    tensors["midlayer.input_layernorm.weight"] = torch.ones(HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    tensors["fc.weight"] = _random("eagle3.fc", HIDDEN, 3 * HIDDEN, std=0.001)
    tensors["norm.weight"] = final_norm.clone()
    return tensors


def _write_draft(directory: Path, tensors: dict[str, Any], **fields: Any) -> None:
    """A one-layer Llama that shares the target's embeddings and lm_head."""
    from transformers import LlamaConfig

    directory.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
        **fields,
    ).save_pretrained(directory)
    _save(directory, tensors)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
