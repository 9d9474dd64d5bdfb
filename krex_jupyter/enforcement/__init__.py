"""Acting on processes: what to gate (`plan.py`), and doing and undoing it (`guardian.py`)."""
