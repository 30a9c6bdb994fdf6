from hypothesis import HealthCheck, settings

# A busy machine must not turn a slow example into a failure; each test has pytest's own timeout.
settings.register_profile("flows", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flows")
