"""transformers' worker: bfloat16, sdpa, the default dynamic cache, a bare greedy loop without generate's own overhead.

Settings: `{"model": directory, "threads": n, "share_prompt": bool}`. There is no batching server in it that runs on a
CPU with this attention: requests of equal prompt length that wait together become one batch (no padding), all others
are served one after another, which is no slower because its decode time grows with the batch. With `share_prompt` a
batch of equal prompts is prefilled once and its KV repeated.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from peers.driver import Driver
from peers.protocol import Handlers, answer_requests


class Transformers:
    """`StepEngine` over a model's forward pass."""

    def __init__(self, model: Any, share_prompt: bool) -> None:
        self.model, self.share_prompt = model, share_prompt
        self._waiting: list[tuple[str, list[int], int]] = []
        self._names: list[str] = []  # of the running batch; its rows stay until all of them have ended
        self._left: list[int] = []
        self._cache: Any = None
        self._last: torch.Tensor | None = None

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append((request_id, prompt, max_tokens))

    def abort(self, request_ids: list[str]) -> None:
        self._waiting = [request for request in self._waiting if request[0] not in request_ids]
        if set(self._names) <= set(request_ids):
            self._names, self._cache, self._last = [], None, None

    @torch.inference_mode()
    def step(self) -> dict[str, list[int]]:
        if not self._names:
            self._prefill()
        else:
            self._last = self._forward(self._last[:, None])
        assert self._last is not None
        new = {}
        for row, (name, token) in enumerate(zip(self._names, self._last.tolist(), strict=True)):
            if self._left[row] > 0:
                self._left[row] -= 1
                new[name] = [token]
        if not any(self._left):
            self._names, self._cache, self._last = [], None, None
        return new

    def _prefill(self) -> None:
        length = len(self._waiting[0][1])
        batch = [request for request in self._waiting if len(request[1]) == length]
        self._waiting = [request for request in self._waiting if len(request[1]) != length]
        self._names = [name for name, _, _ in batch]
        self._left = [max_tokens for _, _, max_tokens in batch]
        prompts = [prompt for _, prompt, _ in batch]
        if len(batch) > 1 and self.share_prompt and all(prompt == prompts[0] for prompt in prompts):
            self._cache = DynamicCache()
            token = self._forward(torch.tensor([prompts[0]]))
            self._cache.batch_repeat_interleave(len(batch))
            self._last = token.repeat(len(batch))
            return
        tokens, caches = [], []
        for prompt in prompts:
            self._cache = DynamicCache()
            tokens.append(self._forward(torch.tensor([prompt])))
            caches.append(self._cache)
        self._last, self._cache = torch.cat(tokens), _together(caches)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1)


def _together(caches: list[Any]) -> Any:
    """One cache of a batch from one for each of its rows."""
    if len(caches) == 1:
        return caches[0]
    cache = DynamicCache()
    for index in range(len(caches[0].layers)):
        keys = torch.cat([row.layers[index].keys for row in caches])
        values = torch.cat([row.layers[index].values for row in caches])
        for row in caches:
            row.layers[index].keys = row.layers[index].values = None  # not twice in memory
        cache.update(keys, values, index)
    return cache


def make(settings: dict[str, Any]) -> tuple[Handlers, dict[str, Any]]:
    """Loads the model."""
    started = time.perf_counter()
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    )
    model.eval()
    info = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "start_s": time.perf_counter() - started,
        "in_force": {"dtype": "bfloat16", "attention": "sdpa", "cache": "dynamic", "threads": torch.get_num_threads()},
    }
    return Driver(Transformers(model, settings["share_prompt"])).handlers(), info


if __name__ == "__main__":
    answer_requests(make)
