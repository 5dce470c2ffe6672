"""The one implementation of the storage contract, on three kinds of database."""
