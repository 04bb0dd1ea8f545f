"""The device sampler: logits in, one token a row out.

Order of operations, vLLM's: mask of a grammar, logit bias and `min_tokens` mask, repetition penalty, presence and
frequency penalties, [log-probabilities are taken here], temperature, min-p, top-k, top-p, draw; a forced token takes
the place of the draw.

Each of the seven parts is a small program of its own (`keep_allowed`, `add_bias`, `apply_penalties`, `greedy_tokens` or
`draw_tokens`, `force_tokens`, `gather_logprobs`), compiled once a batch size and run only if a row needs it: seven
programs instead of the variants of one program with as many static switches, and an all-greedy batch pays one argmax.
Whatever part another row needs leaves a row that does not need it unchanged to the last bit, and draws are keyed by a
row's own seed and position, so a row's token depends only on its own logits and request.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from sparseserve_jax.request import MAX_LOGPROBS, TokenLogprob
from sparseserve_jax.sampling.batch import NOT_FORCED, BiasChunk, RandomParams, SamplingBatch
from sparseserve_jax.sampling.penalties import PenaltyState, apply_penalties

NO_TOKEN = -1
"""The token of a row whose logits have no finite maximum."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Natural log-probabilities after bias and penalties, before temperature and cuts. Ranks count from 1."""

    chosen: Float[Array | np.ndarray, " num_seqs"]
    chosen_rank: Int[Array | np.ndarray, " num_seqs"]
    top_ids: Int[Array | np.ndarray, "num_seqs num_top"]
    top: Float[Array | np.ndarray, "num_seqs num_top"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """Tokens of a batch, on the device.

    Attributes:
        token_ids: `NO_TOKEN` where not `ok`.
        ok: the row's logits hold no NaN and their maximum is finite (also after bias and masks). Padding rows: any.
    """

    token_ids: Int[Array | np.ndarray, " num_seqs"]
    ok: Bool[Array | np.ndarray, " num_seqs"]
    logprobs: Logprobs | None


def sample(
    logits: Float[Array, "num_seqs vocab"], batch: SamplingBatch, penalty_state: PenaltyState | None = None
) -> Sampled:
    """Dispatches the programs that the batch needs; waits for nothing.

    Args:
        batch: of `build_batch`, padded to the rows of `logits`; `SamplingBatch()` = all greedy.
        penalty_state: needed where `batch.penalties` is not None; only read (count the tokens with `add_tokens`).
    """
    if batch.allowed is not None:
        logits = keep_allowed(logits, batch.allowed)
    for chunk in batch.bias:
        logits = add_bias(logits, chunk)
    if batch.penalties is not None:
        assert penalty_state is not None, "a batch with penalties needs the state"
        logits = apply_penalties(logits, penalty_state, batch.penalties)
    token_ids, ok = greedy_tokens(logits) if batch.random is None else draw_tokens(logits, batch.random)
    if batch.forced is not None:
        token_ids = force_tokens(token_ids, ok, batch.forced)
    logprobs = gather_logprobs(logits, token_ids) if batch.wants_logprobs else None
    return Sampled(token_ids=token_ids, ok=ok, logprobs=logprobs)


@jax.jit
def keep_allowed(
    logits: Float[Array, "num_seqs vocab"], allowed: UInt[Array | np.ndarray, "num_seqs num_words"]
) -> Float[Array, "num_seqs vocab"]:
    """-inf for tokens whose bit (`i % 32` of word `i // 32`) is not set."""
    token_ids = jnp.arange(logits.shape[1])
    bits = jnp.asarray(allowed)[:, token_ids // 32] >> (token_ids % 32).astype(jnp.uint32)
    return jnp.where(bits & 1, logits.astype(jnp.float32), -jnp.inf)


@jax.jit
def add_bias(logits: Float[Array, "num_seqs vocab"], chunk: BiasChunk) -> Float[Array, "num_seqs vocab"]:
    """Adds numbers to single logits; -inf bans a token, whatever else is added to it."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.astype(jnp.float32).at[rows, chunk.token_ids].add(chunk.values, mode="drop")


@jax.jit
def greedy_tokens(
    logits: Float[Array, "num_seqs vocab"],
) -> tuple[Int[Array, " num_seqs"], Bool[Array, " num_seqs"]]:
    """The best token of each row (the lowest id among equals), and whether the row is sound."""
    token_ids, _, ok = _best(logits.astype(jnp.float32))
    return jnp.where(ok, token_ids, NO_TOKEN), ok


@jax.jit
def draw_tokens(
    logits: Float[Array, "num_seqs vocab"], params: RandomParams
) -> tuple[Int[Array, " num_seqs"], Bool[Array, " num_seqs"]]:
    """Draws by the Gumbel maximum over what min-p, top-k and top-p keep; rows of temperature 0 are greedy."""
    logits = logits.astype(jnp.float32)
    greedy_ids, best, ok = _best(logits)
    is_random = params.temperature > 0
    # The best logit goes to 0 before the division: no temperature overflows, and exp() needs no further shift.
    scaled = (logits - best[:, None]) / jnp.where(is_random, params.temperature, 1.0)[:, None]
    scaled = filter_logits(scaled, params.top_p, params.top_k, params.min_p)
    drawn_ids, _, _ = _best(scaled + _gumbel(params.seeds, params.positions, logits.shape[1]))
    return jnp.where(ok, jnp.where(is_random, drawn_ids, greedy_ids), NO_TOKEN), ok


@jax.jit
def force_tokens(
    token_ids: Int[Array, " num_seqs"], ok: Bool[Array, " num_seqs"], forced: Int[Array | np.ndarray, " num_seqs"]
) -> Int[Array, " num_seqs"]:
    """The forced tokens where there are any (not `NOT_FORCED`) and the row is sound, else those given."""
    return jnp.where((forced != NOT_FORCED) & ok, forced, token_ids)


def filter_logits(
    scaled: Float[Array, "num_seqs vocab"],
    top_p: Float[Array | np.ndarray, " num_seqs"],
    top_k: Int[Array | np.ndarray, " num_seqs"],
    min_p: Float[Array | np.ndarray, " num_seqs"],
) -> Float[Array, "num_seqs vocab"]:
    """-inf for what min-p, then top-k, then top-p cut; at least the best token of a row survives.

    Tokens equal to the last one kept are kept too. A cut that no row asks for is skipped at run time.

    Args:
        scaled: logits over temperature, with the maximum of each row at 0.
        top_p: smallest set that reaches this share of what is left; 1 = off.
        top_k: 0 = off.
        min_p: share of the best token's probability; 0 = off.
    """
    scaled = jnp.where(scaled < jnp.log(min_p)[:, None], -jnp.inf, scaled)

    def cut_top_k(x: Array) -> Array:
        target = jnp.where(top_k > 0, top_k.astype(jnp.float32), jnp.inf)
        return _keep_heaviest(x, jnp.ones_like(x), target)

    def cut_top_p(x: Array) -> Array:
        weights = jnp.exp(x)
        target = jnp.where(top_p < 1, top_p * jnp.sum(weights, axis=1), jnp.inf)
        return _keep_heaviest(x, weights, target)

    scaled = lax.cond(jnp.any(top_k > 0), cut_top_k, lambda x: x, scaled)
    return lax.cond(jnp.any(top_p < 1), cut_top_p, lambda x: x, scaled)


@jax.jit
def gather_logprobs(logits: Float[Array, "num_seqs vocab"], token_ids: Int[Array, " num_seqs"]) -> Logprobs:
    """Log-probabilities of the chosen tokens and the `MAX_LOGPROBS` best (equals: the lower id first)."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=1)
    top, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
    chosen_ids = jnp.maximum(token_ids, 0)[:, None]
    chosen = jnp.take_along_axis(logprobs, chosen_ids, axis=1)
    ahead = (logprobs > chosen) | ((logprobs == chosen) & (_ids(logprobs) < chosen_ids))
    rank = 1 + jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return Logprobs(chosen=chosen[:, 0], chosen_rank=rank, top_ids=top_ids, top=top)


def token_logprobs(logprobs: Logprobs, row: int, token_id: int, num_logprobs: int) -> list[TokenLogprob]:
    """A row's candidates: the chosen token first, then the others among the `num_logprobs` best.

    Banned tokens (probability 0) are left out.

    Args:
        logprobs: fetched to the host (numpy arrays).
    """
    chosen = TokenLogprob(token_id=token_id, logprob=float(logprobs.chosen[row]), rank=int(logprobs.chosen_rank[row]))
    pairs = zip(logprobs.top_ids[row, :num_logprobs].tolist(), logprobs.top[row, :num_logprobs].tolist(), strict=True)
    others = [
        TokenLogprob(token_id=other, logprob=value, rank=place + 1)
        for place, (other, value) in enumerate(pairs)
        if other != token_id and value > -np.inf
    ]
    return [chosen, *others]


def _ids(logits: Float[Array, "num_seqs vocab"]) -> Int[Array, "1 vocab"]:
    return jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]


def _best(
    logits: Float[Array, "num_seqs vocab"],
) -> tuple[Int[Array, " num_seqs"], Float[Array, " num_seqs"], Bool[Array, " num_seqs"]]:
    """First argmax, maximum, soundness. Plain reductions: half the time of `jnp.argmax` on the CPU backend.

    NaN needs a test of its own: the CPU backend's maximum ignores it.
    """
    best = jnp.max(logits, axis=1)
    token_ids = jnp.min(jnp.where(logits == best[:, None], _ids(logits), logits.shape[1] - 1), axis=1)
    return token_ids, best, jnp.isfinite(best) & ~jnp.any(jnp.isnan(logits), axis=1)


def _gumbel(
    seeds: UInt[Array | np.ndarray, "num_seqs 2"], positions: Int[Array | np.ndarray, " num_seqs"], vocab_size: int
) -> Float[Array, "num_seqs vocab"]:
    def row(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(jnp.asarray(seeds), jnp.asarray(positions))


def _ordered(values: Float[Array, "num_seqs vocab"]) -> Int[Array, "num_seqs vocab"]:
    """Integers in the order of the floats (NaN aside), equal where the floats are."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)  # -0.0 equals 0.0
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _keep_heaviest(
    values: Float[Array, "num_seqs vocab"], weights: Float[Array, "num_seqs vocab"], target: Float[Array, " num_seqs"]
) -> Float[Array, "num_seqs vocab"]:
    """-inf for values below the smallest t such that values above t weigh less than `target`.

    Weights 1 and target k give top-k, probabilities and p give top-p. Exact and without a sort (XLA's takes 110 ms for
    8 rows of 49,152 on two CPU cores, this 8 ms): 32 halvings of the values' range as ordered integers, one masked sum
    each. Float sums of non-negative terms in one fixed order are monotone in the mask: all that bisection needs.
    """
    order = _ordered(values)

    def halve(_: Array | int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # floor of the mean, without overflow
        above = jnp.sum(jnp.where(order > middle[:, None], weights, 0.0), axis=1)
        enough = above < target
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(enough, middle, high)

    bounds = (jnp.min(order, axis=1), jnp.max(order, axis=1))
    _, threshold = lax.fori_loop(0, 32, halve, bounds)
    return jnp.where(order < threshold[:, None], -jnp.inf, values)
