"""`verify rollout` judges each sample of a debug file, and never runs what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_answers import refused, rows_of

from vllm_r3.checks.rollout import RolloutReport, judge, load_torch_file, verify_rollout
from vllm_r3.client import RouteShape
from vllm_r3.errors import R3Error

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'vllm-r3[replay]'")

NOT_LOADED = (
    r"^.*x\.pt: expected plain data, tensors and numpy arrays, got {}, which is not loaded$"
)
SHAPE = RouteShape(num_layers=3, top_k=2, num_experts=16)
GOOD = rows_of(8).astype(np.int32)


def sample_of(rows: Any, tokens: int = 9, **more: Any) -> dict[str, Any]:
    return {
        "index": 5,
        "tokens": list(range(tokens)),
        "response_length": 4,
        "status": "completed",
        "rollout_routed_experts": rows,
        "metadata": {},
        **more,
    }


def saved(path: Path, *samples: dict[str, Any]) -> Path:
    torch.save({"rollout_id": 3, "samples": list(samples)}, path)
    return path


def report_of(path: Path, *samples: dict[str, Any], **more: Any) -> RolloutReport:
    return verify_rollout(saved(path / "r.pt", *samples), SHAPE, **more)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("kind", ["array", "tensor", "chunks", "lists"])
def test_good_rows_pass_in_every_form_that_frameworks_save(
    tmp_path: Path, kind: str, dtype: type
) -> None:
    rows = GOOD.astype(dtype)
    value = {
        "array": rows,
        "tensor": torch.from_numpy(rows),
        "chunks": [torch.from_numpy(rows[:3]), torch.from_numpy(rows[3:])],
        "lists": rows.tolist(),
    }[kind]
    report = report_of(tmp_path, sample_of(value))
    assert report.passed
    assert report.lines() == [f"{tmp_path / 'r.pt'}: 1 samples, 1 with routing", "  1 ok"]


MISFIT = "expected (8, 3, 2) for 9 tokens, got"
BROKEN = [
    (None, "missing", "rollout_routed_experts is None"),
    ([], "missing", "rollout_routed_experts is []"),
    (GOOD[0], "wrong rank", f"{MISFIT} (3, 2)"),
    (GOOD.reshape(-1), "wrong rank", f"{MISFIT} (48,)"),
    ([[1], [1, 2]], "wrong rank", f"{MISFIT} (0,)"),
    (GOOD.astype(np.float32), "wrong dtype", "expected integers, got float32"),
    (GOOD[:7], "wrong rows", f"{MISFIT} (7, 3, 2)"),
    (rows_of(9), "wrong rows", f"{MISFIT} (9, 3, 2)"),
    (GOOD[:, :2], "wrong layers", f"{MISFIT} (8, 2, 2)"),
    (GOOD[:, :, :1], "wrong top-k", f"{MISFIT} (8, 3, 1)"),
    (GOOD * 0, "zero MoE layer", "zero MoE layer: layers 0-2 of 3 are all zeros"),
]


@pytest.mark.parametrize(
    ("rows", "kind", "detail"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_fault_gets_its_own_verdict(tmp_path: Path, rows: Any, kind: str, detail: str) -> None:
    report = report_of(tmp_path, sample_of(rows), sample_of(GOOD, index=6))
    assert not report.passed
    assert [verdict.kind for verdict in report.verdicts] == [kind, "ok"]
    assert report.verdicts[0].sample == "sample 5"
    assert report.verdicts[0].details[0] == detail
    assert report.lines()[:2] == [f"sample 5: {kind}", f"  {detail}"]


@pytest.mark.parametrize(("minimum", "passes"), [(None, False), (0, True), (1, True), (2, False)])
def test_the_minimum_says_how_many_samples_must_hold_rows(
    tmp_path: Path, minimum: int | None, passes: bool
) -> None:
    report = report_of(tmp_path, sample_of(GOOD), sample_of(None), min_with_routing=minimum)
    assert report.passed is passes
    if minimum == 2:
        assert report.lines()[-1] == "expected at least 2 samples with routing, got 1"


def test_an_aborted_sample_needs_no_rows_but_a_file_of_nothing_else_fails(tmp_path: Path) -> None:
    aborted = sample_of(None, status="aborted")
    assert report_of(tmp_path, sample_of(GOOD), aborted).passed
    assert not report_of(tmp_path, aborted).passed


def test_a_minimum_does_not_excuse_broken_rows(tmp_path: Path) -> None:
    assert not report_of(tmp_path, sample_of(GOOD), sample_of(GOOD[:7]), min_with_routing=1).passed


def test_a_sample_of_one_token_has_no_rows_to_be_wrong() -> None:
    assert judge(sample_of(np.zeros((0, 3, 2), np.int32), tokens=1), SHAPE).kind == "ok"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"rollout_id": 1}, "a dict of ['rollout_id']"),
        ({"samples": [1]}, "a dict of ['samples']"),
        (torch.zeros(2), "Tensor"),
    ],
)
def test_another_layout_is_refused(tmp_path: Path, content: Any, found: str) -> None:
    path = tmp_path / "x.pt"
    torch.save(content, path)
    with refused(f"{path}: expected {{'rollout_id': ..., 'samples': [...]}}, got {found}", R3Error):
        verify_rollout(path, SHAPE)


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt")
    with refused(f"{path}: expected samples, got an empty list", R3Error):
        verify_rollout(path, SHAPE)


class Hostile:
    """Runs a command where a pickle is loaded carelessly."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE_MARK"],)


def test_code_in_a_file_is_refused_by_name_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    monkeypatch.setenv("HOSTILE_MARK", str(mark))
    path = saved(tmp_path / "x.pt", sample_of(GOOD, metadata={"x": Hostile()}))
    with pytest.raises(R3Error, match=NOT_LOADED.format("posix.mkdir")):
        verify_rollout(path, SHAPE)
    assert not mark.exists()


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", sample_of(np.array([Path("x")], dtype=object)))
    with pytest.raises(R3Error, match=NOT_LOADED.format("numpy.dtypes.ObjectDType")):
        verify_rollout(path, SHAPE)


def test_numpy_scalars_and_arrays_of_numbers_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    content = {
        "a": np.float64(0.5),
        "b": np.int64(3),
        "c": np.arange(3, dtype=np.float32),
        "d": np.array([True]),
    }
    torch.save(content, path)
    loaded = load_torch_file(path)
    assert loaded["a"] == 0.5 and loaded["b"] == 3 and loaded["d"].dtype == bool
    np.testing.assert_array_equal(loaded["c"], content["c"])


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with refused(f"{tmp_path / 'no.pt'}: expected a torch file, found none", R3Error):
        load_torch_file(tmp_path / "no.pt")
    (tmp_path / "x.pt").write_text("hello")
    with pytest.raises(R3Error, match=r"^.*x\.pt: expected "):
        load_torch_file(tmp_path / "x.pt")
