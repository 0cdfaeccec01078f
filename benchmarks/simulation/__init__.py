"""The scheduler under virtual time: workloads, policies, a world, and what came of it."""
