"""Whether a deployment can have the mesh it asks for.

Owns the comparison of a mesh with the model and with the GPUs of an actor. Loads no framework. The one decision: all of
it is judged before a process starts, every complaint at once, with the sizes that would do.
"""

from pipeline.errors import ParameterError
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.partition import MeshSize, why_not


def check_mesh(mesh: MeshSize, *, config: DecoderConfig | None, slots: int | None, gpus: float, dtype: str) -> None:
    """Hold a mesh against model, slots, GPUs and dtype.

    Args:
        mesh: of each replica.
        config: of the decoder; None where the model is something else.
        slots: of each replica; None where they will be as many as fit.
        gpus: of each process; 0 where jax runs on a CPU, which has as many devices as it is told to.
        dtype: as asked for.

    Raises:
        ParameterError: they do not fit; says all that is wrong.
    """
    complaints = []
    if config is not None:
        complaints += why_not(config, mesh, slots=slots)
    elif mesh.num_devices > 1:
        complaints.append(
            f"mesh has {mesh.num_devices} devices, but only decoders of a family are divided over devices; use replicas"
        )
    if dtype == "int8" and mesh.tensor > 1:
        complaints.append(
            f"dtype: int8 with mesh.tensor {mesh.tensor}: the scale of a weight belongs to all of its rows, which are "
            "divided; use bfloat16, or mesh.tensor: 1"
        )
    needed = max(1, mesh.devices_per_host)
    if gpus > 1 and gpus != needed:
        complaints.append(
            f"resources.gpus is {gpus:g}, but a mesh of tensor {mesh.tensor} x data {mesh.data} on {mesh.hosts} "
            f"host(s) computes on {needed} of them; use gpus: {needed}, or a mesh of {gpus:g} devices a host"
        )
    elif 0 < gpus <= 1 < needed:
        complaints.append(
            f"the mesh needs {needed} GPUs in each process, resources.gpus is {gpus:g}; use gpus: {needed}"
        )
    if complaints:
        raise ParameterError(
            "\n  ".join(["the mesh does not fit:", *complaints]),
            hint="tensor divides the model over devices, data the slots; replicas of their own need no mesh",
        )
