"""Frameworks' own code, from their wheels, reads the server's answers: each row at its token.

Their modules import Ray, Hydra, Megatron and more, which are not here. So the definitions that read
rows are taken out of the wheels' sources as they are, and run with the names that they use.
"""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle_checks import check_rows
from server_fixture import GENERATE, decode, request, seeded_prompt

CONSUMERS = Path(__file__).parents[2] / ".build" / "consumers"
PROMPT = seeded_prompt(77, 21)
MORE = seeded_prompt(78, 6)


def definitions(path: str, *names: str, **given: Any) -> SimpleNamespace:
    """Run these top-level definitions and assignments of a module, and what it imports of numpy,
    pydantic, torch and the standard library."""
    if not (CONSUMERS / path).exists():
        pytest.skip(f"{path}: the wheel could not be had; see consumers.txt")
    tree = ast.parse((CONSUMERS / path).read_text())
    light = ("enum", "typing", "dataclasses", "collections", "numpy", "pydantic", "torch", "json")
    light += ("math", "pybase64", "binascii", "collections.abc")

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            return all(alias.name in light for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return node.module in light
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        found = {getattr(node, "name", None), *(getattr(t, "id", None) for t in targets)}
        return bool(found & set(names))

    space = {"__name__": Path(path).stem, **given}
    tree.body = [node for node in tree.body if wanted(node)]
    exec(compile(tree, path, "exec", dont_inherit=True), space)
    assert set(names) <= set(space)
    return SimpleNamespace(**space)


def ask(kit, prompt, start=0, layout="full"):
    """Return the raw answer, its generated tokens and its rows, which equal the oracle's."""
    ours = dict(routed_experts_layout=layout, routed_experts_prompt_start=start)
    answer = kit.client.post(GENERATE, json=request("generate", prompt, **ours))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    rows = decode(choice["routed_experts"], "npy", "uint8")
    if layout == "full":
        truth = kit.oracle.truth([*prompt, *choice["token_ids"]])
        split = len(prompt) - start
        check_rows(kit.oracle, truth, len(prompt), rows[:split], rows[split:], start, "answer")
    return answer.content, choice["token_ids"], rows


def two_turns(kit):
    """Tokens and rows of a turn, then of a second one whose rows start where the first's ended."""
    _, made, rows = ask(kit, PROMPT)
    prompt = [*PROMPT, *made, *MORE]
    _, again, more = ask(kit, prompt, start=len(rows))
    return (PROMPT, made, rows), (prompt, again, more)


def test_verl_puts_rows_at_their_tokens(kit):
    path = "verl/experimental/agent_loop/agent_loop.py"
    verl = definitions(path, "AgentLoopMetrics", "AgentLoopOutput")
    _, made, rows = ask(kit, PROMPT)
    output = verl.AgentLoopOutput(
        prompt_ids=PROMPT,
        response_ids=made,
        response_mask=[1] * len(made),
        routed_experts=rows,
        metrics=verl.AgentLoopMetrics(),
    )
    aligned = output.as_dict()["routed_experts"]
    assert aligned.shape[0] == len(PROMPT) + len(made)
    np.testing.assert_array_equal(aligned[:-1], rows)
    assert not aligned[-1].any()


def test_skyrl_packs_rows_and_joins_turns(kit):
    base = "skyrl/backends/skyrl_train"
    trace = definitions(
        f"{base}/distributed/megatron/token_metadata.py", "TokenMetadataTrace", "_widen_dtype"
    )
    names = ("RoutedExpertIndices", "ROUTED_EXPERT_DTYPES", "RoutedExpertTrace")
    names += ("compact_routed_expert_indices",)
    given = dict(TokenMetadataTrace=trace.TokenMetadataTrace)
    skyrl = definitions(f"{base}/utils/routed_experts.py", *names, **given)
    wire_names = ("PackedArrayKey", "_ENVELOPE_KEYS", "_ROUTED_EXPERTS_NDIM", "_to_host_array")
    wire_names += ("pack_ndarray", "unpack_ndarray", "pack_routed_experts")
    wire = definitions(
        f"{base}/inference_servers/generate_wire.py",
        *(*wire_names, "decode_packed_routed_experts"),
        **{name: getattr(skyrl, name) for name in names},
    )
    turns = two_turns(kit)
    trace = skyrl.RoutedExpertTrace()
    for prompt, made, rows in turns:
        sent = wire.decode_packed_routed_experts(wire.pack_routed_experts(rows))
        assert sent.dtype == rows.dtype
        counts = dict(prompt_token_count=len(prompt), generated_token_count=len(made))
        trace.record_generation(**counts, routed_experts=sent)
    count = len(turns[1][0]) + len(turns[1][1])
    found = trace.finalize(token_count=count, loss_mask=[1] * count)
    np.testing.assert_array_equal(found, np.concatenate([rows for *_, rows in turns]))
    assert len(found) == count - 1


@pytest.mark.parametrize("layout", ["split", "full"])
def test_renderers_cuts_the_rows_out_of_the_raw_answer(kit, layout):
    names = ("ROUTED_EXPERTS_DATA_PREFIX", "_strip_base64_field", "parse_generate_response")
    renderers = definitions("renderers/client.py", *names)
    raw, made, rows = ask(kit, PROMPT, layout=layout)
    assert renderers.parse_generate_response(raw) == json.loads(raw)
    stripped, data = renderers._strip_base64_field(raw, b'"routed_experts":"')
    np.testing.assert_array_equal(decode(bytes(data).decode(), "npy", "uint8"), rows)
    choice = json.loads(stripped)["choices"][0]
    assert choice["routed_experts"] == "" and choice["token_ids"] == made


def test_verifiers_gives_each_message_its_rows(kit):
    names = ("_replace_placeholder_routing_row", "_attribute_routed_experts")
    verifiers = definitions("verifiers/v1/graph.py", *names, Trace=Any)
    (_, made, rows), (_, again, more) = two_turns(kit)

    def node(tokens, sampled):
        return SimpleNamespace(token_ids=tokens, sampled=sampled, routed_experts=None)

    nodes = [node(PROMPT, False), node(made, True), node(MORE, False), node(again, True)]
    trace = SimpleNamespace(nodes=nodes)
    path_len = len(PROMPT) + len(made)
    for prefix, new, at, found, start in (
        ([], [0, 1], 0, rows, 0),
        ([0, 1], [2, 3], path_len, more, len(rows)),
    ):
        data = base64.b64encode(found.tobytes())
        payload = dict(data=data, shape=found.shape, start=start, dtype="uint8")
        verifiers._attribute_routed_experts(trace, prefix, new, at, payload)
    joined = np.concatenate([node.routed_experts for node in nodes])
    np.testing.assert_array_equal(joined[:-1], np.concatenate([rows, more]))


@pytest.mark.parametrize("padding_free", [False, True])
def test_ms_swift_batches_rows_of_samples(kit, padding_free):
    names = ("_normalize_routed_experts_tensor", "_pad_or_trim_routed_experts")
    given = dict(OnPolicySample=Any, Template=Any)
    path = "swift/rlhf_trainers/utils.py"
    swift = definitions(path, *names, "build_routed_experts_batch", **given)
    asked = [(prompt, *ask(kit, prompt)[1:]) for prompt in (PROMPT, MORE)]
    lengths = [len(prompt) + len(made) for prompt, made, _ in asked]
    samples = [
        SimpleNamespace(routed_experts=rows, encoded={"length": length})
        for (*_, rows), length in zip(asked, lengths, strict=True)
    ]
    found = swift.build_routed_experts_batch(
        samples,
        seq_lengths=torch.tensor(lengths),
        max_seq_len=max(lengths),
        template=SimpleNamespace(padding_side="right", padding_free=padding_free),
        device=torch.device("cpu"),
        router_replay_mode="R3",
    )
    at = [0, lengths[0]] if padding_free else [0, max(lengths)]
    flat = found.reshape(-1, *found.shape[2:])
    for first, (*_, rows) in zip(at, asked, strict=True):
        np.testing.assert_array_equal(flat[first : first + len(rows)], rows)
        assert not flat[first + len(rows)].any()
