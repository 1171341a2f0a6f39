"""From trained weights to GGUF files: F32, Q8_0 and a 4-bit one, each with the draft layer in a file beside it.

    python -m strata.bench.demo_pack.export CHECKPOINT FOLDER [--files Q8_0 Q4_0]

Names, order of the metadata and layout are those of the GGUF converter; a draft file holds block `layers` and shares
embedding and head with the model's file. Readable by this engine and by llama.cpp.
Errors    ValueError for weights that are not those of the geometry, and for a vocabulary that does not fit it
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from strata.bench.demo_pack.checkpoint import Checkpoint
from strata.bench.demo_pack.config import ARCHITECTURE, FILES, Geometry, Shape, tensor_type

NAME: Final = "Strata Demo"
STEM: Final = "strata-demo"
FILE_TYPES: Final = {"F32": 0, "Q8_0": 7, "Q4_0": 2}
_KINDS: Final = {
    "u32": gguf.GGUFValueType.UINT32, "i32": gguf.GGUFValueType.INT32, "u64": gguf.GGUFValueType.UINT64,
    "f32": gguf.GGUFValueType.FLOAT32, "bool": gguf.GGUFValueType.BOOL, "str": gguf.GGUFValueType.STRING,
}  # fmt: skip

Arrays = Mapping[str, np.ndarray]


def tokenizer_metadata() -> list[tuple[str, str, Any]]:
    """The keys of the demo pack's own vocabulary and chat template."""
    from strata.bench.demo_pack import tokenizer

    merges = tokenizer.load_merges()
    tokens = tokenizer.tokens_of(merges)
    return [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", tokenizer.PRE),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.token_type", "[i32]", tokenizer.token_types()),
        ("tokenizer.ggml.merges", "[str]", merges),
        ("tokenizer.ggml.eos_token_id", "u32", tokens.index("<|im_end|>")),
        ("tokenizer.ggml.padding_token_id", "u32", tokens.index("<|endoftext|>")),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.ggml.add_eos_token", "bool", False),
        ("tokenizer.chat_template", "str", tokenizer.chat_template()),
    ]


def check_vocabulary(g: Geometry, words: list[tuple[str, str, Any]]) -> None:
    """ValueError unless the vocabulary fills the embedding and has the n-grams' end where the geometry says."""
    values = {key: value for key, _, value in words}
    tokens, end = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.padding_token_id"]
    if len(tokens) != g.vocab or end != g.ngram_eos:
        raise ValueError(
            f"the vocabulary has {len(tokens)} tokens and <|endoftext|> at {end}, "
            f"the geometry wants {g.vocab} and {g.ngram_eos}"
        )


def write(
    path: Path, g: Geometry, weights: Arrays, file: str, words: list[tuple[str, str, Any]], *, draft: bool = False
) -> None:
    """One GGUF file of the model, or with `draft` of its draft layer.

    weights: float32, by name, `ssm_a` as in the file · words: the vocabulary's keys.
    Raises ValueError for a missing weight or one of another shape.
    """
    shapes = g.draft_shapes() if draft else g.shapes()
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            given = list(weights[name].shape) if name in weights else "missing"
            raise ValueError(f"{name} must have shape {list(shape)}, it is {given}")
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    for key, kind, value in _general(g, file, draft) + g.metadata(draft=draft) + words:
        add_key(writer, key, kind, value)
    for name in _order(shapes):
        kind = tensor_type(name, file)
        values = np.ascontiguousarray(weights[name], np.float32)
        if kind == "F32":
            writer.add_tensor(name, values)
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _general(g: Geometry, file: str, draft: bool) -> list[tuple[str, str, Any]]:
    return [
        ("general.type", "str", "model"),
        ("general.name", "str", NAME + (" draft" if draft else "")),
        ("general.size_label", "str", f"{g.experts}x{_millions(g)}M"),
        ("general.license", "str", "mit"),
        ("general.file_type", "u32", FILE_TYPES[file]),
        ("general.quantization_version", "u32", gguf.GGML_QUANT_VERSION),
    ]


def _millions(g: Geometry) -> int:
    return max(1, round(sum(np.prod(shape) for shape in g.shapes().values()) / 1e6))


def _order(shapes: Mapping[str, Shape]) -> list[str]:
    """The ends first, then block by block, as the converter writes them."""
    return sorted(shapes, key=lambda name: (name.startswith("blk."), int(name.split(".")[1]) if "blk." in name else 0))


def add_key(writer: gguf.GGUFWriter, key: str, kind: str, value: Any) -> None:
    if kind.startswith("["):
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=_KINDS[kind[1:-1]])
    else:
        writer.add_key_value(key, value, _KINDS[kind])


def read(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a GGUF file as float32, by name."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        found[tensor.name] = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            shape
        )
    return found


def export(checkpoint: Checkpoint, folder: Path, files: tuple[str, ...] = FILES) -> list[Path]:
    """Writes the files and returns their paths, model and draft of each type."""
    g, weights = checkpoint.geometry, as_in_file(checkpoint.weights)
    words = tokenizer_metadata()
    check_vocabulary(g, words)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for file in files:
        for draft, stem in ((False, STEM), (True, f"{STEM}-mtp")):
            path = folder / f"{stem}-{file.lower()}.gguf"
            write(path, g, weights, file, words, draft=draft)
            paths.append(path)
    return paths


def as_in_file(weights: Arrays) -> dict[str, np.ndarray]:
    """Training's weights as a file stores them: `ssm_a` is -exp of what training keeps."""
    return {name: -np.exp(w) if name.endswith("ssm_a") else w for name, w in weights.items()}


def as_in_training(weights: Arrays) -> dict[str, np.ndarray]:
    """The inverse of `as_in_file`."""
    return {name: np.log(-w) if name.endswith("ssm_a") else w for name, w in weights.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checkpoint", type=Path)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    given = arguments.parse_args()
    for path in export(Checkpoint.load(given.checkpoint), given.folder, tuple(given.files)):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
