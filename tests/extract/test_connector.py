"""What the connector of native capture refuses, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from draftsmith.extract.vllm_worker.connector import EndedPrompts, Followed, StatesConnector, _blocks_first
from draftsmith.extract.vllm_worker.spool import SpoolWriter, take_sequence

pytestmark = pytest.mark.vllm

LAYERS, BLOCK, HIDDEN = (2, 4, 8), 4, 5


def connector(cache: torch.Tensor, folder: Path, ended: list[Followed]) -> Any:
    """A worker's StatesConnector, in the step in which these prompts end."""
    made: Any = StatesConnector.__new__(StatesConnector)
    made._cache, made._cached_tokens, made.writer = cache, 1, SpoolWriter(folder, LAYERS)
    made._connector_metadata = EndedPrompts(ended)
    return made


def a_cache(blocks: int = 6) -> torch.Tensor:
    return torch.arange(blocks * BLOCK * len(LAYERS) * HIDDEN, dtype=torch.float32).view(blocks, BLOCK, -1, HIDDEN)


def test_each_prompt_is_read_from_its_own_blocks(tmp_path: Path) -> None:
    cache = a_cache()
    ended = [Followed(0, list(range(6)), [5, 2]), Followed(1, list(range(4)), [3, 0])]
    made = connector(cache, tmp_path, ended)
    made.wait_for_save()
    made.writer.flush()
    rows = cache.flatten(0, 1)
    for one, due in zip(ended, (torch.cat([rows[20:24], rows[8:10]]), rows[12:16]), strict=True):
        input_ids, parts = take_sequence(tmp_path, one.number, [LAYERS])
        assert input_ids.tolist() == one.input_ids
        assert torch.equal(parts[""], due)


def test_a_prompt_that_ends_in_a_step_that_cached_nothing_is_refused(tmp_path: Path) -> None:
    made = connector(a_cache(), tmp_path, [Followed(0, [1, 2, 3], [1])])
    made._cached_tokens = 0
    with pytest.raises(RuntimeError, match="a step in which it cached no hidden states"):
        made.wait_for_save()


def test_a_prompt_with_too_few_cache_blocks_is_refused(tmp_path: Path) -> None:
    made = connector(a_cache(), tmp_path, [Followed(7, [1] * 9, [1, 2])])
    with pytest.raises(RuntimeError, match="sample number 7 has 9 tokens and 2 cache blocks of 4 tokens"):
        made.wait_for_save()


@pytest.mark.parametrize(("tokens", "fits"), [(14, True), (15, True), (16, False)])
def test_a_prompt_so_long_that_its_states_are_not_cached_is_refused(tokens: int, fits: bool) -> None:
    made: Any = StatesConnector.__new__(StatesConnector)
    made._max_model_len, made._followed = 16, {"r": Followed(3, [1] * tokens, [])}
    ended = EndedPrompts()
    if fits:
        made._advance("r", tokens, ended)
        assert [one.number for one in ended.requests] == [3]
        return
    with pytest.raises(ValueError, match=f"sample number 3 has {tokens} tokens and the engine takes 16"):
        made._advance("r", tokens, ended)


def test_the_caches_axes_are_told_by_the_number_of_layers_or_not_at_all() -> None:
    cache = a_cache()
    assert torch.equal(_blocks_first(cache, len(LAYERS)), cache)
    assert torch.equal(_blocks_first(cache.transpose(1, 2), len(LAYERS)), cache)
    for layers in (2, 4):
        with pytest.raises(RuntimeError, match=f"in which {layers} layers are not told"):
            _blocks_first(torch.zeros(6, 4, 4, HIDDEN), layers)
