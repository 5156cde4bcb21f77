from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.corpus import corpus_lengths, corpus_metadata, corpus_taught, read_corpus, write_corpus
from draftsmith.errors import DataError
from draftsmith.records import Sample


def sample(number: int) -> Sample:
    ids = list(range(number + 1))
    return Sample(f"s{number}", f"c{number}", "chat", "train", input_ids=ids, loss_mask=[id % 2 for id in ids])


def test_samples_come_back_in_the_order_written(tmp_path: Path) -> None:
    samples = [sample(number) for number in range(1500)]  # more than one row group
    assert write_corpus(tmp_path / "corpus.parquet", iter(samples), {"seed": 3}) == 1500
    assert list(read_corpus(tmp_path / "corpus.parquet")) == samples
    assert corpus_metadata(tmp_path / "corpus.parquet") == {"seed": 3}
    assert list(corpus_lengths(tmp_path / "corpus.parquet").items()) == [(s.id, len(s.input_ids)) for s in samples]
    assert corpus_taught(tmp_path / "corpus.parquet") == {s.id: sum(s.loss_mask[1:]) for s in samples}


def test_a_first_token_of_the_targets_own_has_none_before_it(tmp_path: Path) -> None:
    samples = [replace(sample(number), loss_mask=[1] * (number + 1)) for number in range(3)]
    write_corpus(tmp_path / "corpus.parquet", samples, {})
    assert list(corpus_taught(tmp_path / "corpus.parquet").values()) == [0, 1, 2]


@pytest.mark.parametrize(
    "bad",
    [replace(sample(7), loss_mask=[1]), replace(sample(7), input_ids=[], loss_mask=[]), replace(sample(7), id="s1")],
    ids=["a mask of another length", "no tokens", "an id that was there"],
)
def test_a_sample_that_cannot_be_used_is_refused_and_leaves_no_file(tmp_path: Path, bad: Sample) -> None:
    with pytest.raises(DataError, match=f"sample {bad.id}"):
        write_corpus(tmp_path / "corpus.parquet", [sample(1), sample(2), bad], {})
    assert not list(tmp_path.iterdir())


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    damaged, other = tmp_path / "damaged.parquet", tmp_path / "other.parquet"
    write_corpus(damaged, [sample(1)], {})
    damaged.write_bytes(damaged.read_bytes()[:-10])
    pq.write_table(pa.table({"text": ["hello"]}), other)
    with pytest.raises(DataError, match="not a readable corpus"):
        list(read_corpus(damaged))
    with pytest.raises(DataError, match="its columns are text"):
        corpus_lengths(other)
