"""Programs for processes of their own: what a conversion holds in memory, and what is left when it is stopped."""

CHECKPOINT = """
import json, sys
from pathlib import Path
import numpy as np
from converters.safetensors_writer import write_sharded
from converters.source import TensorHeader

def make_checkpoint(directory, *, layers, hidden, intermediate, vocabulary):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }))
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 4, hidden), "self_attn.v_proj": (hidden // 4, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    noise = np.random.default_rng(0).standard_normal(max(sizes.values()), dtype=np.float32)
    headers = {name: TensorHeader(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()}
    write_sharded(directory, headers=headers, read=lambda name: noise[: sizes[name]].reshape(shapes[name]))
    return 4 * sum(sizes.values()), 4 * max(sizes.values())
"""

MEMORY = (
    CHECKPOINT
    + """
import gc
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import converters.conversion, converters.exporting
from pipeline.models.checkpoint import load_model, model_leaves
from pipeline.models.placement import Layout
from pipeline.models.registry import describe

root = Path(sys.argv[1])

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def growth(act):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    made = act()
    return status("VmHWM") - before, made

def convert(name):
    return converters.conversion.convert(root / name, to=root / f"{name}-flax")

def export(name):
    return converters.exporting.export(root / f"{name}-flax", to=root / f"{name}-back", dtype="bfloat16")

mesh = Mesh(np.array(jax.devices()), ("model",))
axes = {"kernel": PartitionSpec(None, "model"), "embedding": PartitionSpec("model")}
wide = []

def place(path, shape):
    wide.extend(a.shape for a in jax.live_arrays() if len(a.sharding.device_set) != len(jax.devices()))
    return NamedSharding(mesh, axes.get(path.rsplit(".")[-1], PartitionSpec()))

def load(name):
    directory = root / f"{name}-flax"
    return load_model(directory, dtype=None, layout=Layout(description=describe(directory), sharding=place))

make_checkpoint(root / "small", layers=1, hidden=64, intermediate=64, vocabulary=64)
for act in (convert, export, load):
    act("small")  # what the packages themselves take is not the conversion's
total, largest = make_checkpoint(root / "large", layers=10, hidden=1024, intermediate=2048, vocabulary=8192)
converted, _ = growth(lambda: convert("large"))
exported, _ = growth(lambda: export("large"))
loaded, model = growth(lambda: load("large"))
leaves = model_leaves(model)
print(json.dumps({
    "total": total, "largest": largest, "converted": converted, "exported": exported, "loaded": loaded,
    "num_devices": len(jax.devices()), "wide": wide,
    "kernel_shards": sorted({shard.data.shape for shard in leaves["layers.3.mlp.up_proj.kernel"].addressable_shards}),
    "norm_devices": len(leaves["norm.scale"].sharding.device_set),
    "equal": bool((np.asarray(leaves["layers.3.mlp.up_proj.kernel"])[:, 5] == np.asarray(
        leaves["layers.4.mlp.up_proj.kernel"])[:, 5]).all()),
}))
"""
)

FULL_DISK = (
    CHECKPOINT
    + """
import resource
import converters.conversion, converters.exporting, converters.flax_stablehlo, converters.torch_onnx_export

root = Path(sys.argv[1])
make_checkpoint(root / "checkpoint", layers=1, hidden=64, intermediate=96, vocabulary=101)
converters.conversion.convert(root / "checkpoint", to=root / "flax")
before = sorted(path.name for path in root.iterdir())
found = {}
for format in ("orbax", "safetensors", "stablehlo", "onnx"):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # every longer file is refused
    try:
        if format == "orbax":
            converters.conversion.convert(root / "checkpoint", to=root / "out")
        else:
            converters.exporting.export(root / "flax", to=root / "out", format=format)
        found[format] = ["written", ""]
    except Exception as error:
        found[format] = [type(error).__name__, str(error)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found[format].append(sorted(path.name for path in root.iterdir()) == before)
print(json.dumps(found))
"""
)

INTERRUPTED = (
    CHECKPOINT
    + """
import time
import converters.conversion, converters.exporting

root, format = Path(sys.argv[1]), sys.argv[2]
make_checkpoint(root / "checkpoint", layers=9, hidden=64, intermediate=96, vocabulary=101)
slowly = lambda done, total: time.sleep(0.1)
if format == "orbax":
    converters.conversion.convert(root / "checkpoint", to=root / "out", progress=slowly)
else:
    converters.exporting.export(root / "checkpoint", to=root / "out", format=format, progress=slowly)
"""
)
