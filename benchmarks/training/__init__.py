"""Updates that `benchmarks.train_step` compares: the groups, and one module per contender."""
