"""The same workflow in other libraries, each in a process and an environment of its own."""
