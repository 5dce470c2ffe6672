"""What a schema looks like, in words that all databases share."""

from typing import Any, NamedTuple

from romancy.storage import SQLStorage


class ForeignKey(NamedTuple):
    columns: tuple[str, ...]
    table: str
    on_delete: str


class Table(NamedTuple):
    """A table, but for how a database spells its types."""

    columns: dict[str, tuple[str, bool]]
    """Kind (integer, text or binary; times count as text) and whether it may be NULL."""
    unique: set[tuple[str, ...]]
    foreign_keys: set[ForeignKey]


Schema = dict[str, Table]


async def schema_of(storage: SQLStorage) -> Schema:
    """All tables of the database that a storage is on."""
    match storage.runner.driver.driver_name():
        case "sqlite":
            return await _sqlite(storage)
        case "postgres":
            return await _server(storage, _POSTGRES_UNIQUE, _POSTGRES_FOREIGN, schema="current_schema()")
        case _:
            return await _server(storage, _MYSQL_UNIQUE, _MYSQL_FOREIGN, schema="DATABASE()")


async def indexes_of(storage: SQLStorage) -> set[str]:
    """The names of all indexes that have one of their own."""
    query = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index' AND name NOT LIKE 'sqlite_%'",
        "postgres": "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()",
        "mysql": "SELECT index_name FROM information_schema.statistics WHERE table_schema = DATABASE()",
    }
    return {row[0] for row in await _rows(storage, query[storage.runner.driver.driver_name()])}


async def _rows(storage: SQLStorage, query: str) -> list[Any]:
    return list(await storage.conn().fetch_all(query))


async def _sqlite(storage: SQLStorage) -> Schema:
    tables = await _rows(storage, "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return {name: await _sqlite_table(storage, name) for (name,) in tables}


async def _sqlite_table(storage: SQLStorage, table: str) -> Table:
    columns = await _rows(storage, f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{table}') ORDER BY cid")
    unique = {tuple(name for name, _, _, pk in sorted(columns, key=lambda column: column[3]) if pk)}
    for (index,) in await _rows(storage, f"SELECT name FROM pragma_index_list('{table}') WHERE \"unique\""):
        found = await _rows(storage, f"SELECT name FROM pragma_index_info('{index}') ORDER BY seqno")
        unique.add(tuple(name for (name,) in found))
    keys: dict[int, ForeignKey] = {}
    for number, column, parent, on_delete in await _rows(
        storage, f'SELECT id, "from", "table", on_delete FROM pragma_foreign_key_list(\'{table}\') ORDER BY id, seq'
    ):
        so_far = keys[number].columns if number in keys else ()
        keys[number] = ForeignKey((*so_far, column), parent, on_delete)
    return Table(
        columns={name: (_kind_of(declared), not (notnull or pk)) for name, declared, notnull, pk in columns},
        unique=unique,
        foreign_keys=set(keys.values()),
    )


_POSTGRES_UNIQUE = """
    SELECT relname,
           (SELECT string_agg(attname, ',' ORDER BY position) FROM unnest(indkey) WITH ORDINALITY k(n, position)
              JOIN pg_attribute ON attrelid = indrelid AND attnum = n)
      FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
     WHERE relnamespace = current_schema()::regnamespace AND indisunique AND indisvalid"""

_POSTGRES_FOREIGN = """
    SELECT conrelid::regclass::text,
           (SELECT string_agg(attname, ',' ORDER BY position) FROM unnest(conkey) WITH ORDINALITY k(n, position)
              JOIN pg_attribute ON attrelid = conrelid AND attnum = n),
           confrelid::regclass::text, CASE confdeltype WHEN 'c' THEN 'CASCADE' ELSE 'NO ACTION' END
      FROM pg_constraint WHERE contype = 'f' AND connamespace = current_schema()::regnamespace"""

_MYSQL_UNIQUE = """
    SELECT table_name, GROUP_CONCAT(column_name ORDER BY seq_in_index)
      FROM information_schema.statistics WHERE table_schema = DATABASE() AND non_unique = 0
     GROUP BY table_name, index_name"""

_MYSQL_FOREIGN = """
    SELECT k.table_name, GROUP_CONCAT(k.column_name ORDER BY k.ordinal_position), k.referenced_table_name,
           REPLACE(MAX(r.delete_rule), 'RESTRICT', 'NO ACTION')
      FROM information_schema.key_column_usage k
      JOIN information_schema.referential_constraints r
        ON r.constraint_schema = k.constraint_schema AND r.constraint_name = k.constraint_name
     WHERE k.table_schema = DATABASE() AND k.referenced_table_name IS NOT NULL
     GROUP BY k.table_name, k.constraint_name, k.referenced_table_name"""


async def _server(storage: SQLStorage, unique: str, foreign: str, *, schema: str) -> Schema:
    tables: Schema = {}
    for table, column, declared, is_nullable in await _rows(
        storage,
        "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns"
        f" WHERE table_schema = {schema} ORDER BY ordinal_position",
    ):
        known = tables.setdefault(table, Table({}, set(), set()))
        known.columns[column] = (_kind_of(declared), is_nullable == "YES")
    for table, columns in await _rows(storage, unique):
        tables[table].unique.add(tuple(columns.split(",")))
    for table, columns, parent, on_delete in await _rows(storage, foreign):
        tables[table].foreign_keys.add(ForeignKey(tuple(columns.split(",")), parent, on_delete))
    return tables


def _kind_of(declared: str) -> str:
    match declared.lower():
        case "int" | "integer" | "bigint":
            return "integer"
        case "blob" | "bytea" | "longblob":
            return "binary"
        case _:
            return "text"
