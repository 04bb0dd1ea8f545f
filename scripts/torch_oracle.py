"""A Llama with block-sparse decode in plain PyTorch: an oracle for the engine that shares no code with it.

Written from the papers: Llama's architecture, Quest (arXiv 2406.10774), ArkVale's cuboid-mean, and the rules of
docs/design.md. One sequence, float32 (or float64), no batching and no kernels, every step spelled out. It keeps its own
keys and values, makes its own digests and attends to what it selected itself.

The rules of a sparse layer, for a query at position p (n = p // block_size + 1 blocks exist):

- at most `budget` blocks are attended to; if n <= budget, all of them;
- the first `num_sink` and the last `num_newest` blocks are always among them, the others go by rank, ties to the lower
  block;
- a digest is (centre, radius) by channel of the block's rotated keys: with mx, mn the extremes and c = (mx + mn) / 2,
  quest (c, (mx - mn) / 2), cuboid-mean (c, mean |k - c|), mean (mean k, 0); the score is q . centre + |q| . radius,
  scaled like attention;
- per KV head the rank is the mean, over the query heads that share it, of the softmax over the scores of all blocks but
  the newest; per query head the rank is the score, and a KV head fetches what any of its query heads chose.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """How a sparse layer chooses. Sizes in blocks; `method` is quest, cuboid-mean or mean."""

    block_size: int
    budget: int
    method: str
    per_query_head: bool = False
    dense_layers: tuple[int, ...] = (0, 1)
    num_sink: int = 1
    num_newest: int = 2


@dataclasses.dataclass
class Choice:
    """What one layer selected at one step.

    Attributes:
        blocks: for each KV head the sorted ids of the blocks that it fetches.
        ranks: `[heads, num_blocks]`, KV heads or query heads; forced blocks rank +inf. None if all blocks were taken.
    """

    blocks: list[list[int]]
    ranks: Tensor | None


@dataclasses.dataclass
class Agreement:
    """Selections of an engine against the oracle's, counted per decode step, sparse layer and KV head.

    Attributes:
        selections: how many were compared; those of contexts within the budget, where nothing is chosen, do not count.
        equal: how many have the same blocks.
        tie_gaps: for each block in one selection only, how far its rank is from that of the last block which the oracle
            chose: in nats of the score, so that about 1e-5 is a tie within float32.
        tokens / equal_tokens: greedy tokens compared, and how many were the oracle's as well.
        logprobs: the oracle's log-probability of each token.
    """

    selections: int = 0
    equal: int = 0
    tie_gaps: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    equal_tokens: int = 0
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def note(self, model: SparseLlama, choice: Choice, blocks: list[list[int]]) -> None:
        """Compares one layer's selection at one step, `blocks` being the engine's."""
        if choice.ranks is None:
            assert blocks == choice.blocks, "a context within the budget is attended to whole"
            return
        assert model.selection is not None
        for head, (own, theirs) in enumerate(zip(choice.blocks, blocks, strict=True)):
            self.selections += 1
            self.equal += own == theirs
            per_kv_head = len(choice.ranks) // model.num_kv_heads
            ranks = choice.ranks[head * per_kv_head : (head + 1) * per_kv_head]
            if not model.selection.per_query_head:
                ranks = ranks.log()
            last = ranks.sort(dim=-1, descending=True).values[:, model.selection.budget - 1]
            for block in sorted(set(own) ^ set(theirs)):
                self.tie_gaps.append(float((ranks[:, block] - last).abs().min()))


def block_lists(steps: Sequence[Any]) -> list[list[list[list[int]]]]:
    """Arrays `[layers, KV heads, n]` of block ids, -1 = unused, by decode step, as lists without the unused."""
    return [[[[b for b in row if b >= 0] for row in layer] for layer in step.tolist()] for step in steps]


def compare_selections(
    model: SparseLlama, prompt: list[int], token_ids: list[int], selected: list[list[list[list[int]]]]
) -> Agreement:
    """Runs the oracle over a prompt and the tokens that an engine generated, and compares every selection.

    After each comparison the oracle attends to what the engine attended to, where that is known (selection per KV
    head), so that one tie that fell the other way does not change everything after it.

    Args:
        token_ids: greedy tokens; each but the last was taken in by a decode step.
        selected: by decode step, sparse layer and KV head the engine's blocks.
    """
    assert model.selection is not None
    found = Agreement()
    logits = model.prefill(prompt)
    for step, token in enumerate(token_ids):
        found.tokens += 1
        found.equal_tokens += int(logits.argmax()) == token
        found.logprobs.append(float(logits.log_softmax(-1)[token]))
        if step == len(token_ids) - 1:
            return found
        logits, choices = model.decode(token, None if model.selection.per_query_head else selected[step])
        for choice, blocks in zip(choices, selected[step], strict=True):
            found.note(model, choice, blocks)
    return found


class SparseLlama:
    """The model and the state of one sequence.

    Args:
        directory: a Hugging Face directory with one `model.safetensors`.
        selection: None = dense decode.

    Raises:
        NotImplementedError: scaled rotary embeddings or biases.
    """

    def __init__(self, directory: Path, selection: Selection | None, dtype: torch.dtype = torch.float32) -> None:
        config = json.loads((directory / "config.json").read_text())
        for key in ("rope_scaling", "attention_bias", "mlp_bias"):
            if config.get(key):
                raise NotImplementedError(f"{key}={config[key]!r}; the oracle knows the plain model only")
        self.selection = selection
        self.num_layers = config["num_hidden_layers"]
        self.num_q_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.group = self.num_q_heads // self.num_kv_heads
        self.weights: dict[str, Tensor] = {
            name.removeprefix("model."): value.to(dtype)
            for name, value in load_file(directory / "model.safetensors").items()
        }
        self.unembedding = self.weights["embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.frequencies = 1.0 / config["rope_theta"] ** exponents
        self.keys: list[Tensor] = [torch.zeros(0, self.num_kv_heads, self.head_dim, dtype=dtype)] * self.num_layers
        self.values = list(self.keys)

    # --- forward -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, token_ids: list[int], chunk: int = 512) -> Tensor:
        """Dense attention over a prompt; logits `[vocab]` after its last token."""
        logits = torch.zeros(0)
        for start in range(0, len(token_ids), chunk):
            logits = self.forward(token_ids[start : start + chunk], self._attend_causally)[-1]
        return logits

    @torch.inference_mode()
    def decode(self, token_id: int, follow: list[list[list[int]]] | None = None) -> tuple[Tensor, list[Choice]]:
        """Takes one token in; logits `[vocab]` after it and the choices of the sparse layers.

        Args:
            follow: by sparse layer and KV head, blocks to attend to instead of the own choice, which is returned all
                the same (selection per KV head only).
        """
        choices: list[Choice] = []

        def attend(layer: int, q: Tensor) -> Tensor:
            if self.selection is None or layer in self.selection.dense_layers:
                return self._attend_causally(layer, q)
            choice, by_query_head = self._choose(self.selection, self.keys[layer], q[0])
            choices.append(choice)
            if follow is not None:
                followed = follow[len(choices) - 1]
                by_query_head = [followed[head // self.group] for head in range(self.num_q_heads)]
            return self._attend_to_blocks(self.selection.block_size, layer, q[0], by_query_head)[None]

        logits = self.forward([token_id], attend)[-1]
        return logits, choices

    def forward(self, token_ids: list[int], attend: Any, *, all_logits: bool = False) -> Tensor:
        """Takes tokens in; logits `[vocab]` after the last of them in a row of their own, or after each.

        Args:
            attend: from the layer's index and its queries `[tokens, q_heads, head_dim]` to outputs of the same shape;
                the tokens' keys and values are in place by then.
        """
        start = len(self.keys[0])
        positions = torch.arange(start, start + len(token_ids))
        hidden = self.weights["embed_tokens.weight"][torch.tensor(token_ids)]
        for layer in range(self.num_layers):
            w = {key: self.weights.get(f"layers.{layer}.{key}.weight") for key in _LAYER_WEIGHTS}
            x = self._norm(hidden, w["input_layernorm"])
            q = self._rotate(self._heads(x @ w["self_attn.q_proj"].T), positions)
            k = self._rotate(self._heads(x @ w["self_attn.k_proj"].T), positions)
            v = self._heads(x @ w["self_attn.v_proj"].T)
            self.keys[layer] = torch.cat([self.keys[layer], k])
            self.values[layer] = torch.cat([self.values[layer], v])
            hidden = hidden + attend(layer, q).flatten(1) @ w["self_attn.o_proj"].T
            x = self._norm(hidden, w["post_attention_layernorm"])
            gated = torch.nn.functional.silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)
            hidden = hidden + gated @ w["mlp.down_proj"].T
        return self._norm(hidden if all_logits else hidden[-1:], self.weights["norm.weight"]) @ self.unembedding.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, self.head_dim)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attend_causally(self, layer: int, q: Tensor) -> Tensor:
        """`q` [num_tokens, num_q_heads, head_dim] are the newest tokens; each sees itself and all before it."""
        keys = self.keys[layer].repeat_interleave(self.group, dim=1)
        values = self.values[layer].repeat_interleave(self.group, dim=1)
        scores = torch.einsum("qhd,thd->hqt", q, keys) / math.sqrt(self.head_dim)
        first = len(keys) - len(q)
        unseen = torch.arange(len(keys))[None, :] > first + torch.arange(len(q))[:, None]
        probabilities = scores.masked_fill(unseen, -math.inf).softmax(-1)
        return torch.einsum("hqt,thd->qhd", probabilities, values)

    def _attend_to_blocks(self, block_size: int, layer: int, q: Tensor, by_query_head: list[list[int]]) -> Tensor:
        """One query; each query head sees the tokens of its own blocks."""
        keys, values = self.keys[layer], self.values[layer]
        rows = []
        for head, blocks in enumerate(by_query_head):
            tokens = torch.tensor([b * block_size + i for b in blocks for i in range(block_size)])
            tokens = tokens[tokens < len(keys)]
            k, v = keys[tokens, head // self.group], values[tokens, head // self.group]
            rows.append((k @ q[head] / math.sqrt(self.head_dim)).softmax(-1) @ v)
        return torch.stack(rows)

    # --- selection ---------------------------------------------------------------------------------------------------

    def _choose(self, rule: Selection, keys: Tensor, q: Tensor) -> tuple[Choice, list[list[int]]]:
        """What the KV heads fetch, and what each query head attends to."""
        num_blocks = -(-len(keys) // rule.block_size)
        everything = list(range(num_blocks))
        if num_blocks <= rule.budget:
            return Choice([everything] * self.num_kv_heads, None), [everything] * self.num_q_heads
        ranks = self._ranks(rule, keys, q)
        ranks[:, : rule.num_sink] = math.inf
        ranks[:, num_blocks - rule.num_newest :] = math.inf
        order = ranks.argsort(dim=-1, descending=True, stable=True)[:, : rule.budget]
        chosen = [sorted(row) for row in order.tolist()]
        if not rule.per_query_head:
            return Choice(chosen, ranks), [chosen[head // self.group] for head in range(self.num_q_heads)]
        fetched = [
            sorted(set().union(*chosen[head * self.group : (head + 1) * self.group]))
            for head in range(self.num_kv_heads)
        ]
        return Choice(fetched, ranks), chosen

    def _ranks(self, rule: Selection, keys: Tensor, q: Tensor) -> Tensor:
        """`[heads, num_blocks]`, the newest block's column 0."""
        full = len(keys) - 1 - (len(keys) - 1) % rule.block_size  # all blocks before the newest are full
        blocks = keys[:full].reshape(-1, rule.block_size, self.num_kv_heads, self.head_dim)
        centre, radius = digest(rule.method, blocks)  # [blocks, kv_heads, head_dim]
        ranks = []
        for kv_head in range(self.num_kv_heads):
            queries = q[kv_head * self.group : (kv_head + 1) * self.group]
            scores = queries @ centre[:, kv_head].T + queries.abs() @ radius[:, kv_head].T
            scores = scores / math.sqrt(self.head_dim)
            ranks.append(scores if rule.per_query_head else scores.softmax(-1).mean(0, keepdim=True))
        return torch.nn.functional.pad(torch.cat(ranks), (0, 1))


_LAYER_WEIGHTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def digest(method: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(centre, radius) over dimension 1, the block's tokens."""
    if method == "mean":
        mean = blocks.mean(1)
        return mean, torch.zeros_like(mean)
    low, high = blocks.amin(1), blocks.amax(1)
    centre = (low + high) / 2
    if method == "quest":
        return centre, (high - low) / 2
    if method == "cuboid-mean":
        return centre, (blocks - centre[:, None]).abs().mean(1)
    raise ValueError(f"method={method!r} is not known; choose quest, cuboid-mean or mean")
