"""What every operation means, in NumPy and float64, one plain loop after another.

Nothing here is shared with the code under test: no import of it, no constant, no default. Every number that matters
(scale, counts, methods) is an argument, and block scores are the sum of per-channel maxima of the paper's boxes
(hi, lo), not the centre-and-radius form that the kernels use. All inputs are float64 or integers.
"""

import numpy as np

K, V = 0, 1

# --- append ----------------------------------------------------------------------------------------------------------


def append_blocks(pool, blocks, block_ids):
    """`pool[num_blocks, heads, 2, block_size, head_dim]` with whole blocks written; later ones win."""
    out = pool.copy()
    for new, block_id in enumerate(block_ids):
        out[block_id] = blocks[new]
    return out


def append_tokens(pool, k, v, block_ids, offsets):
    """One token a sequence; `k`, `v` are `[seqs, heads, head_dim]`, `block_ids` `[seqs, heads]`."""
    out = pool.copy()
    for seq in range(k.shape[0]):
        for head in range(k.shape[1]):
            out[block_ids[seq, head], head, K, offsets[seq]] = k[seq, head]
            out[block_ids[seq, head], head, V, offsets[seq]] = v[seq, head]
    return out


# --- digests and selection -------------------------------------------------------------------------------------------


def block_digests(k, num_valid, method):
    """The box (hi, lo) of each block; `k` is `[blocks, heads, block_size, head_dim]`. A block with no token: zeros."""
    num_blocks, num_heads, _, head_dim = k.shape
    hi = np.zeros((num_blocks, num_heads, head_dim))
    lo = np.zeros((num_blocks, num_heads, head_dim))
    for block in range(num_blocks):
        for head in range(num_heads):
            keys = k[block, head, : num_valid[block]]
            if len(keys) == 0:
                continue
            mx, mn = np.max(keys, axis=0), np.min(keys, axis=0)
            if method == "quest":
                hi[block, head], lo[block, head] = mx, mn
            elif method == "cuboid-mean":
                c = (mx + mn) / 2
                r = np.mean(np.abs(keys - c), axis=0)
                hi[block, head], lo[block, head] = c + r, c - r
            elif method == "mean":
                hi[block, head] = lo[block, head] = np.mean(keys, axis=0)
            else:
                raise ValueError(method)
    return hi, lo


def box_score(q, hi, lo):
    """The paper's score of one query for one block: the best corner of the box."""
    return sum(max(q[d] * hi[d], q[d] * lo[d]) for d in range(len(q)))


def score_blocks(q, hi, lo, block_table, num_blocks, scale, per_query_head, num_sink_blocks, num_newest_blocks):
    """Ranks `[seqs, heads that select, max_blocks]`: inf for sink and newest blocks, -inf where there is no block.

    `hi` and `lo` are `[pool blocks, kv_heads, head_dim]`. The newest block has no say in the softmax.
    """
    num_seqs, num_q_heads, _ = q.shape
    num_kv_heads = hi.shape[1]
    group = num_q_heads // num_kv_heads
    out = np.full((num_seqs, num_q_heads if per_query_head else num_kv_heads, block_table.shape[1]), -np.inf)
    for seq in range(num_seqs):
        count = num_blocks[seq]
        scored = block_table[seq, : max(count - 1, 0)]
        for head in range(num_kv_heads):
            members = range(head * group, (head + 1) * group)
            scores = [
                [scale * box_score(q[seq, member], hi[block, head], lo[block, head]) for block in scored]
                for member in members
            ]
            if per_query_head:
                out[seq, head * group : (head + 1) * group, : len(scored)] = scores
            elif len(scored):
                out[seq, head, : len(scored)] = np.mean([_softmax(np.array(row)) for row in scores], axis=0)
        out[seq, :, : min(num_sink_blocks, count)] = np.inf
        out[seq, :, max(0, count - num_newest_blocks) : count] = np.inf
    return out


def select_blocks(ranks, num_selected):
    """The best ranked, ties to the lower id; never -inf; ascending, -1 after the last."""
    num_seqs, num_heads, _ = ranks.shape
    out = np.full((num_seqs, num_heads, num_selected), -1)
    for seq in range(num_seqs):
        for head in range(num_heads):
            row = ranks[seq, head]
            exist = [block for block in range(len(row)) if row[block] > -np.inf]
            chosen = sorted(sorted(exist, key=lambda b, row=row: (-row[b], b))[:num_selected])
            out[seq, head, : len(chosen)] = chosen
    return out


def union_over_group(selected, num_kv_heads, num_union):
    """The ids that any query head of a group chose, ascending, and per query head which of them it chose."""
    num_seqs, num_q_heads, _ = selected.shape
    group = num_q_heads // num_kv_heads
    union = np.full((num_seqs, num_kv_heads, num_union), -1)
    mask = np.zeros((num_seqs, num_kv_heads, group, num_union), bool)
    for seq in range(num_seqs):
        for head in range(num_kv_heads):
            choices = [set(selected[seq, head * group + g].tolist()) - {-1} for g in range(group)]
            ids = sorted(set().union(*choices))
            union[seq, head, : len(ids)] = ids
            for g in range(group):
                for index, block in enumerate(ids):
                    mask[seq, head, g, index] = block in choices[g]
    return union, mask


# --- residency -------------------------------------------------------------------------------------------------------


def match_slots(selected, resident, last_selected, num_slots):
    """Hits stay; each miss, in order, takes an empty slot or else the one selected longest ago (ties: the lower slot).

    Slots past `num_slots` and slots that hold a selected block are never taken. Slot -1 where nothing is selected.
    """
    slots = np.full(selected.shape, -1)
    missed = np.zeros(selected.shape, bool)
    after = resident.copy()
    for seq in range(selected.shape[0]):
        for head in range(selected.shape[1]):
            before = resident[seq, head, : num_slots[seq]].tolist()
            wanted = selected[seq, head].tolist()
            free = [slot for slot, block in enumerate(before) if block < 0]
            held = [slot for slot, block in enumerate(before) if block >= 0 and block not in wanted]
            age = {slot: last_selected[seq, head, before[slot]] for slot in held}
            held.sort(key=lambda slot, age=age: (age[slot], slot))
            victims = iter(free + held)
            for index, block in enumerate(wanted):
                if block < 0:
                    continue
                if block in before:
                    slots[seq, head, index] = before.index(block)
                else:
                    slots[seq, head, index] = slot = next(victims)
                    missed[seq, head, index] = True
                    after[seq, head, slot] = block
    return slots, missed, after


# --- attention -------------------------------------------------------------------------------------------------------


def decode_attention(q, pool, block_ids, num_valid, query_mask, scale):
    """One query a sequence over the first `num_valid` tokens of each block; nothing to attend to: zeros."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = pool.shape[1]
    group = num_q_heads // num_kv_heads
    out = np.zeros((num_seqs, num_q_heads, head_dim))
    for seq in range(num_seqs):
        for q_head in range(num_q_heads):
            head, member = divmod(q_head, group)
            keys, values = np.zeros((0, head_dim)), np.zeros((0, head_dim))
            for index, block in enumerate(block_ids[seq, head]):
                if query_mask is None or query_mask[seq, head, member, index]:
                    keys = np.concatenate([keys, pool[block, head, K, : num_valid[seq, head, index]]])
                    values = np.concatenate([values, pool[block, head, V, : num_valid[seq, head, index]]])
            if len(keys):
                out[seq, q_head] = _softmax(keys @ q[seq, q_head] * scale) @ values
    return out


def prefill_attention(q, pool, block_tables, prompts, scale, tile_mask=None, tile=None):
    """Causal attention of packed prompts.

    Args:
        prompts: (row of the first token in `q`, row of `block_tables`, position of the first token, tokens) each.
        tile_mask: `[query tile, q_head, key tile]`, which tiles of `tile` tokens to attend to; nothing left: zeros.
    """
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = pool.shape[1]
    group = num_q_heads // num_kv_heads
    out = np.zeros(q.shape)
    for row, table, start, count in prompts:
        end = start + count
        for q_head in range(num_q_heads):
            keys, values = pool[block_tables[table], q_head // group].swapaxes(0, 1).reshape(2, -1, head_dim)[:, :end]
            scores = q[row : row + count, q_head] @ keys.T * scale
            for token in range(count):
                scores[token, start + token + 1 :] = -np.inf
                if tile_mask is not None:
                    kept = np.flatnonzero(tile_mask[(row + token) // tile, q_head])
                    scores[token, ~np.isin(np.arange(end) // tile, kept)] = -np.inf
            some = np.isfinite(scores).any(axis=1)
            weights = np.exp(scores[some] - scores[some].max(axis=1, keepdims=True))
            out[row : row + count, q_head][some] = weights / weights.sum(axis=1, keepdims=True) @ values
    return out


def _softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()
