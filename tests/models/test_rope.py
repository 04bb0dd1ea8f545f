"""RoPE variants (L09) against transformers' own frequencies and rotation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pointwise import apply_rope
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.rope import max_supported_len, rope_cos_sin, rope_frequencies, with_rope_scaling

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear_old_key": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3_8": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3_32": {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn_old_key": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7,
        "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn_untruncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25,
    },
}  # fmt: skip


def make_config(scaling: dict | None, *, theta: float = 10000.0, head_dim: int = 64, max_len: int = 512) -> ModelConfig:
    return ModelConfig(
        name="tiny", vocab_size=32, hidden_size=2 * head_dim, intermediate_size=32, num_layers=1, num_q_heads=2,
        num_kv_heads=1, head_dim=head_dim, max_position_embeddings=max_len, rms_norm_eps=1e-5, rope_theta=theta,
        rope_scaling=None if scaling is None else tuple(sorted(scaling.items())),
    )  # fmt: skip


def rope_of_transformers(config: ModelConfig):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = transformers.LlamaConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.num_q_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings, rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling_dict,
    )  # fmt: skip
    return LlamaRotaryEmbedding(theirs)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 96])
@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_and_angles_match_transformers(variant: str, theta: float, head_dim: int) -> None:
    torch = pytest.importorskip("torch")
    config = make_config(VARIANTS[variant], theta=theta, head_dim=head_dim)
    theirs = rope_of_transformers(config)
    inv_freq, factor = rope_frequencies(config)
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (head_dim // 2,)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(inv_freq, theirs.inv_freq.numpy(), rtol=3e-7)

    positions = np.array([0, 1, 2, 31, 63, 64, 65, 200, 511])  # below and above the original length
    cos, sin = rope_cos_sin(jnp.asarray(positions), inv_freq, factor)
    their_cos, their_sin = theirs(torch.zeros(1), torch.from_numpy(positions)[None])
    np.testing.assert_allclose(cos, their_cos[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(sin, their_sin[0].numpy(), atol=1e-4)


def test_apply_rope_is_rotate_half() -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((5, heads, 16), np.float32) for heads in (4, 2))
    inv_freq, factor = rope_frequencies(make_config(None, head_dim=16))
    cos, sin = rope_cos_sin(jnp.arange(5) * 7, inv_freq, factor)
    cos_t, sin_t = (torch.from_numpy(np.array(a))[None] for a in (cos, sin))
    their_q, their_k = llama.apply_rotary_pos_emb(
        torch.from_numpy(q).transpose(0, 1)[None], torch.from_numpy(k).transpose(0, 1)[None], cos_t, sin_t
    )
    np.testing.assert_allclose(apply_rope(jnp.asarray(q), cos, sin), their_q[0].transpose(0, 1).numpy(), atol=1e-6)
    np.testing.assert_allclose(apply_rope(jnp.asarray(k), cos, sin), their_k[0].transpose(0, 1).numpy(), atol=1e-6)
    assert apply_rope(jnp.asarray(q, jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


def test_length_limit_is_not_scaled_twice() -> None:
    """`dynamic` alone takes the configured length for the original one."""
    lengths = {name: max_supported_len(make_config(scaling)) for name, scaling in VARIANTS.items()}
    assert lengths.pop("dynamic") == 1024
    assert set(lengths.values()) == {512}


@pytest.mark.parametrize("num_positions", [1, 512, 513, 700, 1024])
@pytest.mark.parametrize("factor", [2.0, 3.5])
def test_dynamic_matches_transformers_at_every_length(num_positions: int, factor: float) -> None:
    torch = pytest.importorskip("torch")
    config = make_config({"rope_type": "dynamic", "factor": factor})
    theirs = rope_of_transformers(config)
    theirs(torch.zeros(1), torch.arange(num_positions)[None])
    inv_freq, _ = rope_frequencies(config, num_positions)
    np.testing.assert_allclose(inv_freq, theirs.inv_freq.numpy(), rtol=1e-6)
    assert np.array_equal(inv_freq, rope_frequencies(config)[0]) == (num_positions <= 512)


def test_rows_have_their_own_frequencies() -> None:
    config = make_config({"rope_type": "dynamic", "factor": 2.0})
    rows = np.stack([rope_frequencies(config, n)[0] for n in (100, 1024)])
    cos, sin = rope_cos_sin(jnp.asarray([90, 90]), rows, 1.0)
    for index in range(2):
        alone = rope_cos_sin(jnp.asarray([90]), rows[index], 1.0)
        np.testing.assert_array_equal(np.stack([cos[index], sin[index]]), np.stack(alone)[:, 0])
    assert not np.allclose(cos[0], cos[1])


@pytest.mark.parametrize(
    ("own", "override", "limit"),
    [
        (None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (None, {"type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
         {"rope_type": "yarn", "factor": 16.0}, 1024),
        (None, {"rope_type": "linear", "factor": 2.5}, 1280),
        (None, {"rope_type": "dynamic", "factor": 3.0}, 1536),
        (None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 4096),
        (None, {"rope_type": "default", "factor": 2.0}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}, 512),
        (None, {"factor": 2, "rope_theta": 50000.0}, 1024),
    ],
)  # fmt: skip
def test_replaced_scaling(own: dict | None, override: dict, limit: int) -> None:
    """The limit follows the factor, and transformers computes the same from the same config."""
    config = with_rope_scaling(make_config(own), override)
    assert max_supported_len(config) == limit
    assert config.rope_theta == override.get("rope_theta", 10000.0)
    theirs = rope_of_transformers(config)
    inv_freq, factor = rope_frequencies(config)
    np.testing.assert_allclose(inv_freq, theirs.inv_freq.numpy(), rtol=3e-7)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "facter": 2.0}, "'facter' is not known; known are .*factor"),
        ({"rope_type": "longrope", "factor": 4.0}, "longrope"),
        ({"rope_type": "default", "factor": 0.0}, "factor"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_wrong_replacement_is_refused(override: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_rope_scaling(make_config(None), override)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope"}, "longrope"),
        ({"type": "surprise", "factor": 2.0}, "surprise"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported_scaling_is_refused(scaling: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_frequencies(make_config(scaling))
