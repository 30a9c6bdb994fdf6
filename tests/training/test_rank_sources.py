"""Which rank a process is: every launcher, its traps, and launchers that disagree."""

import pytest

from pipeline.errors import ParameterError
from pipeline.training.rank_sources import ENVIRONMENT_STORE, derive_place, first_host

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
STEP = {
    "SLURM_JOB_ID": "1204",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "64",  # of the allocation
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
}
MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MEETING = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN | MEETING, (3, 8, 1, "head:29500", "torchrun")),
        (TORCHRUN | MEETING | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, (3, 8, 1, ENVIRONMENT_STORE, "torchrun")),
        (STEP, (5, 8, 1, f"gpu03:{20_000 + 1204 * 31 + 2 - 20_000}", "a SLURM step")),
        (STEP | MEETING, (5, 8, 1, "head:29500", "a SLURM step")),
        (MPI | MEETING, (5, 8, 1, "head:29500", "MPI")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"} | MEETING, (1, 2, 0, "head:29500", "MPI")),
        (
            {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"} | MEETING,
            (2, 4, 0, "head:29500", "an indexed job of Kubernetes"),
        ),
        # An MPI launcher inside a step that says the same.
        (STEP | MPI, (5, 8, 1, f"gpu03:{1204 * 31 + 2}", "a SLURM step")),
        # torchrun's agents are numbered by SLURM, its ranks are not.
        (STEP | TORCHRUN | MEETING, (3, 8, 1, "head:29500", "torchrun")),
        # A batch script without srun: procid 0, and no step of its own.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, "127.0.0.1:0", "no launcher")),
        ({**STEP, "SLURM_STEP_ID": "batch"}, (0, 1, 0, "127.0.0.1:0", "no launcher")),
        # RANK alone is what other tools leave behind; it is no launcher.
        ({"RANK": "4"}, (0, 1, 0, "127.0.0.1:0", "no launcher")),
    ],
)
def test_every_launcher_says_which_rank_this_is(environment: dict[str, str], place: tuple) -> None:
    found = derive_place(environment)
    assert (found.rank, found.world_size, found.local_rank, found.store_address, found.source) == place


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (STEP | MPI | {"OMPI_COMM_WORLD_RANK": "0"}, "disagree: a SLURM step: rank 5 of 8; MPI: rank 0 of 8"),
        (MPI | MEETING | {"JOB_COMPLETION_INDEX": "5", "WORLD_SIZE": "4"}, "disagree: MPI: rank 5 of 8; an indexed"),
        (MPI, "nobody says where rank 0 is"),
        ({"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE is not set, though"),
        (MPI | MEETING | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http', which is no whole number"),
        (MPI | MEETING | {"OMPI_COMM_WORLD_RANK": "8"}, "MPI says rank 8 of 8"),
        ({name: TORCHRUN[name] for name in ("TORCHELASTIC_RUN_ID", "RANK")}, "WORLD_SIZE is not set"),
        (STEP | {"SLURM_STEP_NODELIST": "[3-4]"}, "is no list of nodes"),
    ],
)
def test_a_doubt_is_an_error(environment: dict[str, str], found: str) -> None:
    with pytest.raises(ParameterError) as caught:
        derive_place(environment)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],x1", "gpu03"),
        ("r[1-2]-ib.site", "r1-ib.site"),
        ("a-b[7]", "a-b7"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
