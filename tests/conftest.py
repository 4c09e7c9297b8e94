"""Settings of the whole test suite."""

import os

from hypothesis import HealthCheck, settings

# Shared machines are slow at times, so no test fails on its clock; on CI the examples are the same in every run.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
