"""The services of a worker: each one class with `run()`, all under one task group."""
