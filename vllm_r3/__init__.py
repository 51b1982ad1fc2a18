"""Rollout routing replay (R3) on vLLM.

The package has two halves that do not import each other. The client half reads routed experts out
of servers' answers and needs numpy alone; the tooling half (`series`) keeps the patch
series and needs the extra `series`.
"""

__version__ = "0.1.0"
