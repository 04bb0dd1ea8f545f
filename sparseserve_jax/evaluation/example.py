"""`Task` and `Example`: a question with its reference answers, and how it is asked and scored."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What the examples of one task have in common.

    Attributes:
        name: as the data set spells it.
        metric: a key of `metrics.METRICS`.
        max_tokens: of an answer.
        chat: the prompt goes through the model's chat template.
        first_line: only the prediction's first line (after leading newlines) is scored.
        stops_at_newline: a newline ends the answer, which has at least one token.
    """

    name: str
    metric: str
    max_tokens: int
    chat: bool = True
    first_line: bool = False
    stops_at_newline: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt and its reference answers.

    Attributes:
        row_id: unique within the task.
        prompt: the text before any cut and before the chat template.
        answers: acceptable answers; for the metric "found" all of them are wanted.
        classes: the labels to choose from, for metrics that need them.
        length: tokens that the prompt was made for; None where the data set decides.
        depth: where in the text the answer lies, 0 = start, 1 = end; None where it has no place.
    """

    task: Task
    row_id: str
    prompt: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    length: int | None = None
    depth: float | None = None

    @property
    def reference(self) -> str:
        """The text whose likelihood is asked for: the first answer, or the list of all that are wanted."""
        return ", ".join(self.answers) if self.task.metric == "found" else self.answers[0]
