"""The files of a generator, found and read: spec, chat template, stop ids, sampling. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.pages.identity import with_short_context
from common.types.generation import SamplingParams
from engine.models.decoders.family import parse_decoder
from engine.models.decoders.spec import DecoderSpec
from engine.models.encoders import files
from engine.models.gguf import tokenizer as gguf_tokenizer
from engine.models.gguf.config import huggingface_config
from engine.models.gguf.reader import GgufFile, is_gguf, read_gguf

DEMO = "spillway-demo"
_DEMO_DIRECTORY = Path(__file__).resolve().parents[3] / "models" / "demo"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_NAME = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
_NO_LIMIT = 10_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderFiles:
    """One generator on disk: its name for users, its spec, and its tokens, templates and sampling defaults.

    `stop_ids` end its turns; `sampling` are the defaults for clients that set no values. `chat_template` and
    `grounding_template` are empty if the model has none; `reads` is as in ModelCard. `gguf` is the single file that
    holds the model, if it is a GGUF model.
    """

    name: str
    directory: Path
    spec: DecoderSpec
    weights: tuple[Path, ...]
    context: int
    chat_template: str
    grounding_template: str
    reads: float
    bos: str
    eos: str
    stop_ids: list[int]
    sampling: SamplingParams
    gguf: GgufFile | None = None

    def tokenizer_json(self) -> bytes:
        """Return tokenizer.json without truncation and padding; ConfigError if the file is no tokenizer."""
        if self.gguf is not None:
            return gguf_tokenizer.tokenizer_json(self.gguf)
        return files.tokenizer_json(self.directory)

    def fingerprint(self, *, kv_dtype: str, layout: int) -> str:
        """Return the identity of this model's pages: a hash of weights, adapter, KV type, parameters and page layout.

        The short context, beyond which a text has other pages, is appended in clear (see `common.pages.identity`).
        """
        digest = hashlib.blake2b(digest_size=16)
        for path in self.weights:
            digest.update(files.file_hash(path))
        described = {
            "weights": digest.hexdigest(),
            "adapter": None,
            "kv_dtype": kv_dtype,
            "parameters": dataclasses.asdict(self.spec),
            "layout": layout,
        }
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        found = hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
        return with_short_context(found, self.spec.short_context)


def find_decoder(model: str) -> DecoderFiles:
    """Find and describe a generator by directory, GGUF file, `spillway-demo`, or a hub id that is already downloaded.

    ConfigError names the file or field that is missing or wrong.
    """
    if is_gguf(Path(model).expanduser()):
        return _find_gguf(Path(model).expanduser().resolve())
    directory = _directory(model)
    where = directory / "config.json"
    config = files.read_json(where)
    spec = parse_decoder(config, where=str(where))
    tokens = files.read_json(directory / "tokenizer_config.json", optional=True)
    defaults = files.read_json(directory / "generation_config.json", optional=True)
    special = files.read_json(directory / "special_tokens_map.json", optional=True)
    stop_ids = _ids(defaults, directory / "generation_config.json", spec)
    stop_ids += [each for each in _ids(config, where, spec) if each not in stop_ids]
    return DecoderFiles(
        name=_name(model, config, where),
        directory=directory,
        spec=spec,
        weights=files.weight_files(directory),
        context=_context(spec, tokens),
        chat_template=_chat_template(directory, tokens),
        grounding_template=_text(directory / "grounding.jinja"),
        reads=_reads(defaults, directory / "generation_config.json"),
        bos=_token(tokens, special, "bos_token"),
        eos=_token(tokens, special, "eos_token"),
        stop_ids=stop_ids,
        sampling=_sampling(defaults, directory / "generation_config.json"),
    )


def _find_gguf(path: Path) -> DecoderFiles:
    file = read_gguf(path)
    spec = parse_decoder(huggingface_config(file), where=str(path))
    spec = dataclasses.replace(spec, norm_offset=0.0)  # the file's norm weights include it
    metadata = file.metadata
    defaults = {
        name: metadata.get(f"general.sampling.{key}")
        for name, key in (
            ("temperature", "temp"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("min_p", "min_p"),
            ("repetition_penalty", "penalty_repeat"),
        )
    }
    return DecoderFiles(
        name=files.model_name(path.stem),
        directory=path.parent,
        spec=spec,
        weights=(path,),
        context=spec.positions,
        chat_template=file.text("tokenizer.chat_template", ""),
        grounding_template=file.text("tokenizer.chat_template.grounding", ""),
        reads=0.0,
        bos=gguf_tokenizer.special_token(file, "bos"),
        eos=gguf_tokenizer.special_token(file, "eos"),
        stop_ids=gguf_tokenizer.stop_ids(file),
        sampling=_sampling(defaults, path),
        gguf=file,
    )


def _directory(model: str) -> Path:
    path = Path(model).expanduser()
    if model.lower() == DEMO and not path.exists():
        path = _DEMO_DIRECTORY
    if model and path.is_dir():
        return path
    if not model or path.exists() or not _HUB_ID.match(model):
        raise ConfigError(
            f"model {model!r}: no such directory; expected a directory with config.json, a GGUF file, a hub id, "
            f"or {DEMO}"
        )
    import huggingface_hub  # noqa: PLC0415 - only hub ids need it

    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except Exception as error:  # any error of the library means that the model is missing
        raise ConfigError(
            f"model {model!r}: no such directory, and not among the downloaded models; "
            f"expected a directory, or a hub id after `hf download {model}`"
        ) from error


def _name(model: str, config: Mapping[str, Any], where: Path) -> str:
    given = config.get("spillway")
    if given is None:
        # a relative path such as "." has a name only after it is resolved
        path = Path(model).expanduser()
        if model.lower() == DEMO or (path.is_dir() and path.resolve() == _DEMO_DIRECTORY):
            return DEMO
        return files.model_name(str(path.resolve()) if path.is_dir() else model)
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > 64:
        raise ConfigError(
            f"{where}: spillway.name is {name!r}; expected lower-case letters, digits and single hyphens"
        )
    return name


def _context(spec: DecoderSpec, tokens: Mapping[str, Any]) -> int:
    limit = tokens.get("model_max_length")
    if isinstance(limit, int | float) and 0 < limit < _NO_LIMIT:
        return min(spec.positions, int(limit))
    return spec.positions


def _ids(config: Mapping[str, Any], where: Path, spec: DecoderSpec) -> list[int]:
    """Return the ids in eos_token_id: none, one or several."""
    value = config.get("eos_token_id")
    given = value if isinstance(value, list) else [] if value is None else [value]
    for each in given:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < spec.vocabulary:
            raise ConfigError(
                f"{where}: eos_token_id has {each!r}; expected ids from 0 to {spec.vocabulary - 1}"
            )
    return list(dict.fromkeys(given))


def _sampling(config: Mapping[str, Any], where: Path) -> SamplingParams:
    def number(name: str, default: float, least: float, most: float) -> float:
        value = config.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"{where}: {name} is {value!r}; expected {least:g} to {most:g}")
        return float(value)

    temperature = number("temperature", 1.0, 0, 1e6)
    return SamplingParams(
        temperature=0.0 if config.get("do_sample") is False else temperature,
        top_p=number("top_p", 1.0, 0, 1),
        top_k=int(number("top_k", 0, 0, 1 << 31)),
        min_p=number("min_p", 0.0, 0, 1),
        repetition=number("repetition_penalty", 1.0, 1e-6, 1e6),
    )


def _reads(config: Mapping[str, Any], where: Path) -> float:
    """Return `reads` from Spillway's own key `spillway_reads_characters_per_token`; see ModelCard."""
    value = config.get("spillway_reads_characters_per_token", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise ConfigError(
            f"{where}: spillway_reads_characters_per_token is {value!r}; expected 0 to 100"
        )
    return float(value)


def _chat_template(directory: Path, tokens: Mapping[str, Any]) -> str:
    """Return chat_template.jinja, else the tokenizer configuration's template (of several the default one)."""
    text = _text(directory / "chat_template.jinja")
    given = tokens.get("chat_template")
    if text or given is None:
        return text
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get("default")
    if not isinstance(given, str):
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'}: chat_template is not text; expected a template"
        )
    return given


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; expected a readable text file") from error


def _token(tokens: Mapping[str, Any], special: Mapping[str, Any], name: str) -> str:
    """Return a special token's text, which the file gives as a string or in an object; empty if there is none."""
    for source in (tokens, special):
        value = source.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return ""
