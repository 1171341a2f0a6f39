"""Who may talk to the server: keys, Host names, origins, and errors that are JSON everywhere."""

from __future__ import annotations

import asyncio
import json

OTHER = "http://elsewhere.example"
CORS = "http://app.example"
TRUSTED = "http://page.example"


async def test_only_health_answers_without_a_key(serve):
    async with serve(settings={"api_keys": ("secret",)}) as harness:
        for path in ("/health", "/api/health"):
            assert (await harness.get(path))[0] == 200
        for path in ("/v1/models", "/models", "/v1/status", "/status", "/metrics", "/slots", "/props", "/nothing"):
            status, body = await harness.get(path)
            assert status == 401 and body["error"]["type"] == "authentication_error", path
        async with harness.chat() as response:
            assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"


KEY_HEADERS = [
    ({"Authorization": "Bearer secret"}, 200),
    ({"Authorization": "bearer secret"}, 200),
    ({"x-api-key": "secret"}, 200),
    ({"x-api-key": "secret", "Authorization": "Bearer wrong"}, 200),
    ({"Authorization": "Bearer secre"}, 401),
    ({"Authorization": "Bearer secret2"}, 401),
    ({"Authorization": "Basic secret"}, 401),
    ({"Authorization": "secret"}, 401),
    ({"Authorization": "Bearer "}, 401),
    ({"x-api-key": ""}, 401),
    ({"x-api-key": "sécret"}, 401),
]


async def test_a_key_is_taken_whole_and_from_either_header(serve):
    async with serve(settings={"api_keys": ("secret",)}) as harness:
        for headers, status in KEY_HEADERS:
            assert (await harness.get("/v1/models", headers=headers))[0] == status, headers


HOSTS = [
    ("localhost:8095", 200),
    ("127.0.0.1", 200),
    ("192.168.1.9:8095", 200),
    ("[::1]:8095", 200),
    ("mybox.example:8095", 200),
    ("MYBOX.example", 200),
    ("app.localhost", 200),
    ("evil.example", 403),
    ("evil.example:8095", 403),
    ("127.0.0.1.evil.example", 403),
    ("localhost.evil.example", 403),
]


async def test_a_name_that_points_here_from_outside_is_refused_without_a_key(serve):
    async with serve(settings={"allowed_hosts": ("mybox.example",)}) as harness:
        for host, status in HOSTS:
            got, body = await harness.get("/v1/models", headers={"Host": host})
            assert got == status and (status == 200 or body["error"]["type"] == "forbidden"), host


async def test_with_a_key_any_host_name_will_do(serve):
    async with serve(settings={"api_keys": ("secret",)}) as harness:
        headers = {"Host": "proxy.example", "x-api-key": "secret"}
        assert (await harness.get("/v1/models", headers=headers))[0] == 200


async def test_pages_of_other_origins_are_refused_and_only_listed_ones_get_cors(serve):
    async with serve(settings={"cors_origins": (CORS,), "trusted_origins": (TRUSTED,)}) as harness:
        for origin, status, allowed in (
            (OTHER, 403, None),
            ("null", 403, None),
            (TRUSTED, 200, None),
            (harness.url, 200, None),
            (CORS, 200, CORS),
        ):
            async with harness.http.get(f"{harness.url}/v1/models", headers={"Origin": origin}) as response:
                assert response.status == status, origin
                assert response.headers.get("Access-Control-Allow-Origin") == allowed
        async with harness.chat(stream=True, extra=1) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
        async with harness.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "stream": True},
            headers={"Origin": CORS},
        ) as response:
            assert response.status == 200 and response.headers["Access-Control-Allow-Origin"] == CORS


async def test_a_preflight_needs_no_key_and_tells_what_is_allowed(serve):
    async with serve(settings={"cors_origins": (CORS,), "api_keys": ("secret",)}) as harness:
        for path in ("/v1/chat/completions", "/nothing"):
            async with harness.http.options(harness.url + path, headers={"Origin": CORS}) as response:
                assert response.status == 204 and "POST" in response.headers["Access-Control-Allow-Methods"]
                assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
                assert response.headers["Access-Control-Allow-Origin"] == CORS
        async with harness.http.options(f"{harness.url}/health", headers={"Origin": OTHER}) as response:
            assert response.status == 204 and "Access-Control-Allow-Origin" not in response.headers


async def test_a_form_of_a_page_cannot_post(serve):
    data = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    async with serve(settings={"cors_origins": (CORS,)}) as harness:
        for kind, status in (
            ("text/plain", 415),
            ("application/json; charset=utf-8", 200),
            ("application/x+json", 200),
        ):
            headers = {"Origin": CORS, "Content-Type": kind}
            async with harness.http.post(f"{harness.url}/v1/chat/completions", data=data, headers=headers) as response:
                assert response.status == status, kind
        async with harness.http.post(
            f"{harness.url}/v1/chat/completions", data=data, headers={"Content-Type": "text/plain"}
        ) as response:
            assert response.status == 200, "a client that is no page may call it what it likes"


async def test_unknown_paths_and_wrong_methods_are_json(serve):
    async with serve() as harness:
        for path in ("/nothing", "/v1/responses/abc", "/api/requests", "/mcp", "/web/x"):
            status, body = await harness.get(path)
            assert (status, body["error"]["type"]) == (404, "not_found_error"), path
        status, body = await harness.get("/v1/chat/completions")
        assert status == 405 and "POST" in body["error"]["message"]
        async with harness.post("/v1/models", {}) as response:
            assert response.status == 405 and response.headers["Allow"] == "GET"
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_endpoints_that_are_not_there_yet_say_so(serve):
    async with serve() as harness:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/slots/0?action=save", "/v1/vram"):
            async with harness.post(path, {}) as response:
                assert response.status == 501 and (await response.json())["error"]["type"] == "not_supported", path


async def test_http_1_1_keeps_a_connection_and_1_0_gets_its_answer_too(serve):
    async with serve() as harness:
        host, port = harness.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b'"status":"ok"' in await reader.readexactly(length)
        writer.close()
        body = b'{"messages":[{"role":"user","content":"x"}],"stream":true}'
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.0 200") and answer.endswith(b"data: [DONE]\n\n")
        writer.close()
