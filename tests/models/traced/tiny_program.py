"""A program written by hand: a linear layer, a constant added, a size read from the input."""

from pipeline.models.traced.program import Binding, Dimension, Dtype, Graph, Input, Leaf, Node, Program, Ref

TINY = Program(
    name="Tiny",
    dtype="float32",
    parameters=("x", "y"),
    arguments={"x": Ref("x"), "y": (1.5, [Ref("y.1.0")])},
    inputs={
        "x": Input(shape=("batch", 3), dtype="float32"),
        "y.1.0": Input(shape=("batch",), dtype="int64", low=0, high=7),
    },
    dimensions={"batch": Dimension(low=1, high=64)},
    leaves={
        "layer.weight": Leaf(kind="parameter", shape=(2, 3), dtype="float32", aliases=("other.weight",)),
        "steps": Leaf(kind="buffer", shape=(), dtype="int64"),
    },
    constants={"shift": "float32"},
    bindings={
        "w": Binding(source="leaf", name="layer.weight"),
        "n": Binding(source="leaf", name="steps"),
        "c": Binding(source="constant", name="shift"),
        "x": Binding(source="input", name="x"),
        "y": Binding(source="input", name="y.1.0"),
    },
    graph=Graph(
        inputs=("w", "n", "c", "x", "y"),
        nodes=(
            Node(name="linear", operation="aten.linear.default", arguments=(Ref("x"), Ref("w")), module="layer"),
            Node(name="size", operation="aten.sym_size.int", arguments=(Ref("x"), 0)),
            Node(name="sum", operation="aten.add.Tensor", arguments=(Ref("linear"), Ref("c"))),
            Node(
                name="low",
                operation="aten.full.default",
                arguments=([Ref("size")], float("-inf")),
                keywords={"dtype": Dtype("float32")},
            ),
            Node(name="next", operation="aten.add.Tensor", arguments=(Ref("n"), 1)),
        ),
        output={"sum": Ref("sum"), "rest": (Ref("low"), None, [Ref("y")])},
    ),
    mutations={"steps": "next"},
    taps=(("layer", "linear"),),
    is_training=True,
)
