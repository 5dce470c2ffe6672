"""Where romancy meets other systems: events coming in over HTTP, traces and metrics going out."""
