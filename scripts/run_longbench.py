"""LongBench v1 under several settings: `sparseserve eval longbench`, for a checkout. docs/accuracy.md has the method.

python scripts/run_longbench.py --data-dir DIR --tasks qasper,lcc --limit 10 --budgets dense,2048 --out OUT
"""

from __future__ import annotations

import typer

from sparseserve_jax.cli import engine_options
from sparseserve_jax.evaluation.commands import SETTING_FIELDS, longbench

if __name__ == "__main__":
    typer.run(engine_options(longbench, without=SETTING_FIELDS))
