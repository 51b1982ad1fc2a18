"""The proof that rows are the right ones: replay them elsewhere and watch the mismatch.

The server samples text and says log p of each token. Hugging Face transformers computes the same
log p twice, with its own routing and with the server's rows forced into its routers. In low
precision the free routing parts from the server's at near ties; the replayed one cannot, so its
mismatch is smaller. In float32 both are near zero. Rows of another token or layer make it larger.

P prompt tokens, G generated, S = P + G. Needs torch and transformers, imported when called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.checks.connect import Connection, connect
from vllm_r3.checks.inspect import drawing
from vllm_r3.checks.rows import differing_cells
from vllm_r3.client import RouteShape
from vllm_r3.errors import R3Error
from vllm_r3.replay.experts_hook import HookedModel, load_model

# two float32 implementations differ by about this in log p; below it the mismatch is noise
NOISE = 1e-4


@dataclass(frozen=True)
class ReplayReport:
    """Free and replayed mismatch side by side, each as `mismatch` measures it."""

    model: str
    dtype: str
    texts: int
    rows_differing: float
    free: dict[str, Any]
    replayed: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Return whether replaying does not raise the mismatch (beyond float32 noise)."""
        return self.replayed["mean_abs_delta"] <= max(self.free["mean_abs_delta"], NOISE)

    def lines(self) -> list[str]:
        text = [
            f"{self.model} in {self.dtype}, {self.texts} texts of up to "
            f"{len(self.free['by_position'])} tokens",
            f"rows where free routing differs from the server's: {self.rows_differing:.3%} of "
            "(token, layer)",
            "                 mean KL   max |d log p|   mean |d log p|",
        ]
        for name, found in (("own routing", self.free), ("replayed", self.replayed)):
            text.append(
                f"  {name:<12} {found['mean_kl']:9.3e}      {found['max_abs_delta']:9.3e}       "
                f"{found['mean_abs_delta']:9.3e}"
            )
        return text


def mismatch(delta_NG: np.ndarray) -> dict[str, Any]:
    """Measure how far the trainer's log p is from the server's over N texts of G tokens.

    Takes trainer minus server log p, nan past a text's end. The mean KL(server || trainer) is
    estimated on the sampled tokens as e^d - 1 - d.
    """
    size = np.abs(delta_NG)
    return {
        "mean_kl": float(np.nanmean(np.expm1(delta_NG) - delta_NG)),
        "max_abs_delta": float(np.nanmax(size)),
        "mean_abs_delta": float(np.nanmean(size)),
        "by_position": [float(f"{value:.4g}") for value in np.nanmean(size, axis=0)],
    }


def replay(
    model_dir: str,
    url: str,
    *,
    dtype: str = "auto",
    texts: int = 8,
    prompt_tokens: int = 48,
    max_tokens: int = 32,
    seed: int = 0,
) -> ReplayReport:
    """Sample from the server, then compute its log p free and replayed.

    Args:
        model_dir: the model that the server serves, as a Hugging Face directory or name.
        dtype: of the Hugging Face model: auto (the checkpoint's), float32, bfloat16, float16.
        texts: how many texts to sample, at temperature 1.
        prompt_tokens, max_tokens: P and G.

    Raises:
        R3Error: the server sends no rows or log-probabilities, or the model cannot be replayed.
    """
    server = connect(url)
    base = server.prompt(prompt_tokens + texts, max_tokens)
    hooked = HookedModel(load_model(model_dir, dtype))
    shape = RouteShape(num_layers=hooked.num_layers).joined(server.shape, url)
    free, replayed = np.full((2, texts, max_tokens), np.nan)
    differing, longest = [], 0
    for at in range(texts):
        prompt = base[at : len(base) - texts + at]
        tokens, log_probs, rows = sample(server, prompt, max_tokens, seed + at, shape)
        count = len(log_probs)
        longest = max(longest, count)
        own_rows, own = score(hooked, tokens, None)
        free[at, :count] = own[-count:] - log_probs
        replayed[at, :count] = score(hooked, tokens, rows)[1][-count:] - log_probs
        differing.append(differing_cells(own_rows, rows)[:, hooked.moe_layers].mean())
    name, dtype = Path(model_dir).name, str(hooked.model.dtype).removeprefix("torch.")
    mismatches = (mismatch(delta[:, :longest]) for delta in (free, replayed))
    return ReplayReport(name, dtype, texts, float(np.mean(differing)), *mismatches)


def sample(
    server: Connection, prompt: list[int], max_tokens: int, seed: int, shape: RouteShape
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sample one text: all tokens, log p of the generated ones (G,), and rows (S - 1, L, K)."""
    params = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 1}
    answer = server.generate(prompt, max_tokens, sampling_params=params).good()
    routes = server.decode(answer, len(prompt), shape=shape)
    content = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    if routes.rows is None or routes.token_ids is None or len(content) != len(routes.token_ids):
        raise R3Error(
            f"{server.url}: expected rows, token_ids and {routes.count.num_generated} "
            f"log-probabilities, got {len(content)} log-probabilities {routes.note}".rstrip()
        )
    log_probs = np.array([entry["logprob"] for entry in content])
    return [*prompt, *routes.token_ids], log_probs, routes.rows


def score(
    hooked: HookedModel, tokens: list[int], rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute log p of tokens 1..S-1, free (rows None) or replayed.

    Returns:
        The rows (S - 1, L, K) that the pass used, and log p (S - 1,) in float32.
    """
    import torch

    done = hooked.run(tokens, rows)
    log_probs = torch.from_numpy(done.logits).log_softmax(dim=-1)
    return done.rows, log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def plot(report: ReplayReport, path: str | Path) -> None:
    """Draw mean |d log p| by generated position, free and replayed, into a PNG."""
    with drawing(path) as axes:
        for name, side in (("own routing", report.free), ("replayed rows", report.replayed)):
            axes.plot(side["by_position"], label=f"{name}, mean KL {side['mean_kl']:.1e}")
        axes.set(
            xlabel="generated position", ylabel="mean |d log p|, trainer and server", yscale="log",
            title=f"{report.model} in {report.dtype}, {report.texts} texts",
        )  # fmt: skip
        axes.legend()
