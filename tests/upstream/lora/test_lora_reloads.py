# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The prefix cache must not answer for an adapter with another that had its name."""

import pytest

from vllm.lora.reloads import LoRAReloads
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request


@pytest.fixture(scope="module", autouse=True)
def same_root_of_hashes():
    init_none_hash(sha256)


def lora(lora_id: int = 1, path: str = "/a", load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("policy", lora_id, path, load_inplace=load_inplace)


def hashes(lora_request: LoRARequest | None) -> list:
    """What the prefix cache knows two blocks of a new request by."""
    request = Request(
        request_id="a",
        prompt_token_ids=list(range(8)),
        sampling_params=SamplingParams(),
        pooling_params=None,
        lora_request=lora_request,
        block_hasher=get_request_block_hasher(4, sha256),
    )
    assert len(request.block_hashes) == 2
    return request.block_hashes


@pytest.mark.parametrize(
    "replacement",
    [
        lora(load_inplace=True),
        lora(path="/b", load_inplace=True),
        lora(2),
        lora(2, "/b"),
    ],
    ids=["same files", "other files", "loaded again", "another"],
)
def test_a_replaced_adapter_finds_nothing_of_the_one_before(replacement: LoRARequest):
    reloads = LoRAReloads()
    reloads.note(lora())
    before = hashes(reloads.mark(lora()))
    reloads.note(replacement)
    after = hashes(reloads.mark(replacement))
    assert not set(before) & set(after)
    assert hashes(reloads.mark(replacement)) == after
    reloads.note(replacement if replacement.load_inplace else lora())
    assert not set(after) & set(hashes(reloads.mark(replacement)))


def test_an_adapter_that_replaced_none_is_known_by_its_name_alone():
    reloads = LoRAReloads()
    by_name = hashes(lora())
    assert hashes(reloads.mark(lora())) == by_name
    for _ in range(2):  # the second time it is there already
        reloads.note(lora())
        assert hashes(reloads.mark(lora())) == by_name
    assert reloads.mark(None) is None
    reloads.note(lora(load_inplace=True))
    assert hashes(reloads.mark(LoRARequest("other", 7, "/a"))) == hashes(
        LoRARequest("other", 7, "/a")
    )


def test_a_running_request_keeps_what_it_began_with():
    reloads = LoRAReloads()
    request = reloads.mark(lora())
    reloads.note(lora())
    reloads.note(lora(load_inplace=True))
    assert (request.num_reloads, reloads.mark(lora()).num_reloads) == (0, 1)
