"""How examples are made: the same ones in every run, however slow the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")
