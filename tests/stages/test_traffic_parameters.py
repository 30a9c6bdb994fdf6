"""What a flow may say of traffic is judged when the flow is read."""

import pytest
from pydantic import ValidationError
from test_deploy_serve import context_of

from pipeline.errors import ParameterError
from pipeline.stages.scaling import autoscaling_of, least_replicas
from pipeline.stages.traffic_parameters import AutoscalingParameters, CanaryParameters, ShadowParameters
from pipeline.stages.trial import planned


def parameters_of(tmp_path, **given):
    return context_of(tmp_path, tmp_path, **given).parameters


def test_a_canary_has_conditions_and_a_window_where_the_flow_names_none(tmp_path):
    canary = parameters_of(tmp_path, canary={}).canary
    assert (canary.percent, canary.min_requests, canary.window_seconds) == (10.0, 50, 300.0)
    assert [(gate.metric, gate.limit) for gate in canary.rules.conditions] == [("error_rate", 0.01)]
    given = {"percent": 25, "until": {"p95_ttft_ms": "< 300"}, "min_requests": 5, "window_seconds": 9}
    rules = parameters_of(tmp_path, canary=given).canary.rules
    assert (rules.min_requests, rules.window_seconds, rules.conditions[0].limit) == (5, 9.0, 300.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"until": {"p95_tfft_ms": "< 3"}}, "did you mean p95_ttft_ms"),
        ({"until": {"error_rate": "1%"}}, "is not an operator"),
        ({"until": {"agreement": "> 0.9"}}, "no such metric"),
        ({"percent": 0}, "greater than 0"),
        ({"percent": 101}, "less than or equal to 100"),
        ({"persent": 1}, "Extra inputs"),
        ({"session_header": "a b"}, "pattern"),
    ],
)
def test_what_a_canary_cannot_be_is_said(tmp_path, given, words):
    with pytest.raises(ValidationError, match=words):
        parameters_of(tmp_path, canary=given)


def test_shadow_comes_before_canary_and_true_means_its_defaults(tmp_path):
    both = parameters_of(tmp_path, shadow=True, canary={"percent": 5})
    trials = planned(canary=both.canary, shadow=both.shadow)
    assert [mode for mode, _ in trials] == ["shadow", "canary"]
    assert isinstance(trials[0][1], ShadowParameters) and trials[0][1].percent == 100.0
    assert isinstance(trials[1][1], CanaryParameters) and trials[1][1].percent == 5.0
    own = parameters_of(tmp_path, shadow={"until": {"min_cosine": "> 0.99"}, "queued_copies": 3})
    ((_, shadow),) = planned(canary=None, shadow=own.shadow)
    assert shadow.queued_copies == 3 and shadow.rules.conditions[0].metric == "min_cosine"
    none = parameters_of(tmp_path)
    assert planned(canary=none.canary, shadow=none.shadow) == []


def test_autoscaling_becomes_ray_serves_own(tmp_path):
    from ray.serve.config import AutoscalingConfig

    given = parameters_of(
        tmp_path, autoscaling={"min_replicas": 0, "max_replicas": 3, "idle_delay_seconds": 60}, slots=6
    )
    found = autoscaling_of(given, isolation="process")
    config = AutoscalingConfig(**found)
    assert (config.min_replicas, config.max_replicas, config.initial_replicas) == (0, 3, 1)
    assert config.target_ongoing_requests == 6.0 and config.downscale_to_zero_delay_s == 60.0
    assert least_replicas(given) == 1
    assert autoscaling_of(parameters_of(tmp_path), isolation="shared") is None
    assert least_replicas(parameters_of(tmp_path, replicas=3)) == 3


def test_a_number_of_replicas_or_a_shared_process_excludes_autoscaling(tmp_path):
    scaled = {"min_replicas": 1, "max_replicas": 2}
    with pytest.raises(ParameterError, match="replicas: 2 and autoscaling exclude each other"):
        least_replicas(parameters_of(tmp_path, autoscaling=scaled, replicas=2))
    with pytest.raises(ParameterError, match="'tiny' shares its process"):
        autoscaling_of(parameters_of(tmp_path, autoscaling=scaled), isolation="shared")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2, min_replicas 3"),
        ({"max_replicas": 2, "idle_delay_seconds": 5}, "is for min_replicas: 0"),
        ({"min_replicas": -1, "max_replicas": 2}, "greater than or equal to 0"),
        ({}, "max_replicas"),
    ],
)
def test_an_impossible_range_is_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        AutoscalingParameters(**given)
