"""The rows of speed: our loop against a bare FSDP2 loop, Accelerate and Lightning Fabric.

Owns the sides, the proof that all compute the same, and what ours is charged with. The one decision: a side is timed
only after its losses of the first steps were those of ours. Against the bare loop ours is charged with its share of a
checkpoint at the default cadence, though none falls into a measured round; no other side is, nor is ours against them.
Every round has new ranks: where the memory of a process lies decides over several percent of its speed, for its life.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec

from pipeline.diagnostics.bench_result import BenchRow
from pipeline.diagnostics.bench_train_gang import Gang
from pipeline.diagnostics.bench_train_material import CHECKPOINT_EVERY_STEPS, Material, Measured
from pipeline.diagnostics.bench_turns import Figures, Measure, Rounds, RowSpec, make_row, take_turns
from pipeline.errors import PipelineError, StageError

BARE_BAR = 0.98
PEER_BAR = 1.0
OURS, BARE, ACCELERATE, FABRIC = "ours", "bare", "accelerate", "fabric"
SIDES: Mapping[str, str] = {
    OURS: "pipeline.diagnostics.bench_train_ours:enter",
    BARE: "pipeline.diagnostics.bench_train_bare:enter",
    ACCELERATE: "pipeline.diagnostics.bench_train_accelerate:enter",
    FABRIC: "pipeline.diagnostics.bench_train_fabric:enter",
}
"""`(worker, job) -> context manager of a loop`; resolved in the side's own ranks."""
_NEEDS = {ACCELERATE: "accelerate", FABRIC: "lightning_fabric"}
_PEERS = {
    BARE: ("bare FSDP2 loop", BARE_BAR),
    ACCELERATE: ("Accelerate, FSDP2", PEER_BAR),
    FABRIC: ("Lightning Fabric, FSDP2", PEER_BAR),
}
_COMPARED_STEPS = 5
"""Steps whose losses are compared; four updates lie before the last of them."""
LOSS_TOLERANCE = 1e-5
"""Between sides, nats. Measured: 3e-7 at step 5; an update that is left out moves the loss by 0.3."""
_TURNS_A_ROUND = 4
_STEADY, _CHARGED = "tokens_per_second", "tokens_per_second_with_checkpoints"


def measure(material: Material) -> Measured:
    """Tokens per second of every side, on ranks with one thread each."""
    present = {name: loop for name, loop in SIDES.items() if name not in _NEEDS or find_spec(_NEEDS[name])}
    rounds = [_measure_round(present, material, number) for number in range(material.rounds)]
    measured = {name: _joined([one[name] for one in rounds]) for name in present}
    size = f"{material.model.stem}, {material.world_size} ranks, {material.global_batch_tokens} tokens a step"
    rows = []
    for name, (shown, bar) in _PEERS.items():
        metric = _CHARGED if name == BARE else _STEADY
        spec = RowSpec(
            name=f"speed, {size}", unit="tokens/s", metric=metric, peer_metric=_STEADY, peers={name: shown}, bar=bar
        )
        missing = BenchRow(name=spec.name, unit=spec.unit, ours=None, peer_name=shown, peer=None, bar=bar)
        rows.append(make_row(spec, measured=measured) if name in present else missing)
    return Measured(rows=tuple(rows))


def _measure_round(present: Mapping[str, str], material: Material, number: int) -> dict[str, Rounds]:
    with ExitStack() as stack:
        job = material.job(f"speed-{number}")
        gangs = {
            name: stack.enter_context(Gang(name, loop, job=job, world_size=material.world_size))
            for name, loop in present.items()
        }
        compared = _compare(gangs, material)
        share = _checkpoint_share(gangs[OURS])
        material.notice(
            f"  ours is charged {1000 * share:.1f} ms a step for a checkpoint every {CHECKPOINT_EVERY_STEPS}"
        )
        sides = {
            name: _measure(gang, material, charged=share if name == OURS else 0.0, problem=compared[name])
            for name, gang in gangs.items()
        }
        return take_turns(sides, rounds=_TURNS_A_ROUND, warm_up=False)


def _joined(rounds: Sequence[Rounds]) -> Rounds:
    """All turns of one side; why there are none where a round has none."""
    figures: list[Figures] = []
    for one in rounds:
        if isinstance(one, str):
            return one
        figures.extend(one)
    return figures


def _compare(gangs: Mapping[str, Gang], material: Material) -> dict[str, str]:
    """What keeps a side from being timed, by side; empty where its losses are ours."""
    losses: dict[str, Mapping[int, float]] = {}
    problems: dict[str, str] = {}
    for name, gang in gangs.items():
        try:
            losses[name] = gang.ask("advance", _COMPARED_STEPS)[1]
        except PipelineError as error:
            problems[name] = str(error)
    for name, theirs in losses.items():
        ours = losses.get(OURS, {})
        common = sorted({1, _COMPARED_STEPS} & ours.keys() & theirs.keys())
        worst = max((abs(ours[step] - theirs[step]) for step in common), default=0.0)
        if common != [1, _COMPARED_STEPS] or not worst <= LOSS_TOLERANCE:
            problems[name] = f"computes something else: losses {dict(theirs)}, ours {dict(ours)}"
        else:
            material.notice(f"  {name}: losses of steps {common} are ours within {worst:.1e}")
    return {name: problems.get(name, "") for name in gangs}


def _checkpoint_share(ours: Gang) -> float:
    """Seconds of a step that a checkpoint costs at the default cadence; the second of two is counted."""
    ours.ask("save")
    return ours.ask("save")[0] / CHECKPOINT_EVERY_STEPS


def _measure(gang: Gang, material: Material, *, charged: float, problem: str) -> Measure:
    def measure_round(_: int) -> Figures:
        if problem:
            raise StageError(problem)
        steps = material.turn_steps
        seconds, tokens = gang.ask("advance", steps)[0], steps * material.global_batch_tokens
        return {_STEADY: tokens / seconds, _CHARGED: tokens / (seconds + charged * steps)}

    return measure_round
