"""What this library costs beside the bare drivers and beside other libraries, measured on this machine.

`python -m benchmarks` (or `make bench`) starts servers of its own that wait for the disk as in production. Contenders
take turns in short rounds, so that whatever else the machine is doing hits them alike; only their ratios mean something
elsewhere. Each measurement has a fresh database, and counts its rows afterwards.
"""
