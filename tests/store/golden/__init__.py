"""Stores as earlier versions wrote them, and what is in them."""

from __future__ import annotations

from pathlib import Path

import torch

from draftsmith.records import Features

FORMAT_1 = Path(__file__).parent / "format-1"  # a line of the ledger has the checksum of its entry alone; BLAKE2b
FORMAT_2 = FORMAT_1.with_name("format-2")  # the last state of every token
HIDDEN_SIZE, LENGTHS = 8, (5, 1, 3)


def golden_features(number: int) -> Features:
    tokens = LENGTHS[number]
    states = (torch.arange(tokens * 4 * HIDDEN_SIZE).view(tokens, 4, HIDDEN_SIZE) * 7 + number) % 128 - 64
    states = states.to(torch.bfloat16)
    return Features(
        id=f"sample-{number}",
        domain=("chat", "code")[number % 2],
        split=("train", "validation")[number // 2],
        input_ids=torch.arange(tokens) * 100 + number,
        loss_mask=torch.arange(tokens) % 2 == 1,
        aux=states[:, :-1],
        last=states[:, -1],
    )
