"""Rows by the hundred thousand, made by the database itself."""

from romancy.storage import Driver


def numbers(count: int) -> str:
    """A table expression with the column `n` that runs from 1 to `count`, in words that every database understands."""
    digits = range(len(str(count)))
    ten = " UNION ALL ".join(f"SELECT {digit} AS d" for digit in range(10))
    value = " + ".join(f"{10**place} * p{place}.d" for place in digits)
    tables = " CROSS JOIN ".join(f"({ten}) p{place}" for place in digits)
    return f"(SELECT 1 + {value} AS n FROM {tables} WHERE {value} < {count}) numbers"


def joined(driver: Driver, *parts: str) -> str:
    """Pieces of text put together."""
    return f"CONCAT({', '.join(parts)})" if driver.driver_name() == "mysql" else " || ".join(parts)
