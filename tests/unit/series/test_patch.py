"""Strict means: recorded content, recorded line, recorded result."""

from __future__ import annotations

import re

import pytest
from sample_series import FIRST, SOURCES, Lab

from vllm_r3.errors import R3Error
from vllm_r3.series.patch import NO_BLOB, apply_patch, parse_patch, slug, split_lines


def apply_text(name: str, data: bytes) -> dict[str, bytes | None]:
    files: dict[str, bytes | None] = dict(SOURCES)
    apply_patch(parse_patch(name, data), files)
    return files


def test_every_kind_of_change_gives_the_author_tree(patched_lab: Lab) -> None:
    files: dict[str, bytes | None] = dict(SOURCES)
    for patch in patched_lab.series().patches():
        apply_patch(patch, files)
    tree = patched_lab.import_tree()
    assert files["vllm/old/gone.py"] is None
    assert files["vllm/r3/__init__.py"] == b""
    for path in ("vllm/engine.py", "vllm/odd.py", "vllm/r3/store.py"):
        assert files[path] == (tree / path).read_bytes()


def test_message_of_a_folded_non_ascii_subject_is_read_whole(patched_lab: Lab) -> None:
    first, second = patched_lab.series().patches()
    assert first.subject == "[MoE] Index captured rows by layer"
    assert second.subject == "[Frontend] Add the endpoint — and a subject so long that it folds"
    assert second.trailers == {
        "Reason": "permanent",
        "Upstream": "none",
        "Tested": "by the unit tests",
    }


def test_hunk_shifted_by_one_line_is_refused(patched_lab: Lab) -> None:
    data = patched_lab.series().raw[FIRST]
    shifted = data.replace(b"@@ -7,7 +7,8 @@", b"@@ -8,7 +8,8 @@")
    assert shifted != data
    with pytest.raises(R3Error) as caught:
        apply_text(FIRST, shifted)
    assert str(caught.value) == (
        f"{FIRST} does not apply, first rejected file vllm/engine.py: "
        "hunk 1 does not stand at line 8"
    )


def test_changed_added_line_gives_a_refused_result(patched_lab: Lab) -> None:
    data = patched_lab.series().raw[FIRST].replace(b"+line_10 = 100", b"+line_10 = 101")
    with pytest.raises(R3Error, match="expected result blob [0-9a-f]{12}, found blob [0-9a-f]{12}"):
        apply_text(FIRST, data)


def test_file_that_is_not_the_recorded_one_is_refused(patched_lab: Lab) -> None:
    patch = patched_lab.series().patches()[0]
    files: dict[str, bytes | None] = {**SOURCES, "vllm/engine.py": b"# other\n"}
    with pytest.raises(R3Error, match="first rejected file vllm/engine.py: expected blob"):
        apply_patch(patch, files)


def test_new_file_that_is_there_already_is_refused(patched_lab: Lab) -> None:
    patch = patched_lab.series().patches()[0]
    files: dict[str, bytes | None] = {**SOURCES, "vllm/r3/store.py": b""}
    with pytest.raises(
        R3Error, match="vllm/r3/store.py: expected no such file, found blob e69de29bb2d1"
    ):
        apply_patch(patch, files)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (NO_BLOB.encode(), b"1" * 40, "a zeroed 'From' line, headers, a message and 'diff --git'"),
        (b"Date: ", b"Dated: ", "the headers From, Date and Subject (no Date)"),
        (b"new file mode 100644", b"new file mode 100755", "no mode but that of a plain file for"),
        (b"new file mode 100644", b"new file mode 120000", "no mode but that of a plain file for"),
        (b"vllm/engine.py", b"../vllm/engine.py", "a path below vllm/ in place of ../vllm/engine"),
        (b"vllm/engine.py", b"vllm/../../x.py", "a path below vllm/ in place of vllm/../../x.py"),
        (b"vllm/engine.py", b"setup.py", "a path below vllm/ in place of setup.py"),
    ],
    ids=["commit-id", "no-date", "executable", "link", "above", "out-of-it", "beside"],
)
def test_other_form_of_a_patch_is_refused(
    patched_lab: Lab, old: bytes, new: bytes, expected: str
) -> None:
    count = -1 if b"engine" in old else 1
    data = patched_lab.series().raw[FIRST].replace(old, new, count)
    with pytest.raises(R3Error, match=re.escape(f"{FIRST}: expected {expected}")):
        parse_patch(FIRST, data)


def test_abbreviated_blob_ids_are_refused(patched_lab: Lab) -> None:
    data = re.sub(rb"index ([0-9a-f]{9})\w+\.\.", rb"index \1..", patched_lab.series().raw[FIRST])
    with pytest.raises(R3Error, match="expected full blob ids"):
        parse_patch(FIRST, data)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a\n"]),
        (b"a\r\n\x0cb\x85\n\n", [b"a\r\n", b"\x0cb\x85\n", b"\n"]),
    ],
)
def test_lines_end_at_line_feeds_alone(data: bytes, lines: list[bytes]) -> None:
    assert split_lines(data) == lines


def test_slug_is_the_subject_in_lower_case() -> None:
    subject = "[MoE] Index captured rows by global layer number"
    assert slug(subject) == "moe_index_captured_rows_by_global_layer_number.patch"
