"""What was measured, as JSON and as a markdown table; written again after every row, so that an end keeps the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparseserve_jax.provenance import provenance

BUSY_IDLE_CORES = 0.1
"""An idle side that uses more than this while the other is measured takes something from it."""


AGREEMENT_HEAD = "| greedy tokens, both dense | equal up to the first difference | it is at | largest gap there, nats |"


class Report:
    """Collects rows.

    Args:
        settings: how the run was asked for.
        json_file / markdown_file: where it goes; None = nowhere.
    """

    def __init__(self, settings: dict[str, Any], json_file: Path | None, markdown_file: Path | None) -> None:
        self._json_file, self._markdown_file = json_file, markdown_file
        self.content: dict[str, Any] = {
            "environment": provenance(), "settings": settings, "versions": {}, "configs": {}, "agreement": [],
            "growth": [], "idle_cores": {}, "skipped": [], "failed": [], "results": [],
        }  # fmt: skip
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        """A row of `results`, as `Pairs.result` makes it."""
        self.content["results"].append(row)
        self.content["growth"] = growth(self.content["results"])
        print(line(row), flush=True)
        self.write()

    def add_agreement(self, peer: str, found: dict[str, Any]) -> None:
        """Greedy outputs compared (`pairing.agreement`)."""
        self.content["agreement"].append({"peer": peer, **found})
        print(
            f"greedy tokens equal to {peer}'s: {found['equal_share']:.0%} of {found['tokens']}; where they part, "
            f"the two are at most {found['max_gap_nats']:.3f} nats apart in float32",
            flush=True,
        )
        self.write()

    def skip(self, work: str, peer: str, why: str) -> None:
        """Something that was asked for and not measured."""
        entry = {"work": work, "peer": peer, "why": why}
        if entry not in self.content["skipped"]:
            self.content["skipped"].append(entry)
            print(f"skipped: {work}, {peer}, {why}", flush=True)
            self.write()

    def fail(self, work: str, peer: str, error: str) -> None:
        """A work that broke off; what it had measured stays."""
        self.content["failed"].append({"work": work, "peer": peer, "error": error})
        print(f"failed: {work}, {peer}: {error}", flush=True)
        self.write()

    def note_worker(self, name: str, info: dict[str, Any]) -> None:
        """Versions, and what is in force: as the last worker of this name had it."""
        self.content["versions"] |= info["versions"]
        self.content["configs"][name] = {"start_s": info["start_s"], **info["in_force"]}

    def note_idle(self, busy_cores: dict[str, float]) -> None:
        """Cores that each side used while it should have been idle."""
        for name, cores in busy_cores.items():
            self.content["idle_cores"][name] = round(cores, 3)
            if cores > BUSY_IDLE_CORES:
                print(f"warning: {name} used {cores:.2f} cores while the other side was measured", flush=True)
        self.write()

    def write(self) -> None:
        """Writes both files whole or not at all."""
        if self._json_file is not None:
            _replace(self._json_file, json.dumps(self.content, indent=1) + "\n")
        if self._markdown_file is not None:
            _replace(self._markdown_file, markdown(self.content))


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text)
    unfinished.replace(path)


def growth(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much longer a decode step takes at the longest context of `decode-32k` than at the shortest."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results:
        if row.get("kind") == "decode-32k":
            rows.setdefault((row["peer"], row["variant"]), []).append(row)
    found = []
    for (peer, variant), series in rows.items():
        first, last = min(series, key=lambda row: row["tokens"]), max(series, key=lambda row: row["tokens"])
        if first["tokens"] < last["tokens"]:
            found.append(
                {
                    "peer": peer, "variant": variant, "batch": first["batch"], "from_tokens": first["tokens"],
                    "to_tokens": last["tokens"], "ours": last["ours"] / first["ours"],
                    "theirs": last["theirs"] / first["theirs"],
                }
            )  # fmt: skip
    return found


def shown(value: float, unit: str) -> str:
    """A figure for people: seconds below one as milliseconds."""
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} {unit}"


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    low, high = row["spread"]
    ours, theirs = shown(row["ours"], row["unit"]), shown(row["theirs"], row["unit"])
    text = f"{row['work']} vs {row['peer']}: {ours} to {theirs}, {row['ratio']:.2f}x ({low:.2f}-{high:.2f})"
    if "useful_tflops" in row:
        text += f"; {_shares(row)}"
    return text


def _shares(row: dict[str, Any]) -> str:
    """Useful operations of a dense prefill, ours and theirs."""
    text = " / ".join(f"{row['useful_tflops'][side]:.2f}" for side in ("ours", "theirs")) + " useful TFLOP/s"
    if "share_of_bf16_peak" in row:
        shares = " / ".join(f"{row['share_of_bf16_peak'][side]:.0%}" for side in ("ours", "theirs"))
        text += f", {shares} of the bf16 peak"
    return text


def markdown(content: dict[str, Any]) -> str:
    """The table: a line for each work, a column for each peer, and what it depends on below."""
    results = content["results"]
    peers = list(dict.fromkeys(row["peer"] for row in results))
    cells: dict[str, dict[str, str]] = {}
    for row in results:
        low, high = row["spread"]
        text = f"**{row['ratio']:.2f}x** ({low:.2f}-{high:.2f}): {shown(row['ours'], row['unit'])}"
        cells.setdefault(row["work"], {})[row["peer"]] = f"{text} / {shown(row['theirs'], row['unit'])}"
    lines = [
        "Ratio above 1 = ours is better; in brackets the least and greatest of a pair; ours / theirs (medians).", "",
        "| work | " + " | ".join(f"vs {peer}" for peer in peers) + " |", "|---" * (1 + len(peers)) + "|",
        *(f"| {work} | " + " | ".join(found.get(peer, "") for peer in peers) + " |" for work, found in cells.items()),
    ]  # fmt: skip
    if content["growth"]:
        lines += ["", "| decode step | ours grows | theirs grows |", "|---|---|---|"]
        lines += [
            f"| {row['from_tokens']} to {row['to_tokens']} tokens, batch {row['batch']}, {row['variant']}, beside "
            f"{row['peer']} | {row['ours']:.2f}x | {row['theirs']:.2f}x |"
            for row in content["growth"]
        ]
    prefill = [row for row in results if "useful_tflops" in row]
    if prefill:
        lines += ["", "Useful operations of dense prefill, ours / theirs:", ""]
        lines += [f"- {row['work']}, {row['peer']}: {_shares(row)}" for row in prefill]
    if content["agreement"]:
        lines += ["", AGREEMENT_HEAD, "|---|---|---|---|"]
        lines += [
            f"| {row['peer']} | {row['equal_share']:.0%} of {row['tokens']} | "
            + ", ".join("-" if place is None else str(place) for place in row["first_disagreement"])
            + f" | {row['max_gap_nats']:.3f} |"
            for row in content["agreement"]
        ]  # fmt: skip
    remarks = [("skipped", row, row["why"]) for row in content["skipped"]]
    remarks += [("failed", row, row["error"].splitlines()[0]) for row in content["failed"]]
    if remarks:
        lines += ["", *(f"- {name}: {row['work']}, {row['peer']}: {why}" for name, row, why in remarks)]
    env = content["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines += ["", f"{env['cpu']}, {env['cpus']} CPUs, commit {env['commit']}, {env['date']}; {versions}.", ""]
    return "\n".join(lines)
