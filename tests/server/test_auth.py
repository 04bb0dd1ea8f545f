"""API keys, origins, the status page."""

from __future__ import annotations

import httpx
import pytest

from sparseserve_jax.server.app import content_security_policy
from sparseserve_jax.server.auth import read_key_file
from sparseserve_jax.server.settings import ServerSettings
from tests.server.running_server import RunningServer, error_of

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def locked(engine):
    settings = ServerSettings(api_keys=KEYS, cors_origins=("https://page.example",))
    with RunningServer(engine, settings) as server:
        yield server


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/version", "/openapi.json", "/", "/nope", "/v1/completions"]
)
def test_everything_but_health_needs_a_key(locked, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": "first-key"},
                    {"Authorization": "Basic !"}, {"Authorization": "Bearer first-key2"}):  # fmt: skip
        response = httpx.get(locked.url + path, headers=headers)
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key" and "www-authenticate" in response.headers
        assert not any(key in response.text for key in KEYS)
    locked.wait_ready()
    for key in KEYS:
        assert httpx.get(locked.url + path, headers={"Authorization": f"Bearer {key}"}).status_code != 401
    assert httpx.get(locked.url + path, auth=("anybody", "first-key")).status_code != 401


def test_a_key_with_a_non_ascii_character_is_just_wrong(locked):
    response = httpx.get(locked.url + "/v1/models", headers={"Authorization": "Bearer clé".encode("latin-1")})
    error_of(response, 401)


def test_other_origins(locked, server):
    origin = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    asked = httpx.options(locked.url + "/v1/completions", headers=origin)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(locked.url + "/v1/completions", headers=origin | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.client.get("/health", headers=origin).headers


def test_files_of_keys():
    assert read_key_file("# ours\nfirst\n\n  second  \n") == ["first", "second"]


@pytest.mark.parametrize("wrong", [
    {"api_keys": ("",)}, {"api_keys": ("a b ",)}, {"max_waiting": -1}, {"request_timeout_s": 0.0},
    {"request_timeout_s": float("nan")}, {"metrics_prefix": "a:b"}, {"served_model_names": ("",)},
    {"max_body_bytes": 5},
])  # fmt: skip
def test_settings_check_themselves(wrong):
    with pytest.raises(ValueError, match="must"):
        ServerSettings(**wrong)


def test_a_page_may_run_its_own_scripts_and_no_others():
    policy = content_security_policy("<script>let a = 1;</script><p>hi</p>")
    assert "script-src 'sha256-" in policy and "unsafe-inline'" not in policy.partition("style-src")[0]
    assert "connect-src 'self'" in policy and "default-src 'none'" in policy
