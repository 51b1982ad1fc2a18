"""Recorded rows go into the routers of Hugging Face models, with the family's own weights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from fake_server import serving

from vllm_r3.checks.connect import connect
from vllm_r3.client import RouteShape
from vllm_r3.errors import R3Error
from vllm_r3.replay.experts_hook import HookedModel
from vllm_r3.replay.replay import ReplayReport, mismatch, sample, score

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'vllm-r3[replay]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'vllm-r3[replay]'"
)
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS, TOP_K = 8, 2
BASE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K, max_position_embeddings=128, pad_token_id=0, bos_token_id=None,
    eos_token_id=1,
)  # fmt: skip
SHARED = dict(n_shared_experts=1, first_k_dense_replace=1)
MLA = dict(
    **SHARED, head_dim=8, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, routed_scaling_factor=2.5, n_group=2, topk_group=1,
)  # fmt: skip
GLM4 = dict(**SHARED, routed_scaling_factor=1.5, n_group=1, topk_group=1)
ALL, LAST = [0, 1, 2], [1, 2]
# family: config, layers that route, score, whether weights are made to sum to one, scale
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int], str, bool, float]] = {
    "qwen3": ("qwen3_moe", dict(norm_topk_prob=True), ALL, "softmax", True, 1.0),
    "qwen3-raw": (
        "qwen3_moe", dict(norm_topk_prob=False, mlp_only_layers=[1]), [0, 2], "softmax", False, 1.0
    ),
    "mixtral": ("mixtral", {}, ALL, "softmax", True, 1.0),
    "olmoe": ("olmoe", {}, ALL, "softmax", False, 1.0),
    "qwen2": ("qwen2_moe", dict(shared_expert_intermediate_size=16), ALL, "softmax", False, 1.0),
    "deepseek2": ("deepseek_v2", dict(MLA, topk_method="greedy"), LAST, "softmax", False, 2.5),
    "deepseek3": ("deepseek_v3", dict(MLA, norm_topk_prob=True), LAST, "sigmoid", True, 2.5),
    "glm4": ("glm4_moe", GLM4, LAST, "sigmoid", True, 1.5),
}  # fmt: skip


def build(family: str, dtype: Any = None) -> Any:
    kind, more, *_ = FAMILIES[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **more})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype or torch.float32
    ).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("gate.weight") or "correction_bias" in name:
            torch.nn.init.normal_(tensor)
    return model


TOKENS = [int(token) for token in np.random.default_rng(0).integers(2, 64, 20)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_a_models_own_rows_changes_nothing(family: str, dtype: str) -> None:
    _, _, layers, score_name, normalise, scale = FAMILIES[family]
    forced = HookedModel(build(family, getattr(torch, dtype)))
    own, free = score(forced, TOKENS, None)
    used, replayed = score(forced, TOKENS, own)
    assert forced.moe_layers == layers
    rule = forced.sites[0].rule
    assert (rule.score, rule.normalise, rule.scale) == (score_name, normalise, scale)
    np.testing.assert_array_equal(used, own)
    np.testing.assert_allclose(replayed, free, atol=2e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_rows_reach_the_experts_and_change_the_result(family: str) -> None:
    forced = HookedModel(build(family))
    own, free = score(forced, TOKENS, None)
    other = (own + 1) % EXPERTS
    used, replayed = score(forced, TOKENS, other)
    np.testing.assert_array_equal(used[:, forced.moe_layers], other[:, forced.moe_layers])
    assert np.abs(replayed - free).max() > 1e-4
    again, after = score(forced, TOKENS, None)
    np.testing.assert_array_equal(after, free)


def test_forced_weights_are_those_of_the_recorded_ids() -> None:
    forced = HookedModel(build("deepseek3"))
    other = (score(forced, TOKENS, None)[0] + 3) % EXPERTS
    seen: dict[str, Any] = {}
    site = forced.sites[0]
    site.experts.register_forward_hook(lambda module, inputs, out: seen.update(inputs=inputs))
    forced.run(TOKENS, other)
    hidden, ids, weights = seen["inputs"][:3]
    scores = torch.sigmoid(hidden.reshape(-1, 32) @ site.gate.weight.T)
    chosen = scores.gather(1, torch.from_numpy(other[:, site.layer]))
    expected = chosen / chosen.sum(dim=-1, keepdim=True) * 2.5
    torch.testing.assert_close(weights, expected)
    assert site.gate.e_score_correction_bias.abs().max() > 0


@pytest.mark.parametrize("family", ["qwen3-raw", "glm4"])
def test_margins_are_between_the_last_chosen_and_the_best_left_out(family: str) -> None:
    hooked = HookedModel(build(family))
    site = hooked.sites[-1]
    seen: dict[str, Any] = {}
    site.experts.register_forward_hook(lambda module, inputs, out: seen.update(hidden=inputs[0]))
    done = hooked.run(TOKENS)
    scores = seen["hidden"].reshape(-1, 32) @ site.gate.weight.T
    if family == "glm4":
        scores = scores.sigmoid() + site.gate.e_score_correction_bias
    ordered = scores.sort(dim=-1, descending=True).values
    expected = (ordered[:, TOP_K - 1] - ordered[:, TOP_K]).detach().numpy()
    np.testing.assert_allclose(done.margins[:, site.layer], expected, rtol=1e-4, atol=1e-6)
    dense = [layer for layer in ALL if layer not in hooked.moe_layers]
    assert np.isinf(done.margins[:, dense]).all() and not done.rows[:, dense].any()


def test_the_order_inside_a_row_does_not_matter() -> None:
    forced = HookedModel(build("mixtral"))
    own, free = score(forced, TOKENS, None)
    _, turned = score(forced, TOKENS, own[..., ::-1])
    np.testing.assert_allclose(turned, free, atol=2e-6)


@pytest.mark.parametrize("rows", [18, 20], ids=["one-short", "one-too-many"])
def test_rows_that_do_not_fit_the_pass_are_refused(rows: int) -> None:
    forced = HookedModel(build("qwen3"))
    expected = f"layer 0: expected rows (19, 2) for this pass, got ({rows}, 2)"
    with pytest.raises(R3Error, match=f"^{re.escape(expected)}$"):
        score(forced, TOKENS, np.zeros((rows, 3, 2), np.int64))


def test_a_family_whose_weights_no_rule_makes_is_refused() -> None:
    model = build("qwen3")
    forced = HookedModel(model)
    own, _ = score(forced, TOKENS, None)
    for site in forced.sites:
        site.gate.register_forward_hook(lambda module, inputs, out: (out[0], out[1] ** 2, out[2]))
    message = (
        r"^layer 0: expected the router's weights from softmax or sigmoid scores, got others "
        r"\(off by .*\): this family cannot be replayed$"
    )
    with pytest.raises(R3Error, match=message):
        score(forced, TOKENS, own)


def test_a_dense_model_is_refused() -> None:
    config = transformers.AutoConfig.for_model("llama", **{**BASE})
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = "LlamaForCausalLM: expected MoE blocks with a gate and experts, found none"
    with pytest.raises(R3Error, match=f"^{expected}$"):
        HookedModel(model)


def test_sampling_takes_tokens_log_probabilities_and_rows() -> None:
    with serving() as url:
        found = sample(connect(url), [5, 9, 2, 7], 6, seed=1, shape=RouteShape())
    tokens, log_probs, rows = found
    assert len(tokens) == 10 and rows.shape == (9, 3, 2)
    assert log_probs.tolist() == [-1.0] * 6


def test_mismatch_is_taken_over_real_positions_alone() -> None:
    found = mismatch(np.array([[0.0, 0.2], [-0.1, np.nan]]))
    kl = np.mean([np.exp(d) - 1 - d for d in (0.0, 0.2, -0.1)])
    assert found.pop("by_position") == [0.05, 0.2]
    expected = {"mean_kl": kl, "max_abs_delta": 0.2, "mean_abs_delta": 0.1}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("free", "replayed", "passes"),
    [(0.1, 0.05, True), (0.1, 0.1, True), (0.1, 0.2, False)]
    + [(1e-6, 2e-6, True), (1e-6, 2e-4, False)],
)
def test_replaying_must_not_raise_the_mismatch_beyond_noise(
    free: float, replayed: float, passes: bool
) -> None:
    sides = (mismatch(np.full((1, 4), delta)) for delta in (free, replayed))
    report = ReplayReport("m", "float32", 1, 0.0, *sides)
    assert report.passed is passes
    assert report.replayed["by_position"] == [replayed] * 4
