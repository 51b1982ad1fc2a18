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
class Mismatch:
    """How far the trainer's log p is from the server's, over N texts of G tokens.

    Attributes:
        delta_NG: trainer minus server log p, nan past a text's end.
    """

    delta_NG: np.ndarray

    @property
    def kl(self) -> float:
        """Mean KL(server || trainer), estimated on the sampled tokens as e^d - 1 - d."""
        return float(np.nanmean(np.expm1(self.delta_NG) - self.delta_NG))

    @property
    def largest(self) -> float:
        """Max |d log p|."""
        return float(np.nanmax(np.abs(self.delta_NG)))

    @property
    def mean(self) -> float:
        """Mean |d log p|."""
        return float(np.nanmean(np.abs(self.delta_NG)))

    def by_position(self) -> np.ndarray:
        """Mean |d log p| of each generated position (G,)."""
        return np.nanmean(np.abs(self.delta_NG), axis=0)


@dataclass(frozen=True)
class ReplayReport:
    """Free and replayed mismatch side by side."""

    model: str
    dtype: str
    texts: int
    free: Mismatch
    replayed: Mismatch
    rows_differing: float

    @property
    def passed(self) -> bool:
        """Return whether replaying does not raise the mismatch (beyond float32 noise)."""
        return self.replayed.mean <= max(self.free.mean, NOISE)

    def lines(self) -> list[str]:
        """The report as text."""
        text = [
            f"{self.model} in {self.dtype}, {self.texts} texts of up to "
            f"{self.free.delta_NG.shape[1]} tokens",
            f"rows where free routing differs from the server's: {self.rows_differing:.3%} of "
            "(token, layer)",
            "                 mean KL   max |d log p|   mean |d log p|",
        ]
        for name, found in (("own routing", self.free), ("replayed", self.replayed)):
            text.append(
                f"  {name:<12} {found.kl:9.3e}      {found.largest:9.3e}       {found.mean:9.3e}"
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """The report for a JSON file."""
        names = ("model", "dtype", "texts", "rows_differing")
        named = {name: getattr(self, name) for name in names}
        for name, side in (("free", self.free), ("replayed", self.replayed)):
            positions = [float(f"{value:.4g}") for value in side.by_position()]
            named[name] = {"mean_kl": side.kl, "max_abs_delta": side.largest}
            named[name] |= {"mean_abs_delta": side.mean, "by_position": positions}
        return named


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
        url: the server.
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
    mismatches = Mismatch(free[:, :longest]), Mismatch(replayed[:, :longest])
    return ReplayReport(name, dtype, texts, *mismatches, float(np.mean(differing)))


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
            axes.plot(side.by_position(), label=f"{name}, mean KL {side.kl:.1e}")
        axes.set(
            xlabel="generated position", ylabel="mean |d log p|, trainer and server", yscale="log",
            title=f"{report.model} in {report.dtype}, {report.texts} texts",
        )  # fmt: skip
        axes.legend()
