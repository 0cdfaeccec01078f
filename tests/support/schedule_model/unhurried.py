"""How property tests run here: on any machine, however busy it is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
