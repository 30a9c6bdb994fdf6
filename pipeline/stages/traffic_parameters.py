"""The parameters of `deploy.serve` that say how traffic moves: `canary`, `shadow`, `autoscaling`.

Owns names, types, defaults, units and what excludes what. Knows nothing of how requests are split. The one decision: a
condition is read when the flow is, so a wrong one is an error with a line number and not a rollback at night.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pipeline.serving.traffic.traffic_conditions import CANARY_METRICS, SHADOW_METRICS, parse_conditions
from pipeline.serving.traffic.traffic_judge import Rules

DEFAULT_CONDITIONS: Mapping[str, str] = {"error_rate": "< 1%"}


def _canary_conditions(given: dict[str, str]) -> dict[str, str]:
    parse_conditions(given, known=CANARY_METRICS)
    return given


def _shadow_conditions(given: dict[str, str]) -> dict[str, str]:
    parse_conditions(given, known=SHADOW_METRICS)
    return given


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Trial(_Strict):
    min_requests: int = Field(50, ge=1, description="Requests of the challenger before it is judged.")
    window_seconds: float = Field(
        300.0, gt=0, le=86_400, description="A challenger that is not judged by then is taken down."
    )
    first_byte_seconds: float = Field(
        10.0, gt=0, description="A challenger that has said nothing by then has failed the request."
    )
    session_header: str = Field(
        "x-session-id", pattern=r"^[A-Za-z0-9-]+$", description="Requests with the same value of it go to the same arm."
    )


class CanaryParameters(_Trial):
    """`canary` of `deploy.serve`: the new version answers a share of the requests first."""

    percent: float = Field(10.0, gt=0, le=100, description="Share of the requests.")
    until: Annotated[dict[str, str], AfterValidator(_canary_conditions)] = Field(
        default_factory=lambda: dict(DEFAULT_CONDITIONS),
        description=f"Conditions that must hold: {', '.join(CANARY_METRICS)}.",
    )

    @property
    def rules(self) -> Rules:
        """For the judge."""
        return Rules(
            conditions=parse_conditions(self.until, known=CANARY_METRICS),
            min_requests=self.min_requests,
            window_seconds=self.window_seconds,
        )


class ShadowParameters(_Trial):
    """`shadow` of `deploy.serve`: the new version gets copies of requests, and nobody gets its answers."""

    percent: float = Field(100.0, gt=0, le=100, description="Share of the requests that are copied.")
    until: Annotated[dict[str, str], AfterValidator(_shadow_conditions)] = Field(
        default_factory=lambda: dict(DEFAULT_CONDITIONS),
        description=f"Conditions that must hold: {', '.join(SHADOW_METRICS)}.",
    )
    queued_copies: int = Field(64, ge=1, le=10_000, description="Copies that wait; more are dropped and counted.")
    concurrent_copies: int = Field(4, ge=1, le=256, description="Copies that the challenger answers at once.")

    @property
    def rules(self) -> Rules:
        """For the judge."""
        return Rules(
            conditions=parse_conditions(self.until, known=SHADOW_METRICS),
            min_requests=self.min_requests,
            window_seconds=self.window_seconds,
        )


class AutoscalingParameters(_Strict):
    """`autoscaling` of `deploy.serve`: as many replicas as requests in flight ask for, by Ray Serve."""

    min_replicas: int = Field(1, ge=0, description="0 lets an idle deployment go; the next request waits for a start.")
    max_replicas: int = Field(ge=1, description="Never more.")
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="Requests in flight for each replica, on average; `slots` when absent, else 8."
    )
    upscale_delay_seconds: float = Field(10.0, ge=0, description="How long more replicas must be wanted.")
    downscale_delay_seconds: float = Field(300.0, ge=0, description="How long fewer must be wanted.")
    idle_delay_seconds: float | None = Field(
        None, ge=0, description="How long the last replica must be idle; downscale_delay_seconds when absent."
    )
    averaging_seconds: float = Field(10.0, gt=0, description="Requests in flight are averaged over so long.")

    @model_validator(mode="after")
    def _check_order(self) -> "AutoscalingParameters":
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, min_replicas {self.min_replicas}; it cannot be less"
            )
        if self.idle_delay_seconds is not None and self.min_replicas > 0:
            raise ValueError("idle_delay_seconds is for min_replicas: 0; the last replica of this deployment stays")
        return self
