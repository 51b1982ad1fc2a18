"""What the GPU comparisons hold against rows: a float32 forward pass, and another run.

Every judgement also judges the rows after spoiling them (zeros, shifted by a token, one row
repeated, layers exchanged) and reports how much of each spoiled array is found to be wrong, so
that a comparison which nothing can fail shows itself.

S tokens of a sequence, L decoder layers, K chosen experts, E experts, P prompt tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.checks.rows import differing_cells, repeating_cells


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may differ from the truth.

    Attributes:
        margin: how close a choice must have been, where a sequence first differs.
        share: of all cells.
        behind: how far a greedy token's logit may be behind the best one.
    """

    margin: float
    share: float
    behind: float


LIMITS = {
    # the GPU's and the CPU's order of additions differ
    "float32": Limits(margin=2e-4, share=0.03, behind=0.01),
    # 0.170 to 0.176 and 0.71 were measured with another model (tests/bench/rows_h200.json)
    "bfloat16": Limits(margin=1.5, share=0.35, behind=2.0),
}
NO_LIMITS = Limits(margin=np.inf, share=1.0, behind=np.inf)
SPOILED_SHARE = 0.5  # a spoiled array must differ in more cells than this


@dataclasses.dataclass
class Answer:
    """One answer: all its tokens, its rows (S - 1, L, K), and P."""

    tokens: np.ndarray
    rows: np.ndarray
    prompt_len: int


def pack(phase: str, answers: list[Answer]) -> dict[str, np.ndarray]:
    """Arrays for numpy.savez."""
    arrays = {}
    for i, answer in enumerate(answers):
        arrays[f"{phase}/{i}/tokens"] = answer.tokens
        arrays[f"{phase}/{i}/rows"] = answer.rows
        arrays[f"{phase}/{i}/prompt"] = np.array(answer.prompt_len)
    return arrays


def unpack(path: Path) -> dict[str, list[Answer]]:
    """The phases of a file that `pack` filled."""
    found: dict[str, list[Answer]] = {}
    with np.load(path) as arrays:
        for name in arrays.files:
            phase, number, kind = name.split("/")
            if kind == "prompt":
                tokens, rows = (arrays[f"{phase}/{number}/{k}"] for k in ("tokens", "rows"))
                found.setdefault(phase, []).append(Answer(tokens, rows, int(arrays[name])))
    return found


class Truth:
    """Expected experts, margins and logits of a model, from Hugging Face in float32."""

    def __init__(self, model: Path, device: str = "cpu") -> None:
        from vllm_r3.replay.oracle import Oracle

        self.oracle = Oracle(str(model), device=device)
        self.moe_layers = self.oracle.moe_layers
        self.dense_layers = sorted({*range(self.oracle.num_layers)} - {*self.moe_layers})
        self._known: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __call__(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids (S - 1, M, K), margins (S - 1, M) of the M MoE layers, logits (S - 1, V)."""
        key = tokens.tobytes()
        if key not in self._known:
            truth = self.oracle.truth(tokens.tolist())
            ids, margins = truth.rows[:, self.moe_layers], truth.margins[:, self.moe_layers]
            self._known[key] = ids, margins, truth.logits
        return self._known[key]


def _spoiled(rows: np.ndarray, layers: list[int]) -> dict[str, np.ndarray]:
    """Rows as known faults would leave them."""
    exchanged = rows.copy()
    exchanged[:, layers] = np.roll(rows[:, layers], 1, axis=1)
    return {
        "zeros": np.zeros_like(rows),
        "shifted": np.roll(rows, 1, axis=0),
        "repeated": np.repeat(rows[:1], len(rows), axis=0),
        "layers": exchanged,
    }


class Judgement:
    """Counts over the answers of one phase, and what is wrong with them."""

    def __init__(self, truth: Truth, limits: Limits) -> None:
        self.truth, self.limits = truth, limits
        self.problems: list[str] = []
        self.counts = dict.fromkeys(
            ("answers", "rows", "equal_rows", "expected_rows", "cells", "differing_cells"), 0
        )
        self.counts |= dict.fromkeys(("differing_answers", "cells_with_repeated_ids"), 0)
        self.by_layer = np.zeros(len(truth.moe_layers), dtype=int)
        self.margin = self.behind = 0.0
        self.spoiled: dict[str, list[int]] = {}

    def add(self, number: int, answer: Answer) -> None:
        """Compare one answer, row by row."""
        ids, margins, logits = self.truth(answer.tokens)
        layers, rows, counts = self.truth.moe_layers, answer.rows, self.counts
        shape = (len(answer.tokens) - 1, self.truth.oracle.num_layers, ids.shape[2])
        counts["answers"] += 1
        counts["rows"] += len(rows)
        counts["expected_rows"] += shape[0]
        if rows.shape != shape or rows.dtype != np.uint8:
            found = f"{rows.dtype} {rows.shape}"
            self.problems.append(f"answer {number}: expected uint8 {shape}, got {found}")
            return
        num_experts = self.truth.oracle.shape.num_experts
        if rows[:, self.truth.dense_layers].any() or rows.max() >= num_experts:
            self.problems.append(f"answer {number}: a dense layer is not zero, or an id too high")
        wrong = differing_cells(rows[:, layers], ids)
        counts["cells"] += wrong.size
        counts["differing_cells"] += int(wrong.sum())
        counts["equal_rows"] += int((~wrong.any(-1)).sum())
        self.by_layer += wrong.sum(0)
        counts["cells_with_repeated_ids"] += int(repeating_cells(rows[:, layers]).sum())
        if wrong.any():
            # What follows a near tie that fell the other way may differ by right.
            token = int(wrong.any(-1).argmax())
            self.margin = max(self.margin, float(margins[token, wrong[token].argmax()]))
            counts["differing_answers"] += 1
        else:
            self._compare_tokens(answer, logits)
        if len(rows) > 1:
            for name, bad in _spoiled(rows, layers).items():
                cells = self.spoiled.setdefault(name, [0, 0])
                cells[0] += int(differing_cells(bad[:, layers], ids).sum())
                cells[1] += wrong.size

    def _compare_tokens(self, answer: Answer, logits: np.ndarray) -> None:
        """Greedy tokens are the truth's own choice; else draft tokens were accepted wrongly."""
        at = np.arange(answer.prompt_len - 1, len(answer.tokens) - 1)
        behind = logits[at].max(-1) - logits[at, answer.tokens[at + 1]]
        self.behind = max(self.behind, float(behind.max(initial=0.0)))

    def result(self) -> dict[str, Any]:
        """Everything counted, with a list of what is out of its limits."""
        counts, limits, problems = self.counts, self.limits, self.problems
        spoiled = {name: round(a / max(b, 1), 3) for name, (a, b) in self.spoiled.items()}
        if not counts["cells"]:
            problems.append("nothing was compared")
        if counts["rows"] != counts["expected_rows"]:
            problems.append(f"{counts['rows']} rows for {counts['expected_rows']} tokens")
        if counts["differing_cells"] > limits.share * counts["cells"]:
            problems.append(f"{counts['differing_cells']} of {counts['cells']} cells differ")
        if not self.margin <= limits.margin:
            problems.append(f"an answer first differs where the margin is {self.margin:.3g}")
        if not self.behind <= limits.behind:
            problems.append(f"a greedy token is {self.behind:.3g} behind the best one")
        if counts["cells_with_repeated_ids"]:
            problems.append(f"{counts['cells_with_repeated_ids']} cells repeat an id")
        weak = [name for name, share in spoiled.items() if share < SPOILED_SHARE]
        if weak or not spoiled:
            problems.append(f"the comparison would pass rows spoiled by {weak}: {spoiled}")
        return counts | dict(
            differing_cells_by_layer=dict(
                zip(map(str, self.truth.moe_layers), self.by_layer.tolist(), strict=True)
            ),
            largest_first_margin=float(f"{self.margin:.3g}"),
            largest_logit_behind=float(f"{self.behind:.3g}"),
            share_wrong_if_spoiled=spoiled,
            problems=problems,
        )


def judge(truth: Truth, answers: list[Answer], limits: Limits) -> dict[str, Any]:
    """Compare a phase with the truth about its model."""
    judgement = Judgement(truth, limits)
    for number, answer in enumerate(answers):
        judgement.add(number, answer)
    return judgement.result()


def share_differing(truth: Truth, answers: list[Answer]) -> float:
    """How many cells differ from the truth of a model that was not run."""
    layers = truth.moe_layers
    wrong = [differing_cells(a.rows[:, layers], truth(a.tokens)[0]) for a in answers]
    return float(np.concatenate(wrong).mean())


def compare_runs(found: list[Answer], other: list[Answer], limits: Limits) -> dict[str, Any]:
    """Rows of two runs of the same requests, as far as the tokens before them are the same."""
    rows = equal = cells = differing = other_tokens = shorter = total = 0
    for a, b in zip(found, other, strict=True):
        n = min(len(a.tokens), len(b.tokens))
        same = int((a.tokens[:n] == b.tokens[:n]).cumprod().sum())
        other_tokens += same < n
        shorter += len(a.tokens) != len(b.tokens)
        length = min(same, len(a.rows), len(b.rows))
        bad = differing_cells(a.rows[:length], b.rows[:length])
        rows, total = rows + length, total + n - 1
        equal += int((~bad.any(-1)).sum())
        cells, differing = cells + bad.size, differing + int(bad.sum())
    problems = []
    if rows < 0.8 * total:
        problems.append(f"only {rows} of {total} rows follow the same tokens")
    if differing > limits.share * cells:
        problems.append(f"{differing} of {cells} cells differ between the runs")
    return dict(
        rows=rows,
        equal_rows=equal,
        cells=cells,
        differing_cells=differing,
        answers_with_other_tokens=other_tokens,
        answers_of_other_length=shorter,
        problems=problems,
    )
