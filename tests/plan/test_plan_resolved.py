from pathlib import Path

from pipeline.plan.graph import open_flow
from pipeline.plan.resolved import resolved_text

ROOT = Path(__file__).parents[2]


def same(one, other):
    return all(
        (a.name, a.parameters, a.gates, a.resources, a.retry, a.timeout_seconds)
        == (b.name, b.parameters, b.gates, b.resources, b.retry, b.timeout_seconds)
        for a, b in zip(one.stages, other.stages, strict=True)
    )


def test_the_resolved_text_is_the_same_flow(open_text, chain):
    flow = open_text(chain, "steps=200")
    text = resolved_text(flow)
    assert "# params.steps = 200 (given with -P)" in text
    assert "${params" not in text
    assert same(open_text(text), flow)


def test_odd_values_survive(open_text):
    written = (
        "flow: odd\nstages:\n  a:\n    uses: python.call\n    description: 'a: b'\n    with:\n      call: m:f\n"
        "      arguments: {a: '007', b: 'yes', c: 1e-5, d: 'null', e: '$${x}', f: \"two\\nlines \", g: ['1', 2, true],"
        " h: '', i: 3.0, j: '# no', k: 'ä €'}\n"
        "    gates: {anything: '>= 99%'}\n    resources: {memory: 2GiB, cpus: 0.25}\n    timeout_seconds: 5\n"
        "  b:\n    uses: register.model\n    with: {model: '${stages.c.outputs.model}', name: x, alias: ~}\n"
        "  c:\n    uses: convert.flax\n    with: {checkpoint: '${stages.t.outputs.checkpoint}'}\n"
        "  t:\n    uses: train.fsdp\n    with: {dataset: '${stages.d.outputs.dataset}', model: model.json, steps: 1}\n"
        "  d:\n    uses: data.text\n"
    )
    flow = open_text(written)
    assert flow.stages[0].parameters.arguments["e"] == "${x}"
    assert same(open_text(resolved_text(flow)), flow)


def test_the_shipped_flow_survives(open_text):
    flow = open_flow(ROOT / "flows" / "llm.yaml")
    again = open_text(resolved_text(flow), file=str(ROOT / "flows" / "llm.yaml"))
    assert same(again, flow)


def test_groups_of_parameters_are_written_out(open_text, tmp_path):
    """`mesh`, `canary` and `shadow` of a deployment are mappings with keys of their own."""
    file = str(ROOT / "flows" / "canary.yaml")
    flow = open_text((ROOT / "flows" / "canary.yaml").read_text(), f"source={tmp_path}", file=file)
    text = resolved_text(flow)
    assert "mesh:\n        tensor: 1" in text and "p95_ttft_ms: < 300" in text
    assert same(open_text(text, file=file), flow)
