"""The rows of a checkpoint: how long training stands still for one, and what one costs in all.

Owns the turns between a checkpoint in the background and a synchronous one by torch.distributed.checkpoint, in the same
ranks and of the same state. The one decision: the stall is what a step waits; because a core that writes cannot train,
a second row says how much longer the same steps took with a save under way.
"""

from pipeline.diagnostics.bench_train_gang import Gang
from pipeline.diagnostics.bench_train_material import Material, Measured
from pipeline.diagnostics.bench_train_speed import OURS, SIDES
from pipeline.diagnostics.bench_turns import Figures, RowSpec, make_row, take_turns

STALL_BAR = 3.0
"""Times as long that the synchronous save holds training up."""
STEPS_MEANWHILE = 4
_PLAIN = "plain"
_STALL, _COST = "stall_seconds", "cost_seconds"


def measure(material: Material) -> Measured:
    """Seconds of a stall, and of a checkpoint in all, against a save that is waited for."""
    job = material.job("stall")
    with Gang(OURS, SIDES[OURS], job=job, world_size=material.world_size) as gang:

        def ours(_: int) -> Figures:
            alone = gang.ask("advance", STEPS_MEANWHILE)[0]
            stall = gang.ask("begin_save")[0]
            return {_STALL: stall, _COST: stall + max(0.0, gang.ask("advance_and_drain", STEPS_MEANWHILE)[0] - alone)}

        def plain(number: int) -> Figures:
            seconds = gang.ask("save_plainly", str(material.work / f"plain-{number}"))[0]
            return {_STALL: seconds, _COST: seconds}

        measured = take_turns({OURS: ours, _PLAIN: plain}, rounds=material.rounds)
    peers = {_PLAIN: "synchronous dcp.save"}
    specs = (
        RowSpec(name="checkpoint, stall", unit="s", metric=_STALL, peers=peers, bar=STALL_BAR, is_smaller_better=True),
        RowSpec(name="checkpoint, in all", unit="s", metric=_COST, peers=peers, bar=None, is_smaller_better=True),
    )
    return Measured(rows=tuple(make_row(spec, measured=measured) for spec in specs))
