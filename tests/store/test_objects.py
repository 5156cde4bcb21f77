"""Object storage, by fsspec's own in memory; and by S3's protocol where moto's server and s3fs are installed."""

import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from draftsmith.errors import MissingExtraError, RequestError, StoreError
from draftsmith.store.check import verify
from draftsmith.store.commands import app
from draftsmith.store.objects import download, upload
from draftsmith.store.shards import Store
from tests.store.random_store import assert_same, some_features, write_store
from tests.store.test_faults import contents


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty folder."""
    if request.param == "memory":
        yield "memory://bucket/store"
        fsspec.filesystem("memory").store.clear()
        return
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    fsspec.filesystem("s3").clear_instance_cache()
    yield "s3://bucket/store"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
    server.stop()


def test_a_store_comes_back_from_object_storage_byte_for_byte(tmp_path: Path, bucket: str) -> None:
    folder = write_store(tmp_path / "store", some_features())
    assert upload(folder, bucket)["copied_shards"] == 4
    assert download(bucket, tmp_path / "back")["copied_shards"] == 4
    assert contents(tmp_path / "back") == contents(folder)
    for ours, theirs in zip(Store.open(tmp_path / "back"), some_features(), strict=True):
        assert_same(ours, theirs)


def test_what_is_there_is_not_copied_again_and_a_store_that_grew_is_added_to(tmp_path: Path, bucket: str) -> None:
    samples = some_features()
    folder = write_store(tmp_path / "store", samples[:4])
    upload(folder, bucket)
    assert upload(folder, bucket)["copied_shards"] == 0
    download(bucket, tmp_path / "back")
    write_store(folder, samples[4:])
    assert upload(folder, bucket)["copied_shards"] == 2
    assert download(bucket, tmp_path / "back")["copied_shards"] == 2
    assert contents(tmp_path / "back") == contents(folder)


def test_an_upload_that_was_cut_short_is_no_store_and_goes_on(tmp_path: Path, bucket: str) -> None:
    folder = write_store(tmp_path / "store", some_features())
    upload(folder, bucket)
    files, root = fsspec.core.url_to_fs(bucket)
    for name in ("manifest.json", "shard-00002.safetensors"):
        files.rm_file(f"{root}/{name}")
    with pytest.raises(StoreError, match="no store here, or not all of it"):
        download(bucket, tmp_path / "back")
    assert upload(folder, bucket)["copied_shards"] == 1
    assert download(bucket, tmp_path / "back")["copied_shards"] == 4


def test_a_damaged_object_is_named_and_nothing_is_taken_for_a_store(tmp_path: Path, bucket: str) -> None:
    folder = write_store(tmp_path / "store", some_features())
    upload(folder, bucket)
    files, root = fsspec.core.url_to_fs(bucket)
    whole = files.cat_file(f"{root}/shard-00001.safetensors")
    files.pipe_file(f"{root}/shard-00001.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"shard-00001\.safetensors is not what was written"):
        download(bucket, tmp_path / "back")
    with pytest.raises(StoreError, match="no store here"):
        Store.open(tmp_path / "back")
    files.pipe_file(f"{root}/shard-00001.safetensors", whole)
    download(bucket, tmp_path / "back")
    assert verify(tmp_path / "back")["sound"]


def test_a_damaged_store_is_not_uploaded(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", some_features())
    (folder / "shard-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(StoreError, match="shard-00001"):
        upload(folder, "memory://bucket/damaged")
    with pytest.raises(StoreError, match="no store here"):
        download("memory://bucket/damaged", tmp_path / "back")


def test_another_store_is_not_replaced(tmp_path: Path, bucket: str) -> None:
    upload(write_store(tmp_path / "one", some_features()), bucket)
    with pytest.raises(StoreError, match="weights_sha256"):
        upload(write_store(tmp_path / "two", some_features(), weights_sha256="w1"), bucket)
    other = write_store(tmp_path / "three", some_features()[::-1])
    with pytest.raises(StoreError, match="has other samples"):
        upload(other, bucket)
    with pytest.raises(StoreError, match="has other samples"):
        download(bucket, other)


def test_an_address_that_nothing_is_installed_for_is_refused(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", [])
    with pytest.raises(RequestError, match="nonsense"):
        upload(folder, "nonsense://there")
    result = CliRunner().invoke(app, ["copy", str(folder), str(tmp_path)])
    assert isinstance(result.exception, RequestError)
    if "s3fs" not in sys.modules:
        try:
            import s3fs  # noqa: F401
        except ImportError:
            with pytest.raises(MissingExtraError, match="s3fs"):
                upload(folder, "s3://bucket/folder")
