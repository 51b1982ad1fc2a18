"""Check what the engine answers against the oracle.

S = P + G tokens, L layers, K chosen experts, E experts.
"""

from __future__ import annotations

from typing import Any

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
