"""The command line: verbs and their options, nothing else.

Owns the names of verbs and options and the way an error becomes an exit code. The one decision: a verb's code is a
dotted string that is loaded when the verb is called, so that `--help` loads no framework and answers at once.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import (
    Address,
    Cluster,
    Deployment,
    Ephemeral,
    Flow,
    Force,
    Json,
    NoTracking,
    Params,
    Reason,
    Run,
    Source,
    StoreOption,
    Verbose,
)
from pipeline.cli.verbs import call, complain, explain_click
from pipeline.errors import EXIT_CODE_INTERRUPTED, PipelineError

app = typer.Typer(
    name="pipeline",
    help="Train in torch, prove the conversion, serve from JAX: one YAML flow on Ray, remembered by MLflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def run(
    flow: Flow,
    param: Params = None,
    store: StoreOption = None,
    address: Address = None,
    cluster: Cluster = None,
    ephemeral: Ephemeral = False,
    force: Force = None,
    no_tracking: NoTracking = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a flow: reuse what is committed, run the rest, leave the endpoint up."""
    call(
        "run",
        flow_path=flow,
        overrides=param or [],
        store=store,
        address=address,
        cluster=cluster,
        ephemeral=ephemeral,
        force=force or [],
        no_tracking=no_tracking,
        as_json=json,
        verbose=verbose,
    )


@app.command()
def rerun(
    run: Run = "latest",
    store: StoreOption = None,
    address: Address = None,
    cluster: Cluster = None,
    ephemeral: Ephemeral = False,
    no_tracking: NoTracking = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Take up a run that crashed, failed or was interrupted, from what was committed."""
    call(
        "rerun",
        run=run,
        store=store,
        address=address,
        cluster=cluster,
        ephemeral=ephemeral,
        no_tracking=no_tracking,
        as_json=json,
        verbose=verbose,
    )


@app.command()
def plan(
    flow: Flow,
    param: Params = None,
    store: StoreOption = None,
    cluster: Cluster = None,
    ephemeral: Ephemeral = False,
    force: Force = None,
    json: Json = False,
) -> None:
    """Show what a run would do: which stages are reused or run, why, and what they take."""
    call(
        "plan",
        flow_path=flow,
        overrides=param or [],
        store=store,
        cluster=cluster,
        ephemeral=ephemeral,
        force=force or [],
        as_json=json,
    )


@app.command()
def validate(flow: Flow, param: Params = None, json: Json = False) -> None:
    """Check a flow and say everything that is wrong with it."""
    call("validate", flow_path=flow, overrides=param or [], as_json=json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of flows."""
    call("schema")


@app.command()
def runs(
    limit: Annotated[int, typer.Option(help="Newest runs shown.", min=1)] = 20,
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """List runs, newest first."""
    call("runs", limit=limit, store=store, as_json=json)


@app.command()
def show(run: Run = "latest", store: StoreOption = None, json: Json = False) -> None:
    """Show one run: stages, attempts, metrics, gates."""
    call("show", run=run, store=store, as_json=json)


@app.command()
def logs(
    run: Run,
    stage: Annotated[str, typer.Argument(help="Name of the stage.", show_default=False)],
    attempt: Annotated[int | None, typer.Option(help="Attempt; the last by default.", min=1)] = None,
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """Print what a stage said and printed."""
    call("logs", run=run, stage=stage, attempt=attempt, store=store, as_json=json)


@app.command()
def ui(
    store: StoreOption = None,
    port: Annotated[int | None, typer.Option(help="Port; a free one from 5000 by default.", min=1, max=65535)] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
) -> None:
    """Start MLflow's UI on the store; Ctrl-C stops it."""
    call("ui", store=store, port=port, host=host)


@app.command()
def down(store: StoreOption = None, json: Json = False) -> None:
    """Stop the endpoint and the local Ray head that runs started."""
    call("down", store=store, as_json=json)


@app.command()
def deployments(
    name: Annotated[str | None, typer.Argument(help="Show the events of this one.", show_default=False)] = None,
    store: StoreOption = None,
    address: Address = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """List what serves: version, since when, replicas, endpoint, health, traffic; or the events of one deployment."""
    call("deployments", name=name, store=store, address=address, cluster=cluster, as_json=json)


@app.command()
def promote(
    name: Deployment,
    version: Annotated[
        str,
        typer.Argument(
            help="A version or alias of the registry, the beginning of a digest, or `challenger`.", show_default=False
        ),
    ],
    reason: Reason = "",
    store: StoreOption = None,
    address: Address = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Serve another version of a deployment; the one that serves goes on until the other answers."""
    call(
        "promote",
        name=name,
        version=version,
        reason=reason,
        store=store,
        address=address,
        cluster=cluster,
        as_json=json,
    )


@app.command()
def rollback(
    name: Deployment,
    to: Annotated[
        str | None, typer.Option("--to", help="The version; the one before by default.", show_default=False)
    ] = None,
    reason: Reason = "",
    store: StoreOption = None,
    address: Address = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Serve the version before; its parameters are still in memory where shapes are the same."""
    call("rollback", name=name, to=to, reason=reason, store=store, address=address, cluster=cluster, as_json=json)


@app.command()
def convert(
    source: Source,
    to: Annotated[Path | None, typer.Option("--to", help="The new directory.", show_default=False)] = None,
    format: Annotated[str, typer.Option("--format", help="orbax, safetensors, onnx or stablehlo.")] = "orbax",
    via: Annotated[str, typer.Option("--via", help="auto, family or trace.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="keep, float32 or bfloat16.")] = "keep",
    opset: Annotated[int | None, typer.Option("--opset", help="Of ONNX.", show_default=False)] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Of ONNX: also a model with weights in int8.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Plan only: reads headers, writes nothing.")] = False,
    json: Json = False,
) -> None:
    """Convert a model: a torch checkpoint to Flax, or a Flax directory to another format."""
    call(
        "convert",
        source=source,
        to=to,
        format=format,
        via=via,
        dtype=dtype,
        opset=opset,
        int8=int8,
        check=check,
        as_json=json,
    )


@app.command()
def diff(
    first: Source,
    second: Annotated[str, typer.Argument(help="Another, of any format.", show_default=False)],
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of a number; above 0, dtypes may differ.", min=0.0)
    ] = 0.0,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: missing, extra, shape, dtype, numbers."""
    call("diff", first=first, second=second, tolerance=tolerance, as_json=json)


@app.command()
def parity(
    source: Source,
    flax: Annotated[str, typer.Argument(help="The Flax model directory made from it.", show_default=False)],
    block_limit: Annotated[float, typer.Option(help="Relative error of a block.", min=0.0)] = 1e-5,
    output_limit: Annotated[float, typer.Option(help="Relative error of an output.", min=0.0)] = 1e-4,
    continued_tokens: Annotated[int, typer.Option(help="Tokens continued greedily.", min=0)] = 16,
    seed: Annotated[int, typer.Option(help="Of the random inputs.", min=0)] = 0,
    report: Annotated[
        Path | None, typer.Option("--report", help="Directory for parity.json and parity.html.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Prove that a torch checkpoint and its Flax model compute the same: tensors, blocks, outputs."""
    call(
        "parity",
        source=source,
        flax=flax,
        block_limit=block_limit,
        output_limit=output_limit,
        continued_tokens=continued_tokens,
        seed=seed,
        report=report,
        as_json=json,
    )


@app.command("verify-resume")
def verify_resume(
    flow: Flow,
    stage: Annotated[str, typer.Option(help="The train.fsdp stage; the only one by default.", show_default=False)] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps of the experiment.", min=2)] = 10,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between its checkpoints.", min=1)] = 3,
    kill_at: Annotated[
        list[int] | None, typer.Option(help="Kill a rank at this step (from 0); repeatable.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="Kill once at every step.")] = False,
    other_workers: Annotated[
        int | None, typer.Option(help="Go on with so many ranks too; half by default, 0 for none.", min=0)
    ] = None,
    param: Params = None,
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """Kill a training stage and resume it: are losses, rows, parameters, optimizer and RNG bit-equal?"""
    call(
        "verify-resume",
        flow_path=flow,
        stage=stage,
        steps=steps,
        checkpoint_every=checkpoint_every,
        kill_at=kill_at or [],
        every=every,
        other_workers=other_workers,
        overrides=param or [],
        store=store,
        as_json=json,
    )


@app.command()
def estimate(
    flow: Flow,
    stage: Annotated[str, typer.Option(help="The train.fsdp stage; the only one by default.", show_default=False)] = "",
    memory_gb: Annotated[
        float | None,
        typer.Option(help="Of one rank; its share of this machine where ranks have no GPU.", show_default=False),
    ] = None,
    param: Params = None,
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """Say what a rank of a training stage will hold in memory, by kind, and whether it fits."""
    call(
        "estimate",
        flow_path=flow,
        stage=stage,
        memory_gb=memory_gb,
        overrides=param or [],
        store=store,
        as_json=json,
    )


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="`train`, `trace`, `convert` or `serve`.", show_default=False)],
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are compared.", min=1)] = 5,
    only: Annotated[
        str, typer.Option(help="Comma-separated patterns of models (trace) or rows (serve, train).", show_default=False)
    ] = "",
    jobs: Annotated[int | None, typer.Option(help="Models at a time (trace); 1 by default.", min=1)] = None,
    update_docs: Annotated[bool, typer.Option("--update-docs", help="Write docs/trace-coverage.md (trace).")] = False,
    store: StoreOption = None,
    json: Json = False,
    no_tracking: NoTracking = False,
) -> None:
    """Measure ours and its peers side by side in one run."""
    call(
        "bench",
        name=name,
        rounds=rounds,
        only=only,
        jobs=jobs,
        update_docs=update_docs,
        store=store,
        as_json=json,
        no_tracking=no_tracking,
    )


def main() -> None:
    """Entry point of the `pipeline` command."""
    try:
        code = app(standalone_mode=False)
    except PipelineError as error:
        complain(str(error))
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted")
        code = EXIT_CODE_INTERRUPTED
    except BrokenPipeError:
        code = 0
    except Exception as error:
        code = explain_click(error)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
