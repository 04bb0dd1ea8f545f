"""llama.cpp's worker: `llama_decode` through llama-cpp-python's low-level interface, flash attention on.

Settings: `{"model": GGUF file, "threads": n, "max_model_len": n, "max_num_seqs": n, "kv_type": "f16" | "bf16",
"share_prompt": bool}`. The high-level interface serves one sequence at a time, so this worker batches as llama-server
does: the next token of every running sequence first, then as much of the waiting prompts as fits into `n_batch` (2048,
and 512 a pass, llama.cpp's defaults). Every sequence has a KV stream of its own (`kv_unified` off), which llama.cpp
recommends for sequences without a common prefix. With `share_prompt` a prompt that equals a running one's is copied
from it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import llama_cpp
import numpy as np

from peers.driver import Driver
from peers.protocol import Handlers, answer_requests

BATCH_TOKENS = 2048
GGML_TYPES = {"f16": 1, "bf16": 30}
FLASH_ATTENTION_ON = 1


@dataclasses.dataclass
class Slot:
    """A sequence with KV of its own."""

    name: str
    prompt: list[int]
    left: int
    position: int = 0  # tokens in the KV
    last: int = 0


class LlamaCpp:
    """`StepEngine` over `llama_decode`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.share_prompt = settings["share_prompt"]
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            settings["model"].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = settings["max_num_seqs"]
        params.n_ctx = settings["max_num_seqs"] * _padded(settings["max_model_len"])
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k = params.type_v = GGML_TYPES[settings["kv_type"]]
        params.kv_unified = False
        self.params = params
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if self.context is None:
            raise RuntimeError(f"llama.cpp made no context from {settings}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._waiting: list[Slot] = []
        self._slots: list[Slot | None] = [None] * settings["max_num_seqs"]

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append(Slot(request_id, prompt, max_tokens))

    def abort(self, request_ids: list[str]) -> None:
        self._waiting = [slot for slot in self._waiting if slot.name not in request_ids]
        for seq, slot in enumerate(self._slots):
            if slot is not None and slot.name in request_ids:
                self._free(seq)

    def step(self) -> dict[str, list[int]]:
        self._admit()
        rows: list[tuple[int, Slot]] = []  # (place in the batch, whose next token it gives)
        self.batch.n_tokens = 0
        prefilled = [slot is not None and slot.position >= len(slot.prompt) for slot in self._slots]
        for seq, slot in enumerate(self._slots):
            if slot is not None and slot.position >= len(slot.prompt):
                rows.append((self._append(slot.last, slot.position, seq, True), slot))
                slot.position += 1
        for seq, slot in enumerate(self._slots):
            if slot is not None and slot.position < len(slot.prompt):
                if self.share_prompt and not self._copied_prompt(seq, slot, prefilled):
                    continue
                end = min(len(slot.prompt), slot.position + BATCH_TOKENS - self.batch.n_tokens)
                for position in range(slot.position, end):
                    place = self._append(slot.prompt[position], position, seq, position == len(slot.prompt) - 1)
                if end == len(slot.prompt) and end > slot.position:
                    rows.append((place, slot))
                slot.position = end
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {self.batch.n_tokens} tokens")
        new = {}
        for place, slot in rows:
            logits = llama_cpp.llama_get_logits_ith(self.context, place)
            slot.last = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            slot.left -= 1
            new[slot.name] = [slot.last]
            if slot.left == 0:
                self._free(self._slots.index(slot))
        return new

    def _admit(self) -> None:
        for seq, slot in enumerate(self._slots):
            if slot is None and self._waiting:
                self._slots[seq] = self._waiting.pop(0)

    def _append(self, token: int, position: int, seq: int, wants_logits: bool) -> int:
        place = self.batch.n_tokens
        self.batch.token[place], self.batch.pos[place] = token, position
        self.batch.n_seq_id[place], self.batch.seq_id[place][0] = 1, seq
        self.batch.logits[place] = wants_logits
        self.batch.n_tokens += 1
        return place

    def _copied_prompt(self, seq: int, slot: Slot, prefilled: list[bool]) -> bool:
        """Takes all but the last token of an equal prompt from an earlier sequence; False while that is in prefill."""
        for earlier_seq, earlier in enumerate(self._slots[:seq]):
            if slot.position == 0 and earlier is not None and earlier.prompt == slot.prompt:
                if not prefilled[earlier_seq]:
                    return False
                llama_cpp.llama_memory_seq_cp(self.memory, earlier_seq, seq, -1, -1)
                llama_cpp.llama_memory_seq_rm(self.memory, seq, len(slot.prompt) - 1, -1)
                slot.position = len(slot.prompt) - 1
                break
        return True

    def _free(self, seq: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, seq, -1, -1)
        self._slots[seq] = None


def _padded(tokens: int) -> int:
    return -(-tokens // 256) * 256


def make(settings: dict[str, Any]) -> tuple[Handlers, dict[str, Any]]:
    """Maps the model and makes a context."""
    started = time.perf_counter()
    engine = LlamaCpp(settings)
    info = {
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "start_s": time.perf_counter() - started,
        "in_force": {
            "system": llama_cpp.llama_print_system_info().decode(), "n_batch": engine.params.n_batch,
            "n_ubatch": engine.params.n_ubatch, "kv_type": settings["kv_type"], "flash_attention": True,
            "kv_unified": False,
        },
    }  # fmt: skip
    return Driver(engine).handlers(), info


if __name__ == "__main__":
    answer_requests(make)
