"""The demo: right rows exit 0; wrong ones, a taken port and a server that dies exit 1."""

from __future__ import annotations

import base64
import io
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from forked import ForkedServer
from pool import count_start

from vllm_r3.cli import main
from vllm_r3.demo.serve import Server


def run(*args):
    command = [sys.executable, "-m", "vllm_r3", "demo", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=600)


def test_demo_of_a_model_with_more_than_256_experts_exits_0(tmp_path):
    with count_start("demo"):
        done = run("--model", "wide", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "prompt_routed_experts          int16 (85, 3, 8)\n" in done.stdout
    assert "choices[0].routed_experts      int16 (31, 3, 8)\n" in done.stdout
    assert "cold   116 rows, 232 cells (token, layer): all agree with the oracle\n" in done.stdout
    assert "again  116 rows, 232 cells (token, layer): all agree with the oracle\n" in done.stdout
    assert "cached 64 prompt tokens" in done.stdout
    steps = [line.split()[:3] for line in done.stderr.splitlines() if " of 7  " in line]
    assert steps == [[str(n), "of", "7"] for n in range(1, 8)]
    assert (tmp_path / "server.log").stat().st_size > 0


def npy(rows):
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


class FakeServer(Server):
    """Answers from the oracle, with rows spoiled on the way."""

    oracle = None
    spoil = staticmethod(lambda rows: rows)

    def start(self):
        pass

    def request(self, method, path, body=None, timeout_s=0):
        return 200, b"vllm:prefix_cache_hits_total 64.0"

    def ask(self, path, body=None):
        from vllm_r3.checks.server import META_FIELDS

        info = dict(num_layers=4, moe_layers=[0, 1, 2, 3], num_experts=16, top_k=4)
        info |= dict(dtype="uint8", encoding="npy", layout="split")
        if path == "/routed_experts/info":
            return info
        prompt, generated = body["token_ids"], [100 + i for i in range(32)]
        rows = self.spoil(self.oracle.truth(prompt + generated).rows.astype(np.uint8))
        choice = dict(index=0, token_ids=generated, routed_experts=npy(rows[len(prompt) :]))
        return {
            "prompt_routed_experts": npy(rows[: len(prompt)]),
            "choices": [choice],
            "routed_experts_meta": {"start": 0} | {name: info[name] for name in META_FIELDS},
        }


class Replayed:
    passed = True

    def lines(self):
        return []


@pytest.fixture
def fake(monkeypatch, oracles):
    monkeypatch.setattr("vllm_r3.demo.demo.Server", FakeServer)
    monkeypatch.setattr("vllm_r3.replay.replay.replay", lambda *args, **options: Replayed())
    monkeypatch.setattr(FakeServer, "oracle", oracles("moe"))

    def spoil(how):
        monkeypatch.setattr(FakeServer, "spoil", staticmethod(how))

    return spoil


def test_rows_of_the_oracle_itself_pass(fake, capsys):
    assert main(["demo"]) == 0


def put_zero(rows):
    rows[90:] = 0
    return rows


@pytest.mark.parametrize(
    ("how", "found"),
    [
        (lambda rows: np.roll(rows, 1, axis=0), "row 0, layer 0: expected experts ["),
        (lambda rows: rows[:, [1, 0, 2, 3]], "row 0, layer 0: expected experts ["),
        (put_zero, "zero rows: 26 of 116 rows hold zeros: 90-115\n"),
        (lambda rows: np.concatenate([rows[:-1], rows[-2:-1]]), "row 115, layer "),
    ],
    ids=["shifted", "layers swapped", "zeroed", "last row repeated"],
)
def test_wrong_rows_exit_1_and_name_the_cell(fake, capsys, how, found):
    fake(how)
    assert main(["demo"]) == 1
    assert f"vllm-r3: answer: {found}" in capsys.readouterr().err


def test_port_in_use_exits_1_and_says_so(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["demo", "--port", str(taken.getsockname()[1])]) == 1
    assert "expected a free port, found it in use" in capsys.readouterr().err


def test_unknown_model_exits_1_and_lists_the_known(capsys):
    assert main(["demo", "--model", "huge"]) == 1
    assert "unknown tiny model 'huge', expected one of moe, " in capsys.readouterr().err


def test_dense_model_exits_1_with_the_servers_own_reason(capsys, monkeypatch):
    monkeypatch.setattr("vllm_r3.demo.demo.Server", ForkedServer)
    with count_start("demo, refused"):
        assert main(["demo", "--model", "dense"]) == 1
    error = capsys.readouterr().err
    assert "vllm serve exited with status 1 while starting" in error
    assert "--enable-return-routed-experts does not work with the dense model" in error
