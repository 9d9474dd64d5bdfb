"""The coordinator: one process per host and scope that decides who holds which device."""
