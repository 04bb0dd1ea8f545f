"""KV in host memory: memory kinds, pinned pools, FlashH2D (loading misses) and FlashD2H (saving new blocks).

The only package that names memory kinds or calls `device_put`.
"""
