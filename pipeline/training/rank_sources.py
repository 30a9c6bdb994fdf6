"""Which rank a process is, where no Ray says it: from what its launcher has put into the environment.

Owns the launchers that are understood, their precedence, and the meeting point. Pure: the environment is a value. The
one decision: every launcher that can be seen is asked, and two that disagree are an error; a wrong guess would give a
run of another size without a word.

Precedence: torchrun, a SLURM step, MPI, an indexed job of Kubernetes. Known traps, each a test: `SLURM_PROCID` is 0 for
whatever a batch script starts without `srun` (so only a step counts); `SLURM_NTASKS` is that of the allocation (so the
step's own number counts); under torchrun inside another launcher the outer one numbers agents, not ranks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.errors import ParameterError

FIRST_PORT, NUM_PORTS = 20_000, 20_000
"""Where the meeting point of a SLURM step listens: a port that every rank derives from the ids of job and step."""
ENVIRONMENT_STORE = "env://"
"""torchrun's agent has made the meeting point; torch finds it in the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """A process among the others."""

    rank: int
    world_size: int
    local_rank: int
    store_address: str
    """`host:port` of rank 0's TCP store, or `ENVIRONMENT_STORE`."""
    source: str
    """Who said so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    source: str
    rank: int
    world_size: int
    local_rank: int
    host: str | None
    """Of rank 0, where the launcher knows it."""
    port: int | None = None


def derive_place(environment: Mapping[str, str]) -> RankPlace:
    """This process's place; alone on this machine where no launcher can be seen.

    Raises:
        ParameterError: launchers disagree, a value is no number or out of range, or nobody says where rank 0 is.
    """
    said = [found for ask in _SOURCES if (found := ask(environment)) is not None]
    if not said:
        return RankPlace(rank=0, world_size=1, local_rank=0, store_address="127.0.0.1:0", source="no launcher")
    chosen = said[0]
    different = [
        other
        for other in said[1:]
        if chosen.source != "torchrun" and (other.rank, other.world_size) != (chosen.rank, chosen.world_size)
    ]
    if different:
        told = "; ".join(f"{one.source}: rank {one.rank} of {one.world_size}" for one in (chosen, *different))
        raise ParameterError(
            f"the launchers of this process disagree: {told}",
            hint="start each rank through one launcher, or unset the variables of the other one",
        )
    if not 0 <= chosen.rank < chosen.world_size:
        raise ParameterError(f"{chosen.source} says rank {chosen.rank} of {chosen.world_size}")
    return RankPlace(
        rank=chosen.rank,
        world_size=chosen.world_size,
        local_rank=chosen.local_rank,
        store_address=_store_address(chosen, environment),
        source=chosen.source,
    )


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list such as `gpu[03-05,9],login1`.

    Raises:
        ParameterError: the text is no node list.
    """
    match = re.match(r"([\w.-]+)(?:\[(\d+)[^\]]*\]([\w.-]*))?(?:,|$)", node_list)
    if match is None:
        raise ParameterError(f"SLURM_STEP_NODELIST {node_list!r} is no list of nodes")
    name, number, rest = match[1], match[2] or "", match[3] or ""
    return f"{name}{number}{rest}"


def _store_address(said: _Said, environment: Mapping[str, str]) -> str:
    if said.source == "torchrun" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ENVIRONMENT_STORE
    host = environment.get("MASTER_ADDR") or said.host
    port = _number(environment, "MASTER_PORT") or said.port
    if said.world_size == 1:
        return f"{host or '127.0.0.1'}:{port or 0}"
    if host is None or port is None:
        raise ParameterError(
            f"{said.source} says rank {said.rank} of {said.world_size}, but nobody says where rank 0 is",
            hint="set MASTER_ADDR and MASTER_PORT to rank 0's host and a free TCP port, the same on every rank",
        )
    return f"{host}:{port}"


def _torchrun(environment: Mapping[str, str]) -> _Said | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return _Said(
        source="torchrun",
        rank=_needed(environment, "RANK"),
        world_size=_needed(environment, "WORLD_SIZE"),
        local_rank=_needed(environment, "LOCAL_RANK"),
        host=None,
    )


def _slurm(environment: Mapping[str, str]) -> _Said | None:
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdigit() or "SLURM_STEP_NUM_TASKS" not in environment:  # a batch script's own step has no number
        return None
    nodes = environment.get("SLURM_STEP_NODELIST")
    job = _number(environment, "SLURM_JOB_ID") or 0
    return _Said(
        source="a SLURM step",
        rank=_needed(environment, "SLURM_PROCID"),
        world_size=_needed(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=_needed(environment, "SLURM_LOCALID"),
        host=None if nodes is None else first_host(nodes),
        port=FIRST_PORT + (job * 31 + int(step)) % NUM_PORTS,
    )


def _mpi(environment: Mapping[str, str]) -> _Said | None:
    for rank, size, local in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ):
        if rank in environment and size in environment:
            return _Said(
                source="MPI",
                rank=_needed(environment, rank),
                world_size=_needed(environment, size),
                local_rank=_number(environment, local) or 0,
                host=None,
            )
    return None


def _kubernetes(environment: Mapping[str, str]) -> _Said | None:
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    # One pod of an indexed job is one rank; its number of completions is not in the environment.
    return _Said(
        source="an indexed job of Kubernetes",
        rank=_needed(environment, "JOB_COMPLETION_INDEX"),
        world_size=_needed(environment, "WORLD_SIZE"),
        local_rank=0,
        host=None,
    )


_SOURCES: tuple[Callable[[Mapping[str, str]], _Said | None], ...] = (_torchrun, _slurm, _mpi, _kubernetes)


def _needed(environment: Mapping[str, str], name: str) -> int:
    value = _number(environment, name)
    if value is None:
        raise ParameterError(f"{name} is not set, though other variables of the same launcher are")
    return value


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ParameterError(f"{name} is {text!r}, which is no whole number") from None
