"""A model of the world around the scheduler and the version ledger, to check them in.

`World` plays the workers, the trainer, the broadcaster and the replicas, with their
faults; `Books` and `Fleet` know what must come of it without looking into the
machines under test; `explore` visits every interleaving of a small campaign and
`walk` a random one of any; `mutants` seeds bugs that this must find.
"""
