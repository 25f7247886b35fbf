"""The parts of the load generator `scripts/bench.py`: what is sent, the client, the load's shape,
the report."""
