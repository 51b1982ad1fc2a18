"""The client's public names and what importing it costs; adding one is a decision."""

from __future__ import annotations

import subprocess
import sys

import vllm_r3.client

HEAVY = ("torch", "transformers", "vllm", "matplotlib", "httpx", "requests", "megatron")


def test_public_names_are_these() -> None:
    names = "ChoiceRoutes Count RolloutRoutes RouteShape RoutesError RowFiles StreamedAnswer Turn"
    functions = "collect_stream decode_answer decode_choice dtype_for"
    assert sorted(vllm_r3.client.__all__) == [*names.split(), *functions.split()]
    assert all(hasattr(vllm_r3.client, name) for name in vllm_r3.client.__all__)


def imported(*modules: str) -> set[str]:
    code = (
        f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_client_imports_nothing_heavier_than_numpy() -> None:
    modules = ("client", "adapters.slime", "adapters.batch", "adapters.megatron")
    checks = ("checks.server", "checks.compare", "checks.inspect", "checks.rollout")
    others = ("replay.replay", "replay.oracle", "demo.demo")
    found = imported(*(f"vllm_r3.{name}" for name in modules + checks + others))
    assert "numpy" in found and not found & set(HEAVY)


def test_the_command_line_starts_without_numpy() -> None:
    found = imported("vllm_r3.commands.checks")
    assert not found & {*HEAVY, "numpy"}
