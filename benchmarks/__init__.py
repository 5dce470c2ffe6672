"""What the storage costs beside the bare drivers, measured on this machine.

`python -m benchmarks` (or `make bench`) starts servers of its own that wait for the disk as in production, or uses
those that the variables of `tests/servers` name. Contenders take turns in short rounds, so that whatever else the
machine is doing hits them alike; only their ratios mean something elsewhere.
"""
