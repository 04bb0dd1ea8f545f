"""LongBench v1 from where it is published: rows from the Hugging Face hub, templates from its repository."""

from __future__ import annotations

import shutil
import urllib.request
import zipfile
from pathlib import Path

from sparseserve_jax.evaluation.longbench import TEMPLATES_FILE

DATASET = "THUDM/LongBench"
ARCHIVE = "data.zip"
TEMPLATES_URL = f"https://raw.githubusercontent.com/THUDM/LongBench/main/LongBench/config/{TEMPLATES_FILE}"
TIMEOUT_S = 60.0


def download_longbench(templates: Path | None = None) -> tuple[Path, Path]:
    """The folder with `<task>.jsonl` and the file of templates; both are kept in the hub's cache.

    Args:
        templates: a file that is there; None = from the repository.

    Raises:
        OSError: no connection; the message says what to give instead.
    """
    import huggingface_hub  # slow to import, and only needed here

    try:
        archive = Path(huggingface_hub.hf_hub_download(DATASET, ARCHIVE, repo_type="dataset"))
    except Exception as error:  # the library's errors have no common base beside Exception
        raise OSError(f"{DATASET} could not be downloaded ({error}); give --data-dir with its rows") from error
    unpacked = archive.parent / "unpacked"
    if not unpacked.exists():
        _unpack(archive, unpacked)
    return unpacked, templates or _download_templates(unpacked)


def _unpack(archive: Path, target: Path) -> None:
    """Every JSONL file of the archive, without its folders."""
    partial = target.with_suffix(".part")
    partial.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive) as content:
        for name in content.namelist():
            if name.endswith(".jsonl"):
                with content.open(name) as source, (partial / Path(name).name).open("wb") as file:
                    shutil.copyfileobj(source, file)
    partial.rename(target)


def _download_templates(folder: Path) -> Path:
    path = folder / TEMPLATES_FILE
    if not path.exists():
        try:
            with urllib.request.urlopen(TEMPLATES_URL, timeout=TIMEOUT_S) as answer:
                path.write_bytes(answer.read())
        except OSError as error:
            raise OSError(f"{TEMPLATES_URL}: {error}; give --templates with that file") from error
    return path
