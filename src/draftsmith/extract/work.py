"""The samples that an engine has been given and the store has not: their order, their retries, who is to blame."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from draftsmith.records import EncodedFeatures, Features, Sample


@dataclass(frozen=True)
class Captured:
    """What an engine made of a sample."""

    features: Features | EncodedFeatures
    next_token: int  # that it wrote after the sample's last


class Work:
    """The samples between corpus and store. They come out in the order in which they went in.

    Args:
        samples: what is to be captured.
        room_tokens: of samples that may be in between at once.
    """

    def __init__(self, samples: Iterable[Sample], room_tokens: int) -> None:
        self._incoming = enumerate(samples)
        self._ahead = next(self._incoming, None)  # drawn from `samples`, not sent
        self._room_tokens = room_tokens
        self._samples: dict[int, Sample] = {}  # sent at least once, not given out
        self._under_way: set[int] = set()
        self._again: deque[int] = deque()
        self._alone: set[int] = set()  # an engine died over these together
        self._reasons: dict[int, list[str]] = {}
        self._settled: dict[int, Captured | None] = {}
        self._next = self._held_tokens = 0
        self.captured = 0

    @property
    def done(self) -> bool:
        return self._ahead is None and not self._samples

    def next_to_send(self) -> tuple[int, Sample] | None:
        """Number and sample for the engine, if it may have one more now."""
        if self._again:
            number = self._again[0]
            if self._under_way and self._alone & {number, *self._under_way}:
                return None
            self._again.popleft()
        elif self._ahead is None or self._alone & self._under_way:
            return None
        else:
            number, sample = self._ahead
            if self._samples and self._held_tokens + len(sample.input_ids) > self._room_tokens:
                return None
            self._samples[number] = sample
            self._held_tokens += len(sample.input_ids)
            self._ahead = next(self._incoming, None)
        self._under_way.add(number)
        return number, self._samples[number]

    def sample(self, number: int) -> Sample:
        return self._samples[number]

    def ids(self, numbers: Iterable[int]) -> list[str]:
        """Of those that were not given out."""
        return [self._samples[number].id for number in numbers if number in self._samples]

    def settle(self, number: int, captured: Captured) -> None:
        self._under_way.remove(number)
        self._settled[number] = captured
        self.captured += 1

    def fail(self, number: int, reason: str) -> list[str] | None:
        """Note a failure. The sample is sent again; after the second time it is given up and its reasons returned."""
        self._under_way.remove(number)
        self._reasons.setdefault(number, []).append(reason)
        if len(self._reasons[number]) < 2:
            self._again.append(number)
            return None
        self._settled[number] = None
        return self._reasons[number]

    def lose_engine(self, lost: Collection[int], suspects: Sequence[int], reason: str) -> dict[int, list[str]]:
        """Note that an engine died over some of the samples that it had: over all if there are none to suspect.

        Each of those is tried alone. Where nobody could say why it died, perhaps killed from outside, it is none of
        several samples' failure yet.

        Args:
            lost: all that it had under way.

        Returns:
            The reasons of those that have failed twice by now.
        """
        blamed = [number for number in sorted(lost) if not suspects or number in suspects]
        failed = blamed if suspects or len(blamed) == 1 else []
        innocent = set(lost) - set(failed)
        given_up = {number: reasons for number in failed if (reasons := self.fail(number, reason))}
        self._alone |= set(blamed)
        self._under_way -= innocent
        self._again.extendleft(sorted(innocent, reverse=True))
        return given_up

    def take_ready(self) -> list[Captured]:
        """The samples that are next in order, as far as they are settled; those given up are passed over."""
        ready = []
        while self._next in self._settled:
            captured = self._settled.pop(self._next)
            self._held_tokens -= len(self._samples.pop(self._next).input_ids)
            self._next += 1
            if captured is not None:
                ready.append(captured)
        return ready
