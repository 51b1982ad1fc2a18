"""`verify server` passes a server that keeps the contract and names each broken promise."""

from __future__ import annotations

import re

import pytest
from fake_server import serving

from vllm_r3.checks.server import CHECKS, ServerReport, verify_server
from vllm_r3.errors import R3Error

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
INFO = "GET /routed_experts/info"
VALUES = "row values: different experts in every MoE layer"
FORMS = "routed_experts_encoding and routed_experts_layout"
PAST = "routed_experts_prompt_start past the prompt is refused"


def verify(kind: str = "r3", *faults: str, **more: object) -> ServerReport:
    with serving(kind, faults) as url:
        return verify_server(url, prompt_tokens=40, max_tokens=4, **more)


def problem(report: ServerReport, name: str) -> str:
    return next(result.problem for result in report.results if result.name == name)


def test_a_server_that_keeps_the_contract_passes_every_check() -> None:
    report = verify()
    assert report.passed
    assert report.names("ok") == [name for name, _ in CHECKS]
    assert report.lines()[-1] == "11 checks: 11 ok, 0 FAILED, 0 not checked"


def test_a_server_that_answers_200_with_zero_rows_fails_and_what_it_lacks_is_named() -> None:
    report = verify("vllm")
    assert not report.passed
    assert report.names("ok") == [f"rows from {GENERATE}"]
    assert report.names("not checked") == ["warm equals cold"]
    assert problem(report, VALUES) == "zero MoE layer: layers 0-2 of 3 are all zeros"
    assert problem(report, INFO) == "expected HTTP 200 and a JSON object, got HTTP 404, Not Found"
    assert problem(report, "warm equals cold") == "the first answer's rows are not real ones"
    lines = report.lines()
    named = lines[lines.index("missing from the contract:") + 1 : -1]
    assert named == [f"  {name}" for name in report.names("FAILED")]
    assert lines[-1] == "11 checks: 1 ok, 9 FAILED, 1 not checked"


@pytest.mark.parametrize(
    ("fault", "failed", "message"),
    [
        ("short info", INFO, "expected the fields .*, got none of encoding, layout"),
        (
            "no meta",
            "routed_experts_meta",
            "expected routed_experts_meta beside the rows, got none",
        ),
        (
            "other meta",
            "routed_experts_meta",
            "expected dtype uint8 as in /routed_experts/info, got int16",
        ),
        (
            COMPLETIONS,
            f"rows from {COMPLETIONS}",
            "request r, choice 0: expected 43 rows .*, got none: .*",
        ),
        (CHAT, f"rows from {CHAT}", "request r, choice 0: expected 8 rows .*, got none: .*"),
        ("no forms", FORMS, "expected npy split, got npy full"),
    ],
)
def test_one_broken_promise_fails_its_own_check_alone(
    fault: str, failed: str, message: str
) -> None:
    report = verify("r3", fault)
    assert report.names("FAILED") == [failed]
    assert report.names("not checked") == []
    assert re.fullmatch(message, problem(report, failed))


def test_a_start_that_is_ignored_is_found() -> None:
    report = verify("r3", "no start")
    found = "request r, choice 0: expected rows from start 1, the answer says start 0"
    assert problem(report, "routed_experts_prompt_start") == found


def test_rows_that_are_zero_when_warm_are_found() -> None:
    report = verify("r3", "cold cache")
    assert "warm equals cold" in report.names("FAILED")
    found = problem(report, "warm equals cold")
    assert found.startswith(
        "the second answer: expected the first answer's rows, got 8 of 129 cells different, "
        "the first at row 0, layer 1: "
    )


@pytest.mark.parametrize(("share", "passes"), [(0.0, False), (1 / 130, False), (1 / 129, True)])
def test_cells_may_differ_up_to_the_given_share(share: float, passes: bool) -> None:
    report = verify("r3", "flip", max_differing=share)
    assert ("warm equals cold" in report.names("ok")) is passes


def test_a_server_with_the_flag_off_fails_from_the_first_check_on() -> None:
    report = verify("r3", "off", GENERATE)
    expected = "enabled is false: start the server with --enable-return-routed-experts"
    assert problem(report, INFO) == expected
    assert set(report.names("not checked")) >= {VALUES, "warm equals cold", FORMS}
    assert not report.passed


def test_an_address_without_a_server_is_an_error() -> None:
    with pytest.raises(
        R3Error, match=r"^http://127\.0\.0\.1:9/routed_experts/info: expected a server, got "
    ):
        verify_server("127.0.0.1:9", timeout=2)


def test_an_sglang_server_is_refused_by_name() -> None:
    message = r"^http://\S+: expected a vLLM server, got SGLang 0\.5\.23: use compare$"
    with pytest.raises(R3Error, match=message):
        verify("sglang")
