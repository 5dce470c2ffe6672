"""How operations reach a database: one runner for SQLite, one for the servers."""
