"""The command `doorbell`: one file per noun. Its exit codes stand in `command`."""

from doorbell_postgres.cli import bell, cursor, demo, listing, log, moving, retention, roles, schema, status
from doorbell_postgres.cli.command import main

for _command in (bell.wait, cursor.subscribe, cursor.catch_up, cursor.ack, log.post, log.tail, schema.migrate, demo.demo):
    main.add_command(_command)
for _command in (
    status.status, status.doctor, status.metrics, listing.channels, listing.handles, listing.turns, listing.unsubscribe,
    retention.prune, retention.skip, moving.import_, roles.grant,
):  # fmt: skip
    main.add_command(_command)

__all__ = ["main"]
