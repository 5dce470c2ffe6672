"""Many want the same thing at once, in one process and in several: one gets it, nothing is lost or doubled."""
