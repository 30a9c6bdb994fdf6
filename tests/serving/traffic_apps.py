"""ASGI applications that answer well, badly, slowly or not at all, and a client that is one function."""

import asyncio
import json

GREEDY = {"model": "tiny", "prompt": "a", "temperature": 0}


class Answering:
    """An application with a name; what it was asked is kept."""

    def __init__(self, name, *, status=200, text=None, chunks=None, wait=0.0, fail_after=None, headers=()):
        self.name, self.status, self.wait, self.fail_after = name, status, wait, fail_after
        self.text = name if text is None else text
        self.chunks = chunks
        self.headers = list(headers)
        self.asked = []
        self.num_gone = 0
        self.num_cancelled = 0
        self.release = None

    def body(self):
        if self.chunks is not None:
            return self.chunks
        return [json.dumps({"choices": [{"index": 0, "text": self.text}]}).encode()]

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.asked.append((scope["path"], message.get("body", b""), dict(scope["headers"])))
        try:
            if self.release is not None:
                gone = asyncio.ensure_future(self._watch(receive))
                await asyncio.wait((gone, asyncio.ensure_future(self.release.wait())), return_when="FIRST_COMPLETED")
                if gone.done():
                    return
            await asyncio.sleep(self.wait)
            if self.fail_after == 0:
                raise RuntimeError(f"{self.name} fails")
            headers = [(b"content-type", b"application/json"), *self.headers]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            parts = self.body()
            for number, part in enumerate(parts, start=1):
                await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})
                if self.fail_after == number:
                    raise RuntimeError(f"{self.name} breaks off")
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _watch(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_gone += 1


class Got:
    """What a client received, message by message."""

    def __init__(self):
        self.status, self.headers, self.parts, self.is_whole = None, {}, [], False

    @property
    def body(self):
        return b"".join(self.parts)

    @property
    def text(self):
        return json.loads(self.body)["choices"][0]["text"]

    async def send(self, message):
        if message["type"] == "http.response.start":
            assert self.status is None, "two answers"
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            assert not self.is_whole, "an answer after its end"
            self.parts += [message["body"]] if message.get("body") else []
            self.is_whole = not message.get("more_body", False)


async def ask(app, body=GREEDY, *, path="/v1/completions", method="POST", headers=None, gone=None, root=""):
    """One request; `gone` is an event after which the client is away."""
    got = Got()
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    pending = [raw[: len(raw) // 2], raw[len(raw) // 2 :]]

    async def receive():
        if pending:
            part = pending.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(pending)}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": method,
        "path": root + path,
        "root_path": root,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    await app(scope, receive, got.send)
    return got
