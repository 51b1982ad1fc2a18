"""The tiny models are worth testing with, and the oracle reads what their routers chose."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from engines import seeded_prompts

from vllm_r3.demo.tiny_models import KINDS, write_model

MOE_KINDS = [kind for kind in KINDS if kind not in ("dense", "draft", "gpt-oss")]
MOE_KINDS += ["drafted-moe", "drafted-glm4"]


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_choices_vary_with_token_layer_and_context(oracles, kind):
    oracle = oracles(kind)
    (tokens,) = seeded_prompts(5, [120])
    rows = np.sort(oracle.truth(tokens).rows[:, oracle.moe_layers], axis=-1)
    assert (rows[1:] != rows[:-1]).any(axis=-1).mean() > 0.8
    assert (rows[:, 1:] != rows[:, :-1]).any(axis=-1).mean() > 0.8
    one, two, tail = seeded_prompts(9, [20, 20, 20])
    last = [oracle.truth(head + tail).rows[20:, oracle.moe_layers[-1]] for head in (one, two)]
    assert (np.sort(last[0], -1) != np.sort(last[1], -1)).any(axis=-1).mean() > 0.2


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_every_layer_uses_most_of_its_experts(oracles, kind):
    oracle = oracles(kind)
    rows = oracle.truth(seeded_prompts(6, [300])[0]).rows
    used = [len(np.unique(rows[:, layer])) for layer in oracle.moe_layers]
    assert min(used) >= (200 if kind == "wide" else rows[:, oracle.moe_layers].max() * 0.8)


def test_layers_without_a_router_are_the_dense_ones(oracles):
    assert oracles("moe").moe_layers == [0, 1, 2, 3]
    assert oracles("dense-between").moe_layers == [1, 2, 4]
    assert oracles("glm4").moe_layers == [1, 2, 3]
    dense = [0, 3, 5]
    assert not oracles("dense-between").truth([1, 2, 3, 4]).rows[:, dense].any()


def test_oracles_ids_are_the_top_of_the_routers_own_logits(oracles):
    import torch

    oracle = oracles("moe")
    (tokens,) = seeded_prompts(7, [50])
    with torch.no_grad():
        logits = oracle.model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    best = np.stack([np.argsort(-layer.numpy(), axis=-1)[:, :4] for layer in logits], axis=1)
    assert np.array_equal(np.sort(best, axis=-1), np.sort(oracle.truth(tokens).rows, axis=-1))


def test_truth_of_a_prefix_is_the_prefix_of_the_truth(oracles):
    (tokens,) = seeded_prompts(8, [60])
    whole, part = oracles("moe").truth(tokens), oracles("moe").truth(tokens[:30])
    assert whole.rows.shape == (59, 4, 4)
    assert np.array_equal(np.sort(whole.rows[:29], -1), np.sort(part.rows, -1))


def test_same_kind_is_the_same_bytes_each_time(models, tmp_path):
    first, second = models("moe"), write_model("moe", tmp_path / "again")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        one, two = (hashlib.sha256((d / name).read_bytes()).digest() for d in (first, second))
        assert one == two, name


def test_every_id_has_a_text_and_the_chat_template_works(models):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models("moe"))
    assert len(tokenizer) == 512
    assert tokenizer.eos_token_id == 509
    assert all(tokenizer.convert_ids_to_tokens(i) for i in range(512))
    assert (
        tokenizer.decode(tokenizer("Größe: 5 µm, the end")["input_ids"]) == "Größe: 5 µm, the end"
    )
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
