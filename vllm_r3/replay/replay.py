"""The proof that rows are the right ones: replay them elsewhere and watch the mismatch.

The server samples text and says log p of each token. Hugging Face transformers computes the same
log p twice, with its own routing and with the server's rows forced into its routers. In low
precision the free routing parts from the server's at near ties; the replayed one cannot, so its
mismatch is smaller. In float32 both are near zero. Rows of another token or layer make it larger.

P prompt tokens, G generated, S = P + G. Needs torch and transformers, imported when called.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_r3.checks.target import Target, connect
from vllm_r3.client import RouteShape
from vllm_r3.errors import R3Error
from vllm_r3.replay.experts_hook import ForcedRouting

# two float32 implementations differ by about this in log p; below it the mismatch is noise
NOISE = 1e-4
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Sampled:
    """One sampled text: all tokens, log p of the generated ones (G,), and rows (S - 1, L, K)."""

    tokens: list[int]
    log_probs: np.ndarray
    rows: np.ndarray


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
        delta = self.delta_NG[~np.isnan(self.delta_NG)]
        return float(np.mean(np.expm1(delta) - delta))

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
        """Replaying does not raise the mismatch (beyond float32 noise)."""
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
        sides = {"free": self.free, "replayed": self.replayed}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "texts": self.texts,
            "rows_differing": self.rows_differing,
            **{
                name: {
                    "mean_kl": side.kl,
                    "max_abs_delta": side.largest,
                    "mean_abs_delta": side.mean,
                    "by_position": [float(f"{value:.4g}") for value in side.by_position()],
                }
                for name, side in sides.items()
            },
        }


def replay(
    model_dir: str, url: str, *, dtype: str = "auto", texts: int = 8, prompt_tokens: int = 48,
    max_tokens: int = 32, seed: int = 0,
) -> ReplayReport:  # fmt: skip
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
    target = connect(url)
    base = target.prompt(prompt_tokens + texts, max_tokens)
    model, name = load_model(model_dir, dtype)
    forced = ForcedRouting(model)
    shape = RouteShape(num_layers=model.config.num_hidden_layers).joined(target.shape, url)
    sampled = [
        sample(target, base[at : len(base) - texts + at], max_tokens, seed + at, shape)
        for at in range(texts)
    ]
    free, replayed, differing = [], [], []
    for text in sampled:
        own_rows, own = score(forced, text.tokens, None)
        _, again = score(forced, text.tokens, text.rows)
        free.append(own[-len(text.log_probs) :] - text.log_probs)
        replayed.append(again[-len(text.log_probs) :] - text.log_probs)
        differing.append(_differing(own_rows, text.rows, forced.moe_layers))
    return ReplayReport(
        Path(model_dir).name, name, texts, Mismatch(_padded(free)), Mismatch(_padded(replayed)),
        float(np.mean(differing)),
    )  # fmt: skip


def load_model(model_dir: str, dtype: str) -> tuple[Any, str]:
    """Load a causal language model for scoring and say its dtype."""
    if dtype not in DTYPES:
        raise R3Error(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise R3Error(
            f"replay needs torch and transformers ({error}): pip install 'vllm-r3[replay]'"
        ) from None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    return model, str(model.dtype).removeprefix("torch.")


def sample(
    target: Target, prompt: list[int], max_tokens: int, seed: int, shape: RouteShape
) -> Sampled:
    """Sample one text at temperature 1 with its log-probabilities and rows."""
    params = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 1}
    reply = target.generate(prompt, max_tokens, sampling_params=params)
    routes = target.routes(reply, len(prompt), shape)
    content = (reply.body["choices"][0].get("logprobs") or {}).get("content") or []
    if routes.rows is None or routes.token_ids is None or len(content) != len(routes.token_ids):
        raise R3Error(
            f"{target.http.url}: expected rows, token_ids and {routes.count.num_generated} "
            f"log-probabilities, got {len(content)} log-probabilities {routes.note}".rstrip()
        )
    log_probs = np.array([entry["logprob"] for entry in content])
    return Sampled([*prompt, *routes.token_ids], log_probs, routes.rows)


def score(
    forced: ForcedRouting, tokens: list[int], rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute log p of tokens 1..S-1, free (rows None) or replayed.

    Returns:
        The rows (S - 1, L, K) that the pass used, and log p (S - 1,) in float32.
    """
    import torch

    used: dict[int, Any] = {}
    ids = torch.tensor([tokens[:-1]], device=forced.model.device)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if rows is not None:
            stack.enter_context(forced.forced(rows))
        for site in forced.sites:  # after the forcing hooks, so that these see what the experts see
            keeper = site.experts.register_forward_pre_hook(_keeper(used, site.layer))
            stack.callback(keeper.remove)
        logits = forced.model(ids, use_cache=False).logits[0]
    chosen = torch.tensor(tokens[1:], device=logits.device)[:, None]
    log_probs = logits.float().log_softmax(dim=-1).gather(1, chosen)[:, 0]
    first = next(iter(used.values()))
    made = np.zeros(
        (len(tokens) - 1, forced.model.config.num_hidden_layers, first.shape[1]), np.int64
    )
    for layer, found in used.items():
        made[:, layer] = found
    return made, log_probs.cpu().numpy()


def _keeper(used: dict[int, Any], layer: int) -> Any:
    def keep(module: Any, inputs: tuple[Any, ...]) -> None:
        used[layer] = inputs[1].cpu().numpy()

    return keep


def _differing(own: np.ndarray, recorded: np.ndarray, layers: list[int]) -> float:
    mine, theirs = (np.sort(rows[:, layers], axis=2) for rows in (own, recorded))
    return float((mine != theirs).any(axis=2).mean())


def _padded(deltas: list[np.ndarray]) -> np.ndarray:
    width = max(len(delta) for delta in deltas)
    result = np.full((len(deltas), width), np.nan)
    for line, delta in zip(result, deltas, strict=True):
        line[: len(delta)] = delta
    return result


def plot(report: ReplayReport, path: str | Path) -> None:
    """Draw mean |d log p| by generated position, free and replayed, into a PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise R3Error(f"the plot needs matplotlib ({error}): pip install 'vllm-r3[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(report.free.by_position(), label=f"own routing, mean KL {report.free.kl:.1e}")
    axes.plot(
        report.replayed.by_position(), label=f"replayed rows, mean KL {report.replayed.kl:.1e}"
    )
    axes.set(
        xlabel="generated position", ylabel="mean |d log p|, trainer and server", yscale="log",
        title=f"{report.model} in {report.dtype}, {report.texts} texts",
    )  # fmt: skip
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
