"""What all parameters of stages are made of.

Owns the strict base of the models, and the marks a field carries. Knows no kind of stage.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

NOT_IDENTITY: dict[str, JsonValue] = {"identity": False}
"""`json_schema_extra` of a field that is left out of the fingerprint."""
SOURCE_FILE: dict[str, JsonValue] = {"source_file": True}
"""`json_schema_extra` of a field that names a file relative to the project; its content, not its name, is identity."""

Device = Literal["auto", "cpu", "cuda"]
PlainArguments = dict[str, bool | int | float | str | list[bool | int | float | str]]
"""Keywords of a function of the user's own."""


class Parameters(BaseModel):
    """Base of all: strict keys, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def problems_within(self, timeout_seconds: float | None) -> list[str]:
        """What here does not fit into the stage's own `timeout_seconds`, where it has one; in words."""
        return []
