"""`verify server` passes a server that keeps the contract and names each broken promise."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest
from fake_server import serving
from sample_answers import meta, nested, npy, refused, rows_of, split_answer

from vllm_r3.checks.server import (
    CHECKS,
    META_FIELDS,
    ServerReport,
    hold_form,
    hold_meta,
    verify_server,
)
from vllm_r3.errors import R3Error

GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
INFO, META = "GET /routed_experts/info", "routed_experts_meta"
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
    assert report.names("ok") == list(CHECKS)
    assert report.lines()[-1] == "15 checks: 15 ok, 0 FAILED, 0 not checked"


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
    assert lines[-1] == "15 checks: 1 ok, 13 FAILED, 1 not checked"


@pytest.mark.parametrize(
    ("fault", "failed", "message"),
    [
        ("short info", INFO, "expected the fields .*, got none of encoding, layout"),
        ("other meta", META, f"{META}: expected {{'start': 0, .*'uint8'.*}}, got {{.*'int16'.*}}"),
        (
            COMPLETIONS,
            f"rows from {COMPLETIONS}",
            "request r, .*: expected 43 rows .* got none: .*",
        ),
        (CHAT, f"rows from {CHAT}", "request r, .*: expected 8 rows .* got none: .*"),
        ("file", f"{FORMS.split()[0]} file", "expected the name of a file, got 'k05V.*'"),
        ("no versions", "weight versions", "expected weight_version and .*, got none"),
        (
            "no abort",
            "POST /inference/v1/abort_requests",
            "expected a request ended by its id, got length",
        ),
        ("no forms", FORMS, "prompt_routed_experts: expected none in layout full, got one"),
    ],
)
def test_one_broken_promise_fails_its_own_check_alone(
    fault: str, failed: str, message: str
) -> None:
    report = verify("r3", fault)
    assert report.names("FAILED") == [failed]
    assert report.names("not checked") == []
    assert re.fullmatch(message, problem(report, failed))


def test_rows_without_their_meta_have_no_versions_either() -> None:
    report = verify("r3", "no meta")
    assert report.names("FAILED") == [META, "weight versions"]
    assert problem(report, META) == "expected routed_experts_meta beside the rows, got none"


def test_a_start_that_is_ignored_is_found() -> None:
    report = verify("r3", "no start")
    found = "request r, choice 0: expected rows from start 1, the answer says start 0"
    assert problem(report, "routed_experts_prompt_start") == found


def test_rows_that_are_zero_when_warm_are_found() -> None:
    report = verify("r3", "cold cache")
    assert "warm equals cold" in report.names("FAILED")
    found = problem(report, "warm equals cold")
    assert found == "the second answer: zero rows: 4 of 43 rows hold zeros: 0-3"


@pytest.mark.parametrize(("share", "passes"), [(0.0, False), (1 / 87, False), (1 / 86, True)])
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


ROWS = rows_of(8)
PROMISED = meta(ROWS) | {"enabled": True, "version": "0.21.0+r3.1"}
WIRE = "choices[0].routed_experts: expected |u1 (rows, L, K) in C order, got"
NO_NPY = "choices[0].routed_experts: expected base64 of npy format 1.0, got"


@pytest.mark.parametrize("encode", [npy, nested])
def test_an_answer_in_the_promised_form_passes(encode) -> None:
    answer = split_answer(ROWS, 5, start=2, encode=encode)
    hold_meta(answer, PROMISED, start=2)
    hold_form(answer, "npy" if encode is npy else "list", "split", "uint8")


@pytest.mark.parametrize("name", ["start", *META_FIELDS])
def test_each_field_of_the_meta_must_agree_with_the_info(name: str) -> None:
    answer = split_answer(ROWS, 5)
    answer["routed_experts_meta"][name] = "other"
    with pytest.raises(R3Error, match="^routed_experts_meta: expected {'start': 0, .*'other'"):
        hold_meta(answer, PROMISED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, f"{NO_NPY} None"),
        (ROWS.tolist(), f"{NO_NPY} [[[0, 1], [3, 4], [6, 7]], [[5, 6], [8, 9], [11, 12]], "),
        (base64.b64encode(bytes(200)).decode(), f"{NO_NPY} 'AAAAAAAAAAAA"),
        (npy(ROWS)[:-1] + "*", "choices[0].routed_experts: expected padded base64, got "),
        (npy(np.asfortranarray(ROWS)), f"{WIRE} |u1 (8, 3, 2) in Fortran order"),
        (npy(ROWS[0]), f"{WIRE} |u1 (3, 2)"),
        *((npy(ROWS.astype(d)), f"{WIRE} {d} (8, 3, 2)") for d in ("<i2", ">i2", "<i4", "<u2")),
    ],
)
def test_a_field_in_another_form_is_refused(value: object, message: str) -> None:
    answer = split_answer(ROWS, 5)
    answer["choices"][0]["routed_experts"] = value
    with pytest.raises(R3Error, match=f"^{re.escape(message)}"):
        hold_form(answer, "npy", "split", "uint8")


def test_layout_full_has_no_prompt_rows_and_lists_are_lists() -> None:
    answer = split_answer(ROWS, 5)
    with refused("prompt_routed_experts: expected none in layout full, got one", R3Error):
        hold_form(answer, "npy", "full", "uint8")
    message = r"^choices\[0\].routed_experts: expected nested lists, got '"
    with pytest.raises(R3Error, match=message):
        hold_form(answer, "list", "split", "uint8")
