"""Check what the engine answers against the oracle, for the tests and by hand.

    python tests/oracle_checks.py MODEL_DIR     a few prompts through an in-process engine

S = P + G tokens, L layers, K chosen experts, E experts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from vllm_r3.checks.rows import Compared, compare_rows
from vllm_r3.replay.experts_hook import Pass
from vllm_r3.replay.oracle import Oracle

# float32 log-probabilities of the engine and of transformers agree to about 1e-5
LOGPROB_TOLERANCE = 2e-4


def check_greedy(truth: Pass, tokens: list[int], prompt_len: int, where: str) -> None:
    """Generated tokens are the oracle's own choice, teacher-forced; else rows prove little."""
    for i in range(prompt_len, len(tokens)):
        logits = truth.logits[i - 1]
        behind = float(logits.max() - logits[tokens[i]])
        assert behind < LOGPROB_TOLERANCE, (
            f"{where}: token {i} is {tokens[i]}, {behind:.2e} behind {logits.argmax()}"
        )


def check_completion(
    oracle: Oracle,
    prompt: list[int],
    output: Any,
    prompt_rows: np.ndarray | None,
    start: int = 0,
    greedy: bool = True,
    where: str = "request",
) -> Compared:
    """Compare one offline completion's rows with the oracle.

    Without `prompt_rows` the completion must hold all of them, as in layout full.
    """
    generated = list(output.token_ids)
    tokens = [*prompt, *generated]
    truth = oracle.truth(tokens)
    if greedy:
        check_greedy(truth, tokens, len(prompt), where)
    rows = output.routed_experts
    assert rows is not None, f"{where}: no routed_experts"
    if prompt_rows is None:
        prompt_rows, rows = np.split(rows, [len(prompt) - start])
    return check_rows(oracle, truth, len(prompt), prompt_rows, rows, start, where)


def check_rows(
    oracle: Oracle,
    truth: Pass,
    prompt_len: int,
    prompt_rows: np.ndarray,
    rows: np.ndarray,
    start: int = 0,
    where: str = "request",
) -> Compared:
    """Compare split rows with the truth about the whole sequence."""
    done = [
        compare_rows(part, truth.rows[a:b], oracle.shape, f"{where} {name}", truth.margins[a:b])
        for name, part, a, b in (
            ("prompt", prompt_rows, start, prompt_len),
            ("generated", rows, prompt_len, len(truth.rows)),
        )
    ]
    return Compared(sum(d.rows for d in done), sum(d.cells for d in done))


def prompts_for(rng: np.random.Generator, lengths: list[int], top: int = 509) -> list[list[int]]:
    """Random prompts of the given lengths, without special tokens."""
    return [rng.integers(0, top, n).tolist() for n in lengths]


def probe(model_dir: str, **engine: Any) -> None:
    """Run a few prompts twice and report what agrees; for debugging."""
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    flag = not os.environ.get("NO_FLAG")
    llm = LLM(
        model_dir,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=16,
        seed=0,
        enable_return_routed_experts=flag,
        **engine,
    )
    oracle = Oracle(model_dir)
    base = prompts_for(np.random.default_rng(1), [5, 15, 16, 17, 31, 32, 33, 100])
    shared = [base[7][:50] + p for p in prompts_for(np.random.default_rng(2), [10, 40])]
    for name, prompts in (("cold", base), ("again", base), ("shared", shared)):
        outs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            SamplingParams(temperature=0, max_tokens=24, logprobs=1),
        )
        for p, out in zip(prompts, outs, strict=True):
            where = f"{name} P={len(p)} cached={out.num_cached_tokens}"
            try:
                if not flag:
                    tokens = [*p, *out.outputs[0].token_ids]
                    check_greedy(oracle.truth(tokens), tokens, len(p), where)
                    print("tokens agree", where)
                    continue
                done = check_completion(
                    oracle,
                    p,
                    out.outputs[0],
                    getattr(out, "prompt_routed_experts", None),
                    where=where,
                )
                print("ok   ", where, done)
            except Exception as error:
                print("WRONG", type(error).__name__, error)


if __name__ == "__main__":
    probe(sys.argv[1], **dict(pair.split("=", 1) for pair in sys.argv[2:]))
