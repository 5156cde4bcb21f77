"""Where a target is: a local folder, the hub's cache, or the hub. Only small files and headers are ever fetched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import RequestError, TargetNotFoundError
from draftsmith.probe.gather import gather, summarize

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "*.py"]
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def read_evidence(model: str, *, revision: str | None = None) -> dict[str, Any]:
    """What `gather` finds in a folder, or in the hub's cached files of an id; the rest is asked of the hub.

    Adds `weights_at`: "here", or "hub" where only their headers were read; and of a hub model `hub_id` and `revision`,
    which is its commit.

    Raises:
        TargetNotFoundError: no such hub id or revision, or no right to read it, or no network.
        RequestError: a revision of a folder is asked for.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not _HUB_ID.match(model):
        if revision is not None:
            raise RequestError("a folder has no revisions", where=model, hint="leave it out, or give a hub id")
        return {**gather(model), "weights_at": "here"}
    return _from_hub(model, revision)


def _from_hub(model: str, revision: str | None) -> dict[str, Any]:
    from huggingface_hub import HfApi, try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(cached, str):
        evidence = _gather_snapshot(model, Path(cached).parent)
        if _has_weights(evidence):
            return evidence
    api = HfApi()
    evidence = _gather_snapshot(model, _fetch(api, model, revision))
    return evidence if _has_weights(evidence) else _with_remote_headers(evidence, api, model)


def _has_weights(evidence: dict[str, Any]) -> bool:
    """Whether any weight file is on this machine, whole or not."""
    return any(shard["bytes"] for shard in evidence["shards"])


def _gather_snapshot(model: str, folder: Path) -> dict[str, Any]:
    """Snapshots of the cache are named by their commit."""
    return {**gather(str(folder)), "hub_id": model, "revision": folder.name, "weights_at": "here"}


def _fetch(api: HfApi, model: str, revision: str | None) -> Path:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(api.snapshot_download(model, revision=revision, allow_patterns=SMALL_FILES))
    except GatedRepoError as error:
        raise TargetNotFoundError(
            "is gated: its owners have to grant access",
            where=model,
            hint="ask on the model's page, then `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise TargetNotFoundError(
            f"has no revision {revision!r}", where=model, hint="give a branch, tag or commit of it, or leave it out"
        ) from error
    except RepositoryNotFoundError as error:
        raise TargetNotFoundError(
            "is neither a folder here nor a model on the hub",
            where=model,
            hint="check the spelling; a private model needs `hf auth login`",
        ) from error
    except OSError as error:
        raise TargetNotFoundError(
            "is not a folder here and not in the hub's cache, and the hub cannot be reached",
            where=model,
            hint=f"`hf download {model}` where there is a network, and copy the folder; HF_HUB_OFFLINE forbids asking",
        ) from error


def _with_remote_headers(evidence: dict[str, Any], api: HfApi, model: str) -> dict[str, Any]:
    """The same evidence with sizes and tensor headers of the weight files that are on the hub only.

    Without a network it stays without them.
    """
    import httpx
    from huggingface_hub.errors import NotASafetensorsRepoError

    absent = ("no_weights", "missing_shard")
    evidence = {
        **evidence,
        "problems": [problem for problem in evidence["problems"] if problem["kind"] not in absent],
        "weights_at": "hub",
    }
    try:
        metadata = api.get_safetensors_metadata(model, revision=evidence["revision"])
        files = api.model_info(model, revision=evidence["revision"], files_metadata=True).siblings or []
    except NotASafetensorsRepoError:
        problem = {"kind": "no_weights", "file": model, "detail": "has no safetensors files on the hub"}
        return {**evidence, "problems": [*evidence["problems"], problem]}
    except (httpx.HTTPError, OSError):  # of huggingface_hub's errors, all that concern the network are one of these
        return evidence
    sizes = {file.rfilename: file.size or 0 for file in files}
    headers = {
        name: {
            tensor: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": info.data_offsets}
            for tensor, info in file.tensors.items()
        }
        for name, file in metadata.files_metadata.items()
    }
    shards = [{"name": name, "bytes": sizes.get(name, 0), "tensors": len(header)} for name, header in headers.items()]
    return {**evidence, "shards": shards, **summarize(headers)}
