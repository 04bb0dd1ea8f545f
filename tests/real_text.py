"""Real English text that every Python installation has: the language reference behind `help()`."""

from __future__ import annotations

from pydoc_data.topics import topics


def real_text() -> str:
    """About 700,000 characters."""
    return "\n\n".join(topics[name] for name in sorted(topics))
