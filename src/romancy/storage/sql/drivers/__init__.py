"""What the databases disagree on: one small class each."""
