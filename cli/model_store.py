"""Models on this machine's disk: in the cache of `huggingface_hub`, and in other files and directories."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError, Unavailable

# The files downloaded of a model: no weights in other formats, no pictures.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.gguf))?\Z")


class HubName(NamedTuple):
    """A model of the hub, `org/name`; `file`: one GGUF file of it (`org/name/FILE.gguf`), or ""."""

    model: str
    file: str


class StoredModel(NamedTuple):
    """A downloaded model: its id, its size in bytes, and its GGUF files, if it has any."""

    model: str
    size: int
    files: list[str]


def hub_name(text: str) -> HubName | None:
    """Return a text as a name on the hub, or None if it cannot be one."""
    match = _NAME.match(text)
    if match is None or (text.endswith(".gguf") and not match[2]):
        return None
    return HubName(match[1], match[2] or "")


def find(text: str) -> Path | None:
    """Return the path of a model: the given path, or one in the cache; None if the model is not on this machine."""
    place = Path(text).expanduser()
    if place.exists():
        return place
    name = hub_name(text)
    if name is None:
        return None
    import huggingface_hub  # noqa: PLC0415 - slow to import

    found = huggingface_hub.try_to_load_from_cache(name.model, name.file or "config.json")
    if not isinstance(found, str):
        return None
    return Path(found) if name.file else Path(found).parent


def missing(text: str) -> ConfigError:
    """Return the error for a model of the hub that is not downloaded."""
    return ConfigError(
        f"model {text!r} is not downloaded; expected a path, or a hub id after `spillway models pull {text}`"
    )


def pull(text: str) -> Path:
    """Download a model, or one GGUF file of it; Unavailable names the hub's refusal."""
    name = hub_name(text)
    if name is None:
        raise ConfigError(f"model {text!r}: expected a hub id, org/name or org/name/FILE.gguf")
    import huggingface_hub  # noqa: PLC0415 - slow to import

    try:
        if name.file:
            return Path(huggingface_hub.hf_hub_download(name.model, name.file))
        found = Path(huggingface_hub.snapshot_download(name.model, allow_patterns=_WANTED))
    except Exception as error:  # the library raises its own errors, httpx's and the system's
        reason = str(error).strip().partition("\n")[0][:300]
        raise Unavailable(f"model {text!r} cannot be downloaded: {reason}") from error
    if not (found / "config.json").exists():
        raise ConfigError(
            f"model {text!r} has no config.json; expected one file of it, as {text}/FILE.gguf"
        )
    return found


def stored() -> list[StoredModel]:
    """Return the downloaded models, by id."""
    import huggingface_hub  # noqa: PLC0415 - slow to import

    try:
        cache = huggingface_hub.scan_cache_dir()
    except huggingface_hub.CacheNotFound:
        return []
    found = []
    for repo in cache.repos:
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        files = sorted(name for name in names if name.endswith(".gguf"))
        if repo.repo_type == "model":
            found.append(StoredModel(repo.repo_id, repo.size_on_disk, files))
    return sorted(found)


def remove(text: str) -> int:
    """Delete a downloaded model from the cache; return the bytes freed. ConfigError if it is not in the cache."""
    import huggingface_hub  # noqa: PLC0415 - slow to import

    name = hub_name(text)
    if name is not None and not name.file:
        try:
            cache = huggingface_hub.scan_cache_dir()
        except huggingface_hub.CacheNotFound:
            raise missing(text) from None
        for repo in cache.repos:
            if repo.repo_id == name.model and repo.repo_type == "model":
                # Not by revisions: copies of one model on the hub may share them.
                shutil.rmtree(repo.repo_path)
                return repo.size_on_disk
        raise missing(text)
    raise ConfigError(
        f"model {text!r}: expected the hub id of a downloaded model, org/name; files of yours are yours to delete"
    )
