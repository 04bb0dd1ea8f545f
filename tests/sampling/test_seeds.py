from sparseserve_jax.sampling.seeds import derive_seed


def test_own_seed_ignores_engine_and_number():
    assert derive_seed(7, 0, 0) == derive_seed(7, 99, 12)


def test_streams_are_distinct():
    seeds = [-(2**63), -1, 0, 1, 2, 2**63 - 1]
    streams = [derive_seed(seed, 0, 0, index) for seed in seeds for index in range(64)]
    streams += [derive_seed(None, engine, number) for engine in (-1, 0, 1, 10**30) for number in range(64)]
    assert len(set(streams)) == len(streams)
    assert all(0 <= word < 2**32 for words in streams for word in words)


def test_stays_the_same_across_releases():
    assert derive_seed(42, 0, 0) == (1058155991, 2511914273)
