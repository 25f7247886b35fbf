"""The parts of the load generator `scripts/bench.py`: the workload, the client, the load's shape,
the report."""
