"""The default encoder as an ONNX file for ONNX Runtime and OpenVINO: token ids in, unit vectors out.

`python onnx_file.py MODEL FILE plain|fused|int8` runs in their environment. fused has ONNX Runtime's own fusions of
BERT, int8 its dynamic quantization of the plain file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS = ("plain", "fused", "int8")
HEADS, HIDDEN = 12, 384


def of(model: Path, kind: str, folder: Path, python: Path) -> Path:
    """Return the file of a kind in a folder; `python`, which has torch and onnx, writes it if it is not there."""
    file = folder / f"minilm-{kind}.onnx"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new.onnx")
        subprocess.run([str(python), "-P", __file__, str(model), str(fresh), kind], check=True)
        fresh.rename(file)
    return file


def export(model: Path, target: Path) -> None:
    """Write the encoder with its pooling and normalising, any batch and length, in fp32."""
    import torch  # noqa: PLC0415 - in its environment only
    from transformers import AutoModel  # noqa: PLC0415

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert: Any = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            rows = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weights = attention_mask[..., None].to(rows.dtype)
            mean = (rows * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=1)

    ids = torch.ones(2, 16, dtype=torch.long)
    free = {0: "batch", 1: "tokens"}
    with torch.inference_mode():
        torch.onnx.export(
            Encoder(), (ids, ids), str(target), input_names=["input_ids", "attention_mask"], output_names=["vectors"],
            dynamic_axes={"input_ids": free, "attention_mask": free, "vectors": {0: "batch"}},
            opset_version=17, dynamo=False,
        )  # fmt: skip


def write(model: Path, target: Path, kind: str) -> None:
    """Write a file of a kind."""
    export(model, target)
    if kind == "fused":
        from onnxruntime.transformers import optimizer  # type: ignore[import-not-found]  # noqa: PLC0415

        found = optimizer.optimize_model(str(target), "bert", num_heads=HEADS, hidden_size=HIDDEN)
        print(found.get_fused_operator_statistics())
        found.save_model_to_file(str(target))
    elif kind == "int8":
        from onnxruntime.quantization import quantize_dynamic  # type: ignore[import-not-found]  # noqa: PLC0415

        quantize_dynamic(str(target), str(target))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
