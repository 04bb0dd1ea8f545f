"""A measurement from beginning to end: what the server is, the plan, the warm-up, the load, the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

from sparseserve_jax.load_generator.client import Endpoint, OpenAIClient
from sparseserve_jax.load_generator.generator import generate_load
from sparseserve_jax.load_generator.records import PlannedRequest, RequestRecord
from sparseserve_jax.load_generator.report import remarks, summary_tables, to_json
from sparseserve_jax.load_generator.summary import summarize
from sparseserve_jax.load_generator.workload import Workload, make_plan

MIN_TABLE_WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement, from the server's name to the result.

    Attributes:
        url / endpoint / api_key / timeout_s: as `OpenAIClient` takes them.
        model: the name to ask for; None = the first that the server lists.
        workload: what is sent.
        num_warmups: requests sent before, all at once, that do not count.
        max_concurrency: requests under way at most; None = no limit.
        slos: objectives of goodput, seconds by name (`parse_slos`).
        show_progress: draw a bar on stderr.

    Raises:
        ValueError: a number that cannot be.
    """

    url: str
    endpoint: Endpoint
    model: str | None
    api_key: str | None = dataclasses.field(repr=False)
    timeout_s: float
    workload: Workload
    num_warmups: int
    max_concurrency: int | None
    slos: dict[str, float]
    show_progress: bool

    def __post_init__(self) -> None:
        if self.num_warmups < 0:
            raise ValueError(f"num_warmups={self.num_warmups} must be at least 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency={self.max_concurrency} must be at least 1")

    async def run(self) -> tuple[dict[str, Any], list[RequestRecord]]:
        """Plans, warms up, measures; shows the table on stderr. The result is plain data.

        Raises:
            ValueError: the server is not there, has no such model, or answers no warm-up; a workload that is none.
            OSError: a file of the workload cannot be read.
        """
        console = rich.console.Console(stderr=True)
        console.width = max(console.width, MIN_TABLE_WIDTH)
        client = OpenAIClient(self.url, endpoint=self.endpoint, api_key=self.api_key, timeout_s=self.timeout_s)
        async with client:
            server = await self._server(client)
            plan = await self._plan(client, server, self.workload)
            lengths = "counted by the server" if server["counts_tokens"] else "estimates: it has no /tokenize"
            console.print(
                f"{len(plan)} requests ({self.workload.pattern}) to {server['model']} at {client.url}; "
                f"prompt lengths are {lengths}", markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
            await self._warm_up(client, server)
            records = await self._send(client, plan, console)
        summary = summarize(records, self.slos)
        for table in summary_tables(summary):
            console.print(table)
        for remark in remarks(summary, max_concurrency=self.max_concurrency):
            console.print(f"note: {remark}", markup=False, highlight=False, soft_wrap=True)
        return to_json(self._settings(), server, summary, records), records

    async def _server(self, client: OpenAIClient) -> dict[str, Any]:
        models = await client.models()
        names = [model["id"] for model in models]
        if self.model is not None and self.model not in names:
            raise ValueError(f"the server has no model {self.model!r}; it has {', '.join(names) or 'none'}")
        if not names:
            raise ValueError(f"{client.url} lists no model; give --model")
        name = self.model or names[0]
        return {
            "model": name,
            "model_entry": models[names.index(name)],
            "version": await client.optional("/version"),
            "info": await client.optional("/info"),
            "counts_tokens": await client.count_tokens("the", name) is not None,
        }

    async def _plan(self, client: OpenAIClient, server: dict[str, Any], workload: Workload) -> list[PlannedRequest]:
        async def count(text: str) -> int:
            return await client.count_tokens(text, server["model"]) or 0

        return await make_plan(
            workload, model=server["model"], endpoint=self.endpoint,
            count_tokens=count if server["counts_tokens"] else None,
        )  # fmt: skip

    async def _warm_up(self, client: OpenAIClient, server: dict[str, Any]) -> None:
        """Requests of other prompts; if none of them is answered, there is nothing to measure."""
        if not self.num_warmups:
            return
        workload = dataclasses.replace(
            self.workload, num_prompts=self.num_warmups, seed=~self.workload.seed, arrival="at-once", rate_rps=None
        )
        plan = await self._plan(client, server, workload)
        records = await generate_load(plan, client, max_concurrency=self.max_concurrency)
        if not any(record.ok for record in records):
            raise ValueError(f"no warm-up request was answered: {records[0].status}, {records[0].error}")

    async def _send(
        self, client: OpenAIClient, plan: list[PlannedRequest], console: rich.console.Console
    ) -> list[RequestRecord]:
        columns = (*rich.progress.Progress.get_default_columns(), "{task.fields[failed]} failed")
        with rich.progress.Progress(
            *columns, console=console, disable=not self.show_progress, transient=True, refresh_per_second=2
        ) as progress:
            task = progress.add_task("requests", total=len(plan), failed=0)
            failed = 0

            def note(record: RequestRecord) -> None:
                nonlocal failed
                failed += not record.ok
                progress.update(task, advance=1, failed=failed)

            return await generate_load(plan, client, max_concurrency=self.max_concurrency, on_done=note)

    def _settings(self) -> dict[str, Any]:
        workload = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self.workload).items()
        }
        return {
            "url": self.url, "endpoint": self.endpoint, "timeout_s": self.timeout_s, "num_warmups": self.num_warmups,
            "max_concurrency": self.max_concurrency, "slos_s": self.slos, "pattern": self.workload.pattern, **workload,
        }  # fmt: skip
