"""What doorbell-postgres costs, each measure beside its floor: `make bench`. See docs/performance.md."""
