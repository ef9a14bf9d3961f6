"""Runs the revisions, then declares the functions and views, in one transaction.

The connection comes from doorbell_postgres.migrate, which holds the guard. Offline (`--sql`) the same statements are printed.
"""

from alembic import context

from doorbell_postgres import migrate

config = context.config
settings = {
    "version_table": "schema_version",
    "version_table_schema": migrate.SCHEMA,
    "transaction_per_migration": False,
}

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True, **settings)
    with context.begin_transaction():
        for statement in migrate.preamble():
            context.get_context().output_buffer.write(f"{statement};\n\n")
        context.run_migrations()
        context.get_context().output_buffer.write(migrate.declaration())
else:
    connection = config.attributes["connection"]
    context.configure(connection=connection, **settings)
    context.run_migrations()
    migrate.declare(connection)
