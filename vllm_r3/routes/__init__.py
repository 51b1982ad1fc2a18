"""Routed experts for trainers: decode answers, merge segments, grow rollouts. Needs numpy only."""

from vllm_r3.routes.decode import ChoiceRoutes, decode_answer, decode_choice
from vllm_r3.routes.merge import Count
from vllm_r3.routes.rollout import RolloutRoutes, Turn
from vllm_r3.routes.rules import RoutesError, RouteShape, dtype_for
from vllm_r3.routes.stream import collect_stream

__all__ = [
    "ChoiceRoutes",
    "Count",
    "RolloutRoutes",
    "RouteShape",
    "RoutesError",
    "Turn",
    "collect_stream",
    "decode_answer",
    "decode_choice",
    "dtype_for",
]
