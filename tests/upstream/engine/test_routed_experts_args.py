# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The flags of how routed experts are returned."""

import pytest

from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(*words: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(list(words)))


def test_defaults_are_npy_and_split():
    args = parse()
    assert args.routed_experts_encoding == "npy"
    assert args.routed_experts_layout == "split"


@pytest.mark.parametrize("encoding", ["npy", "list", "file"])
@pytest.mark.parametrize("layout", ["split", "full"])
def test_every_value_is_taken(encoding: str, layout: str):
    args = parse(
        *("--routed-experts-encoding", encoding, "--routed-experts-layout", layout)
    )
    assert args.routed_experts_encoding == encoding
    assert args.routed_experts_layout == layout


@pytest.mark.parametrize(
    "words",
    [["--routed-experts-encoding", "json"], ["--routed-experts-layout", "joined"]],
)
def test_other_values_are_refused(words: list[str], capsys):
    with pytest.raises(SystemExit):
        parse(*words)
    assert f"argument {words[0]}: invalid choice" in capsys.readouterr().err


def test_flags_of_files_are_taken():
    args = parse()
    assert args.routed_experts_dir is None and args.routed_experts_dir_bytes is None
    assert args.routed_experts_file_ttl == 600
    args = parse(
        *("--routed-experts-dir", "/rows", "--routed-experts-file-ttl", "1.5"),
        *("--routed-experts-dir-bytes", "64G"),
    )
    assert args.routed_experts_dir == "/rows" and args.routed_experts_file_ttl == 1.5
    assert args.routed_experts_dir_bytes == 64 * 2**30


def test_help_describes_both_flags():
    text = EngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()
    assert "--routed-experts-encoding {file,list,npy}" in text
    assert "--routed-experts-layout {full,split}" in text


def test_flags_do_not_change_the_compiled_graph(model: str):
    flags = {"routed_experts_encoding": "list", "routed_experts_layout": "full"}
    flags |= {"routed_experts_dir": "/tmp", "routed_experts_file_ttl": 1.0}
    flags |= {"routed_experts_dir_bytes": 1}
    plain, other = ModelConfig(model), ModelConfig(model, **flags)
    assert plain.compute_hash() == other.compute_hash()
