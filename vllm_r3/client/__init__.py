"""Routed experts for trainers: decode answers, merge segments, grow rollouts. Needs numpy only.

shape     dtype rule, what is known of a model, typed JSON fields, the error type
files     the files that an answer names
npy       one field to an array: npy, headerless int32, lists
servers   where each server puts what
merge     segments to one array, counts and ids checked
decode    an answer to the rows of its choices
stream    chunks to an answer, also of a stream that was cut
rollout   turns, aborts and resumes to the trainer's array
"""

from vllm_r3.client.decode import ChoiceRoutes, decode_answer, decode_choice
from vllm_r3.client.files import RowFiles
from vllm_r3.client.merge import Count
from vllm_r3.client.rollout import RolloutRoutes, Turn
from vllm_r3.client.shape import RoutesError, RouteShape, dtype_for
from vllm_r3.client.stream import StreamedAnswer, collect_stream

__all__ = [
    "ChoiceRoutes",
    "Count",
    "RolloutRoutes",
    "RouteShape",
    "RoutesError",
    "RowFiles",
    "StreamedAnswer",
    "Turn",
    "collect_stream",
    "decode_answer",
    "decode_choice",
    "dtype_for",
]
